"""Products of each group's rows with its own matrix, summed in float32, with what follows in the same kernel.

C rows, G groups, D contracted width, F width of the result.

An item is a tile of 128 rows times up to 256 columns of one group; each computing warpgroup has 64 of the rows and one or two
accumulators of 128 columns. Of a gated product the two are gate and up, and the result is the activation of both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_gemm import plan
from pallas_kernels.grouped_gemm.persistent import CONSUMERS, WARPGROUPS, Ring, deepest, programs, ring
from pallas_kernels.mosaic import Transposed, launch, plain, tiled

BLOCKS = {"rows": 128, "columns": 128, "depth": 64, "stored": 64, "band": 8}
ROWS, COLUMNS, DEPTH, STORED, BAND = BLOCKS.values()
SHARE = ROWS // CONSUMERS
"""Rows of a computing warpgroup."""

Activation = Callable[[jax.Array, jax.Array], jax.Array]


def product(
    x: Float[Array, "C D"],
    matrices: tuple[jax.Array, ...],
    group_sizes: Int[Array, " G"],
    *,
    transposed: bool = False,
    activation: Activation | None = None,
    row_weights: Float[Array, " C"] | None = None,
    dtype: Any = jnp.bfloat16,
    interpret: bool = False,
) -> Float[Array, "C F"]:
    """x times the one matrix [G, D, F], or [G, F, D] if transposed; or the activation of the products with two.

    C a multiple of 8 and at least ROWS, D of DEPTH, F of COLUMNS. Rows after the last group are not written.
    """
    C, D = x.shape
    F = matrices[0].shape[1 if transposed else 2]
    halves = 2 if activation or F % (2 * COLUMNS) == 0 else 1  # accumulators
    width = COLUMNS if activation else halves * COLUMNS  # columns of an item
    items = plan.products(group_sizes, C, height=ROWS, columns=F // width, band=BAND)
    tile = (COLUMNS, DEPTH) if transposed else (DEPTH, COLUMNS)
    bytes_stored = ROWS * STORED * jnp.dtype(dtype).itemsize
    stages = deepest(2 * DEPTH * (ROWS + halves * COLUMNS), besides=2 * bytes_stored + 4 * ROWS)
    scratch = [
        tiled(stages, CONSUMERS, SHARE, DEPTH),
        tiled(stages, halves, *tile),
        tiled(CONSUMERS, SHARE, STORED, dtype=dtype),
        plain(CONSUMERS, SHARE, STORED, dtype=dtype),
        plain(CONSUMERS, SHARE),
        ring(stages, copies=CONSUMERS + halves),
        plgpu.Barrier(num_barriers=CONSUMERS),
    ]
    weights = () if row_weights is None else (row_weights,)
    how = {"transposed": transposed, "activation": activation, "width": width, "interpret": interpret}
    (y,) = launch(
        lambda *refs: kernel(*refs, matrices=len(matrices), weighted=len(weights), **how),
        *(*items, x, *matrices, *weights),
        name="grouped_gated_product" if activation else "grouped_product",
        out=[jax.ShapeDtypeStruct((C, F), dtype)],
        grid={"program": programs(interpret)},
        scratch=scratch,
        interpret=interpret,
        warpgroups=WARPGROUPS,
    )
    return y


def kernel(*refs, matrices: int, weighted: int, transposed: bool, activation: Activation | None, width: int, interpret):
    items, (x_g, *refs) = plan.Products(*refs[:6]), refs[6:]
    w_g, weights_g, (y_g, *scratch) = refs[:matrices], refs[matrices : matrices + weighted], refs[matrices + weighted :]
    x, w, stored, ladder, weights, (loaded, consumed), weights_loaded = scratch
    halves, steps = w.shape[1], x_g.shape[1] // DEPTH
    stages = Ring(loaded, consumed, x.shape[0], interpret)

    def load(item, step, slot, barrier):
        depth, group = pl.ds(step * DEPTH, DEPTH), items.group[item]
        row, column = items.row[item], items.column[item] * width
        for part in range(CONSUMERS):
            rows = pl.ds(pl.multiple_of(row + part * SHARE, plan.ALIGN), SHARE)
            plgpu.copy_gmem_to_smem(x_g.at[rows, depth], x.at[slot, part], barrier)
        for half in range(halves):
            matrix, columns = (w_g[half], 0) if activation else (w_g[0], half * COLUMNS)
            columns = pl.ds(pl.multiple_of(column + columns, COLUMNS), COLUMNS)
            source = matrix.at[group, columns, depth] if transposed else matrix.at[group, depth, columns]
            plgpu.copy_gmem_to_smem(source, w.at[slot, half], barrier)

    def compute(item, warpgroup, turn):
        skipped = warpgroup * SHARE
        row, column = pl.multiple_of(items.row[item] + skipped, plan.ALIGN), items.column[item] * width
        first = lax.max(items.first[item] - skipped, 0)
        count = lax.min(items.last[item] - skipped, SHARE) - first
        if weighted:
            source = weights_g[0].at[pl.ds(row, SHARE)]
            plgpu.copy_gmem_to_smem(source, weights.at[warpgroup], weights_loaded.at[warpgroup])
        right = lambda slot, half: Transposed(w.at[slot, half]) if transposed else w.at[slot, half]
        pairs = lambda _, slot: [(x.at[slot, warpgroup], right(slot, half)) for half in range(halves)]
        results = stages.sum([(SHARE, COLUMNS)] * halves, turn, steps, pairs)
        if activation:
            results = [activation(*results)]
        if weighted:
            plgpu.barrier_wait(weights_loaded.at[warpgroup])
            spread = lax.broadcast_in_dim(weights[warpgroup], (SHARE, COLUMNS), (0,))
            results = [result * spread for result in results]
        for half, result in enumerate(results):
            for part in range(COLUMNS // STORED):
                columns = pl.ds(pl.multiple_of(column + half * COLUMNS + part * STORED, STORED), STORED)
                store(
                    result[:, part * STORED : (part + 1) * STORED].astype(y_g.dtype),
                    *(stored.at[warpgroup], ladder.at[warpgroup]),
                    *(y_g, row, columns, first, count),
                )

    stages.run(items.items[0], lambda _: steps, load, compute)


def store(result, stored, ladder, y_g, row, columns, first, count):
    """Writes `count` rows of a result, from `first` on, and no others: they may be another program's.

    A copy's height is part of the program: other heights than the whole are put together from powers of two.
    """
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
