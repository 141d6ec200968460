"""What a row of a batch gets is its own: whatever the other rows are, wherever it stands, and however large the batch."""

import dataclasses

import numpy as np
import pytest
from serving_problem import (
    BUCKETS,
    CONFIG,
    NOT_A_NUMBER,
    Holder,
    T,
    assert_close,
    dirty_pool,
    prefill,
    prompt,
    serving,
    training_logits,
)

from k3jax.serve.model import Sampler

LENGTHS = (5, 33, 40, 64)
SAMPLERS = [
    Sampler(),
    Sampler(temperature=0.7, seed=3, request=1),
    Sampler(temperature=1.3, top_p=0.8, seed=3, request=2),
    Sampler(temperature=1.0, top_p=0.5, seed=2**40, request=2**63),
]


@pytest.fixture(scope="module")
def started(model):
    """Four prompts, prefilled in one pool."""
    holder, pool = Holder(), dirty_pool(model)
    tokens, held = [prompt(n, seed=n) for n in LENGTHS], [holder.sequence(n + 8) for n in LENGTHS]
    for h, row in zip(held, tokens, strict=True):
        _, pool = prefill(model, pool, h, row)
    next_tokens = prompt(4, seed=9)
    tokens = [np.append(row, token) for row, token in zip(tokens, next_tokens, strict=True)]
    return held, tokens, pool


def rows_of(held, tokens, which):
    return [held[i].row(tokens[i], LENGTHS[i], LENGTHS[i] + 1) for i in which]


def decoded(model, started, which, change=lambda tokens: tokens):
    held, tokens, pool = started
    step, pool = model.decode(pool + 0, rows_of(held, change(tokens), which))
    return np.asarray(step.logits)[step.at], np.asarray(pool)


def test_other_rows_change_no_bit_of_a_row(model, started):
    """Also when their tokens are all routed elsewhere, and when there are none."""
    held, _, _ = started
    whole, pool = decoded(model, started, [0, 1, 2, 3])
    others = lambda tokens: [tokens[0], *((row + 7) % 32 for row in tokens[1:])]
    changed, other_pool = decoded(model, started, [0, 1, 2, 3], others)
    np.testing.assert_array_equal(changed[0], whole[0])
    np.testing.assert_array_equal(pool[:, held[0].all], other_pool[:, held[0].all])
    assert np.abs(changed[1:] - whole[1:]).max() > 0.1
    two, _ = decoded(model, started, [0, 1])
    np.testing.assert_array_equal(two, whole[:2])


def test_order_and_size_of_a_batch_change_nothing_but_rounding(model, started):
    whole, _ = decoded(model, started, [0, 1, 2, 3])
    order = [2, 0, 3, 1]
    assert_close(decoded(model, started, order)[0], whole[order], 1e-6)
    for i in range(4):
        assert_close(decoded(model, started, [i])[0][0], whole[i], 1e-6)


def test_a_row_gets_the_same_tokens_alone_and_in_any_batch(model, started):
    held, tokens, first = started

    def run(which, steps=4):
        pool, rows, made = first + 0, {i: list(tokens[i]) for i in which}, {i: [] for i in which}
        for n in range(steps):
            at = [LENGTHS[i] + n for i in which]
            each = [held[i].row(np.array(rows[i]), a, a + 1) for i, a in zip(which, at, strict=True)]
            step, pool = model.decode(pool, each)
            chosen, logp = model.choose(step, [SAMPLERS[i] for i in which], [a + 1 for a in at])
            assert (logp <= 0).all()
            for i, token in zip(which, chosen.tolist(), strict=True):
                rows[i].append(token)
                made[i].append(token)
        return made

    together = run([0, 1, 2, 3])
    assert run([3, 1, 0, 2]) == together
    for i in range(4):
        assert run([i]) == {i: together[i]}


def test_requests_come_and_go_and_nothing_of_one_reaches_another(model, weights):
    """Random prompts and lengths, in pages that others had before and that hold no numbers when they are handed out."""
    random = np.random.default_rng(0)
    holder, pool = Holder(), dirty_pool(model)
    tokens = random.integers(0, CONFIG.vocab_size, (12, T)).astype(np.int32)
    want = np.concatenate([training_logits(CONFIG, weights, pair) for pair in np.split(tokens, 6)])
    waiting, running, decoded = list(range(12)), {}, 0
    while waiting or running:
        if waiting and len(running) < 4 and (not running or random.random() < 0.3):
            i, length = waiting.pop(), int(random.integers(1, 90))
            held = holder.sequence()
            pool = pool.at[:, np.array(held.all)].set(NOT_A_NUMBER)
            logits, pool = prefill(model, pool, held, tokens[i, :length])
            assert_close(np.concatenate(logits), want[i, :length], 1e-5)
            running[i] = held, length, length + int(random.integers(1, 10))
        else:
            order = random.permutation(list(running)).tolist()
            rows = [running[i][0].row(tokens[i], running[i][1], running[i][1] + 1) for i in order]
            step, pool = model.decode(pool, rows)
            for row, i in enumerate(order):
                held, at, end = running.pop(i)
                assert_close(step.logits[step.at[row]], want[i, at], 1e-5)
                decoded += 1
                if at + 1 < end:
                    running[i] = held, at + 1, end
                else:
                    holder.free = held.all + holder.free
                    random.shuffle(holder.free)
    assert decoded > 40


@pytest.mark.slow
def test_prompts_in_one_batch_are_each_as_if_alone(model, weights):
    """At other blocks of theirs, of other lengths; also of one row less than there is room for."""
    together = serving(weights, buckets=dataclasses.replace(BUCKETS, prefill=3))
    holder, pool, alone_pool = Holder(), dirty_pool(together), dirty_pool(model)
    tokens, held = [prompt(n, seed=n) for n in (64, 40)], [holder.sequence(64) for _ in range(2)]
    _, pool = together.prefill(pool, [held[0].row(tokens[0], 0, 32)])
    step, pool = together.prefill(pool, [held[1].row(tokens[1], 0, 32), held[0].row(tokens[0], 32, 64)])
    wants = []
    for h, row in zip(held, tokens, strict=True):
        logits, alone_pool = prefill(model, alone_pool, h, row)
        wants.append(logits)
    assert_close(np.asarray(step.logits)[step.at], np.stack([wants[1][0][-1], wants[0][1][-1]]), 1e-6)
    with pytest.raises(ValueError, match="rank 0 has its 1 rows already"):
        model.prefill(dirty_pool(model), [held[0].row(tokens[0], 0, 32), held[1].row(tokens[1], 0, 32)])
    with pytest.raises(ValueError, match="start=16 is no multiple of the block of 32 tokens"):
        model.prefill(dirty_pool(model), [held[0].row(tokens[0], 16, 32)])
