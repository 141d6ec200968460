"""Whether a step fits into a target's memory, and if not, the smallest change with which it would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from k3jax.train.config import StepConfig
from k3jax.train.memory import Part, memory, state_parts
from k3jax.train.step import TrainStep
from meshes.targets import Target

KEPT_FREE = 0.1
"""Share of a device's memory that a plan leaves to what it does not predict: fragments, buffers of libraries."""
POLICIES = ("*=quantize", "*=local-offload", "*=recompute", "*=recompute,group.in=local-offload")
"""Of activations, those that cost least time first."""


class Fit(NamedTuple):
    parts: list[Part]
    limit: int
    """Bytes of a device that may be planned with."""
    host_limit: int
    """Bytes of its host's memory that are a device's own."""

    @property
    def device(self) -> int:
        return sum(part.reserved for part in self.parts if part.place == "device")

    @property
    def host(self) -> int:
        return sum(part.reserved for part in self.parts if part.place == "host")

    @property
    def holds(self) -> bool:
        return self.device <= self.limit and self.host <= self.host_limit


class Change(NamedTuple):
    changes: dict[str, Any]
    """Fields of the step's configuration."""
    fit: Fit

    def __str__(self) -> str:
        return " ".join(f"--{name.replace('_', '-')}={value}" for name, value in self.changes.items())


def limits(target: Target) -> tuple[int, int]:
    """Bytes that may be planned with, of a device, and of the host's memory for it."""
    return int((1 - KEPT_FREE) * target.memory.bytes), int((1 - KEPT_FREE) * target.host.memory)


def fit(step: TrainStep, target: Target) -> Fit:
    """Bytes of a rank by purpose, against what a device has."""
    return Fit(memory(step), *limits(target))


def smallest_change(step: TrainStep, target: Target) -> Change | None:
    """The first of `changes` with which the step fits; None if it fits with none of them."""
    limit, _ = limits(target)
    for change in changes(step.config):
        try:
            other = step.changed(**change)
        except ValueError:  # microbatches that the batch or the schedule does not divide by
            continue
        if sum(part.reserved for part in state_parts(other)) > limit:
            continue  # whatever its activations
        if (found := fit(other, target)).holds:
            return Change(change, found)
    return None


def changes(config: StepConfig) -> Iterator[dict[str, Any]]:
    """One thing changed, then two, then three; of each the ones first that cost less time.

    Sharing out masters and gradients costs next to nothing; then policies of activations; then smaller microbatches, of which
    there are more.
    """
    zeros = [{"zero": level} for level in (1, 2) if level > config.zero]
    policies = [{"activations": policy} for policy in POLICIES if policy != config.activations]
    more = [{"microbatches": n * config.microbatches} for n in (2, 4)]
    yield from (*zeros, *policies, *more)
    best_zero = zeros[-1:]
    yield from (zero | policy for zero in best_zero for policy in policies)
    yield from (first | second for first in [*best_zero, *policies] for second in more)
    yield from (zero | policy | second for zero in best_zero for policy in policies for second in more)
