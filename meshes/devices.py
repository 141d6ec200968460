"""Devices to build a mesh from: on a machine without accelerators, fake CPU devices."""

from __future__ import annotations

import os
import re
from pathlib import Path

_COUNT = "--xla_force_host_platform_device_count"
# Fake devices are threads that share few cores. By default XLA ends the process when one waits 40 s for the others.
_PATIENCE = ("--xla_cpu_collective_call_terminate_timeout_seconds", "--xla_cpu_collective_timeout_seconds")
_PATIENCE_SECONDS = 3600
_MOST_FAKE = 1024  # each is several threads of this process


def require_devices(n: int) -> None:
    """Make sure that JAX has at least n devices; call it before the first JAX computation (importing jax is fine).

    On CPU it makes n fake devices through XLA_FLAGS: the user's other flags stay, larger values of the user stay.
    It starts JAX's backend, so that a failure shows here and not later; jax.distributed.initialize comes before it.
    In a job of several CPU processes, each asks for its own share. It never moves a GPU job to CPU.
    Raises RuntimeError if there are fewer, saying what to do; ValueError if n is not a positive integer, or if
    XLA_FLAGS names a file that cannot be read.
    """
    if type(n) is not int or n < 1:
        raise ValueError(f"require_devices({n!r}): the number of devices must be a positive integer")
    import jax

    if not _backend_started():
        fake = min(n, _MOST_FAKE)
        os.environ["XLA_FLAGS"] = _flags_for(fake, os.environ.get("XLA_FLAGS", ""))
        # Where the user set this one too, JAX prefers it to XLA_FLAGS. (JAX adds its options when it is imported.)
        if 0 <= jax.config.jax_num_cpu_devices < fake:  # pyright: ignore[reportAttributeAccessIssue]
            jax.config.update("jax_num_cpu_devices", fake)
    found, platform = jax.device_count(), jax.default_backend()
    if found >= n:
        return
    have = f"{n} devices are needed, JAX has {found} on {platform}"
    if platform == "cpu" and n > _MOST_FAKE:
        raise RuntimeError(
            f"{have}, and makes at most {_MOST_FAKE} fake ones: use a smaller mesh, or --dry-run to plan"
        )
    if platform == "cpu":
        raise RuntimeError(
            f"{have} and has already started: call meshes.require_devices({n}) before the first JAX computation, "
            f"or start Python with XLA_FLAGS={_COUNT}={n}"
        )
    raise RuntimeError(f"{have}: use a mesh of at most {found} devices, or fake CPU devices with JAX_PLATFORMS=cpu")


def _backend_started() -> bool:
    """Whether JAX has fixed its devices. No public function tells without starting it; 0.10 to 0.12 have this one."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def _flags_for(n: int, flags: str) -> str:
    """The user's XLA_FLAGS with at least n CPU devices and patient collectives."""
    if flags.strip() and not flags.lstrip().startswith("-"):  # then XLA reads its flags from the file of that name
        try:
            flags = Path(flags.strip()).read_text()
        except OSError as unreadable:
            raise ValueError(
                f"XLA_FLAGS={flags!r} is neither flags that start with '--' nor a readable file"
            ) from unreadable
    flags = _at_least(n, _COUNT, flags)
    for name in _PATIENCE:
        flags = _at_least(_PATIENCE_SECONDS, name, flags)
    return flags.strip()


def _at_least(least: int, name: str, flags: str) -> str:
    """`flags` with `name` set to `least`, unless the last setting, the one XLA obeys, is larger already."""
    setting = re.compile(rf"{name}=(\d+)")
    values = setting.findall(flags)
    if values and int(values[-1]) >= least:
        return flags
    return f"{setting.sub('', flags).rstrip()} {name}={least}"
