"""QK-clip on MLA: the capped logit, untouched heads bit by bit, the shared key dims, and stacked layers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from k3jax import model as lm
from k3jax.layers.common import Tokens
from k3jax.layers.mla import qk_powers
from k3jax.optim import muon, qk_clip
from k3jax.optim.clip import clip_factor

LATENT = dataclasses.replace(tiny.MODEL, num_heads=3)
DIRECT = dataclasses.replace(LATENT, q_lora_rank=None)
NO_SHARED = dataclasses.replace(LATENT, qk_rope_dim=0)
T = 11
SEGMENTS = np.repeat([0, 1], [4, T - 4])


@functools.cache
def initial(config):
    return jax.jit(lambda key: lm.init_part(config, "M", key))(jax.random.key(0))


def layer(config):
    """MLA's parameters, away from uniform attention, and inputs [B, T, D]."""
    x = 3 * jax.random.normal(jax.random.key(1), (2, T, config.hidden_size))
    return jax.tree.map(lambda a: a * 30 if a.ndim > 1 else a, initial(config)["attn"]), x


def logits(config, attn, x):
    """Scaled logits in float64, [B, H, T, S], −inf where masked, and the latent that values are made of."""
    c, x = config, np.asarray(x, np.float64)
    attn = jax.tree.map(lambda a: np.asarray(a, np.float64), attn)
    rms = lambda a, w: a / np.sqrt((a * a).mean(-1, keepdims=True) + c.latent_norm_eps) * w
    if c.q_lora_rank is None:
        q = np.einsum("btd,hdk->bhtk", x, attn["q_proj"])
    else:
        q = np.einsum("btr,hrk->bhtk", rms(x @ attn["q_down"], attn["q_norm"]["weight"]), attn["q_up"])
    latent, shared = np.split(x @ attn["kv_down"], [c.kv_lora_rank], -1)
    latent = rms(latent, attn["kv_norm"]["weight"])
    k = np.einsum("btl,hln->bhtn", latent, attn["k_up"])
    k = np.concatenate([k, np.repeat(shared[:, None], c.num_heads, 1)], -1)
    seen = np.tril(np.ones((T, T), bool)) & (SEGMENTS[:, None] == SEGMENTS)
    scores = q @ k.swapaxes(-1, -2) * (c.qk_nope_dim + c.qk_rope_dim) ** -0.5
    return np.where(seen, scores, -np.inf), latent


def largest(config, attn, x):
    return logits(config, attn, x)[0].max((0, 2, 3))


@pytest.mark.quick
@pytest.mark.parametrize("config", [LATENT, DIRECT])
def test_the_oracle_of_logits_is_the_layer(config):
    attn, x = layer(config)
    attn = jax.tree.map(lambda a: a / 10 if a.ndim > 1 else a, attn)  # where softmax is smooth
    scores, latent = logits(config, attn, x)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    o = np.einsum("bhts,bsl,hlv->bthv", weights, latent, np.asarray(attn["v_up"], np.float64)).reshape(2, T, -1)
    want = o / (1 + np.exp(-np.asarray(x @ attn["out_gate"], np.float64))) @ np.asarray(attn["out_proj"], np.float64)
    segments = jnp.broadcast_to(jnp.asarray(SEGMENTS), (2, T))
    module = lm.bind(config, "M", initial(config) | {"attn": attn}).attn
    got = jax.jit(lambda x: module(x, Tokens(segments, segments * 0))[0])(x)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.quick
@pytest.mark.parametrize(
    "config, rate",
    [(LATENT, 0.0), (LATENT, 1e-5), (DIRECT, 1e-5), (NO_SHARED, 0.0)],
    ids=["weights as they were", "after a step", "one projection of queries", "no shared dims"],
)
def test_the_next_logit_of_a_clipped_head_is_the_threshold(config, rate):
    """On the same batch, whatever part of the logit comes from keys that all heads share; other heads are untouched."""
    attn, x = layer(config)
    before = largest(config, attn, x)
    order = np.argsort(before)
    threshold = float((before[order[-1]] + before[order[-2]]) / 2)  # one head is above
    grads = jax.tree.map(jnp.cos, attn)
    plain, clipped = muon(rate), optax.chain(muon(rate), qk_clip(threshold, powers=qk_powers(config)))
    want, _ = jax.jit(plain.update)(grads, plain.init(attn), attn)
    updates, _ = jax.jit(clipped.update)(grads, clipped.init(attn), attn, max_logits=jnp.float32(before))
    unclipped, after = optax.apply_updates(attn, want), optax.apply_updates(attn, updates)

    head = order[-1]
    next_largest = largest(config, after, x)
    assert next_largest[head] <= threshold * (1 + 1e-3)
    gamma = threshold / before[head]
    np.testing.assert_allclose(next_largest[head], gamma * largest(config, unclipped, x)[head], rtol=1e-5)
    assert next_largest[head] > threshold * (1 - 1e-2)  # cut back to it, not away

    names = set(qk_powers(config))
    for name in attn.keys() - names:
        jax.tree.map(np.testing.assert_array_equal, updates[name], want[name])
    for name in names:
        np.testing.assert_array_equal(np.delete(after[name], head, 0), np.delete(unclipped[name], head, 0))
        assert (np.asarray(after[name][head]) != np.asarray(unclipped[name][head])).all()
    if rate == 0:
        q = next(iter(names - {"k_up"}))
        nope, shared = np.split(np.asarray(after[q][head] / attn[q][head], np.float64), [config.qk_nope_dim], -1)
        np.testing.assert_allclose(nope, gamma**0.5, rtol=1e-6)
        np.testing.assert_allclose(shared, gamma, rtol=1e-6)
        np.testing.assert_allclose(after["k_up"][head], gamma**0.5 * attn["k_up"][head], rtol=1e-6)


