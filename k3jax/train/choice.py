"""The schedule of a step that is not told which: the fastest in lock-step that fits into a device's memory.

How long a table takes depends on its operations where a row mixes kinds: it lasts as long as the longest. So they are
counted, in the chunk that the step will run, under its policy.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from k3jax.activations.flops import flops
from k3jax.parallel import pipeline
from k3jax.parallel.schedules import Schedule, best, ranked
from k3jax.train.config import StepConfig
from k3jax.train.devices import memory_limit, shape_of
from k3jax.train.memory import memory
from k3jax.train.plan import in_bytes
from k3jax.train.step import TrainStep

WORKSPACE = 0.1
"""Share of a device's memory that no prediction may take: what operations need while they run is not in it."""


class NothingFitsError(ValueError):
    """No schedule fits into a device's memory."""


class Choice(NamedTuple):
    schedule: Schedule
    why: str


class Times(NamedTuple):
    """Of one chunk's operations, in any one unit; the defaults for tables in which they make no difference."""

    forward: int | float = 1.0
    backward: int | float = 2.0
    """The whole of it."""
    weight: int | float | None = None
    """The part of it that weight gradients take."""

    def __str__(self) -> str:
        weight = self.backward / 2 if self.weight is None else self.weight
        shares = (self.backward - weight) / self.forward, weight / self.forward
        return f"products of F : B : W as 1 : {shares[0]:.2f} : {shares[1]:.2f}"


def choose(
    config: StepConfig, mesh: Mesh | AbstractMesh, platform: str | None = None, memory_of_device: int | None = None
) -> Choice:
    """Of the tables made for the step's virtual stages; traces the step, compiles nothing. Arguments as of `TrainStep`.

    Raises NothingFitsError if none fits. A mesh that does not say how much memory its devices have limits nothing: CPU, and one
    without devices, if it is not said here. Devices of a mesh are taken to be alike.
    """
    tables = config.tables(shape_of(mesh))
    first = TrainStep(dataclasses.replace(config, schedule=tables[0].name), mesh, platform)
    mixed = any(table.mixes for table in tables)
    times = counted(first) if mixed else Times()
    limit, needed = memory_of_device or memory_limit(mesh), {}

    def fits(schedule: Schedule) -> bool:
        if limit is None:
            return True
        needed[schedule.name] = sum(part.reserved for part in memory(first, schedule) if part.place == "device")
        return needed[schedule.name] <= (1 - WORKSPACE) * limit

    try:
        schedule = best(tables, fits, **times._asdict())
    except ValueError as none:
        takes = ", ".join(f"{name} {in_bytes(size)}" for name, size in needed.items())
        raise NothingFitsError(
            f"{none}; of {in_bytes(limit or 0)} on a device, {WORKSPACE:.0%} kept free: {takes}"
        ) from None
    bubbles = {table.name: bubble for bubble, table in ranked(tables, **times._asdict())}
    others = ", ".join(f"{name} {bubble:.3f}" for name, bubble in bubbles.items() if name != schedule.name)
    why = [f"bubble in lock-step {bubbles[schedule.name]:.3f}" + (f", of others {others}" if others else "")]
    why += [str(times)] if mixed else []
    if limit is None:
        why.append("nothing limits memory: no device says how much it has")
    else:
        why.append(f"{in_bytes(needed.pop(schedule.name))} of {in_bytes(limit)} predicted")
        why += [f"{name} would take {in_bytes(size)}" for name, size in needed.items()]
    return Choice(schedule, "; ".join(why))


def counted(step: TrainStep) -> Times:
    """Operations of the matrix products in one chunk's forward and backward."""

    def trace(program: pipeline.Program, params: Any) -> Times:
        schedule = step.resolved.schedule
        example, histories = pipeline.example_of(schedule, program, params)
        pullback = pipeline.pullback_of(schedule, program, example, histories)
        (forward, made), backward = pullback.whole_forward, pullback.whole_backward(example).jaxpr
        of_stream = range(len(jax.tree.leaves(example[0])), len(backward.outvars))
        everything = flops(backward)
        return Times(flops(forward.jaxpr, range(made)), everything, everything - flops(backward, of_stream))

    return step.on_one_rank(trace)
