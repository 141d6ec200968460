"""What a grouped kernel's programs work through, made from the groups' sizes: integers only, static shapes.

C rows, G groups, N items at most.

Row tiles are anchored at their group's first row, rounded down to ALIGN, and not at multiples of their height: a group pays
for one partial tile instead of two. Each tile belongs to one group; rows of it before `first` and from `last` on are others',
or nobody's, and are not stored.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

ALIGN = 8
"""Rows of a swizzled tile in shared memory: where a copy of rows may start."""


class Products(NamedTuple):
    """Items of a product, in the order in which they are dealt out: a tile of rows times a tile of columns."""

    group: Int[Array, " N"]
    row: Int[Array, " N"]
    """Where the tile starts, a multiple of ALIGN; the whole tile lies inside the array."""
    first: Int[Array, " N"]
    last: Int[Array, " N"]
    """The group's rows of the tile, [first, last)."""
    column: Int[Array, " N"]
    """Number of the column tile."""
    items: Int[Array, "1"]
    """How many there are; what is listed after them is not to be used."""


def most_tiles(rows: int, groups: int, height: int) -> int:
    """Row tiles that groups of at most `rows` rows in all can need."""
    return (rows + min(rows, groups) * (ALIGN - 1 + height - 1)) // height


def products(group_sizes: Int[Array, " G"], rows: int, *, height: int, columns: int, band: int) -> Products:
    """Items of all groups: `rows` (a multiple of ALIGN, at least `height`) times so many column tiles.

    All items cost the same, so that what order can win is traffic: programs run neighbours in the list at the same time.
    Columns of at most `band` row tiles of one group follow each other, so that neighbours share weights and rows alike, and
    one large group does not read its rows once for every column tile.
    """
    starts, ends = borders(group_sizes)
    anchors = starts - starts % ALIGN
    tiles = jnp.where(group_sizes > 0, -(-(ends - anchors) // height), 0)
    items = jnp.cumsum(tiles * columns)
    number = jnp.arange(most_tiles(rows, len(group_sizes), height) * columns, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(number[:, None] >= items, axis=1, dtype=jnp.int32), len(group_sizes) - 1)
    tiles, start, end, anchor = tiles[group], starts[group], ends[group], anchors[group]
    number = number - (items[group] - tiles * columns)
    before = number // (band * columns) * band
    number = number - before * columns
    in_band = jnp.clip(tiles - before, 1, band)
    top = anchor + height * (before + number % in_band)
    row = jnp.minimum(top, rows - height)
    first, last = jnp.maximum(start, top) - row, jnp.minimum(end, top + height) - row
    return Products(group, row, first, last, number // in_band, items[-1:])


class Sums(NamedTuple):
    """Groups in the order in which sums over their rows are dealt out, and where the rows lie: [start, end)."""

    group: Int[Array, " G"]
    start: Int[Array, " G"]
    end: Int[Array, " G"]


def sums(group_sizes: Int[Array, " G"]) -> Sums:
    """All groups, the largest first.

    An item costs what its group's size is. Dealt in turn from a falling list, no two programs' shares differ by more than
    the largest item.
    """
    starts, ends = borders(group_sizes)
    order = jnp.argsort(-group_sizes, stable=True).astype(jnp.int32)
    return Sums(order, starts[order], ends[order])


def borders(group_sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First row of each group, and the one after its last."""
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    return ends - group_sizes, ends
