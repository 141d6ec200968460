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


class Items(NamedTuple):
    """Items of a product, in the order in which they are dealt out: a tile of rows times a tile of columns."""

    group: Int[Array, " N"]
    row: Int[Array, " N"]
    """Where the tile starts, a multiple of ALIGN; the whole tile lies inside the array."""
    first: Int[Array, " N"]
    last: Int[Array, " N"]
    """The group's rows of the tile, [first, last)."""
    tile: Int[Array, " N"]
    """Number of the row tile, over all groups."""
    column: Int[Array, " N"]
    """Number of the column tile."""
    count: Int[Array, "1"]
    """How many there are; what is listed after them is not to be used."""


def most_tiles(rows: int, groups: int, height: int) -> int:
    """Row tiles that groups of at most `rows` rows in all can need."""
    return (rows + min(rows, groups) * (ALIGN - 1 + height - 1)) // height


def items(group_sizes: Int[Array, " G"], rows: int, *, height: int, columns: int, band: int) -> Items:
    """Items of all groups: `rows` (a multiple of ALIGN, at least `height`) times so many column tiles.

    All items cost the same, so that what order can win is traffic: programs run neighbours in the list at the same time.
    Columns of at most `band` row tiles of one group follow each other, so that neighbours share weights and rows alike, and
    one large group does not read its rows once for every column tile.
    """
    starts, ends, anchors, tiles = borders(group_sizes, height)
    number = jnp.arange(most_tiles(rows, len(group_sizes), height) * columns, dtype=jnp.int32)
    group = owner(number, jnp.cumsum(tiles) * columns)
    before = (jnp.cumsum(tiles) - tiles)[group]  # tiles of other groups
    number = number - before * columns
    done = number // (band * columns) * band  # tiles of this group's bands before
    number = number - done * columns
    in_band = jnp.clip(tiles[group] - done, 1, band)
    tile = done + number % in_band
    top = anchors[group] + height * tile
    row = jnp.minimum(top, rows - height)
    first, last = jnp.maximum(starts[group], top) - row, jnp.minimum(ends[group], top + height) - row
    return Items(group, row, first, last, before + tile, number // in_band, jnp.sum(tiles, keepdims=True) * columns)


def places(group_sizes: Int[Array, " G"], rows: int, *, height: int) -> tuple[Int[Array, " C"], Int[Array, " C"]]:
    """For each of `rows` rows the number of its tile among those of `items`, and its place there.

    Rows after the last group get some place inside some tile.
    """
    _, ends, anchors, tiles = borders(group_sizes, height)
    row = jnp.arange(rows, dtype=jnp.int32)
    group = owner(row, ends)
    tile = jnp.clip((row - anchors[group]) // height, 0, jnp.maximum(tiles[group] - 1, 0))
    top = jnp.minimum(anchors[group] + height * tile, rows - height)
    return (jnp.cumsum(tiles) - tiles)[group] + tile, jnp.clip(row - top, 0, height - 1)


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
    order = jnp.argsort(-group_sizes, stable=True).astype(jnp.int32)
    starts, ends, _, _ = borders(group_sizes, 1)
    return Sums(order, starts[order], ends[order])


def borders(group_sizes: jax.Array, height: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Of each group: first row, the one after its last, where its tiles start, and how many of them it has."""
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    starts = ends - group_sizes
    anchors = starts - starts % ALIGN
    return starts, ends, anchors, jnp.where(group_sizes > 0, -(-(ends - anchors) // height), 0)


def owner(number: jax.Array, ends: jax.Array) -> jax.Array:
    """Whose each number is, if the numbers of each end where `ends` says; the last one's if nobody's."""
    return jnp.minimum(jnp.sum(number[:, None] >= ends, axis=1, dtype=jnp.int32), len(ends) - 1)
