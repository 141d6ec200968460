"""Pipeline ZeRO-2 as a plan: which buffer a weight gradient adds into, and when a buffer is emptied into owner shards.

A rank has gradient buffers for two chunks, however many it runs. While it adds into one, the other is reduce-scattered
over the replicas and added to the shards, which wait in host memory. The plan is made from the schedule alone.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from k3jax.parallel.schedules import FORWARD, Schedule

BUFFERS = 2


@dataclass(frozen=True, eq=False)
class Buffering:
    """For every tick and stage: what the operation adds into, and what is flushed beside it."""

    buffer: Int32[np.ndarray, "ticks stages"]
    """Buffer that a weight gradient adds into; -1 at any other operation."""
    starts: Bool[np.ndarray, "ticks stages"]
    """Whether it overwrites what is there instead."""
    flush: Int32[np.ndarray, "ticks stages 3"]
    """(buffer, virtual chunk, whether its shard is written for the first time), or -1s. A flush reads its buffer as the tick
    before left it, and is done when its tick is."""
    rest: Int32[np.ndarray, "buffers stages 2"]
    """(virtual chunk, whether its shard is written for the first time) of each buffer's flush after the last tick."""

    @property
    def num_buffers(self) -> int:
        """Two; one for stages of a single chunk."""
        return len(self.rest)

    def validate(self, schedule: Schedule) -> None:
        """Replay; ValueError at the first thing that would lose or mix up a gradient."""
        for stage in range(schedule.stages):
            try:
                _replay(self, schedule, stage)
            except ValueError as wrong:
                raise ValueError(f"gradient buffers of {schedule.name}, stage {stage}: {wrong}") from None


def buffering(schedule: Schedule) -> Buffering:
    """The plan: runs of weight gradients of one chunk take the two buffers in turn.

    A run's buffer is flushed in the tick after the run ends, while the next run fills the other one, and so is free when a
    third begins. If that is of the same chunk, it goes on where the first ended and nothing is flushed: two chunks on a
    stage are flushed only at the end. Raises ValueError for a table without backwards.
    """
    if schedule.kinds[-1] == FORWARD:
        raise ValueError(f"{schedule.name} makes no gradients: nothing to buffer")
    ticks, stages = schedule.mail.shape
    none = lambda *shape: np.full(shape, -1, np.int32)
    buffer, flush = none(ticks, stages), none(ticks, stages, 3)
    starts, rest = np.zeros((ticks, stages), bool), none(min(BUFFERS, schedule.virtual), stages, 2)
    for stage in range(stages):
        written: set[int] = set()
        runs = _runs(schedule, stage)
        for i, (chunk, at) in enumerate(runs):
            mine = i % BUFFERS
            buffer[at, stage] = mine
            starts[at[0], stage] = i < BUFFERS or runs[i - BUFFERS][0] != chunk
            if i + BUFFERS >= len(runs):
                rest[mine, stage] = chunk, chunk not in written
            elif runs[i + BUFFERS][0] != chunk:
                flush[at[-1] + 1, stage] = mine, chunk, chunk not in written
                written.add(chunk)
    return Buffering(buffer, starts, flush, rest)


def _runs(schedule: Schedule, stage: int) -> list[tuple[int, list[int]]]:
    """(virtual chunk, ticks) of consecutive weight gradients of one chunk, other kinds of operations between them or not."""
    at = np.flatnonzero(schedule.table[:, stage, 0] == schedule.kinds[-1])
    virtual = lambda tick: int(schedule.table[tick, stage, 1]) // schedule.stages
    return [(chunk, list(ticks)) for chunk, ticks in itertools.groupby(at.tolist(), virtual)]


