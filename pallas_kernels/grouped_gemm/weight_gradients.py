"""Gradient of each group's matrix: xᵀ dy, the sum over the group's rows.

C rows, G groups, D width of x, F width of dy.

An item is a tile of 128 rows and up to 256 columns of one group's matrix. Rows of the group come as the stages of the ring,
64 at a time. In the first and the last of them rows of others are set to zero, in shared memory and on both sides: what lies
after the last group may be anything, and zero times anything need not be zero.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_gemm import plan
from pallas_kernels.grouped_gemm.persistent import CONSUMERS, WARPGROUPS, Ring, deepest, programs, ring
from pallas_kernels.grouped_gemm.products import store
from pallas_kernels.mosaic import Transposed, launch, tiled

BLOCKS = {"rows": 128, "columns": 128, "depth": 64, "stored": 64}
ROWS, COLUMNS, DEPTH, STORED = BLOCKS.values()
SHARE = ROWS // CONSUMERS


def weight_gradient(
    x: Float[Array, "C D"],
    dy: Float[Array, "C F"],
    group_sizes: Int[Array, " G"],
    *,
    dtype: Any = jnp.bfloat16,
    interpret: bool = False,
) -> Float[Array, "G D F"]:
    """xᵀ dy of each group's rows, 0 for a group without rows. C a multiple of 8 and at least DEPTH, D and F of 128."""
    (C, D), F, G = x.shape, dy.shape[1], len(group_sizes)
    halves = 2 if F % (2 * COLUMNS) == 0 else 1
    tiles = D // ROWS * (F // (halves * COLUMNS))
    stages = deepest(2 * DEPTH * (ROWS + halves * COLUMNS), besides=ROWS * STORED * jnp.dtype(dtype).itemsize)
    scratch = [
        tiled(stages, CONSUMERS, DEPTH, SHARE),
        tiled(stages, halves, DEPTH, COLUMNS),
        tiled(CONSUMERS, SHARE, STORED, dtype=dtype),
        ring(stages, copies=CONSUMERS + halves),
        plgpu.Barrier(num_arrivals=CONSUMERS),
    ]
    (dw,) = launch(
        lambda *refs: kernel(*refs, items=G * tiles, tiles=tiles, interpret=interpret),
        *(*plan.sums(group_sizes), x, dy),
        name="grouped_weight_gradient",
        out=[jax.ShapeDtypeStruct((G, D, F), dtype)],
        grid={"program": programs(interpret)},
        scratch=scratch,
        interpret=interpret,
        warpgroups=WARPGROUPS,
    )
    return dw


def kernel(*refs, items: int, tiles: int, interpret: bool):
    groups, (x_g, dy_g, dw_g, x, dy, stored, (loaded, consumed), cut) = plan.Sums(*refs[:3]), refs[3:]
    halves = dy.shape[1]
    width = halves * COLUMNS
    across = dy_g.shape[1] // width
    stages = Ring(loaded, consumed, x.shape[0], interpret)
    rank = lambda item: lax.div(item, tiles)

    def place(item):
        """Where the item's tile lies in its group's matrix."""
        tile = lax.rem(item, tiles)
        return lax.div(tile, across) * ROWS, lax.rem(tile, across) * width

    def steps(item):
        start, end = groups.start[rank(item)], groups.end[rank(item)]
        return jnp.where(start < end, lax.div(end - anchor(start) + DEPTH - 1, DEPTH), 0)

    def anchor(start):
        return start - lax.rem(start, plan.ALIGN)

    def rows(item, step):
        """First row of a stage, and which of its rows count: [first, last)."""
        start, end = groups.start[rank(item)], groups.end[rank(item)]
        top = anchor(start) + step * DEPTH
        row = pl.multiple_of(lax.min(top, x_g.shape[0] - DEPTH), plan.ALIGN)
        return row, lax.max(start, top) - row, lax.min(end, top + DEPTH) - row

    def load(item, step, slot, barrier):
        (down, right), (row, _, _) = place(item), rows(item, step)
        for source, target, at in ((x_g, x, down), (dy_g, dy, right)):
            for part in range(target.shape[1]):
                size = target.shape[3]
                columns = pl.ds(pl.multiple_of(at + part * size, size), size)
                plgpu.copy_gmem_to_smem(source.at[pl.ds(row, DEPTH), columns], target.at[slot, part], barrier)

    def compute(item, warpgroup, turn):
        down, right = place(item)

        def pairs(step, slot):
            _, first, last = rows(item, step)

            @pl.when((first > 0) | (last < DEPTH))
            def _():
                keep_rows(x.at[slot, warpgroup], first, last)
                if halves == CONSUMERS:
                    keep_rows(dy.at[slot, warpgroup], first, last)
                else:
                    pl.when(warpgroup == 0)(lambda: keep_rows(dy.at[slot, 0], first, last))
                plgpu.commit_smem()
                # The other warpgroup's share of dy.
                plgpu.barrier_arrive(cut)
                plgpu.barrier_wait(cut)

            return [(Transposed(x.at[slot, warpgroup]), dy.at[slot, half]) for half in range(halves)]

        results = stages.sum([(SHARE, COLUMNS)] * halves, turn, steps(item), pairs)
        matrix = dw_g.at[groups.group[rank(item)]]
        for half, result in enumerate(results):
            for part in range(COLUMNS // STORED):
                columns = pl.ds(pl.multiple_of(right + half * COLUMNS + part * STORED, STORED), STORED)
                row = pl.multiple_of(down + warpgroup * SHARE, SHARE)
                result_part = result[:, part * STORED : (part + 1) * STORED].astype(dw_g.dtype)
                store(result_part, stored.at[warpgroup], None, matrix, row, columns, 0, SHARE)

    stages.run(items, steps, load, compute)


def keep_rows(ref, first, last):
    """Zeros all rows but [first, last)."""
    row = lax.broadcasted_iota(jnp.int32, ref.shape, 0)
    ref[...] = jnp.where((row >= first) & (row < last), ref[...].astype(jnp.float32), 0.0).astype(ref.dtype)
