"""Rows that chunks append and all later chunks read: who keeps them, and which of them travel with which message.

Rows are only appended, so a stage keeps those of a microbatch that it works on, and a message carries the rows alone that
its receiver has not seen. Gradients go the same way back: a stage sums those of all its chunks, and returns a row's sum
with the backward of the chunk that the row had come to. Rows move like this between chunks of attention residuals
(K3 report, pre-training: cache-based pipeline communication), but nothing here knows what a row is.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from k3jax.parallel.schedules import BACKWARD, DOWN, FORWARD, STAY, UP, Life, Schedule, assign, route

Rows = range
NOTHING = -1


def windows(stage_of: Sequence[int], appended: Sequence[int]) -> list[Rows]:
    """Rows that come with the input of each chunk: those that exist and that its stage has not seen.

    stage_of, appended: of each chunk, its stage and the number of rows that it appends. The sender has them all, because
    it has just run the chunk before.
    """
    seen = dict.fromkeys(stage_of, 0)  # a chunk sees all rows before it: what a stage knows is a number of rows
    exist, found = 0, []
    for stage, new in zip(stage_of, appended, strict=True):
        found.append(range(seen[stage], exist))
        exist += new
        seen[stage] = exist
    return found


class Traffic(NamedTuple):
    """Rows sent in one step, forward and backward, all stages together."""

    useful: int
    """Those that their receiver needs: what a cache at each stage leaves to send."""
    moved: int
    """What permutes carry: in a tick, every stage sends as many rows as the one that sends most."""
    naive: int
    """All that exist, with every message: without a cache."""
    naive_moved: int
    """What permutes would carry if every message had room for all rows."""


@dataclass(frozen=True, eq=False)
class Relay:
    """The rows of a schedule's chunks: slots on each stage and the way of every row. `appended`: rows of each chunk.

    A slot holds all rows of one microbatch. The first `num_values` slots are for the rows, the others for sums of their
    gradients. Raises ValueError if `appended` does not give a number for each chunk.
    """

    schedule: Schedule
    appended: tuple[int, ...]

    def __post_init__(self):
        if len(self.appended) != self.schedule.chunks or min(self.appended) < 0:
            raise ValueError(
                f"appended={self.appended}: give the number of rows, 0 or more, of each of {self.schedule.chunks} chunks"
            )

    @property
    def num_rows(self) -> int:
        """Rows of one microbatch, of all chunks."""
        return sum(self.appended)

    @property
    def stages(self) -> list[int]:
        return [self.schedule.stage_of(c) for c in range(self.schedule.chunks)]

    @functools.cached_property
    def windows(self) -> list[Rows]:
        """See `windows`."""
        return windows(self.stages, self.appended)

    @property
    def room(self) -> int:
        """Rows that a message has room for."""
        return max(map(len, self.windows))

    # ---- slots ----------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def values(self) -> dict[tuple[int, ...], int]:
        """Slot of each (stage, microbatch), from the first arrival there until the last operation there has run."""
        return self._slots(FORWARD, self.schedule.kinds[-1])

    @functools.cached_property
    def sums(self) -> dict[tuple[int, ...], int]:
        """Slot of each (stage, microbatch) for sums of gradients, from the first arrival until the last backward there."""
        if BACKWARD not in self.schedule.kinds:
            return {}
        return {key: self.num_values + slot for key, slot in self._slots(BACKWARD, BACKWARD).items()}

    @property
    def num_values(self) -> int:
        return max(self.values.values()) + 1

    @property
    def num_slots(self) -> int:
        return max([*self.values.values(), *self.sums.values()]) + 1

    def _slots(self, first: int, last: int) -> dict[tuple[int, ...], int]:
        """From the tick in which the first operation of kind `first` has its input to the last operation of kind `last`."""
        born: dict[tuple[int, ...], int] = {}
        dies: dict[tuple[int, ...], int] = {}
        for (kind, chunk, m), tick in self.schedule.ticks.items():
            key = self.stages[chunk], m
            if kind == first:
                there = self._input_is_there(kind, chunk, m)
                born[key] = min(there, born.get(key, there))
            if kind == last:
                dies[key] = max(tick, dies.get(key, tick))
        return assign([Life(key[0], born[key], dies[key], key) for key in born], self.schedule.stages)

    def _input_is_there(self, kind: int, chunk: int, m: int) -> int:
        ticks = self.schedule.ticks
        if kind == FORWARD:
            return ticks[FORWARD, chunk - 1, m] + 1 if chunk else ticks[FORWARD, chunk, m]
        if chunk < self.schedule.chunks - 1:
            return ticks[BACKWARD, chunk + 1, m] + 1
        return ticks[FORWARD, chunk, m]  # the model's head makes gradients in the tick of the last forward

    # ---- what happens in each tick ----------------------------------------------------------------------------------------

    @functools.cached_property
    def columns(self) -> dict[str, Int32[np.ndarray, "ticks *more"]]:
        """For the executor.

        values [tick, stage]: slot of the rows that the operation reads. result [tick, stage]: slot of what it makes, which
        holds what it is made from: of all rows for a forward, of sums of their gradients for a backward; others hand back
        slot 0 as it is. deposit [tick]: slot on the last stage for the gradients that the head makes.
        exist, summed [tick, stage, 2]: ranges of rows that must be there, in values, and in the result of a backward.
        leaving [tick, stage, room]: rows that go with the operation's message. arriving [tick, stage, (UP, DOWN), room]:
        where they are put at the beginning of the next tick: slot · num_rows + row. −1 is an unused place.
        travelling [tick, (UP, DOWN)]: rows that any stage sends this way, in the tick in which they arrive.
        """
        shape = self.schedule.mail.shape
        values, result = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        deposit = np.zeros(shape[0], np.int32)
        exist, summed = (np.zeros((*shape, 2), np.int32) for _ in range(2))
        made = [0, *itertools.accumulate(self.appended)]
        leaving = np.full((*shape, self.room), NOTHING, np.int32)
        arriving = np.full((*shape, 2, self.room), NOTHING, np.int32)
        last = self.schedule.chunks - 1
        for (kind, chunk, m), tick in self.schedule.ticks.items():
            stage = self.stages[chunk]
            values[tick, stage] = self.values[stage, m]
            exist[tick, stage] = 0, made[chunk + (kind != FORWARD)]
            if kind not in (FORWARD, BACKWARD):
                continue
            slots, receiver, rows = self._message(kind, chunk)
            result[tick, stage] = slots[stage, m]
            if kind == FORWARD and chunk == last:
                deposit[tick] = self.sums.get((stage, m), 0)
            if kind == BACKWARD:
                summed[tick, stage] = self._summed(chunk)
            if len(rows):
                way = route(stage, receiver, self.schedule.stages)
                assert way != STAY, "a stage has its own rows"
                places = [slots[receiver, m] * self.num_rows + row for row in rows]
                leaving[tick, stage, : len(rows)] = rows
                arriving[tick + 1, receiver, way, : len(rows)] = places
        travelling = (arriving != NOTHING).sum(-1).max(1).astype(np.int32)
        return dict(
            values=values,
            result=result,
            deposit=deposit,
            exist=exist,
            summed=summed,
            leaving=leaving,
            arriving=arriving,
            travelling=travelling,
        )

    def _summed(self, chunk: int) -> tuple[int, int]:
        """Rows whose gradients must have come before a chunk's backward: for a stage's first those of its message alone."""
        if chunk + 1 == self.schedule.chunks or self.stages[chunk] in self.stages[chunk + 1 :]:
            return 0, self.num_rows
        rows = self.windows[chunk + 1]
        return rows.start, rows.stop

    def _message(self, kind: int, chunk: int) -> tuple[dict[tuple[int, ...], int], int, Rows]:
        """Slots that an operation of this kind writes, the receiver of its message, and the rows in it."""
        if kind == FORWARD:
            onward = min(chunk + 1, self.schedule.chunks - 1)
            rows = self.windows[onward] if onward > chunk else range(0)
            return self.values, self.stages[onward], rows
        return self.sums, self.stages[max(chunk - 1, 0)], self.windows[chunk]

    def traffic(self) -> Traffic:
        """Rows sent in one step."""
        schedule = self.schedule
        times = schedule.microbatches * (2 if BACKWARD in schedule.kinds else 1)
        exist = np.cumsum((0, *self.appended))
        crossing = [c for c in range(1, schedule.chunks) if self.stages[c] != self.stages[c - 1]]
        return Traffic(
            useful=times * sum(map(len, self.windows)),
            moved=schedule.stages * int(self.columns["travelling"].sum()),
            naive=times * int(sum(exist[c] for c in crossing)),
            naive_moved=schedule.stages * self.num_rows * int(schedule.moves[:, [UP, DOWN]].sum()),
        )