def _replay(plan: Buffering, schedule: Schedule, stage: int) -> None:
    """See `Buffering.validate`; names of values in place of arrays."""
    held: dict[int, list[tuple[int, int]]] = {}  # buffer -> (virtual chunk, microbatch) whose gradients it sums
    shards: dict[int, list[tuple[int, int]]] = {}

    def flush(when: str, source: int, chunk: int, first: int) -> None:
        flushed = held.pop(source, None)
        if flushed is None or {v for v, _ in flushed} != {chunk}:
            raise ValueError(f"{when} flushes buffer {source} to chunk {chunk}, but it holds {flushed}")
        if bool(first) == (chunk in shards):
            raise ValueError(f"{when} takes the shard of chunk {chunk} for {'new' if first else 'written'}")
        shards.setdefault(chunk, []).extend(flushed)

    for tick, (kind, chunk, m, _) in enumerate(schedule.table[:, stage].tolist()):
        when, source = f"tick {tick}", plan.flush[tick, stage, 0]
        if source >= 0:
            flush(when, *plan.flush[tick, stage].tolist())
        target, part = int(plan.buffer[tick, stage]), (chunk // schedule.stages, m)
        if (target >= 0) != (kind == schedule.kinds[-1]):
            raise ValueError(f"{when} makes {'no' if target >= 0 else 'a'} weight gradient, for buffer {target}")
        if target < 0:
            continue
        if target == source:
            raise ValueError(f"{when} writes buffer {target} while it is flushed")
        if plan.starts[tick, stage]:
            if target in held:
                raise ValueError(f"{when} overwrites {held[target]} in buffer {target}")
            held[target] = []
        elif target not in held or held[target][0][0] != part[0]:
            raise ValueError(f"{when} adds chunk {part[0]} to buffer {target}, which holds {held.get(target)}")
        held[target].append(part)
    for source, (chunk, first) in enumerate(plan.rest[:, stage].tolist()):
        flush("the end", source, chunk, first)
    if held:
        raise ValueError(f"never flushed: {held}")
    wanted = {v: [(v, m) for m in range(schedule.microbatches)] for v in range(schedule.virtual)}
    if {chunk: sorted(parts) for chunk, parts in shards.items()} != wanted:
        raise ValueError(f"shards are not the sums over all microbatches: {shards}")


# ---- bytes -----------------------------------------------------------------------------------------------------------


class BytesPerParameter(NamedTuple):
    """What a rank holds for each parameter of its own, between and during steps."""

    weight: float
    """In the compute dtype."""
    gradient: float
    """On the device."""
    optimizer: float
    """Master weight and moments, float32."""
    host: float
    """Gradient shards in host memory."""

    @property
    def device(self) -> float:
        """All that is on the device."""
        return self.weight + self.gradient + self.optimizer


def bytes_per_parameter(
    zero: int, replicas: int, *, virtual: int = 0, weight: int = 2, gradient: int = 4, moments: int = 4
) -> BytesPerParameter:
    """Bytes for each parameter that has `replicas` replicas (dense: data x expert x context; experts: data x context).

    zero: 0 nothing is sharded over replicas; 1 the optimizer state is; 2 gradients too. virtual: chunks of a stage whose
    gradients pass through buffers into host memory (Pipeline ZeRO-2); 0: shards stay on the device. weight, gradient,
    moments: bytes of one element; Muon's momentum is 4, AdamW's two moments 8. K3 report, pre-training memory.
    """
    if zero not in (0, 1, 2) or replicas < 1 or virtual < 0:
        got = f"zero={zero}, replicas={replicas}, virtual={virtual}"
        raise ValueError(f"got {got}: zero is 0, 1 or 2, replicas at least 1, virtual at least 0")
    shard = gradient / replicas
    optimizer = (4 + moments) / (replicas if zero else 1)
    if zero < 2:
        return BytesPerParameter(weight, gradient, optimizer, 0.0)
    if not virtual:
        return BytesPerParameter(weight, shard, optimizer, 0.0)
    return BytesPerParameter(weight, gradient * min(BUFFERS, virtual) / virtual, optimizer, shard)
