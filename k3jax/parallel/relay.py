"""Rows that chunks append and all later chunks read: who keeps them, and which of them travel with which message.

Rows are only appended, so a stage keeps those of a microbatch that it works on, and a message carries the rows alone that
its receiver has not seen. Gradients go the same way back: a stage sums those of all its chunks, and returns a row's sum
with the backward of the chunk that the row had come to. Rows move like this between chunks of attention residuals
(K3 report, pre-training: cache-based pipeline communication), but nothing here knows what a row is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from k3jax.parallel.schedules import BACKWARD, DOWN, FORWARD, UP, Life, Schedule, assign, route

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


class RowTraffic(NamedTuple):
    """Bytes of rows sent in one step, forward and backward, all stages together."""

    moved: int
    """Of rows that their receiver lacks, which is what permutes carry."""
    naive: int
    """Of all rows that exist, with every message between two stages: without a cache."""


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

    @functools.cached_property
    def stages(self) -> list[int]:
        """Of each chunk."""
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
        """Slot of each (stage, microbatch), from its first forward there until the last operation there has run."""
        return assign(self._lives(FORWARD, self.schedule.kinds[-1]), self.schedule.stages)

    @functools.cached_property
    def sums(self) -> dict[tuple[int, ...], int]:
        """Slot of each (stage, microbatch) for sums of gradients, from its first backward there until its last there.

        On the last stage from its last forward: in that tick the model's head makes gradients.
        """
        if BACKWARD not in self.schedule.kinds:
            return {}
        slots = assign(self._lives(BACKWARD, BACKWARD), self.schedule.stages)
        return {key: self.num_values + slot for key, slot in slots.items()}

    @property
    def num_values(self) -> int:
        return max(self.values.values()) + 1

    @property
    def num_slots(self) -> int:
        return max([*self.values.values(), *self.sums.values()]) + 1

    @property
    def alive(self) -> np.ndarray:
        """Slots in use, of rows and of sums; [tick, stage]."""
        counts = np.zeros(self.schedule.mail.shape, np.int64)
        lives = self._lives(FORWARD, self.schedule.kinds[-1])
        lives += self._lives(BACKWARD, BACKWARD) if BACKWARD in self.schedule.kinds else []
        for life in lives:
            counts[life.born : life.dies + 1, life.stage] += 1
        return counts

    def _lives(self, first: int, last: int) -> list[Life]:
        """Of each (stage, microbatch), between its first operation of one kind there and its last of another."""
        born: dict[tuple[int, ...], int] = {}
        dies: dict[tuple[int, ...], int] = {}
        for (kind, chunk, m), tick in self.schedule.ticks.items():
            key = self.stages[chunk], m
            if kind == first:
                at_head = kind == BACKWARD and chunk == self.schedule.chunks - 1
                start = self.schedule.ticks[FORWARD, chunk, m] if at_head else tick
                born[key] = min(start, born.get(key, start))
            if kind == last:
                dies[key] = max(tick, dies.get(key, tick))
        return [Life(key[0], born[key], dies[key], key) for key in born]

    # ---- what happens in each tick ----------------------------------------------------------------------------------------

    @functools.cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """For the executor; [tick, stage, ...] unless said otherwise, −1 for unused places.

        values: slot of the microbatch's rows. result: slot of what it makes, which holds what it is made from:
        of all rows for a forward, of sums of their gradients for a backward; others hand back slot 0 as it is. fresh: 1 if
        there is nothing in the slot of the result yet. deposit [tick]: slot on the last stage for the gradients of the head.
        entering [..., num_rows]: for each row its place in the operation's message. leaving [..., room]: the rows that go
        with the message that it sends. travelling [tick, (UP, DOWN)]: which of the `loads` of this way arrives.
        """
        shape, last = self.schedule.mail.shape, self.schedule.chunks - 1
        last_chunk = {stage: chunk for chunk, stage in enumerate(self.stages)}
        first_chunk = {self.stages[chunk]: chunk for chunk in reversed(range(last + 1))}
        values, result, fresh = (np.zeros(shape, np.int32) for _ in range(3))
        deposit = np.zeros(shape[0], np.int32)
        entering = np.full((*shape, self.num_rows), NOTHING, np.int32)
        leaving = np.full((*shape, self.room), NOTHING, np.int32)
        for (kind, chunk, m), tick in self.schedule.ticks.items():
            stage = self.stages[chunk]
            at = tick, stage
            values[at] = self.values[stage, m]
            if kind not in (FORWARD, BACKWARD):
                continue
            # Rows that came with a chunk's input are those whose gradients go back with the input's.
            before, behind = self._window(chunk), self._window(chunk + 1)
            slots, came, goes, first = (
                (self.values, before, behind, first_chunk[stage])
                if kind == FORWARD
                else (self.sums, behind, before, last_chunk[stage])
            )
            result[at] = slots[stage, m]
            fresh[at] = chunk == first and (kind, chunk) != (BACKWARD, last)
            entering[at][list(came)] = range(len(came))
            leaving[at][: len(goes)] = goes
            if kind == FORWARD and chunk == last:
                deposit[tick] = self.sums.get((stage, m), 0)
        return dict(
            values=values,
            result=result,
            fresh=fresh,
            deposit=deposit,
            entering=entering,
            leaving=leaving,
            travelling=np.stack([self._loads[way][1] for way in (UP, DOWN)], axis=1),
        )

    @functools.cached_property
    def loads(self) -> list[np.ndarray]:
        """For each way (UP, DOWN) the different numbers of rows that travel in a tick: [load, sending stage]."""
        return [loads for loads, _ in self._loads]

    @functools.cached_property
    def _loads(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """With the index of the load that arrives in each tick."""
        sent = np.zeros((2, *self.schedule.mail.shape), np.int32)
        for (kind, chunk, _), tick in self.schedule.ticks.items():
            # The rows that came with a chunk's input, and their gradients, pass between it and the chunk before.
            after = chunk + 1 if kind == FORWARD else chunk
            to = {FORWARD: after, BACKWARD: after - 1}.get(kind)
            if to is not None and len(rows := self._window(after)):
                way = route(self.stages[chunk], self.stages[to], self.schedule.stages)
                sent[way, tick + 1, self.stages[chunk]] = len(rows)
        found = [np.unique(of_way, axis=0, return_inverse=True) for of_way in sent]
        return [(loads, index.reshape(-1).astype(np.int32)) for loads, index in found]

    def _window(self, chunk: int) -> Rows:
        return self.windows[chunk] if chunk < self.schedule.chunks else range(0)

    def traffic(self, row_bytes: int) -> RowTraffic:
        """What one step sends. `row_bytes`: of one row of one microbatch on a rank."""
        times = self.schedule.microbatches * (2 if BACKWARD in self.schedule.kinds else 1)
        exist = np.cumsum((0, *self.appended))
        crossing = [c for c in range(1, self.schedule.chunks) if self.stages[c] != self.stages[c - 1]]
        return RowTraffic(
            moved=row_bytes * sum(int(loads[index].sum()) for loads, index in self._loads),
            naive=row_bytes * times * int(sum(exist[c] for c in crossing)),
        )
