"""Whether a step fits into a target's memory, and if not, the smallest change with which it would."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from k3jax.train.choice import WORKSPACE
from k3jax.train.config import StepConfig
from k3jax.train.memory import Part, memory, state_parts
from k3jax.train.step import TrainStep
from meshes.targets import Target

POLICIES = ("*=quantize", "*=local-offload", "*=recompute", "group.in=local-offload,*=recompute")
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
    return int((1 - WORKSPACE) * target.memory.bytes), int((1 - WORKSPACE) * target.host.memory)


def fit(step: TrainStep, target: Target) -> Fit:
    """Bytes of a rank by purpose, against what a device has."""
    return Fit(memory(step), *limits(target))


def smallest_change(step: TrainStep, target: Target) -> Change | None:
    """The change with which the step fits that costs least time; None if there is none among those known here.

    Sharing out masters and gradients costs next to nothing, so the least activations are given up: with each change of
    theirs, in order, every change of the state whose own bytes fit is tried.
    """
    limit, _ = limits(target)
    name = step.resolved.schedule.name
    changed = lambda change: step.changed(**{"schedule": name} | change)
    states = []
    for change in state_changes(step.config):
        with contextlib.suppress(ValueError):  # more virtual stages than the model has groups for
            if sum(part.reserved for part in state_parts(changed(change)) if part.place == "device") <= limit:
                states.append(change)
    for of_activations in activation_changes(step.config):
        for of_state in states:
            change = of_activations | of_state
            with contextlib.suppress(ValueError):  # microbatches that the batch does not divide by
                if change and (found := fit(changed(change), target)).holds:
                    return Change(change, found)
    return None


def state_changes(config: StepConfig) -> Iterator[dict[str, Any]]:
    """Of what is shared out over replicas: nothing, then less and less kept. ZeRO-2 holds gradients of two chunks, so it
    gains by virtual stages."""
    yield {}
    yield from ({"zero": level} for level in (1, 2) if level > config.zero)
    if config.virtual == 1:
        yield from ({"zero": 2, "virtual": n, "schedule": "interleaved_1f1b"} for n in (2, 3))


def activation_changes(config: StepConfig) -> Iterator[dict[str, Any]]:
    """Of what is stored for backward: nothing, policies, smaller microbatches, both."""
    policies = [{}, *({"activations": policy} for policy in POLICIES if policy != config.activations)]
    yield from policies
    yield from (policy | {"microbatches": n * config.microbatches} for n in (2, 4) for policy in policies)
