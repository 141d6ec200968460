"""The ledger of activations: who makes each stored leaf, who needs it last, where it waits, and how many bytes that is.

Pure bookkeeping over a schedule's table, no devices: memory is a schedule, peak = max over ticks of the bytes alive. It
counts what waits between operations, not the workspace of an operation that runs. XLA's statistics do not see host
memory on CPU, nor whose bytes a rank holds. K3 report, unified activation manager and balancing over pipeline ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from k3jax.activations.policy import Policy
from k3jax.activations.residency import Stay, Timeline, stays, timeline_of
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
    policy: Policy
    stays: tuple[Stay, ...]
    """Where it is, in order of time; where one stay follows another it is moved."""

    @property
    def ready(self) -> int:
        """First tick in which it is stored."""
        return self.producer.tick

    @property
    def release(self) -> int:
        """Tick after whose operation it may be freed."""
        return self.consumer.tick

    @property
    def location(self) -> str:
        """Where it waits: "device" (of its own rank), "host", "rank r", or "nowhere" if it is recomputed."""
        away = [stay for stay in self.stays if (stay.place, stay.rank) != ("device", self.producer.stage)]
        if not away:
            return "device" if self.stays else "nowhere"
        return "host" if away[0].place == "host" else f"rank {away[0].rank}"

    @property
    def restoration(self) -> str:
        """ "none", "recompute", "decode", "fetch from host", "fetch from rank r", or a fetch "and decode"."""
        if not self.stays:
            return "recompute"
        fetch = [f"fetch from {self.location}"] * (self.location != "device")
        return " and ".join(fetch + ["decode"] * self.policy.quantized) or "none"


def records(schedule: Schedule, leaves: Iterable[Leaf]) -> list[ActivationRecord]:
    """A record for each leaf of each (chunk, microbatch), in the order of chunks, microbatches, leaves.

    Raises ValueError for a leaf that is made or read by a kind that the schedule has not, or not read after it is made,
    for bytes below 0, and for recomputed bytes.
    """
    spans = [(leaf, span_of(schedule, leaf)) for leaf in leaves]
    operations: dict[tuple[int, int], dict[int, Operation]] = {}
    for tick, stage, kind, chunk, microbatch, _ in schedule.operations():
        operations.setdefault((chunk, microbatch), {})[kind] = Operation(tick, stage, kind, chunk, microbatch)
    made = []
    for key, by_kind in sorted(operations.items()):
        for leaf, span in spans:
            ends = by_kind[span[0]], by_kind[span[1]]
            places = stays(schedule, *span, leaf.policy.storage)[key]
            made.append(ActivationRecord(len(made), leaf.name, *ends, leaf.bytes, leaf.policy, places))
    return made


def span_of(schedule: Schedule, leaf: Leaf) -> tuple[int, int]:
    """The kinds that make a leaf and read it last; ValueError as of `records`."""
    kinds, consumer = schedule.kinds, schedule.kinds[-1] if leaf.consumer is None else leaf.consumer
    if not {leaf.producer, consumer} <= set(kinds) or kinds.index(leaf.producer) >= kinds.index(consumer):
        raise ValueError(
            f"{leaf.name}: made by kind {leaf.producer}, read last by kind {consumer}: must be two of {kinds}, in order"
        )
    if leaf.bytes < 0 or (leaf.bytes and leaf.policy.storage == "recompute"):
        raise ValueError(
            f"{leaf.name}: {leaf.bytes} bytes under {leaf.policy}: must be at least 0, and 0 if recomputed"
        )
    return leaf.producer, consumer


def timeline(schedule: Schedule, records: Iterable[ActivationRecord]) -> Timeline:
    """Bytes alive at each moment: a stay counts from its first to its last, both included."""
    return timeline_of(schedule, [(r.producer.chunk, stay, r.bytes) for r in records for stay in r.stays])


class NameSummary(NamedTuple):
    """What all records of a name have in common."""

    name: str
    policy: Policy
    bytes: int
    """Of one chunk and microbatch."""
    ticks: int
    """Longest life, first and last tick included."""
    records: int
    where: tuple[str, ...]
    """All locations, in alphabetical order."""
    restorations: tuple[str, ...]


def names_table(records: Iterable[ActivationRecord]) -> list[NameSummary]:
    """A line for each name, in alphabetical order."""
    by_name: dict[str, list[ActivationRecord]] = {}
    for record in records:
        by_name.setdefault(record.name, []).append(record)
    summaries = []
    for name, group in sorted(by_name.items()):
        pieces = {(record.producer.chunk, record.producer.microbatch) for record in group}
        total, ticks = sum(record.bytes for record in group), max(r.release - r.ready + 1 for r in group)
        where, restorations = ({f(r) for r in group} for f in (lambda r: r.location, lambda r: r.restoration))
        sides = tuple(sorted(where)), tuple(sorted(restorations))
        summaries.append(NameSummary(name, group[0].policy, total // len(pieces), ticks, len(group), *sides))
    return summaries
