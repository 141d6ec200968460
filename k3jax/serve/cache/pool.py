"""One pool of equal pages with reference counts, for MLA pages and KDA states alike.

A page is free when nobody holds it: requests, the index and copies under way are the holders. Pins are nothing else: what
a request holds cannot be freed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

CANARY = 0
"""The page that is never handed out: page tables are padded with it, so a stray write shows in it, not in a cached page."""


class PoolExhausted(RuntimeError):
    """Fewer pages can be had than are needed; nothing was allocated, and nothing evicted for it."""

    def __init__(self, needed: int, free: int, evictable: int = 0):
        super().__init__(
            f"needs {needed} pages, but {free} are free and {evictable} evictable: wait for a request to end, "
            f"or give the pool more pages"
        )
        self.needed, self.free, self.evictable = needed, free, evictable


class Pool:
    """Pages 1 … pages − 1, first freed first reused.

    on_free is told each page that falls free, before it can be handed out again (debugging: fill it with NaN).
    """

    def __init__(self, pages: int, *, on_free: Callable[[int], None] | None = None):
        if pages < 2:
            raise ValueError(f"a pool of {pages} pages: needs the canary and at least one more")
        self.pages = pages
        self._on_free = on_free
        self.counts = [0] * pages
        """Holders of each page; to be read."""
        self._queue = deque(range(1, pages))

    @property
    def free(self) -> int:
        """Pages that can be handed out at once."""
        return len(self._queue)

    def allocate(self, n: int) -> tuple[int, ...]:
        """n pages, each held once. All or none: raises PoolExhausted."""
        if n > self.free:
            raise PoolExhausted(n, self.free)
        pages = tuple(self._queue.popleft() for _ in range(n))
        for page in pages:
            self.counts[page] = 1
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder of each. Raises ValueError for a free page: it holds nothing worth keeping."""
        for page in pages:
            if self.counts[page] < 1:
                raise ValueError(f"page {page} is {'the canary' if page == CANARY else 'free'}: it cannot be held")
            self.counts[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """One holder of each fewer; a page without holders is free. Raises ValueError for a page that is free already."""
        for page in pages:
            if self.counts[page] < 1:
                raise ValueError(f"page {page} is freed twice")
            self.counts[page] -= 1
            if not self.counts[page]:
                if self._on_free:
                    self._on_free(page)
                self._queue.append(page)

    def check(self) -> None:
        """Raises AssertionError unless the queue and the counts tell the same story."""
        queue = list(self._queue)
        assert len(set(queue)) == len(queue), "a page is twice in the free queue"
        assert set(queue) == {p for p in range(1, self.pages) if not self.counts[p]}, (
            "free pages are not those without holders"
        )
        assert self.counts[CANARY] == 0, "somebody holds the canary"