@pytest.mark.quick
def test_layers_of_a_stack_are_clipped_each_for_itself():
    """[S, V, J] in front, one array of maxima for each slot of a group; layers without maxima are not clipped."""
    shape = (2, 1, 2)
    stack = lambda seed, *dims: jax.random.normal(jax.random.key(seed), (*shape, *dims))
    attn = {"q_up": stack(0, 3, 8, 10), "k_up": stack(1, 3, 12, 6), "v_up": stack(2, 3, 12, 10)}
    params = {"chunks": {"0": {"attn": {"q_proj": stack(3, 3, 8, 8)}}, "1": {"attn": attn}}}
    maxima = jnp.asarray(np.random.default_rng(0).uniform(-50, 150, (*shape, 3)), jnp.float32)
    clip = qk_clip(powers=qk_powers(LATENT))
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(clip.update)(zeros, clip.init(params), params, max_logits={"chunks": {"1": {"attn": maxima}}})
    after = optax.apply_updates(params, updates)
    gamma = 100 / np.maximum(np.asarray(maxima, np.float64), 100)
    assert 0 < (gamma < 1).sum() < gamma.size
    q = np.asarray(after["chunks"]["1"]["attn"]["q_up"], np.float64) / attn["q_up"]
    np.testing.assert_allclose(q[..., 0, 0], gamma**0.5, rtol=1e-5)
    np.testing.assert_allclose(q[..., 0, -1], gamma, rtol=1e-5)
    assert not np.asarray(updates["chunks"]["0"]["attn"]["q_proj"]).any()
    assert not np.asarray(updates["chunks"]["1"]["attn"]["v_up"]).any()
    alone = {"q_up": attn["q_up"][1, 0, 1], "k_up": attn["k_up"][1, 0, 1]}  # and maxima at the weights themselves
    zeros = jax.tree.map(jnp.zeros_like, alone)
    one, _ = clip.update(zeros, clip.init(alone), alone, max_logits={name: maxima[1, 0, 1] for name in alone})
    for name, update in one.items():
        np.testing.assert_allclose(update, updates["chunks"]["1"]["attn"][name][1, 0, 1], rtol=0, atol=1e-7)


@pytest.mark.quick
def test_logits_up_to_the_threshold_change_nothing():
    """Also those of an empty slot, which saw no pair at all."""
    maxima = jnp.array([100.0, 0.0, -3.0, -jnp.inf])
    np.testing.assert_array_equal(clip_factor(maxima, 100.0, 0.5), np.ones((4, 1, 1)))
    np.testing.assert_allclose(clip_factor(jnp.array([400.0]), 100.0, 0.5), 0.5)
    np.testing.assert_array_equal(clip_factor(jnp.array([*maxima, jnp.inf]), jnp.inf, 0.5), np.ones((5, 1, 1)))


@pytest.mark.quick
@pytest.mark.parametrize("threshold", [0.0, -1.0, float("nan")])
def test_a_threshold_that_would_turn_weights_to_nan_or_clip_nothing_is_refused(threshold):
    with pytest.raises(ValueError, match=f"threshold={threshold}: must be above 0"):
        qk_clip(threshold, powers=qk_powers(LATENT))


@pytest.mark.quick
def test_maxima_that_fit_no_weight_are_refused():
    params = {"attn": {"q_up": jnp.ones((3, 8, 10)), "k_up": jnp.ones((3, 12, 6))}, "moe": {"up": jnp.ones((3, 3))}}
    clip = qk_clip(powers=qk_powers(LATENT))
    update = lambda **given: clip.update(params, clip.init(params), **({"params": params} | given))
    with pytest.raises(ValueError, match=r"attn.k_up is \(3, 12, 6\): its max_logits must be \(3,\).* are \(2,\)"):
        update(max_logits={"attn": jnp.zeros(2)})
    with pytest.raises(ValueError, match="max_logits at moe clip nothing: there is no weight named q_up or k_up"):
        update(max_logits={"attn": jnp.zeros(3), "moe": jnp.zeros(3)})
    for given in ({"max_logits": {"attn": jnp.zeros(3)}, "params": None}, {}):
        with pytest.raises(ValueError, match="call update.updates, state, params, max_logits"):
            update(**given)
