"""Backward of a gated product whose rows are weighted: everything of an expert between its matrices.

C rows, G groups, D width of x, F width of the hidden.

Forward, a = activation(x gate, x up), and what comes after sees p a, row by row. From da, the cotangent of a for p = 1, the
kernel makes both products again, keeps them in float32, and writes

    p a        d(x gate), d(x up) of p da        Σ_F da a, the gradient of p

A row's sum over F is spread over the column tiles: each item writes its own share, next to those of the same row tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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

WithSlopes = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
"""An activation of two arrays, and its derivatives by each, elementwise."""


class GatedGradients(NamedTuple):
    """bfloat16, of the weights float32."""

    weighted: Float[Array, "C F"]
    gate: Float[Array, "C F"]
    up: Float[Array, "C F"]
    row_weights: Float[Array, " C"]


def gated_gradients(
    x: Float[Array, "C D"],
    gate: Float[Array, "G D F"],
    up: Float[Array, "G D F"],
    da: Float[Array, "C F"],
    row_weights: Float[Array, " C"],
    group_sizes: Int[Array, " G"],
    *,
    with_slopes: WithSlopes,
    interpret: bool = False,
) -> GatedGradients:
    """All rows and widths as `product` needs them. Rows after the last group are not written."""
    C, F = da.shape
    tile_columns = F // COLUMNS
    items = plan.items(group_sizes, C, height=ROWS, columns=tile_columns, band=BAND)
    stages = deepest(stage_bytes(2), besides=2 * (2 * ROWS * STORED + ROWS * COLUMNS) + 2 * 4 * ROWS)
    scratch = [
        *operands(stages, 2),
        tiled(CONSUMERS, PARTS, SHARE, STORED),
        tiled(CONSUMERS, SHARE, STORED),
        plain(CONSUMERS, SHARE, STORED, dtype=jnp.bfloat16),
        *(plain(CONSUMERS, SHARE) for _ in range(2)),
        ring(stages, copies=CONSUMERS + 2),
        plgpu.Barrier(num_arrivals=PARTS + 1, num_barriers=CONSUMERS),
    ]
    shares = plan.most_tiles(C, len(group_sizes), ROWS), tile_columns, ROWS
    weighted, d_gate, d_up, shares = launch(
        lambda *refs: kernel(*refs, with_slopes=with_slopes, interpret=interpret),
        *(items, x, (gate, up), da, row_weights),
        name="grouped_gated_gradients",
        out=[*[jax.ShapeDtypeStruct((C, F), jnp.bfloat16)] * 3, jax.ShapeDtypeStruct(shares, jnp.float32)],
        grid={"program": programs(interpret)},
        scratch=scratch,
        interpret=interpret,
        warpgroups=WARPGROUPS,
    )
    tile, place = plan.places(group_sizes, C, height=ROWS)
    return GatedGradients(weighted, d_gate, d_up, shares.sum(1)[tile, place])


def kernel(items, x_g, matrices_g, da_g, p_g, *refs, with_slopes: WithSlopes, interpret: bool):
    *results_g, shares_g, x, w, da, stored, ladder, p, shares, barriers, loaded = refs
    tiles = Tiles(items, [Source(x_g, [(matrix, 0) for matrix in matrices_g])], x, w, COLUMNS)
    stages = Ring(barriers, x.shape[0], interpret)

    def compute(item, warpgroup, turn):
        row, column, first, count = tiles.place(item, warpgroup)
        rows, ready = pl.ds(row, SHARE), loaded.at[warpgroup]
        for part in range(PARTS):
            columns = pl.ds(pl.multiple_of(column + part * STORED, STORED), STORED)
            plgpu.copy_gmem_to_smem(da_g.at[rows, columns], da.at[warpgroup, part], ready)
        plgpu.copy_gmem_to_smem(p_g.at[rows], p.at[warpgroup], ready)
        products = tiles.sums(stages, warpgroup, turn)
        plgpu.barrier_wait(ready)
        spread = lax.broadcast_in_dim(p[warpgroup], (SHARE, STORED), (0,))
        total = jnp.zeros(SHARE, jnp.float32)
        for part in range(PARTS):
            a, *slopes = with_slopes(*(columns_of(x, part) for x in products))
            da_now = da[warpgroup, part].astype(jnp.float32)
            total += jnp.sum(da_now * a, axis=1)
            for result, y_g in zip((a, *(da_now * slope for slope in slopes)), results_g, strict=True):
                at = row, column + part * STORED, first, count
                store(spread * result, stored.at[warpgroup], ladder.at[warpgroup], y_g, *at)
        shares[warpgroup] = total
        plgpu.commit_smem()
        target = shares_g.at[items.tile[item], items.column[item], pl.ds(warpgroup * SHARE, SHARE)]
        plgpu.copy_smem_to_gmem(shares.at[warpgroup], target)

    stages.run(items.count[0], lambda _: tiles.steps, tiles.load, compute)
