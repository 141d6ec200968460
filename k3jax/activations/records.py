"""The ledger of activations: who makes each stored leaf, who needs it last, where it waits, and how many bytes that is.

Pure bookkeeping over a schedule's table, no devices: memory is a schedule, peak = max over ticks of the bytes alive. It
counts what waits between operations, not the workspace of an operation that runs. XLA's statistics do not see host
memory on CPU, nor whose bytes a rank holds. K3 report, unified activation manager and balancing over pipeline ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from k3jax.activations.policy import Policy
from k3jax.parallel.schedules import FORWARD, Schedule


class Leaf(NamedTuple):
    """A leaf of a chunk's pullback: what each (chunk, microbatch) puts away once."""

    name: str
    bytes: int
    """As stored: the encoded bytes if its policy quantizes it, and 0 if it is recomputed."""
    policy: Policy
    producer: int = FORWARD
    """Kind of operation that makes it."""
    consumer: int | None = None
    """Kind of operation that reads it last; None: the last kind of the schedule."""
    holders: tuple[int, ...] | None = None
    """Under remote-offload, the rank that keeps each rank's values (its own number: it keeps them itself); None: `mirrored`."""


class Operation(NamedTuple):
    """One entry of a schedule's table."""

    tick: int
    stage: int
    kind: int
    chunk: int
    microbatch: int


@dataclass(frozen=True)
class ActivationRecord:
    """The life of one leaf of one (chunk, microbatch)."""

    id: int
    name: str
    producer: Operation
    consumer: Operation
    """The last one that reads it."""
    bytes: int
    ready: int
    """First tick in which it is stored."""
    release: int
    """Tick after whose operation it may be freed."""
    policy: Policy
    location: str
    """"device" (of its own rank), "host", or "rank r"."""
    restoration: str
    """"none", "recompute", "decode", "fetch from host", "fetch from rank r", or a fetch "and decode"."""


def mirrored(stages: int) -> tuple[int, ...]:
    """Rank s of the first half parks at rank stages - 1 - s: early ranks hold as much more as late ones hold less."""
    return tuple(max(stage, stages - 1 - stage) for stage in range(stages))


def records(schedule: Schedule, leaves: Iterable[Leaf]) -> list[ActivationRecord]:
    """A record for each leaf of each (chunk, microbatch), in the order of chunks, microbatches, leaves.

    Raises ValueError for a leaf that is made or read by a kind that the schedule has not, or read before it is made,
    for bytes below 0, for recomputed bytes, and for holders that are not one rank for each stage.
    """
    resolved = [(leaf, _resolved(schedule, leaf)) for leaf in leaves]
    operations: dict[tuple[int, int], dict[int, Operation]] = {}
    for tick, stage, kind, chunk, microbatch, _ in schedule.operations():
        operations.setdefault((chunk, microbatch), {})[kind] = Operation(tick, stage, kind, chunk, microbatch)
    made = []
    for _, by_kind in sorted(operations.items()):
        for leaf, (last_kind, holders) in resolved:
            producer, consumer = by_kind[leaf.producer], by_kind[last_kind]
            location, restoration = _place(leaf.policy, producer.stage, holders[producer.stage])
            life = (leaf.bytes, producer.tick, consumer.tick)
            made.append(
                ActivationRecord(len(made), leaf.name, producer, consumer, *life, leaf.policy, location, restoration)
            )
    return made


def _resolved(schedule: Schedule, leaf: Leaf) -> tuple[int, tuple[int, ...]]:
    """The leaf's consumer and holders, with defaults filled in."""
    kinds, stages = schedule.kinds, schedule.stages
    consumer = kinds[-1] if leaf.consumer is None else leaf.consumer
    holders = mirrored(stages) if leaf.holders is None else leaf.holders
    if not {leaf.producer, consumer} <= set(kinds) or kinds.index(leaf.producer) > kinds.index(consumer):
        raise ValueError(
            f"{leaf.name}: made by kind {leaf.producer}, read last by kind {consumer}: must be of {kinds}, in this order"
        )
    if leaf.bytes < 0 or (leaf.bytes and leaf.policy.storage == "recompute"):
        raise ValueError(
            f"{leaf.name}: {leaf.bytes} bytes under {leaf.policy}: must be at least 0, and 0 if recomputed"
        )
    if len(holders) != stages or not set(holders) <= set(range(stages)):
        raise ValueError(f"{leaf.name}: holders {holders}: must be {stages} ranks of 0 to {stages - 1}")
    return consumer, holders


def _place(policy: Policy, stage: int, holder: int) -> tuple[str, str]:
    """Location, and what brings it back."""
    if policy.storage == "recompute":
        return "device", "recompute"
    location = "device"
    if policy.storage == "local-offload":
        location = "host"
    elif policy.storage == "remote-offload" and holder != stage:
        location = f"rank {holder}"
    steps = [f"fetch from {location}"] * (location != "device") + ["decode"] * policy.quantized
    return location, " and ".join(steps) or "none"


class Timeline(NamedTuple):
    """Bytes at each tick, by the place that holds them."""

    own: Int64[np.ndarray, "ticks stages"]
    """On each rank's device, its own."""
    parked: Int64[np.ndarray, "ticks stages"]
    """On each rank's device, those of other ranks."""
    host: Int64[np.ndarray, "ticks stages"]
    """In host memory, of each rank."""

    @property
    def device(self) -> Int64[np.ndarray, "ticks stages"]:
        """All that a rank's device holds."""
        return self.own + self.parked

    @property
    def peak(self) -> Int64[np.ndarray, " stages"]:
        """Most bytes that each rank's device holds at any tick."""
        return self.device.max(axis=0)


def timeline(records: Iterable[ActivationRecord], ticks: int, stages: int) -> Timeline:
    """Bytes alive at each tick: a record counts from its ready tick to its release tick, both included."""
    change = Timeline(*(np.zeros((ticks + 1, stages), np.int64) for _ in Timeline._fields))
    for record in records:
        place, rank = change.own, record.producer.stage
        if record.location == "host":
            place = change.host
        elif record.location != "device":
            place, rank = change.parked, int(record.location.removeprefix("rank "))
        place[record.ready, rank] += record.bytes
        place[record.release + 1, rank] -= record.bytes
    return Timeline(*(part.cumsum(axis=0)[:-1] for part in change))


class NameSummary(NamedTuple):
    """What all records of a name have in common."""

    name: str
    policy: Policy
    bytes: int
    """Of one chunk and microbatch."""
    ticks: int
    """Longest life, first and last tick included."""
    records: int


def names_table(records: Iterable[ActivationRecord]) -> list[NameSummary]:
    """A line for each name, in alphabetical order."""
    by_name: dict[str, list[ActivationRecord]] = {}
    for record in records:
        by_name.setdefault(record.name, []).append(record)
    summaries = []
    for name, group in sorted(by_name.items()):
        pieces = {(record.producer.chunk, record.producer.microbatch) for record in group}
        total, ticks = sum(record.bytes for record in group), max(r.release - r.ready + 1 for r in group)
        summaries.append(NameSummary(name, group[0].policy, total // len(pieces), ticks, len(group)))
    return summaries
