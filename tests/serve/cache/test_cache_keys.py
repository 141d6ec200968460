"""Names of prefixes: equal exactly where contents are, on every machine and in every process."""

import dataclasses
import itertools

import numpy as np
import pytest
from cache_engine import KEY
from hypothesis import given
from hypothesis import strategies as st

from k3jax.serve.cache import CacheKey, Chain, keys

TOKENS = st.lists(st.integers(0, 2**40), max_size=40)


def test_a_hash_is_the_same_in_every_process():
    chain = Chain(KEY, 4, [1, 2, 3, 4, 163839])
    assert chain.at(0).hex().startswith("0d92d45c39f63c5f")
    assert chain.at(4).hex().startswith("76404c2a6bdfd639")


@given(TOKENS, st.integers(1, 9), st.lists(st.integers(0, 40), max_size=4))
def test_a_chain_does_not_depend_on_how_tokens_come(tokens, unit, cuts):
    whole, pieces = Chain(KEY, unit, tokens), Chain(KEY, unit)
    cuts = sorted(min(cut, len(tokens)) for cut in cuts)
    for start, end in itertools.pairwise([0, *cuts, len(tokens)]):
        pieces.extend(np.array(tokens[start:end], np.int64))
    assert pieces.between(0, len(tokens)) == whole.between(0, len(tokens))
    assert len(pieces) == len(whole) == len(tokens) and whole.aligned == len(tokens) // unit * unit
    assert list(whole.first) == tokens[:unit] * (len(tokens) >= unit)


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_prefixes_share_hashes_exactly_as_far_as_they_are_equal(a, b, unit):
    first, second = Chain(KEY, unit, a), Chain(KEY, unit, b)
    for end in range(0, min(first.aligned, second.aligned) + 1, unit):
        assert (first.at(end) == second.at(end)) == (a[:end] == b[:end])


def test_each_token_is_hashed_once(monkeypatch):
    blocks = []
    monkeypatch.setattr(
        keys, "block_hash", lambda parent, block: (blocks.append(list(block)), parent[:-1] + bytes([1]))[1]
    )
    chain = Chain(KEY, 2, range(5))
    chain.extend([5])
    chain.extend([6, 7])
    chain.copy().at(8)
    assert blocks == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_copies_of_a_chain_part_ways():
    chain = Chain(KEY, 2, [1, 2, 3])
    other = chain.copy()
    chain.extend([4])
    other.extend([5])
    assert chain.at(2) == other.at(2) and chain.at(4) != other.at(4) and (len(chain), len(other)) == (4, 4)


@given(st.lists(st.text("ab\0", min_size=1, max_size=3), min_size=16, max_size=16))
def test_no_two_keys_share_a_root(values):
    names = [field.name for field in dataclasses.fields(CacheKey)]
    a = CacheKey(**dict(zip(names, values[:8], strict=True)))
    b = CacheKey(**dict(zip(names, values[8:], strict=True)))
    assert (a.root(2) == b.root(2)) == (a == b) == (not a.differing(b))
    assert a.root(2) != a.root(4)


@pytest.mark.parametrize("tokens", [[1.5], [-1], [[1], [2]], ["a"]])
def test_what_is_no_token_is_refused(tokens):
    with pytest.raises(ValueError, match="flat sequence of integers >= 0, got"):
        Chain(KEY, 2, np.array(tokens))


def test_where_there_is_no_hash_none_is_given():
    chain = Chain(KEY, 2, [1, 2, 3])
    for boundary in (1, 4, -2):
        with pytest.raises(ValueError, match=f"no hash at {boundary} tokens: .* multiple of 2 up to 2"):
            chain.at(boundary)
    with pytest.raises(ValueError, match="cache key field 'model' is empty"):
        dataclasses.replace(KEY, model="")
