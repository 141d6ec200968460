"""Grouped products as batches of tiles, on any backend.

C rows, G groups, D and F widths, n tiles of t rows.

Rows are cut into tiles of one group each: work grows with rows, not with rows times groups, as that of `lax.ragged_dot` does
where it has no kernel. Each tile takes a copy of its group's matrix along, so tiles take turns where those would be large.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.compat import vary_like
from k3jax.ops.grouped_gemm.mosaic import Activation, WithSlopes

COPIED_BYTES = 1 << 28
"""Of matrices at once."""


class Xla:
    """The same methods as `Mosaic`."""

    def product(self, x, w, group_sizes, *, dtype, transposed=False, row_weights=None) -> jax.Array:
        pairs = list(zip(x, w, strict=True)) if isinstance(x, tuple) else [(x, w)]
        tiles = cut(group_sizes, len(pairs[0][0]), pairs[0][1])
        (y,) = tiles.each(
            lambda x, w: (sum(product(a, b.mT if transposed else b) for a, b in zip(x, w, strict=True)),),
            tuple(x for x, _ in pairs),
            tuple(w for _, w in pairs),
        )
        return (y if row_weights is None else y * row_weights[:, None]).astype(dtype)

    def gated_product(self, x, gate, up, group_sizes, *, activation: Activation) -> jax.Array:
        hidden = lambda x, w: (activation(*(product(x[0], matrix) for matrix in w)).astype(x[0].dtype),)
        return cut(group_sizes, len(x), gate).each(hidden, (x,), (gate, up))[0]

    def gated_gradients(self, x, gate, up, da, row_weights, group_sizes, *, with_slopes: WithSlopes):
        def gradients(rows, w):
            x, da, p = rows
            a, *slopes = with_slopes(*(product(x, matrix) for matrix in w))
            wide_da = da.astype(a.dtype)
            results = a, *(wide_da * slope for slope in slopes)
            dp = (wide_da * a).sum(-1, keepdims=True).astype(p.dtype)
            return *((p * y).astype(x.dtype) for y in results), dp

        rows = x, da, row_weights[:, None]
        *results, dp = cut(group_sizes, len(x), gate).each(gradients, rows, (gate, up))
        return *results, dp[:, 0]

    def weight_gradient(self, x, dy, group_sizes, *, dtype) -> jax.Array:
        sums = jnp.zeros((len(group_sizes), x.shape[1], dy.shape[1]), wide(x.dtype))
        tiles = cut(group_sizes, len(x), sums)

        def add(sums, turn):
            group, row = turn
            products = jnp.einsum("ntd,ntf->ndf", take(x, row), take(dy, row), preferred_element_type=sums.dtype)
            return sums.at[group].add(products, indices_are_sorted=True), None

        return tiles.scan(add, vary_like(sums, x, dy, group_sizes))[0].astype(dtype)


class Tiles(NamedTuple):
    """Tiles of all groups, in their order; a group's last tile may be partly empty. They are made in turns."""

    group: jax.Array
    """[turns, n]: the group of each tile; the last one for tiles that are not used."""
    row: jax.Array
    """[turns, n, t]: the row in each place; C where there is none."""
    place: jax.Array
    """[C]: where each row is, counted through all places; beyond them for rows after the last group."""

    def each(self, function, rows: tuple[jax.Array, ...], matrices: tuple[jax.Array, ...]) -> list[jax.Array]:
        """Arrays [C, ...] of what `function` makes of rows, each [n, t, ...], and their groups' matrices, each [n, D, F]."""

        def turn(_, at):
            group, row = at
            return None, function(tuple(take(a, row) for a in rows), tuple(a[group] for a in matrices))

        made = self.scan(turn, None)[1]
        return [take(y.reshape(-1, y.shape[-1]), self.place) for y in made]

    def scan(self, turn, carry):
        return lax.scan(turn, carry, (self.group, self.row), unroll=len(self.group) == 1)


def cut(group_sizes: jax.Array, rows: int, matrices) -> Tiles:
    """Tiles for groups of these rows, in turns that copy not too much of the matrices [G, D, F]."""
    G, *shape = matrices.shape
    t = next((t for t in (64, 32, 16) if G * t <= rows), 8)
    most = max(1, COPIED_BYTES // (math.prod(shape) * matrices.dtype.itemsize))
    tiles = rows // t + min(G, rows)
    turns = -(-tiles // most)
    tile = jnp.arange(turns * -(-tiles // turns))

    row_end, tile_end = jnp.cumsum(group_sizes), jnp.cumsum(-(-group_sizes // t))
    row_begin, tile_begin = row_end - group_sizes, tile_end + group_sizes // -t
    group_of = lambda end, at: jnp.minimum(jnp.searchsorted(end, at, side="right"), G - 1)
    group = group_of(tile_end, tile)
    row = (row_begin[group] + (tile - tile_begin[group]) * t)[:, None] + jnp.arange(t)
    row = jnp.where(row < row_end[group][:, None], row, rows)
    every = jnp.arange(rows)
    owner = group_of(row_end, every)
    place = jnp.where(every < row_end[-1], tile_begin[owner] * t + every - row_begin[owner], row.size)
    return Tiles(group.reshape(turns, -1), row.reshape(turns, -1, t), place)


def take(x: jax.Array, row: jax.Array) -> jax.Array:
    """Those rows, 0 where there are none."""
    return x.at[row].get(mode="fill", fill_value=0)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Of each tile with its matrix."""
    return jnp.einsum("ntd,ndf->ntf", x, w, preferred_element_type=wide(x.dtype))


def wide(dtype):
    """What sums are made in: float32, or float64."""
    return jnp.promote_types(dtype, jnp.float32)
