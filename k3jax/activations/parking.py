"""Remote offload as a plan: early ranks park what they need last in the memory of late ranks, and fetch it in time.

Under 1F1B early ranks hold more in-flight microbatches than late ones. Rank r is paired with rank P - 1 - r: together they
hold as much as any other pair. What is parked lies in a slot of the holder's store, as the holder's own things do, and is
back in a slot of its owner when it is read. K3 report, balancing over pipeline ranks.

Beside the operation of a tick, a rank exchanges the contents of at most one slot with its partner. Within a tick the
operation reads, then what it made and what arrived is written, then what leaves in the next tick is read into a buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32

from k3jax.parallel.schedules import Life, Schedule, assign

Pair = tuple[int, int]
"""Stages: sender, receiver."""


class Move(NamedTuple):
    """Contents of a slot that one stage sends to another beside the operation of a tick."""

    tick: int
    pair: Pair
    slots: tuple[int, int]
    """Of the sender, of the receiver."""
    key: tuple[int, ...]
    """(chunk, microbatch)."""


@dataclass(frozen=True, eq=False)
class Parking:
    """Where what each (chunk, microbatch) stores lies at every tick."""

    slots: Int32[np.ndarray, "ticks stages"]
    """Slot, on its own stage, at each operation that makes or reads it; else -1."""
    moves: tuple[Move, ...]
    stays: dict[tuple[int, ...], tuple[Life, ...]]
    """Where each (chunk, microbatch) is, in thirds of ticks: on its own stage, and in between, if parked, with its holder."""
    resident: Int[np.ndarray, "ticks stages"]
    """Slots in use, the most at any time in a tick. A buffer of one slot's contents comes on top where anything moves."""

    @property
    def num_slots(self) -> int:
        """Slots of a store: the most over stages, because all run one program."""
        return int(self.resident.max())

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Stages that exchange anything, the earlier one first."""
        return tuple(sorted({(min(move.pair), max(move.pair)) for move in self.moves}))

    def column(self, pair: Pair) -> Int32[np.ndarray, "ticks 2"]:
        """For each tick the slots of the sender and of the receiver, -1 where nothing moves between them."""
        column = np.full((len(self.slots), 2), -1, np.int32)
        for move in self.moves:
            if move.pair == pair:
                column[move.tick] = move.slots
        return column


@functools.cache
def park(schedule: Schedule, made: int, read: int) -> Parking:
    """The plan with the fewest slots, and of those the fewest moves, for what `made` stores and `read` is last to need."""
    peaks = schedule.alive(made, read).max(axis=0)
    limits = range(int(peaks.max()) + 1, max(int(peaks.mean()) - 2, 0), -1)
    plans = (_plan(schedule, made, read, limit) for limit in limits)
    return min(plans, key=lambda plan: (plan.num_slots, len(plan.moves)))


class _Stay(NamedTuple):
    """A (chunk, microbatch) on a stage: one of up to three in its life."""

    life: Life
    """In thirds of ticks: the operation reads, the store is written, what leaves is read."""
    key: tuple[int, ...]


def _plan(schedule: Schedule, made: int, read: int, limit: int) -> Parking:
    """A stage that has `limit` slots in use parks what it needs last, if its partner is a later stage."""
    stays: dict[tuple[int, ...], list[Life]] = {}
    for stage in range(schedule.stages):
        for life, key in _of_stage(schedule, made, read, stage, limit):
            stays.setdefault(key, []).append(life)
    lives = [life for of_key in stays.values() for life in of_key]
    slot_of = assign(lives, schedule.stages)
    slots, thirds = np.full(schedule.mail.shape, -1, np.int32), np.zeros((3 * schedule.num_ticks, schedule.stages), int)
    for life in lives:
        thirds[life.born : life.dies + 1, life.stage] += 1
    for tick, stage, kind, chunk, m, _ in schedule.operations():
        if made <= kind <= read:
            at = next(x for x in stays[chunk, m] if x.stage == stage and x.born <= 3 * tick + (kind == made) <= x.dies)
            slots[tick, stage] = slot_of[at.key]
    moves = [
        Move(there.born // 3, (here.stage, there.stage), (slot_of[here.key], slot_of[there.key]), key)
        for key, of_key in stays.items()
        for here, there in zip(of_key, of_key[1:], strict=False)
    ]
    resident = thirds.reshape(schedule.num_ticks, 3, schedule.stages).max(axis=1)
    return Parking(slots, tuple(sorted(moves)), {key: tuple(of_key) for key, of_key in stays.items()}, resident)


def _of_stage(schedule: Schedule, made: int, read: int, stage: int, limit: int) -> Iterator[_Stay]:
    """Where the things of one stage stay."""
    holder, next_kind = schedule.stages - 1 - stage, schedule.kinds[schedule.kinds.index(made) + 1]
    mine = {life.key: life for life in schedule.lives(made, read) if life.stage == stage}
    back = {key: schedule.ticks[next_kind, *key] - 1 for key in mine}
    parked: dict[tuple[int, ...], int] = {}
    for tick in range(schedule.num_ticks):
        away = lambda k, tick=tick: parked.get(k, tick) < tick < back[k]
        here = [k for k, life in mine.items() if life.born <= tick <= life.dies and not away(k)]
        movable = [k for k in here if k not in parked and mine[k].born < tick < back[k]]
        if holder > stage and len(here) >= limit and movable:
            parked[max(movable, key=back.__getitem__)] = tick
    for key, life in mine.items():
        stay = lambda stage, written, last, part, key=key: _Stay(Life(stage, 3 * written + 1, last, (*key, part)), key)
        if key not in parked:
            yield stay(stage, life.born, 3 * life.dies, 0)
        else:
            sent, returned = parked[key], back[key]
            yield stay(stage, life.born, 3 * (sent - 1) + 2, 0)
            yield stay(holder, sent, 3 * (returned - 1) + 2, 1)
            yield stay(stage, returned, 3 * life.dies, 2)
