"""Gradient of each group's matrix: xᵀ dy, the sum over the group's rows.

C rows, G groups, D width of x, F width of dy.

An item is a tile of 128 rows and up to 256 columns of one group's matrix. Rows of the group come as the stages of the ring,
64 at a time. In the first and the last of them rows of others are set to zero, in shared memory and on both sides: what lies
after the last group may be anything, and zero times anything need not be zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_gemm import plan
from pallas_kernels.grouped_gemm.persistent import CONSUMERS, WARPGROUPS, Ring, deepest, programs, ring
from pallas_kernels.grouped_gemm.tiles import (
    COLUMNS,
    DEPTH,
    PARTS,
    ROWS,
    SHARE,
    STORED,
    columns_of,
    stage_bytes,
    store,
)
from pallas_kernels.mosaic import Transposed, launch, tiled

BLOCKS = {"rows": ROWS, "columns": COLUMNS, "depth": DEPTH, "stored": STORED}


def weight_gradient(
    x: Float[Array, "C D"],
    dy: Float[Array, "C F"],
    group_sizes: Int[Array, " G"],
    *,
    dtype: Any = jnp.bfloat16,
    interpret: bool = False,
) -> Float[Array, "G D F"]:
    """xᵀ dy of each group's rows, 0 for a group without rows. C a multiple of 8 and at least DEPTH, D and F of 128."""
    D, F, G = x.shape[1], dy.shape[1], len(group_sizes)
    accumulators = 2 if F % (2 * COLUMNS) == 0 else 1
    tiles = D // ROWS, F // (accumulators * COLUMNS)
    stages = deepest(stage_bytes(accumulators), besides=ROWS * STORED * jnp.dtype(dtype).itemsize)
    scratch = [
        tiled(stages, CONSUMERS, DEPTH, SHARE),
        tiled(stages, accumulators, DEPTH, COLUMNS),
        tiled(CONSUMERS, SHARE, STORED, dtype=dtype),
        ring(stages, copies=CONSUMERS + accumulators),
        plgpu.Barrier(num_arrivals=CONSUMERS),
    ]
    (dw,) = launch(
        lambda *refs: kernel(*refs, tiles=tiles, interpret=interpret),
        *(plan.sums(group_sizes), x, dy),
        name="grouped_weight_gradient",
        out=[jax.ShapeDtypeStruct((G, D, F), dtype)],
        grid={"program": programs(interpret)},
        scratch=scratch,
        interpret=interpret,
        warpgroups=WARPGROUPS,
    )
    return dw


class Rows(NamedTuple):
    """A group's rows, [start, end), as stages of DEPTH rows of arrays that have `limit`."""

    start: Any
    end: Any
    limit: int

    @property
    def anchor(self):
        return self.start - lax.rem(self.start, plan.ALIGN)

    @property
    def stages(self):
        return jnp.where(self.start < self.end, lax.div(self.end - self.anchor + DEPTH - 1, DEPTH), 0)

    def stage(self, step):
        """First row of a stage, and which of its rows count: [first, last)."""
        top = self.anchor + step * DEPTH
        row = pl.multiple_of(lax.min(top, self.limit - DEPTH), plan.ALIGN)
        return row, lax.max(self.start, top) - row, lax.min(self.end, top + DEPTH) - row


def kernel(groups, x_g, dy_g, dw_g, x, dy, stored, barriers, cut, *, tiles: tuple[int, int], interpret: bool):
    (down, across), accumulators = tiles, dy.shape[1]
    shared = Ring(barriers, x.shape[0], interpret)
    rank = lambda item: lax.div(item, down * across)
    rows = lambda item: Rows(groups.start[rank(item)], groups.end[rank(item)], x_g.shape[0])

    def place(item):
        """First row and column of the item's tile of its group's matrix."""
        tile = lax.rem(item, down * across)
        return lax.div(tile, across) * ROWS, lax.rem(tile, across) * (accumulators * COLUMNS)

    def load(item):
        of_group, corner = rows(item), place(item)

        def start(step, slot, barrier):
            row, _, _ = of_group.stage(step)
            for source, target, at in zip((x_g, dy_g), (x, dy), corner, strict=True):
                *_, parts, _, size = target.shape
                for part in range(parts):
                    columns = pl.ds(pl.multiple_of(at + part * size, size), size)
                    plgpu.copy_gmem_to_smem(source.at[pl.ds(row, DEPTH), columns], target.at[slot, part], barrier)

        return start

    def compute(item, warpgroup, turn):
        of_group, (down_to, column) = rows(item), place(item)

        def pairs(step, slot):
            _, first, last = of_group.stage(step)

            @pl.when((first > 0) | (last < DEPTH))
            def clear_rows_of_others():
                keep_rows(x.at[slot, warpgroup], first, last)
                # Both read all of dy: each clears its share of it, and waits for the other.
                for number in range(accumulators):
                    pl.when(warpgroup == number)(lambda n=number: keep_rows(dy.at[slot, n], first, last))
                plgpu.commit_smem()
                plgpu.barrier_arrive(cut)
                plgpu.barrier_wait(cut)

            return [(Transposed(x.at[slot, warpgroup]), dy.at[slot, number]) for number in range(accumulators)]

        sums = shared.sum([(SHARE, COLUMNS)] * accumulators, turn, of_group.stages, pairs)
        matrix, row = dw_g.at[groups.group[rank(item)]], pl.multiple_of(down_to + warpgroup * SHARE, SHARE)
        for number, result in enumerate(sums):
            for part in range(PARTS):
                at = row, column + number * COLUMNS + part * STORED
                store(columns_of(result, part), stored.at[warpgroup], None, matrix, *at, first=0, count=SHARE)

    shared.run(groups.group.shape[0] * down * across, lambda item: rows(item).stages, load, compute)


def keep_rows(ref, first, last):
    """Zeros all rows but [first, last)."""
    row = lax.broadcasted_iota(jnp.int32, ref.shape, 0)
    ref[...] = jnp.where((row >= first) & (row < last), ref[...].astype(jnp.float32), 0.0).astype(ref.dtype)
