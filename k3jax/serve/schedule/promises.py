"""What a router believes the workers' caches hold: followed through their events, corrected when it was wrong.

A name (`bytes`) is the chained hash of a prefix, so it stands for all its tokens. Workers number their events. A gap means
that something was missed: the worker is asked for all its names (`resync`), and events that arrive meanwhile wait. Until
then the old belief stays: it only decides where a request goes, a wrong one costs a prefill, and it is then taken back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Event:
    """Names that a worker's cache stored and removed, removed first. `number` is one more than the event's before."""

    number: int
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


@dataclass
class _Feed:
    """Of one worker: the number of its last event, later ones that wait for those missed, names that were not there."""

    last: int
    early: dict[int, Event] = field(default_factory=dict)
    distrusted: set[bytes] = field(default_factory=set)


class Promises:
    """Which worker holds which names."""

    def __init__(self) -> None:
        self._feeds: dict[str, _Feed] = {}
        self._holders: dict[bytes, set[str]] = {}
        self._readers: dict[bytes, set[str]] = {}  # sessions that asked for a name somebody holds

    def join(self, worker: str, number: int = 0) -> None:
        """A worker with an empty cache; `number` is that of the last event before."""
        if worker in self._feeds:
            raise ValueError(f"{worker!r} is known already.")
        self._feeds[worker] = _Feed(number)

    def leave(self, worker: str) -> None:
        del self._feeds[worker]
        self._remove(worker, [name for name, holders in self._holders.items() if worker in holders])

    def observe(self, worker: str, event: Event) -> bool:
        """Follows an event; False if events before it are missing and the worker must be asked for all its names.

        An event that came before is ignored.
        """
        feed = self._feeds[worker]
        if event.number > feed.last:
            feed.early[event.number] = event
            self._catch_up(worker, feed)
        return not feed.early

    def resync(self, worker: str, number: int, names: Iterable[bytes]) -> bool:
        """All names that a worker held after its event `number`; False if this is older than what was missed.

        Names that failed stay out: only a new event brings them back, this answer may be older than the failure.
        """
        feed = self._feeds[worker]
        if number < feed.last:
            return not feed.early
        held = set(names) - feed.distrusted
        self._remove(
            worker, [name for name, workers in self._holders.items() if worker in workers and name not in held]
        )
        self._add(worker, held)
        feed.last = number
        feed.early = {n: event for n, event in feed.early.items() if n > number}
        self._catch_up(worker, feed)
        return not feed.early

    def stale(self, worker: str) -> bool:
        """Are events of this worker missing?"""
        return bool(self._feeds[worker].early)

    def failed(self, worker: str, names: Iterable[bytes]) -> None:
        """Names that the worker did not have when a request came for them."""
        wrong = [name for name in names if worker in self._holders.get(name, ())]
        self._feeds[worker].distrusted.update(wrong)
        self._remove(worker, wrong)

    def depths(self, names: Sequence[bytes]) -> dict[str, int]:
        """How many of a prompt's names each worker has: the place, from 1, of the longest prefix that it holds."""
        depths: dict[str, int] = {}
        for place in range(len(names), 0, -1):
            for worker in self._holders.get(names[place - 1], ()):
                depths.setdefault(worker, place)
            if len(depths) == len(self._feeds):
                break
        return depths

    def shared(self, names: Sequence[bytes], sessions: int) -> int:
        """How many of a prompt's names at least so many sessions asked for, as for a system prompt's."""
        for place in range(len(names), 0, -1):
            if len(self._readers.get(names[place - 1], ())) >= sessions:
                return place
        return 0

    def read(self, names: Sequence[bytes], session: str, most: int) -> None:
        """Remembers that a session asked for these names, up to `most` sessions a name, as long as somebody holds it."""
        for name in names:
            if name in self._holders and len(readers := self._readers.setdefault(name, set())) < most:
                readers.add(session)

    def _catch_up(self, worker: str, feed: _Feed) -> None:
        while (event := feed.early.pop(feed.last + 1, None)) is not None:
            self._remove(worker, event.removed)
            self._add(worker, event.stored)
            feed.distrusted.difference_update(event.stored)
            feed.last += 1

    def _add(self, worker: str, names: Iterable[bytes]) -> None:
        for name in names:
            self._holders.setdefault(name, set()).add(worker)

    def _remove(self, worker: str, names: Iterable[bytes]) -> None:
        for name in names:
            holders = self._holders.get(name, set())
            holders.discard(worker)
            if not holders:
                self._holders.pop(name, None)
                self._readers.pop(name, None)
