"""Where what an operation stores waits until it is read: in which memory, of which rank, from when to when.

Exactly as the executor's stores do it: what is kept stays on its own rank; what is parked or hosted is away for the middle
of its life (parking.py, hosting.py); what is recomputed is nowhere. A tick has three moments: its operation reads, the
stores are written, what leaves in the next tick is read. Within a tick a slot may change its contents between two.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from k3jax.activations.hosting import host
from k3jax.activations.parking import park
from k3jax.activations.stores import make_store
from k3jax.parallel.schedules import Life, Schedule

Key = tuple[int, ...]
"""(chunk, microbatch)."""


MOMENTS = 3
"""Of a tick."""


class Stay(NamedTuple):
    """In one place, from the beginning of moment `first` to the end of moment `last`."""

    place: str
    """"device" or "host"."""
    rank: int
    """Pipeline rank whose device or host that is."""
    first: int
    last: int

    @property
    def ticks(self) -> tuple[int, int]:
        """The first and the last in which it is there."""
        return self.first // MOMENTS, self.last // MOMENTS


class Timeline(NamedTuple):
    """How much waits at each moment, by the place that holds it: bytes, or contents of slots."""

    own: Int64[np.ndarray, "moments stages"]
    """On each rank's device, its own."""
    parked: Int64[np.ndarray, "moments stages"]
    """On each rank's device, those of other ranks."""
    host: Int64[np.ndarray, "moments stages"]
    """In host memory, of each rank."""

    @property
    def device(self) -> Int64[np.ndarray, "moments stages"]:
        """All that a rank's device holds."""
        return self.own + self.parked

    @property
    def peak(self) -> Int64[np.ndarray, " stages"]:
        """Most that each rank's device holds at any moment."""
        return self.device.max(axis=0)


def by_tick(amounts: Int64[np.ndarray, "moments stages"]) -> Int64[np.ndarray, "ticks stages"]:
    """The most of each tick."""
    return amounts.reshape(-1, MOMENTS, amounts.shape[1]).max(axis=1)


@functools.cache
def stays(schedule: Schedule, made: int, read: int, storage: str) -> dict[Key, tuple[Stay, ...]]:
    """Of each (chunk, microbatch), in order of time; `made` stores it and `read` is the last kind to need it."""
    whole = lambda place, life: Stay(place, life.stage, MOMENTS * life.born, MOMENTS * life.dies + MOMENTS - 1)
    if storage == "remote-offload":
        in_moments = lambda life: Stay("device", life.stage, life.born, life.dies)
        return {key: tuple(map(in_moments, of_key)) for key, of_key in park(schedule, made, read).stays.items()}
    if storage == "local-offload":
        plan = host(schedule, made, read)
        away = lambda key: (whole("host", plan.away[key]),) if key in plan.away else ()
        return {key: (*away(key), whole("device", here)) for key, here in plan.here.items()}
    lives: list[Life] = schedule.lives(made, read)
    return {life.key: (whole("device", life),) if storage == "keep" else () for life in lives}


@functools.cache
def resident(schedule: Schedule, made: int, read: int, storage: str) -> Timeline:
    """How many contents of such a store are where, at each moment."""
    counts = [(chunk, stay, 1) for (chunk, _), of in stays(schedule, made, read, storage).items() for stay in of]
    return timeline_of(schedule, counts)


def timeline_of(schedule: Schedule, staying: list[tuple[int, Stay, int]]) -> Timeline:
    """The sum of (chunk, stay, amount)."""
    change = Timeline(
        *(np.zeros((MOMENTS * schedule.num_ticks + 1, schedule.stages), np.int64) for _ in Timeline._fields)
    )
    for chunk, stay, amount in staying:
        elsewhere = change.own if stay.rank == schedule.stage_of(chunk) else change.parked
        place = change.host if stay.place == "host" else elsewhere
        place[stay.first, stay.rank] += amount
        place[stay.last + 1, stay.rank] -= amount
    return Timeline(*(part.cumsum(axis=0)[:-1] for part in change))


class Slots(NamedTuple):
    """Contents for which a store has room for the whole step, on every rank alike because all run one program."""

    device: int
    host: int


def reserved(schedule: Schedule, made: int, read: int, storage: str) -> Slots:
    """Room of such a store: at least what any rank holds at any moment."""
    return Slots(0, 0) if storage == "recompute" else Slots(*make_store(schedule, (made, read), storage).reserved)


def transfers(schedule: Schedule, made: int, read: int, storage: str) -> int:
    """How often, in a step and over all ranks, contents of such a store cross from memory to memory: there, and back."""
    return 2 * sum(len(of_key) > 1 for of_key in stays(schedule, made, read, storage).values())
