"""Devices that are not there: enough of a GPU cluster to compile a program for it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

TARGETS = {file.stem: file for file in sorted((Path(__file__).parent / "targets").glob("*.txtpb"))}


def absent_devices(target: str, *, hosts: int = 1, per_host: int = 8) -> list[Any]:
    """GPUs to build a mesh of and compile for; nothing can run on them.

    Raises ValueError for an unknown target or sizes below 1, RuntimeError without the extra gpu-compile.
    """
    if target not in TARGETS:
        raise ValueError(f"target {target!r} is not known: choose one of {', '.join(TARGETS)}")
    if min(hosts, per_host) < 1:
        raise ValueError(f"hosts={hosts} and per_host={per_host} must be at least 1")
    if importlib.util.find_spec("jax_plugins") is None:
        raise RuntimeError('compiling for absent GPUs needs Python 3.12 or newer and pip install "k3jax[gpu-compile]"')
    from jax.experimental import topologies

    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # the plugin looks for a driver when it loads
    description = topologies.get_topology_desc(
        platform="cuda",
        topology_name=target,
        target_config=TARGETS[target].read_text(),
        topology=f"1x{hosts}x{per_host}",
    )
    return list(description.devices)
