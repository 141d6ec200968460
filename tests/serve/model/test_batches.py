"""What a row of a batch gets is its own: whatever the other rows are, wherever it stands, and however large the batch."""

import numpy as np
import pytest
from serving_problem import Holder, assert_close, dirty_pool, prefill, prompt

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
