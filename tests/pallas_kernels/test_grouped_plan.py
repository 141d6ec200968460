"""What programs of the grouped kernels work through covers every group's rows once, in an order that shares loads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_gemm import plan
from pallas_kernels.grouped_gemm.plan import ALIGN

ROWS, GROUPS, HEIGHT, BAND = 160, 6, 16, 3

# Where groups end: also empty groups, one with all rows, rows that no group has.
ends = st.lists(st.integers(0, ROWS), min_size=GROUPS, max_size=GROUPS).map(sorted)
sizes_of_groups = ends.map(lambda ends: np.diff(ends, prepend=0))
column_tiles = st.sampled_from([1, 4])
planned = jax.jit(plan.items, static_argnums=1, static_argnames=("height", "columns", "band"))


def items(sizes, columns, rows=ROWS):
    """The planned items as numpy arrays, cut to those to be used."""
    made = planned(jnp.asarray(sizes, jnp.int32), rows, height=HEIGHT, columns=columns, band=BAND)
    arrays = [np.asarray(x) for x in made]
    assert all(x.dtype == np.int32 for x in arrays)
    (count,) = arrays.pop()
    assert count <= len(arrays[0])
    return plan.Items(*(x[:count] for x in arrays), count=count)


@settings(deadline=None, max_examples=60)
@given(sizes_of_groups, column_tiles)
def test_every_row_of_a_group_meets_every_column_once_and_no_other_row_does(sizes, columns):
    made = items(sizes, columns)
    assert (made.row % ALIGN == 0).all() and (made.row >= 0).all() and (made.row + HEIGHT <= ROWS).all()
    assert (0 <= made.first).all() and (made.first < made.last).all() and (made.last <= HEIGHT).all()
    met = np.full((ROWS, columns), -1)
    for group, row, first, last, column in zip(*made[:4], made.column, strict=True):
        assert (met[row + first : row + last, column] == -1).all()
        met[row + first : row + last, column] = group
    right = np.full(ROWS, -1)
    right[: sum(sizes)] = np.repeat(np.arange(len(sizes)), sizes)
    assert (met == right[:, None]).all()


@settings(deadline=None, max_examples=60)
@given(sizes_of_groups)
def test_every_row_finds_its_place_in_its_tile(sizes):
    made = items(sizes, 1)
    find = jax.jit(plan.places, static_argnums=1, static_argnames="height")
    tile, place = map(np.asarray, find(jnp.asarray(sizes, jnp.int32), ROWS, height=HEIGHT))
    used = np.arange(sum(sizes))
    row_of_tile = dict(zip(made.tile, made.row, strict=True))
    assert [row_of_tile[tile[i]] + place[i] for i in used] == list(used)
    assert ((0 <= place) & (place < HEIGHT) & (0 <= tile) & (tile < plan.most_tiles(ROWS, GROUPS, HEIGHT))).all()


@settings(deadline=None, max_examples=60)
@given(sizes_of_groups, column_tiles)
def test_tiles_are_as_few_as_starts_at_whole_copies_allow(sizes, columns):
    made = items(sizes, columns)
    starts = np.cumsum(sizes) - sizes
    needed = [-(-(size + start % ALIGN) // HEIGHT) for size, start in zip(sizes, starts, strict=True) if size]
    assert made.count == sum(needed) * columns


@settings(deadline=None, max_examples=60)
@given(sizes_of_groups, column_tiles)
def test_neighbours_are_columns_of_one_band_of_one_group(sizes, columns):
    made = items(sizes, columns)
    start = np.cumsum(sizes) - sizes
    # Clamped tiles start earlier; where their own rows begin says which tile of the group they are.
    own = made.row + made.first - (start - start % ALIGN)[made.group]
    band = own // HEIGHT // BAND
    order = list(zip(made.group, band, made.column, own, strict=True))
    assert order == sorted(order)


def test_the_bound_on_tiles_is_reached_by_no_more_than_rounding():
    # One row in each group, as badly placed as can be, and the rest in one.
    sizes = [1] * 63 + [65]
    assert items(sizes, 1, rows=128).count <= plan.most_tiles(128, 64, HEIGHT)
    assert plan.most_tiles(8192 * 16, 112, 128) - 1024 == 117  # K3 on 8 ranks: about one tile a group


@settings(deadline=None, max_examples=100)
@given(sizes_of_groups, st.integers(1, 12), st.integers(1, 7))
def test_dealt_in_turn_shares_differ_by_at_most_the_largest_group(sizes, tiles, programs):
    order, starts, ends = (np.asarray(x) for x in jax.jit(plan.sums)(jnp.asarray(sizes, jnp.int32)))
    np.testing.assert_array_equal(np.sort(order), np.arange(len(sizes)))
    np.testing.assert_array_equal(ends - starts, np.asarray(sizes)[order])
    np.testing.assert_array_equal(starts, (np.cumsum(sizes) - sizes)[order])
    costs = np.repeat(ends - starts, tiles)
    shares = [costs[program::programs].sum() for program in range(programs)]
    assert max(shares) - min(shares) <= max(sizes)


@pytest.mark.quick
def test_without_rows_there_is_no_item():
    assert items([0] * GROUPS, 4).count == 0
