"""The real training step, compiled ahead of time for a cluster that is not there: what XLA makes of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from k3jax.plan import hlo
from k3jax.plan.cost import Walk
from k3jax.plan.overlap import messages
from k3jax.train.step import TrainStep

AS_IT_IS = {"xla_disable_hlo_passes": "rematerialization"}
"""Options with which XLA does not try to make a program smaller that does not fit."""


class Compiled(NamedTuple):
    """Of one device."""

    arguments: int
    """Bytes of parameters and optimizer state; results take their place."""
    temporaries: int
    """Bytes that XLA sets aside beside them, operations' workspace included."""
    peak: int
    """Most bytes at one time."""
    host: int
    """Bytes in host memory."""
    received: Mapping[tuple[tuple[str, ...], str], float]
    """Bytes from other ranks in a step, the mean over ranks, by axes and kind of collective."""
    messages: int
    """Collectives in the program, loops' bodies once."""
    asynchronous: int
    """Of these, such that other work may stand between their start and their end."""
    covered: int
    """Of these, such that matrix products do."""
    lowering: float
    """Seconds."""
    compiling: float
    """Seconds."""


def compile_step(step: TrainStep, walk: Walk, *, as_it_is: bool = False) -> Compiled:
    """Compiles the step of a mesh of devices, present or absent. walk: of its traced program.

    as_it_is: without rematerialisation by XLA, which else tries for long to make a program fit that does not.
    """
    began = time.monotonic()
    lowered = step.step.trace(*step.operands()).lower()
    lowering = time.monotonic() - began
    options: dict[str, Any] = {"compiler_options": AS_IT_IS} if as_it_is else {}
    compiled = lowered.compile(**options)
    compiling = time.monotonic() - began - lowering
    text, memory = str(compiled.as_text()), compiled.memory_analysis()
    assert memory is not None
    found = hlo.collectives(text, step.resolved.mesh.sizes, hlo.taken_as(walk.branches))
    sent = messages(text)
    return Compiled(
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.peak_memory_in_bytes,
        memory.host_temp_size_in_bytes,
        hlo.received(found),
        len(sent),
        sum(one.asynchronous for one in sent),
        sum(one.asynchronous and bool(one.beside.keys() - {"other"}) for one in sent),
        lowering,
        compiling,
    )
