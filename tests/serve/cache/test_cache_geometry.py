"""Sizes of pages and states: one page size for both, and a clear word where numbers do not fit."""

import pytest
from cache_engine import toy
from hypothesis import given
from hypothesis import strategies as st

from k3jax import configs
from k3jax.serve.cache import Geometry


@pytest.mark.parametrize("head_shards, page_tokens", [(1, 6144), (8, 1024)])
def test_k3_pages_hold_the_reported_tokens(head_shards, page_tokens):
    k3 = Geometry.for_model(configs.get("k3"), head_shards=head_shards)
    assert (k3.hash_unit, k3.page_tokens, k3.groups, k3.pages_per_state) == (512, page_tokens, 3, 1)
    assert k3.page_bytes == 24 * page_tokens * 576 * 2
    assert k3.head_bytes == 128 * 128 * 4 + 3 * 384 * 2
    assert 1 - k3.state_waste == pytest.approx(69 * 96 // head_shards * k3.head_bytes / (3 * k3.page_bytes))


def test_a_state_lies_head_by_head_in_smaller_pages():
    k3 = Geometry.for_model(configs.get("k3"), page_tokens=1024)
    assert (k3.pages_per_state, k3.heads_per_page, k3.state_pages) == (6, 16, 18)
    # Records of 64 tokens would take twice a state: 2·128 + 128 numbers a token against 128 · 128.
    assert k3.record_pages(64) > k3.state_pages > k3.record_pages(32)


@pytest.mark.parametrize("name", ["nano", "mini", "kimi_linear_48b"])
def test_every_preset_has_a_geometry(name):
    sizes = Geometry.for_model(configs.get(name))
    assert sizes.pages_per_state == 1 and 0 <= sizes.state_waste < 1


@given(st.integers(1, 64), st.integers(1, 9), st.integers(1, 9), st.integers(1, 40), st.integers(1, 40))
def test_states_and_records_fit_the_pages_they_are_given(page_tokens, kv_layers, kda_layers, heads, kv_token_bytes):
    sizes = dict(page_tokens=page_tokens, hash_unit=1, chunk_size=1, kv_layers=kv_layers, kda_layers=kda_layers)
    one = toy(**sizes, heads=heads, kv_token_bytes=kv_token_bytes, head_bytes=min(7, page_tokens * kv_token_bytes))
    assert one.heads_per_page * one.head_bytes <= one.slot_bytes
    assert (one.pages_per_state - 1) * one.heads_per_page < one.heads <= one.pages_per_state * one.heads_per_page
    assert (one.groups - 1) * one.kv_layers < one.kda_layers <= one.groups * one.kv_layers
    for tokens in (1, 5):
        pages = one.record_pages(tokens) // one.groups
        assert (pages - 1) * one.slot_bytes < heads * tokens * one.record_token_bytes <= pages * one.slot_bytes


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(chunk_size=3), "chunk_size=3 does not divide hash_unit=2: a state is only exact at an edge"),
        (dict(page_tokens=5), "page_tokens=5 is no multiple of hash_unit=2"),
        (dict(head_bytes=100), "a layer's 32 bytes of a page hold no KDA head of 100 bytes; needs at least 13 tokens"),
        (dict(kda_layers=0), "kda_layers=0: must be at least 1"),
        (dict(hash_unit=0), "hash_unit=0: must be at least 1"),
        (dict(tail_bytes=-1), "tail_bytes=-1: must be at least 0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        toy(**changes)
    with pytest.raises(ValueError, match="head_shards=5 does not divide the model's 96 heads"):
        Geometry.for_model(configs.get("k3"), head_shards=5)
