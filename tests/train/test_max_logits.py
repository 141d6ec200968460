"""The largest attention logits that a step reports are those of the whole batch, whatever mesh and schedule split it."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_step import equations

from k3jax import model as lm
from k3jax.layers.common import Axes, Tokens
from k3jax.parallel.layout import StackLayout

# K M K M M: on two stages, a slot of each kind is inactive. Three heads, a number that no other dim has.
MODEL = dataclasses.replace(
    tiny.MODEL, num_layers=5, num_heads=3, attn_res_block=None, dense_layers=0, num_experts=4, experts_per_token=1
)
STEP = dataclasses.replace(tiny.STEP, model=MODEL, seq_len=16, global_batch=12, microbatches=3)
LOUD = 31  # a token whose keys are far larger than others'
LOUDEST = 1  # the microbatch with a loud token that later ones of its document see


@jax.jit
def loud(params):
    """Weights away from uniform attention; dim 0 is the loud token's alone, and makes large key dims that heads share."""
    attn = jax.tree.map(lambda a: a * 4, params["chunks"]["1"]["attn"])
    attn["kv_down"] = attn["kv_down"].at[..., 0, MODEL.kv_lora_rank :].mul(40)
    table = params["embed"]["table"].at[:, 0].set(0).at[LOUD, 0].set(30)
    chunks = params["chunks"] | {"1": params["chunks"]["1"] | {"attn": attn}}
    return params | {"chunks": chunks, "embed": {"table": table}}


def batch():
    """Documents and padding of `tiny.batch`; in one microbatch a loud token in the middle of a document, two at an end."""
    b = tiny.batch(STEP)
    tokens = np.where(b.tokens == LOUD, 0, b.tokens)
    tokens[4, 9] = LOUD
    tokens[[5, 7], 7] = LOUD
    return b._replace(tokens=tokens)


@functools.cache
def expected():
    """{layer: logits of every sequence, [N, H, T, T]} in float64, unsharded, from what enters each MLA layer; no mask."""
    layout, b = StackLayout(MODEL), jax.tree.map(jnp.asarray, batch())
    entered = {}

    @jax.jit
    def run(params, bias):
        stream = lm.embed(params["embed"], b.tokens, num_blocks=0, axes=Axes(), dtype=jnp.float32)
        for layer, kind in enumerate(MODEL.layer_kinds):
            s, v, j, p = layout.position(layer)
            at = lambda tree, where=(s, v, j): jax.tree.map(lambda a: a[where], tree)
            whole = lm.bind(MODEL, kind, at(params["chunks"][str(p)]))

            def attn(x, tokens, layer=layer, attn=whole.attn):
                entered[layer] = x
                return attn(x, tokens)

            parts = types.SimpleNamespace(attn=attn, attn_norm=whole.attn_norm, ffn_norm=whole.ffn_norm, moe=whole.moe)
            flags = layout.flags(p, {name: jnp.asarray(table[s, v, j]) for name, table in layout.flag_tables.items()})
            bias_E = at(bias["chunks"][str(p)])
            stream, *_ = lm.run_layer(MODEL, parts, {}, stream, bias_E, flags, Tokens(b.segment_ids, b.tokens))
        return dict(entered)

    params = jax.jit(lambda: loud(lm.init(MODEL, layout, STEP.seed)))()
    inputs = run(params, lm.init_balance(MODEL, layout))
    weights = params["chunks"]["1"]["attn"]
    found = {}
    for layer, x in inputs.items():
        if MODEL.layer_kinds[layer] == "M":
            where = layout.position(layer)[:3]
            w = jax.tree.map(lambda a, where=where: np.asarray(a[where], np.float64), weights)
            found[layer] = logits(w, np.asarray(x, np.float64))
    return found


def logits(w, x):
    normed = lambda a, norm: a / np.sqrt((a * a).mean(-1, keepdims=True) + MODEL.latent_norm_eps) * norm["weight"]
    q = np.einsum("ntr,hrk->nhtk", normed(x @ w["q_down"], w["q_norm"]), w["q_up"])
    latent, shared = np.split(x @ w["kv_down"], [MODEL.kv_lora_rank], -1)
    own = np.einsum("nsl,hlk->nhsk", normed(latent, w["kv_norm"]), w["k_up"])
    k = np.concatenate([own, np.broadcast_to(shared[:, None], (*own.shape[:3], shared.shape[-1]))], -1)
    return np.einsum("nhtk,nhsk->nhts", q, k) / np.sqrt(k.shape[-1])


def visible():
    """[N, 1, T, T]: causal, the same document, no padding on either side."""
    b, T = batch(), STEP.seq_len
    real = b.tokens >= 0
    same = b.segment_ids[:, :, None] == b.segment_ids[:, None]
    return (np.tril(np.ones((T, T), bool)) & same & real[:, :, None] & real[:, None])[:, None]


def test_the_problem_tells_masks_and_microbatches_apart():
    for found in expected().values():
        seen = np.where(visible(), found, -np.inf).reshape(STEP.microbatches, -1, *found.shape[1:]).max((1, 3, 4))
        assert (seen.max(0) > 1.01 * np.sort(seen, 0)[-2]).all(), "one microbatch alone has a head's largest"
        assert seen.max(1).argmax() == LOUDEST
        assert (found.max((0, 2, 3)) > 1.1 * seen.max(0)).any(), "what masks hide is larger"


MESHES = [
    pytest.param("data=2,pipe=2,expert=2", dict(schedule="zb1p"), marks=pytest.mark.slow),
    ("data=2,pipe=2,context=2", dict(virtual=2, activations="*=recompute")),
    pytest.param("pipe=2", dict(virtual=2), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("mesh", "how"), MESHES)
def test_largest_logits_are_those_of_the_whole_batch(mesh, how):
    step = tiny.train_step(mesh, STEP, **how)
    state = step.init()
    out = step.gradients(loud(state.params), state.balance, step.place(batch()))
    assert int(out.misplaced) == 0 and out.max_logits.keys() == {"1"}, "layers of KDA report nothing"
    got = np.asarray(out.max_logits["1"])
    assert got.shape == (*step.layout.layer_table.shape[:3], MODEL.num_heads)
    for layer, found in expected().items():
        want = np.where(visible(), found, -np.inf).max((0, 2, 3))
        # float32 activations through some layers
        np.testing.assert_allclose(got[step.layout.position(layer)[:3]], want, rtol=2e-5, err_msg=str(layer))
    inactive = step.layout.layer_table[..., 1] < 0
    assert inactive.any() == (mesh != "data=1") and (got[inactive] == -np.inf).all()


@pytest.mark.quick
def test_recomputation_does_not_look_for_the_largest_again():
    """Backward makes the logits again, and softmax's own maxima, but not what only the report needs."""
    layout = StackLayout(MODEL)
    params, bias = jax.eval_shape(lambda: (lm.init(MODEL, layout, 0), lm.init_balance(MODEL, layout)))
    loss = lambda params, bias, batch: lm.plain_loss(MODEL, params, bias, batch)
    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, has_aux=True))(params, bias, tiny.batch(STEP)).jaxpr
    maxima = [e.outvars[0].aval.shape for e in equations(jaxpr) if e.primitive.name == "reduce_max"]
    N, T, H = STEP.global_batch, STEP.seq_len, MODEL.num_heads
    assert maxima.count((H,)) == 1
    assert maxima.count((N, H, T)) == 3, "softmax's in forward and backward, and the report's, which XLA makes one"
