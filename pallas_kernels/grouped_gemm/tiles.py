"""An item of a grouped product: a tile of 128 rows times up to 256 columns of one group.

C rows, G groups, D contracted width, F width of the result.

Each computing warpgroup has 64 of the rows, and one or two accumulators of 128 columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_gemm import plan
from pallas_kernels.grouped_gemm.persistent import CONSUMERS, Ring
from pallas_kernels.mosaic import Transposed, tiled

BLOCKS = {"rows": 128, "columns": 128, "depth": 64, "stored": 64, "band": 8}
ROWS, COLUMNS, DEPTH, STORED, BAND = BLOCKS.values()
SHARE = ROWS // CONSUMERS
"""Rows of a computing warpgroup."""
PARTS = COLUMNS // STORED
"""In which an accumulator's result is stored."""


class Source(NamedTuple):
    """References to rows [C, D], and for each accumulator to [G, D, F] and its first column, beside the item's."""

    x: Any
    matrices: list[tuple[Any, int]]


class Place(NamedTuple):
    """Of a warpgroup's share of an item: its first row and column, and which rows are the group's."""

    row: Any
    column: Any
    first: Any
    count: Any


def operands(stages: int, accumulators: int, transposed: bool = False) -> list:
    """Shared memory of a ring."""
    tile = (COLUMNS, DEPTH) if transposed else (DEPTH, COLUMNS)
    return [tiled(stages, CONSUMERS, SHARE, DEPTH), tiled(stages, accumulators, *tile)]


def stage_bytes(accumulators: int) -> int:
    return 2 * DEPTH * (ROWS + accumulators * COLUMNS)


class Tiles(NamedTuple):
    """Sums over sources and their depth of x times a matrix, or its transpose; `width` columns an item."""

    items: plan.Items
    sources: list[Source]
    x: Any
    w: Any
    width: int
    transposed: bool = False

    @property
    def depth(self) -> int:
        """Stages of a source."""
        return self.sources[0].x.shape[1] // DEPTH

    @property
    def steps(self) -> int:
        return len(self.sources) * self.depth

    def load(self, item):
        group, row, column = self.items.group[item], self.items.row[item], self.items.column[item] * self.width

        def copies(source: Source, step, slot, barrier) -> None:
            depth = pl.ds(step * DEPTH, DEPTH)
            for part in range(CONSUMERS):
                rows = pl.ds(pl.multiple_of(row + part * SHARE, plan.ALIGN), SHARE)
                plgpu.copy_gmem_to_smem(source.x.at[rows, depth], self.x.at[slot, part], barrier)
            for number, (matrix, start) in enumerate(source.matrices):
                columns = pl.ds(pl.multiple_of(column + start, COLUMNS), COLUMNS)
                part = matrix.at[group, columns, depth] if self.transposed else matrix.at[group, depth, columns]
                plgpu.copy_gmem_to_smem(part, self.w.at[slot, number], barrier)

        def start(step, slot, barrier) -> None:
            if len(self.sources) == 1:
                return copies(self.sources[0], step, slot, barrier)
            for number, source in enumerate(self.sources):
                mine = lax.div(step, self.depth) == number
                pl.when(mine)(lambda n=number, s=source: copies(s, step - n * self.depth, slot, barrier))

        return start

    def place(self, item, warpgroup) -> Place:
        skipped = warpgroup * SHARE
        first = lax.max(self.items.first[item] - skipped, 0)
        count = lax.min(self.items.last[item] - skipped, SHARE) - first
        row = pl.multiple_of(self.items.row[item] + skipped, plan.ALIGN)
        return Place(row, self.items.column[item] * self.width, first, count)

    def sums(self, stages: Ring, warpgroup, turn) -> list:
        """The warpgroup's share of each accumulator's sum."""
        accumulators = self.w.shape[1]

        def pairs(_, slot):
            w = [self.w.at[slot, number] for number in range(accumulators)]
            return [(self.x.at[slot, warpgroup], Transposed(x) if self.transposed else x) for x in w]

        return stages.sum([(SHARE, COLUMNS)] * accumulators, turn, self.steps, pairs)


def columns_of(result, part: int):
    """The columns of an accumulator's result that are stored together."""
    return result[:, part * STORED : (part + 1) * STORED]


def store(result, stored, ladder, y_g, row, column, first, count) -> None:
    """Writes `count` rows of a part of a result, from `first` on, and no others: they may be another program's.

    A copy's height is part of the program: other heights than the whole are put together from powers of two.
    """
    columns = pl.ds(pl.multiple_of(column, STORED), STORED)
    result = result.astype(y_g.dtype)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was stored before has left shared memory

    @pl.when(count == SHARE)
    def _():
        stored[...] = result
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(stored, y_g.at[pl.ds(row, SHARE), columns])

    @pl.when((count > 0) & (count < SHARE))
    def _():
        ladder[...] = result
        plgpu.commit_smem()
        at = first
        for height in (2**n for n in reversed(range(SHARE.bit_length() - 1))):

            def copy(at=at, height=height):
                plgpu.copy_smem_to_gmem(ladder.at[pl.ds(at, height)], y_g.at[pl.ds(row + at, height), columns])

            pl.when((count & height) != 0)(copy)
            at = at + (count & height)
