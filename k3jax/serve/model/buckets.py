"""Static shapes: one program for each size of a batch and each number of pages, so few sizes of both."""

from __future__ import annotations

import bisect
import dataclasses


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Sizes that batches and page tables are filled up to.

    batch: rows on each rank that decode together. prefill: the rows of a block of prompts, one size, since a state must not
    depend on what else was there. pages: of a sequence's latents.
    Raises ValueError unless sizes are positive and grow.
    """

    batch: tuple[int, ...]
    pages: tuple[int, ...]
    prefill: int = 1

    def __post_init__(self):
        for name, sizes in (("batch", self.batch), ("pages", self.pages), ("prefill", (self.prefill,))):
            if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
                raise ValueError(f"buckets.{name}={sizes}: needs sizes of at least 1, each larger than the one before")

    @classmethod
    def doubling(cls, *, rows: int, pages: int, prefill: int = 1) -> Buckets:
        """1, 2, 4, … up to these: at most half of a program's work is for nothing."""
        grow = lambda most: (*(1 << i for i in range((most - 1).bit_length())), most)
        return cls(grow(rows), grow(pages), prefill)

    def rows_for(self, rows: int) -> int:
        """The smallest size that holds so many rows. ValueError if none does."""
        return smallest(self.batch, rows, "rows to decode on a rank")

    def pages_for(self, pages: int) -> int:
        """The smallest size that holds so many pages. ValueError if none does."""
        return smallest(self.pages, pages, "pages of latents in a sequence")


def smallest(sizes: tuple[int, ...], needed: int, what: str) -> int:
    at = bisect.bisect_left(sizes, needed)
    if at == len(sizes):
        raise ValueError(f"{needed} {what}: buckets go up to {sizes[-1]}")
    return sizes[at]
