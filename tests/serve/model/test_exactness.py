"""Prefill and decode compute what the training forward computes, wherever prompts are cut and whatever pages held before."""

import numpy as np
import pytest
from serving_problem import (
    BLOCK,
    CONFIG,
    Holder,
    T,
    assert_close,
    dirty_pool,
    prefill,
    prompt,
    training_logits,
)

# float32 in another order of sums: chunks against single tokens, pages against whole rows, depth in two phases.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def taught(weights):
    """Two sequences, and the training forward's logits at every position."""
    tokens = np.stack([prompt(T), prompt(T, seed=1)])
    return tokens, np.asarray(training_logits(CONFIG, weights, tokens))


def test_decoding_from_nothing_equals_the_training_forward_at_every_position(model, taught):
    tokens, want = taught
    holder, pool = Holder(), dirty_pool(model)
    held = [holder.sequence(), holder.sequence()]
    for at in range(70):
        step, pool = model.decode(pool, [h.row(row, at, at + 1) for h, row in zip(held, tokens, strict=True)])
        assert_close(step.logits[step.at], want[:, at], TOLERANCE)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 65, 97])
def test_prefill_in_blocks_and_then_decoding_equals_the_training_forward(model, taught, length):
    tokens, want = taught[0][0], taught[1][0]
    held, pool = Holder(seed=length).sequence(), dirty_pool(model)
    logits, pool = prefill(model, pool, held, tokens[:length], every_logit=True)
    got = np.concatenate(logits)
    for at in range(0, length, BLOCK):
        end = min(at + BLOCK, length)
        assert_close(got[at:end], want[at:end], TOLERANCE)
    for at in range(length, min(length + 3, T)):
        step, pool = model.decode(pool, [held.row(tokens, at, at + 1)])
        assert_close(step.logits[step.at[0]], want[at], TOLERANCE)
