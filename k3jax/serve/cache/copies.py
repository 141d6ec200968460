"""Copies that must be done before the next forward, and what they hold until then.

A copy shares both its source and its destination, so neither can be freed and reused under it, whatever becomes of the
request. No destination is another copy's source or destination, so a batch may run in any order, or at once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

from k3jax.serve.cache.pool import Pool


class Kind(StrEnum):
    KV = "kv"
    """destination := source."""
    STATE = "state"
    """destination := source, then the records, if any, applied to it."""
    ZERO = "zero"
    """destination := 0."""
    KEEP = "keep"
    """destination := source: a checkpoint leaves a live state. On success the index names the destination."""
    RECORD = "record"
    """destination := the request's own records of tokens [start, end) and its convolution tails at end."""


@dataclasses.dataclass(frozen=True)
class Copy:
    """Page i of the destination gets page i of the source. All of it belongs to the request named, wherever its row is."""

    id: int
    request: str
    kind: Kind
    source: tuple[int, ...]
    destination: tuple[int, ...]
    records: tuple[int, ...] = ()
    """Pages that hold the records of tokens [start, end)."""
    start: int = 0
    end: int = 0
    """The boundary of what the destination holds afterwards."""

    @property
    def pages(self) -> tuple[int, ...]:
        return self.source + self.destination + self.records


class CopyQueue:
    """Copies from when they are ordered until they have landed or failed."""

    def __init__(self, pool: Pool):
        self._pool = pool
        self._ids = itertools.count()
        self.open: dict[int, Copy] = {}
        self._untaken: set[int] = set()
        self.pending: set[int] = set()
        """Pages that must not be matched: destinations, which are not valid yet, and live states that are being copied out,
        which will not be for long.
        """
        self.sources: Counter[int] = Counter()

    def add(self, request: str, kind: Kind, destination: tuple[int, ...], **fields) -> Copy:
        copy = Copy(next(self._ids), request, kind, fields.pop("source", ()), destination, **fields)
        self._pool.hold(copy.pages)
        self.open[copy.id] = copy
        self._untaken.add(copy.id)
        self.pending.update(_closed(copy))
        self.sources.update(copy.source + copy.records)
        return copy

    def take(self) -> tuple[Copy, ...]:
        """All that were not taken yet. Each has to come back, by `close`."""
        taken = tuple(self.open[id] for id in sorted(self._untaken))
        self._untaken.clear()
        return taken

    def under_way(self, copies: Iterable[Copy]) -> list[Copy]:
        """The same copies. Raises ValueError unless each was taken, and is reported for the first time."""
        copies = list(copies)
        times = Counter(copy.id for copy in copies)
        bad = sorted(id for id, n in times.items() if id not in self.open or id in self._untaken or n > 1)
        if bad:
            raise ValueError(f"copies {bad} are not under way: take each once, report each once")
        return copies

    def untaken(self, request: str) -> list[Copy]:
        """A request's copies that nobody took yet: they can be withdrawn by `close`."""
        return [self.open[id] for id in sorted(self._untaken) if self.open[id].request == request]

    def close(self, copy: Copy) -> None:
        """Lets go of its pages."""
        del self.open[copy.id]
        self._untaken.discard(copy.id)
        self.pending.difference_update(_closed(copy))
        self.sources.subtract(copy.source + copy.records)
        self._pool.drop(copy.pages)

    def check(self) -> None:
        """Raises AssertionError if two copies of a batch could get into each other's way."""
        destinations = [page for copy in self.open.values() for page in copy.destination]
        assert len(set(destinations)) == len(destinations), "two copies write the same page"
        sources = Counter(page for copy in self.open.values() for page in copy.source + copy.records)
        assert not sources.keys() & set(destinations), "a copy reads what another writes"
        closed = {page for copy in self.open.values() for page in _closed(copy)}
        assert closed == self.pending and sources == +self.sources, "pending pages are not those of open copies"


def _closed(copy: Copy) -> tuple[int, ...]:
    return copy.destination + (copy.source if copy.kind is Kind.KEEP else ())
