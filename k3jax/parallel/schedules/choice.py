"""Which schedule to take: the fastest table that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from k3jax.parallel.schedules.build import NAMES, RECIPES, build
from k3jax.parallel.schedules.table import Schedule


def candidates(stages: int, virtual: int, microbatches: int, names: Iterable[str] = NAMES) -> list[Schedule]:
    """The tables of these names that are made for so many virtual stages."""
    made_for = [name for name in names if RECIPES[name].virtual in (None, virtual)]
    return [build(name, stages=stages, virtual=virtual, microbatches=microbatches) for name in made_for]


def ranked(
    tables: Iterable[Schedule],
    *,
    forward: int | float = 1.0,
    backward: int | float = 2.0,
    weight: int | float | None = None,
) -> list[tuple[float, Schedule]]:
    """Bubbles in lock-step with their tables, the least first; of equal ones that which holds fewest activations.

    forward, backward, weight: as of `Schedule.bubble_fraction`; tables for equally many chunks and microbatches do the same
    work, so the least bubble is the least time.
    """

    def bubble(schedule: Schedule) -> float:
        part = weight if len(schedule.kinds) == 3 else None
        return round(schedule.bubble_fraction(forward, backward, part, lockstep=True), 12)

    return sorted(((bubble(s), s) for s in tables), key=lambda pair: (pair[0], pair[1].in_flight().max()))


def best(tables: Iterable[Schedule], fits: Callable[[Schedule], bool], **times: Any) -> Schedule:
    """The first of `ranked`, which takes the times, for which `fits` holds. Raises ValueError if there is none.

    `fits` may be costly: the fastest table is asked first.
    """
    found = [schedule for _, schedule in ranked(tables, **times)]
    for schedule in found:
        if fits(schedule):
            return schedule
    tried = ", ".join(f"{s.name} ({s.in_flight().max()} in flight)" for s in found)
    raise ValueError(f"no schedule fits: tried {tried}; recompute or offload more, or make microbatches smaller")
