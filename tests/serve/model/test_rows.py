"""What does not fit is refused in one line, before anything is computed."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_problem import PAGES

from k3jax.serve.model import Buckets, Row, blocks
from k3jax.serve.model.rows import arrange
from k3jax.serve.model.serving import check_block

pytestmark = pytest.mark.quick
GOOD = Row(tokens=[1, 2, 3], start=30, latents=[4, 5, 6], states=[[7, 8]])
SHAPES = dict(T=4, per_rank=2, ranks=2, width=5, pool_pages=10)


def test_rows_lie_with_their_ranks_and_the_rest_is_padding():
    second = dataclasses.replace(GOOD, latents=[1, 2, 3], states=[[0, 9]], writes=33)
    rows, at = arrange(PAGES, [dataclasses.replace(GOOD, rank=1), GOOD, dataclasses.replace(second, rank=1)], **SHAPES)
    rows = jax.tree.map(np.asarray, rows)
    np.testing.assert_array_equal(at, [2, 0, 3])
    np.testing.assert_array_equal(rows.tokens_BT, [[1, 2, 3, -1], [-1] * 4, [1, 2, 3, -1], [1, 2, 3, -1]])
    np.testing.assert_array_equal(rows.latents_Bn[[0, 1, 3]], [[4, 5, 6, -1, -1], [-1] * 5, [1, 2, 3, -1, -1]])
    np.testing.assert_array_equal(rows.starts_B, [30, 0, 30, 30])
    np.testing.assert_array_equal(rows.writes_B, [30, 0, 30, 33])


BAD = {
    "5 tokens; a call takes 1 to 4": dict(tokens=[1] * 5),
    "0 tokens; a call takes": dict(tokens=[]),
    "ids from 0 to 31": dict(tokens=[32]),
    "before the first token": dict(start=-1),
    "there are 2": dict(rank=2),
    "33 tokens need 3 pages of 16; got 2": dict(latents=[4, 5]),
    "needs? 1 groups of 2 pages": dict(states=[[7]]),
    "pages must be from 0 to 9": dict(latents=[4, 5, 10]),
    "page 5 of rank 0 is written by row 0 too": dict(latents=[4, 5, 5]),
    "page 8 of rank 0 is written by row 0 too": dict(states=[[8, 8]]),
    "page 6 of rank 0 is written by row 0 too": dict(states=[[6, 8]]),
}


@pytest.mark.parametrize("message", BAD)
def test_a_row_that_does_not_fit_is_refused(message):
    with pytest.raises(ValueError, match=message):
        arrange(PAGES, [dataclasses.replace(GOOD, **BAD[message])], **SHAPES)


def test_rows_share_pages_that_neither_writes():
    other = dataclasses.replace(GOOD, latents=[4, 1, 2], states=[[0, 9]])
    arrange(PAGES, [GOOD, other], **SHAPES)
    with pytest.raises(ValueError, match="row 1: page 6 of rank 0 is written by row 0 too"):
        arrange(PAGES, [GOOD, dataclasses.replace(other, latents=[4, 1, 6])], **SHAPES)
    with pytest.raises(ValueError, match="row 2: rank 0 has its 2 rows already"):
        arrange(PAGES, [GOOD, other, other], **SHAPES)


@given(st.integers(0, 20), st.integers(0, 200), st.integers(1, 40))
def test_blocks_cover_a_prompt_and_meet_at_absolute_multiples(first, length, size):
    start = first * size
    pieces = list(blocks(start, start + length, size))
    assert [n for piece in pieces for n in range(*piece)] == list(range(start, start + length))
    assert all(a % size == 0 and b - a <= size for a, b in pieces)
    if size > 1:
        with pytest.raises(ValueError, match="is no multiple of the block"):
            list(blocks(start + 1, start + 1 + length, size))


@given(st.integers(1, 100), st.integers(1, 1000))
def test_a_bucket_is_the_smallest_that_holds(rows, pages):
    buckets = Buckets.doubling(rows=100, pages=1000)
    assert rows <= buckets.rows_for(rows) <= 2 * rows - (rows == 1)
    assert pages <= buckets.pages_for(pages) <= 2 * pages - (pages == 1)


def test_sizes_that_do_not_fit_each_other_are_refused():
    with pytest.raises(ValueError, match="101 rows to decode on a rank: buckets go up to 100"):
        Buckets.doubling(rows=100, pages=1).rows_for(101)
    for wrong in (dict(batch=(), pages=(1,)), dict(batch=(2, 1), pages=(1,)), dict(batch=(1,), pages=(1,), prefill=0)):
        with pytest.raises(ValueError, match="needs sizes of at least 1"):
            Buckets(**wrong)
    with pytest.raises(ValueError, match="block=40 must be a multiple of KDA's chunk_size=16"):
        check_block(40, chunk_size=16, hash_unit=80)
    with pytest.raises(ValueError, match="block=32 must divide hash_unit=48"):
        check_block(32, chunk_size=16, hash_unit=48)
    check_block(32, chunk_size=16, hash_unit=64)
