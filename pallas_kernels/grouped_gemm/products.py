"""Products of each group's rows with its own matrix, summed in float32, with what follows in the same kernel.

C rows, G groups, D contracted width, F width of the result.
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
from pallas_kernels.grouped_gemm.tiles import (
    BAND,
    COLUMNS,
    PARTS,
    ROWS,
    SHARE,
    STORED,
    Source,
    Tiles,
    columns_of,
    operands,
    stage_bytes,
    store,
)
from pallas_kernels.mosaic import launch, plain, tiled

Activation = Callable[[jax.Array, jax.Array], jax.Array]


def product(
    rows: tuple[Float[Array, "C D"], ...],
    matrices: tuple[jax.Array, ...],
    group_sizes: Int[Array, " G"],
    *,
    transposed: bool = False,
    activation: Activation | None = None,
    row_weights: Float[Array, " C"] | None = None,
    dtype: Any = jnp.bfloat16,
    interpret: bool = False,
) -> Float[Array, "C F"]:
    """The sum of each x times its matrix [G, D, F], or [G, F, D] if transposed, weighted by row.

    With an activation: that of the products of the one x with two matrices.

    C a multiple of 8 and at least ROWS, D of DEPTH, F of COLUMNS. Rows after the last group are not written.
    """
    C, F = len(rows[0]), matrices[0].shape[1 if transposed else 2]
    accumulators = 2 if activation or F % (2 * COLUMNS) == 0 else 1
    width = COLUMNS if activation else accumulators * COLUMNS
    items = plan.items(group_sizes, C, height=ROWS, columns=F // width, band=BAND)
    bytes_stored = ROWS * STORED * jnp.dtype(dtype).itemsize
    stages = deepest(stage_bytes(accumulators), besides=2 * bytes_stored + 4 * ROWS)
    scratch = [
        *operands(stages, accumulators, transposed),
        tiled(CONSUMERS, SHARE, STORED, dtype=dtype),
        plain(CONSUMERS, SHARE, STORED, dtype=dtype),
        plain(CONSUMERS, SHARE),
        ring(stages, copies=CONSUMERS + accumulators),
        plgpu.Barrier(num_barriers=CONSUMERS),
    ]
    how = {"width": width, "transposed": transposed, "activation": activation, "interpret": interpret}
    (y,) = launch(
        lambda *refs: kernel(*refs, **how),
        *(items, rows, matrices, row_weights),
        name="grouped_gated_product" if activation else "grouped_product",
        out=[jax.ShapeDtypeStruct((C, F), dtype)],
        grid={"program": programs(interpret)},
        scratch=scratch,
        interpret=interpret,
        warpgroups=WARPGROUPS,
    )
    return y


def kernel(items, rows_g, matrices_g, p_g, y_g, *scratch, width: int, transposed: bool, activation, interpret: bool):
    x, w, stored, ladder, p, barriers, p_loaded = scratch
    if activation:
        sources = [Source(rows_g[0], [(matrix, 0) for matrix in matrices_g])]
    else:
        starts = range(0, width, COLUMNS)
        sources = [Source(x_g, [(matrix, at) for at in starts]) for x_g, matrix in zip(rows_g, matrices_g, strict=True)]
    tiles, stages = Tiles(items, sources, x, w, width, transposed), Ring(barriers, x.shape[0], interpret)

    def compute(item, warpgroup, turn):
        row, column, first, count = tiles.place(item, warpgroup)
        if p_g is not None:
            plgpu.copy_gmem_to_smem(p_g.at[pl.ds(row, SHARE)], p.at[warpgroup], p_loaded.at[warpgroup])
        results = tiles.sums(stages, warpgroup, turn)
        if activation:
            results = [activation(*results)]
        if p_g is not None:
            plgpu.barrier_wait(p_loaded.at[warpgroup])
            spread = lax.broadcast_in_dim(p[warpgroup], (SHARE, COLUMNS), (0,))
            results = [result * spread for result in results]
        for number, result in enumerate(results):
            for part in range(PARTS):
                at = row, column + number * COLUMNS + part * STORED, first, count
                store(columns_of(result, part), stored.at[warpgroup], ladder.at[warpgroup], y_g, *at)

    stages.run(items.count[0], lambda _: tiles.steps, tiles.load, compute)
