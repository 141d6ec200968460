"""Consistent hashing: which workers a session belongs to, first choice first, and how little moves when workers change."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from blake3 import blake3


def position(kind: str, *fields: str) -> int:
    """A point on the ring, the same in every process. Fields are length-prefixed: ("a", "bc") is not ("ab", "c")."""
    parts = [part.encode() for part in (kind, *fields)]
    message = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return int.from_bytes(blake3(message).digest(length=8), "little")


@dataclass(frozen=True)
class Ring:
    """Each worker stands on the ring at `points` places; a key belongs to the first worker at or after its own place.

    The worker after that is the one to which the key falls if the first leaves, so the secondary is known beforehand.
    Karger et al. 1997; K3 report, section 5.2.
    """

    workers: frozenset[str]
    points: int = 128

    @cached_property
    def _places(self) -> tuple[list[int], list[str]]:
        placed = sorted((position("worker", name, str(i)), name) for name in self.workers for i in range(self.points))
        return [place for place, _ in placed], [name for _, name in placed]

    def owners(self, key: str) -> Iterator[str]:
        """All workers in the order in which the key prefers them: primary, secondary, and so on."""
        places, names = self._places
        first = bisect_left(places, position("key", key))
        seen: set[str] = set()
        for i in range(len(names)):
            if (name := names[(first + i) % len(names)]) not in seen:
                seen.add(name)
                yield name

    def changed(self, *, add: Iterable[str] = (), remove: Iterable[str] = ()) -> Ring:
        return Ring((self.workers | frozenset(add)) - frozenset(remove), self.points)
