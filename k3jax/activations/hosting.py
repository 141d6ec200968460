"""Local offload as a plan: what waits for long does so in host memory, and lands on the device a tick before it is read."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from k3jax.parallel.schedules import Life, Schedule, assign


@dataclass(frozen=True, eq=False)
class Hosting:
    """Slots in host memory and on the device; -1 for none. All [tick, stage]."""

    write: Int32[np.ndarray, "ticks stages"]
    """Host slot for what the operation made, …"""
    land: Int32[np.ndarray, "ticks stages"]
    """… or a slot on the device, because it is read too soon to leave."""
    fetch: Int32[np.ndarray, "ticks stages 2"]
    """Host slot to read before the operation, and slot on the device to write after it."""
    slots: Int32[np.ndarray, "ticks stages"]
    """Slot on the device, at each operation that reads it."""
    away: dict[tuple[int, ...], Life]
    """Of each (chunk, microbatch) that leaves the device: when it is in host memory; …"""
    here: dict[tuple[int, ...], Life]
    """… and of all, when they are on the device."""

    @property
    def num_host_slots(self) -> int:
        return max(int(self.write.max()) + 1, 1)

    @property
    def num_slots(self) -> int:
        """Slots on the device."""
        return int(self.slots.max()) + 1


@functools.cache
def host(schedule: Schedule, made: int, read: int) -> Hosting:
    """The plan for what `made` stores and `read` is last to need.

    Fetched in the tick before it is first read; what would have to be fetched in the tick that made it never leaves.
    """
    next_kind = schedule.kinds[schedule.kinds.index(made) + 1]
    lives = schedule.lives(made, read)
    fetched = {life.key: schedule.ticks[next_kind, *life.key] - 1 for life in lives}
    away = {x.key: x._replace(dies=fetched[x.key]) for x in lives if fetched[x.key] > x.born}
    here = {x.key: x._replace(born=fetched[x.key] if x.key in away else x.born) for x in lives}
    host_slot, slot = (assign(of_key.values(), schedule.stages) for of_key in (away, here))
    none = lambda *more: np.full((*schedule.mail.shape, *more), -1, np.int32)
    plan = Hosting(none(), none(), none(2), none(), away, here)
    for life in lives:
        stage, key = life.stage, life.key
        if key in away:
            plan.write[life.born, stage] = host_slot[key]
            plan.fetch[fetched[key], stage] = host_slot[key], slot[key]
        else:
            plan.land[life.born, stage] = slot[key]
    for tick, stage, kind, chunk, m, _ in schedule.operations():
        if made < kind <= read:
            plan.slots[tick, stage] = slot[chunk, m]
    return plan
