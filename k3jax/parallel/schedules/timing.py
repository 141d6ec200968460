"""How long a table takes: with ranks that run freely, and in lock-step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from k3jax.parallel.schedules.kinds import BACKWARD, FORWARD

if TYPE_CHECKING:
    from k3jax.parallel.schedules.table import Schedule

Time = int | float


def costs(schedule: Schedule, forward: Time, backward: Time, weight: Time | None) -> list[Time]:
    """Time of each kind of operation, idle first; ValueError for times that mean nothing."""
    split = len(schedule.kinds) == 3
    if weight is not None and not split:
        raise ValueError(f"{schedule.name} runs backward whole: got weight={weight}, pass weight=None")
    if not (forward > 0 and backward > 0):
        raise ValueError(f"times must be positive: got forward={forward}, backward={backward}")
    weight = (backward / 2 if weight is None else weight) if split else 0.0
    if not 0 <= weight < backward or (split and weight == 0):
        raise ValueError(f"weight is a part of backward={backward}, above 0 and below it: got {weight}")
    return [0.0, forward, backward - weight, weight]


def bubble_fraction(schedule: Schedule, cost: list[Time], lockstep: bool) -> float:
    """See `Schedule.bubble_fraction`."""
    busy = sum(cost[kind] for kind in schedule.kinds) * schedule.virtual * schedule.microbatches
    if lockstep:
        return 1 - busy / float(np.array(cost)[schedule.table[:, :, 0]].max(axis=1).sum())
    return 1 - busy / max(free_running(schedule, cost).values())


def free_running(schedule: Schedule, cost: list[Time]) -> dict[tuple[int, int, int], float]:
    """When each (kind, chunk, microbatch) ends, if a rank runs its own order as soon as inputs exist."""
    free, end = [0.0] * schedule.stages, {}
    for _, stage, kind, chunk, m, _ in schedule.operations():
        upstream = {FORWARD: chunk - 1, BACKWARD: chunk + 1}.get(kind)
        free[stage] = max(free[stage], end.get((kind, upstream, m), 0.0)) + cost[kind]
        end[kind, chunk, m] = free[stage]
    return end
