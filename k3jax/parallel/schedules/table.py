"""Pipeline schedules as pure data: tables that an executor runs row by row, checked and timed without devices.

A chunk is a run of layers; it lives on one stage. A tick is one row of a table. All ranks run one program and a tick ends
when its slowest rank is done, so where backward runs whole, a row holds one kind of operation for all stages.

What belongs to one (chunk, microbatch) waits in numbered slots of a rank: messages in its mailbox, what backward needs in
its stores. The tables name the slot of every operation and of every message, so no address travels with it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int, Int32

from k3jax.parallel.schedules import placement as places
from k3jax.parallel.schedules import replay, timing
from k3jax.parallel.schedules.kinds import BACKWARD, FORWARD, IDLE, LETTERS
from k3jax.parallel.schedules.placement import Placement
from k3jax.parallel.schedules.slots import Life, assign


@dataclass(frozen=True, eq=False)
class Schedule:
    """A pipeline schedule (K3 report, pre-training: interleaved 1F1B), ready for an executor.

    table [tick, stage, (kind, chunk, microbatch, slot)]; idle is (0, -1, -1, -1). slot: of what a forward stores for its
    backward, until the last operation that reads it.
    mail [tick, stage]: mailbox slot of the message that the operation reads, -1 for none: a forward's input, a backward's
    cotangent.
    arrivals [tick, stage, (UP, DOWN, STAY)]: mailbox slot for the message that came this way, sent in the tick before, to be
    written before the operation of this tick runs; -1: nothing arrives.
    Chunk 0's input is made by the embedding and written to its mailbox slot in the tick that reads it. The last chunk's
    forward sends nothing on: the head makes its cotangent in that tick, which the stage sends to itself.
    """

    name: str
    placement: Placement
    kinds: tuple[int, ...]
    """Kinds of operations every (chunk, microbatch) goes through, in order."""
    stages: int
    virtual: int
    microbatches: int
    table: Int32[np.ndarray, "ticks stages 4"]
    mail: Int32[np.ndarray, "ticks stages"]
    arrivals: Int32[np.ndarray, "ticks stages 3"]

    @property
    def chunks(self) -> int:
        """Chunks of the whole model: stages * virtual."""
        return self.stages * self.virtual

    @property
    def num_ticks(self) -> int:
        """Rows of the table."""
        return len(self.table)

    @property
    def num_slots(self) -> int:
        """Slots a rank needs for what its forwards store, the most over all stages, because all run one program."""
        return int(self.table[:, :, 3].max()) + 1

    @property
    def num_mail_slots(self) -> int:
        """Slots of the mailbox, the most over all stages."""
        return int(self.mail.max()) + 1

    def stage_of(self, chunk: int) -> int:
        """The stage that runs a chunk."""
        return places.stage_of(chunk, self.stages, self.placement)

    @property
    def last_stage(self) -> int:
        """The stage of the last chunk, where the model's output is."""
        return self.stage_of(self.chunks - 1)

    @property
    def mixes(self) -> bool:
        """Whether any row holds operations of several kinds, so that it lasts as long as the longest of them."""
        return any(len(set(row) - {IDLE}) > 1 for row in self.table[:, :, 0].tolist())

    @property
    def moves(self) -> Bool[np.ndarray, "ticks 3"]:
        """Whether any message arrives by a route, in each tick."""
        return np.any(self.arrivals >= 0, axis=1)

    @property
    def embed_forward(self) -> Int32[np.ndarray, " ticks"]:
        """Microbatch whose chunk 0 runs forward in this tick (on its stage), or -1: embed it before the operation."""
        return self._microbatch_of(FORWARD, 0)

    @property
    def head(self) -> Int32[np.ndarray, " ticks"]:
        """Microbatch whose last chunk runs forward in this tick (on its stage), or -1: the head runs after it."""
        return self._microbatch_of(FORWARD, self.chunks - 1)

    @property
    def embed_backward(self) -> Int32[np.ndarray, " ticks"]:
        """Microbatch whose chunk 0 runs backward in this tick (on its stage), or -1: embedding's backward follows."""
        return self._microbatch_of(BACKWARD, 0)

    def _microbatch_of(self, kind: int, chunk: int) -> Int32[np.ndarray, " ticks"]:
        row = self.table[:, self.stage_of(chunk)]
        return np.where((row[:, 0] == kind) & (row[:, 1] == chunk), row[:, 2], np.int32(-1))

    def operations(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """All (tick, stage, kind, chunk, microbatch, slot) that are not idle, tick by tick."""
        for tick, stage in np.argwhere(self.table[:, :, 0] != IDLE).tolist():
            yield tick, stage, *self.table[tick, stage].tolist()

    @functools.cached_property
    def ticks(self) -> dict[tuple[int, ...], int]:
        """When each (kind, chunk, microbatch) runs."""
        return {(kind, chunk, m): tick for tick, _, kind, chunk, m, _ in self.operations()}

    def lives(self, made: int, read: int) -> list[Life]:
        """Of each (chunk, microbatch): what its `made` operation stores until its `read` operation has run."""
        keys = [(chunk, m) for kind, chunk, m in self.ticks if kind == made]
        return [Life(self.stage_of(c), self.ticks[made, c, m], self.ticks[read, c, m], (c, m)) for c, m in keys]

    def slots(self, made: int, read: int) -> Int32[np.ndarray, "ticks stages"]:
        """Slot, at each operation, of a store whose contents one kind makes and another is the last to read; else -1."""
        if (made, read) == (FORWARD, self.kinds[-1]):
            return self.table[:, :, 3]
        slot_of = assign(self.lives(made, read), self.stages)
        slots = np.full(self.mail.shape, -1, np.int32)
        for tick, stage, kind, chunk, m, _ in self.operations():
            if made <= kind <= read:
                slots[tick, stage] = slot_of[chunk, m]
        return slots

    def alive(self, made: int, read: int) -> Int[np.ndarray, "ticks stages"]:
        """How many such contents each stage holds in each tick, the ticks of both operations included."""
        counts = np.zeros(self.mail.shape, int)
        for life in self.lives(made, read):
            counts[life.born : life.dies + 1, life.stage] += 1
        return counts

    def in_flight(self) -> Int[np.ndarray, " stages"]:
        """Most chunk activations each stage holds at once, from a forward until its last operation has run.

        1F1B in rows of one kind: 2 (stages - s) - 1 + (virtual - 1) stages on stage s, given enough microbatches; plain 1F1B
        stages - s; zb1p 2 stages - 1; zbv 2 stages (of half the size); gpipe all; 1 when there is no backward.
        """
        return self.alive(FORWARD, self.kinds[-1]).max(axis=0)

    def bubble_fraction(
        self,
        forward: int | float = 1.0,
        backward: int | float = 2.0,
        weight: int | float | None = None,
        lockstep: bool = False,
    ) -> float:
        """Share of the step that a rank idles; forward and backward are the times of one chunk, in any one unit.

        lockstep=False: each rank runs its own order as soon as its inputs exist; True: every row waits for its slowest
        rank. weight: the part of backward that weight gradients take, by default half of it; ValueError for a table that
        runs backward whole. `docs/notes/schedules.md` has the closed forms.
        """
        return timing.bubble_fraction(self, timing.costs(self, forward, backward, weight), lockstep)

    def gantt(self) -> str:
        """The table as text, a line a stage: F2.13 is the forward of chunk 2 for microbatch 13, a dot is idle."""
        cells = [
            [f"{LETTERS[kind]}{chunk}.{microbatch}" if kind else "." for kind, chunk, microbatch, _ in row]
            for row in self.table.transpose(1, 0, 2).tolist()
        ]
        width = max(len(cell) for row in cells for cell in row)
        label = len(str(self.stages - 1))
        return "\n".join(
            f"stage {stage:>{label}} | " + " ".join(cell.ljust(width) for cell in row).rstrip()
            for stage, row in enumerate(cells)
        )

    def validate(self) -> None:
        """Replay the tables; raise ValueError at the first thing an executor would get wrong.

        Every operation runs exactly once, on its stage, after what it needs has arrived; every message is received, in the
        right slot; no slot is written while it holds something that is still needed.
        """
        replay.replay(self)
