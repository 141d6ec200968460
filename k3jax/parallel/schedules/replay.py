"""Replay of a table with the names of values in place of arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3jax.parallel.schedules.kinds import BACKWARD, FORWARD, IDLE
from k3jax.parallel.schedules.placement import DOWN, STAY, UP, destination, route

if TYPE_CHECKING:
    from k3jax.parallel.schedules.table import Schedule

Message = tuple[int, int, int]
"""(kind, chunk, microbatch) of the operation that reads it."""


def replay(schedule: Schedule) -> None:
    """See `Schedule.validate`."""
    stages, ticks = schedule.stages, schedule.num_ticks
    shapes = schedule.table.shape, schedule.mail.shape, schedule.arrivals.shape
    if shapes != ((ticks, stages, 4), (ticks, stages), (ticks, stages, 3)):
        shown = "table {}, mail {}, arrivals {}".format(*shapes)
        raise ValueError(f"{schedule.name} is not valid: {shown} do not fit {stages} stages")
    ranks = [_Rank(schedule, stage) for stage in range(stages)]
    sent: dict[tuple[int, int], Message] = {}  # (destination, route) -> what is under way
    for tick in range(ticks):
        arrived, sent = sent, {}
        for stage, rank in enumerate(ranks):
            try:
                for way in (UP, DOWN, STAY):
                    rank.receive(arrived.get((stage, way)), int(schedule.arrivals[tick, stage, way]))
                kind, chunk, m, slot = schedule.table[tick, stage].tolist()
                for way, message in rank.run(kind, chunk, m, slot, int(schedule.mail[tick, stage])):
                    sent[destination(stage, way, stages), way] = message
            except ValueError as wrong:
                raise ValueError(f"{schedule.name} is not valid at tick {tick}, stage {stage}: {wrong}") from None
    done, wanted = sum(len(rank.finished) for rank in ranks), schedule.chunks * schedule.microbatches
    if done != wanted or sent:
        raise ValueError(f"{schedule.name} is not valid: it finishes {done} of {wanted} (chunk, microbatch)")


class _Rank:
    """What one stage holds."""

    def __init__(self, schedule: Schedule, stage: int):
        self.schedule, self.stage = schedule, stage
        self.mail: dict[int, Message] = {}
        self.store: dict[int, tuple[int, int, int]] = {}  # slot -> (chunk, microbatch, kind that ran last)
        self.finished: set[tuple[int, int]] = set()

    def receive(self, message: Message | None, slot: int) -> None:
        if message is None and slot == -1:
            return
        if message is None:
            raise ValueError(f"slot {slot} waits for a message that nobody sent")
        if slot < 0:
            raise ValueError(f"the message for (kind, chunk, microbatch) {message} is not received")
        if slot in self.mail:
            raise ValueError(f"message {message} overwrites live slot {slot}")
        self.mail[slot] = message

    def run(self, kind: int, chunk: int, m: int, slot: int, mail: int) -> list[tuple[int, Message]]:
        """What the operation sends, with routes."""
        schedule, kinds = self.schedule, self.schedule.kinds
        if (kind, chunk, m, slot, mail) == (IDLE, -1, -1, -1, -1):
            return []
        operation = f"operation (kind {kind}, chunk {chunk}, microbatch {m}, slot {slot})"
        known = kind in kinds and 0 <= chunk < schedule.chunks and 0 <= m < schedule.microbatches and slot >= 0
        if not known or schedule.stage_of(chunk) != self.stage:
            raise ValueError(f"{operation} does not belong here")
        self._read_mail(operation, kind, chunk, m, mail)
        if kind == FORWARD:
            if slot in self.store:
                raise ValueError(f"{operation} overwrites a live slot")
        elif self.store.get(slot) != (chunk, m, kind - 1):
            raise ValueError(f"{operation} does not find its residual in its slot")
        self.store[slot] = chunk, m, kind
        if kind == kinds[-1]:
            del self.store[slot]
            self.finished.add((chunk, m))
        return self._send(kind, chunk, m)

    def _read_mail(self, operation: str, kind: int, chunk: int, m: int, slot: int) -> None:
        if kind == FORWARD and chunk == 0:  # the embedding writes its input now
            if (chunk, m) in self.finished or (chunk, m) in {key[:2] for key in self.store.values()}:
                raise ValueError(f"{operation} runs a second time")
            self.receive((kind, chunk, m), slot)
        if kind not in (FORWARD, BACKWARD):
            if slot != -1:
                raise ValueError(f"{operation} reads no message, but names mail slot {slot}")
        elif self.mail.pop(slot, None) != (kind, chunk, m):
            raise ValueError(f"{operation} does not find its message in mail slot {slot}")

    def _send(self, kind: int, chunk: int, m: int) -> list[tuple[int, Message]]:
        schedule, last = self.schedule, self.schedule.chunks - 1
        onward = {FORWARD: chunk + 1, BACKWARD: chunk - 1}.get(kind, -1)
        if kind == FORWARD and chunk == last:  # the head makes the cotangent in this same tick
            return [(STAY, (BACKWARD, last, m))] if BACKWARD in schedule.kinds else []
        if onward < 0:
            return []
        return [(route(self.stage, schedule.stage_of(onward), schedule.stages), (kind, onward, m))]
