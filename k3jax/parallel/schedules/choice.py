"""Which schedule to take: the fastest table that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from k3jax.parallel.schedules.build import NAMES, RECIPES, build
from k3jax.parallel.schedules.table import Schedule


def candidates(stages: int, virtual: int, microbatches: int, names: Iterable[str] = NAMES) -> list[Schedule]:
    """The tables of these names that are made for so many virtual stages."""
    made_for = [name for name in names if RECIPES[name].virtual in (None, virtual)]
    return [build(name, stages=stages, virtual=virtual, microbatches=microbatches) for name in made_for]


def best(
    stages: int,
    virtual: int,
    microbatches: int,
    fits: Callable[[Schedule], bool],
    *,
    forward: int | float = 1.0,
    backward: int | float = 2.0,
    weight: int | float | None = None,
) -> Schedule:
    """The table of least time in lock-step for which `fits` holds; of equal ones that which holds fewest activations.

    forward, backward, weight: as of `Schedule.bubble_fraction`; all tables do the same work, so the least bubble is the
    least time. `fits` may be costly: the fastest is asked first. Raises ValueError if none fits, or a count is below 1.
    """

    def order(schedule: Schedule) -> tuple[float, int]:
        part = weight if len(schedule.kinds) == 3 else None
        bubble = schedule.bubble_fraction(forward, backward, part, lockstep=True)
        return round(bubble, 12), int(schedule.in_flight().max())

    found = sorted(candidates(stages, virtual, microbatches), key=order)
    for schedule in found:
        if fits(schedule):
            return schedule
    tried = ", ".join(f"{s.name} ({s.in_flight().max()} in flight)" for s in found)
    raise ValueError(
        f"no schedule fits stages={stages}, virtual={virtual}, microbatches={microbatches}: tried {tried}; "
        "recompute or offload more, or make microbatches smaller"
    )
