"""Prefill and decode compute what the training forward computes, wherever prompts are cut and whatever pages held before."""

import dataclasses

import jax
import jax.numpy as jnp
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
    serving,
    training_logits,
)
from serving_problem import weights as make_weights

from k3jax import model as lm
from k3jax.serve.model import PageLayout, Weights, blocks

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
    logits, pool = prefill(model, pool, held, tokens[:length])
    for at, got in zip(range(length), np.concatenate(logits), strict=True):
        assert_close(got, want[at], TOLERANCE)
    for at in range(length, min(length + 3, T)):
        step, pool = model.decode(pool, [held.row(tokens, at, at + 1)])
        assert_close(step.logits[step.at[0]], want[at], TOLERANCE)


def run_both(config, how, dtype, tolerance, length=40, decoded=5):
    """Prefill in blocks and decode, against the training forward in the same dtype."""
    given = jax.tree.map(jnp.asarray, cast(config, make_weights(config), dtype))
    layout = PageLayout(config, tokens=32, dtype=dtype)
    served = serving(given, pages=layout, **how)
    tokens = prompt(length + decoded)
    want = np.asarray(training_logits(config, given, tokens[None], dtype), np.float64)[0]
    held, pool = Holder(layout=layout).sequence(), dirty_pool(served)
    for first, last in blocks(0, length, BLOCK):
        step, pool = served.prefill(pool, [held.row(tokens, first, last)])
        assert_close(step.logits[step.at[0]], want[last - 1], tolerance)
    for at in range(length, length + decoded):
        step, pool = served.decode(pool, [held.row(tokens, at, at + 1)])
        assert_close(step.logits[step.at[0]], want[at], tolerance)


def cast(config, given, dtype):
    return Weights(lm.cast_for_compute(config, given.params, dtype), given.bias)


@pytest.mark.slow
def test_in_double_precision_all_that_differs_is_the_order_of_sums(double_precision):
    run_both(CONFIG, {}, "float64", 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["kimi linear", "three K to one M"])
def test_other_models_are_served_as_exactly(variant):
    """Without attention residuals, query latent, output gate of MLA and latent of experts; and other patterns."""
    kimi = dict(gate_lower_bound=None, output_gate_rank=5, q_lora_rank=None, mla_output_gate=False, activation="swiglu")
    kimi |= dict(attn_res_block=None, latent_size=None, dense_layers=2)
    changes = kimi if variant == "kimi linear" else dict(pattern="KKKM", num_layers=9, attn_res_block=4)
    run_both(dataclasses.replace(CONFIG, **changes), {}, "float32", TOLERANCE)


@pytest.mark.slow
def test_in_bfloat16_it_stays_as_near_as_that_allows():
    """A few roundings of 2^-8 in other places, through seven layers."""
    run_both(CONFIG, {}, "bfloat16", 0.1)
