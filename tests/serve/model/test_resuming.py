"""A prompt that goes on from saved pages, in other pages, has the very bits of one that began from nothing."""

import dataclasses

import numpy as np
import pytest
from serving_problem import (
    BLOCK,
    NOT_A_NUMBER,
    PAGES,
    POOL,
    Holder,
    assert_close,
    block,
    dirty_pool,
    prefill,
    prompt,
)


def contents(pool, held, tokens: int):
    """Words of a sequence: latents of its first tokens, and its states."""
    pool = np.asarray(pool)
    latents = pool[:, held.latents].reshape(len(pool), -1, PAGES.latent_words)[:, :tokens]
    used = PAGES.heads_per_page * PAGES.head_words
    states = pool[:3, [page for group in held.states for page in group], :used]  # three layers of KDA
    return latents, states


@pytest.mark.parametrize("length", [33, 64, 65, 97])
def test_a_prompt_split_at_any_block_goes_on_with_the_same_bits(model, length):
    """Its pages are copied elsewhere, as a prefix cache does, into a pool that held no numbers."""
    tokens, holder = prompt(length), Holder(seed=length)
    whole = holder.sequence(length)
    cold, pool = prefill(model, dirty_pool(model), whole, tokens)
    want = contents(pool, whole, length)
    assert np.isfinite(want[0].view(np.float32)).all() and np.isfinite(want[1].view(np.float32)).all()
    for boundary in range(BLOCK, length, BLOCK):
        first, moved = (holder.sequence(length) for _ in range(2))
        _, part = prefill(model, dirty_pool(model), first, tokens, end=boundary)
        part = model.copy(part, [list(zip(first.all, moved.all, strict=True))])
        part = part.at[:, np.array(first.all)].set(NOT_A_NUMBER)
        warm, part = prefill(model, part, moved, tokens, start=boundary)
        for got, expected in zip(warm, cold[boundary // BLOCK :], strict=True):
            np.testing.assert_array_equal(got, expected)
        for got, expected in zip(contents(part, moved, length), want, strict=True):
            np.testing.assert_array_equal(got, expected)
        holder.free += first.all + moved.all


@pytest.mark.parametrize("k", [0, 1, 2])
def test_one_token_after_whole_chunks_is_the_same_cold_warm_and_decoded(model, k):
    """Lengths of 64k + 1: the last block holds one token; at k = 0 the state starts from zeros, though its page does not."""
    tokens, holder = prompt(64 * k + 1, seed=k), Holder(seed=k)
    cold_held, warm_held = holder.sequence(len(tokens)), holder.sequence(len(tokens))
    cold, cold_pool = prefill(model, dirty_pool(model), cold_held, tokens)
    _, pool = prefill(model, dirty_pool(model), warm_held, tokens, end=64 * k)
    warm, warm_pool = block(model, pool + 0, warm_held, tokens, 64 * k, len(tokens))
    np.testing.assert_array_equal(warm, cold[-1])
    warm_contents, cold_contents = (
        contents(*of, len(tokens)) for of in ((warm_pool, warm_held), (cold_pool, cold_held))
    )
    for got, want in zip(warm_contents, cold_contents, strict=True):
        np.testing.assert_array_equal(got, want)
    step, pool = model.decode(pool, [warm_held.row(tokens, 64 * k, len(tokens))])
    assert_close(step.logits[step.at[0]], cold[-1][0], 1e-5)  # the recurrence, instead of a chunk
    assert_close(contents(pool, warm_held, 1)[1].view(np.float32), cold_contents[1].view(np.float32), 1e-5)
    assert np.argmax(step.logits[step.at[0]]) == np.argmax(cold[-1][0])


def test_a_block_ending_early_leaves_the_state_of_its_tokens(model):
    """Cut after every number of tokens: the state is that of decoding them one by one; behind them nothing is written."""
    tokens, holder = prompt(BLOCK), Holder()
    held = holder.sequence(BLOCK)
    pool = dirty_pool(model)
    for n in range(1, BLOCK + 1):
        step, pool = model.decode(pool, [held.row(tokens, n - 1, n)])
        if n % 5 == 1 or n == BLOCK:
            cut = holder.sequence(BLOCK)
            logits, whole = block(model, dirty_pool(model), cut, tokens, 0, n)
            assert_close(logits[-1], step.logits[step.at[0]], 1e-5)
            for got, want in zip(contents(whole, cut, n), contents(pool, held, n), strict=True):
                assert_close(got.view(np.float32), want.view(np.float32), 1e-5)
            assert (contents(whole, cut, BLOCK)[0][:, n:] == NOT_A_NUMBER).all()
            holder.free += cut.all


def test_tokens_that_run_again_for_the_state_write_no_latents(model):
    """They read those of a shared page, and neither they nor padding rows touch pages that are not theirs."""
    tokens, holder = prompt(64), Holder()
    held = holder.sequence(64)
    cold, pool = prefill(model, dirty_pool(model), held, tokens)
    before = np.asarray(pool)
    states = [holder.take(PAGES.pages_per_state) for _ in range(PAGES.groups)]
    pool = model.copy(pool, [[(-1, page) for page in states[0]]])
    zeroed = np.asarray(pool)
    assert (zeroed[:, states[0]] == 0).all()
    shared = dataclasses.replace(held, states=states)
    for at in (0, BLOCK):
        logits, pool = block(model, pool, shared, tokens, at, at + BLOCK, writes=64)
    np.testing.assert_array_equal(logits, cold[-1])
    after, others = np.asarray(pool), [page for page in range(POOL) if page not in states[0]]
    np.testing.assert_array_equal(after[:, others], before[:, others])
    np.testing.assert_array_equal(contents(pool, shared, 64)[1], contents(before, held, 64)[1])
    # What they would write has the same bits as what is there: with others there, it shows who wrote.
    marked = pool.at[:, np.array(held.latents)].set(pool[:, np.array(held.latents)] ^ 1)
    _, pool = block(model, marked + 0, shared, tokens, 0, BLOCK, writes=BLOCK)
    np.testing.assert_array_equal(pool[:, np.array(held.latents)], marked[:, np.array(held.latents)])
