"""MLA's two forms agree, both attentions are causal and keep documents apart, and Kimi Linear's variants train."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from k3jax import model as lm
from k3jax.layers.common import Tokens


def attention_layer(config, kind, x, segments, **kwargs):
    params = lm.init_part(config, kind, jax.random.key(0))
    params["attn"] = jax.tree.map(lambda a: a * 4, params["attn"])  # away from uniform attention
    return lm.bind(config, kind, params).attn(x, Tokens(segments, segments * 0), **kwargs)[0]


@pytest.mark.quick
@pytest.mark.parametrize("rope", [4, 0])
def test_absorbed_mla_equals_the_expanded_form_at_every_position(rope):
    """Both scale by 1/sqrt(nope + rope), whatever width the absorbed keys have; one key alone is blind to scale."""
    config = dataclasses.replace(
        tiny.MODEL, num_heads=2, qk_nope_dim=8, qk_rope_dim=rope, kv_lora_rank=16, v_head_dim=8, init_range=0.3
    )
    x = jax.random.normal(jax.random.key(1), (2, 7, config.hidden_size))
    segments = jnp.zeros((2, 7), jnp.int32)
    expanded = jax.jit(lambda x: attention_layer(config, "M", x, segments))(x)
    absorbed = jax.jit(lambda x: attention_layer(config, "M", x, segments, absorbed=True))(x)
    np.testing.assert_allclose(absorbed[:, 1:], expanded[:, 1:], atol=2e-5 * float(jnp.abs(expanded).max()))
    assert float(jnp.abs(expanded[:, 1:] - expanded[:, :1]).max()) > 1e-3  # positions differ


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["K", "M"])
def test_attention_sees_no_future_and_no_other_document(kind):
    config = tiny.MODEL
    x = jax.random.normal(jax.random.key(2), (1, 20, config.hidden_size))
    segments = jnp.asarray((np.arange(20) >= 9).astype(np.int32) + (np.arange(20) >= 10))[None]
    run = jax.jit(lambda x, s: attention_layer(config, kind, x, s))
    out = run(x, segments)
    later = run(x.at[:, 14:].set(5.0), segments)
    np.testing.assert_array_equal(later[:, :14], out[:, :14])
    assert np.abs(later[:, 14:] - out[:, 14:]).max() > 1e-3
    other = run(x.at[:, :10].set(3.0), segments)
    np.testing.assert_allclose(other[:, 10:], out[:, 10:], atol=1e-6)  # other sums of the same chunk, rounded
    alone = run(x[:, 10:], jnp.zeros((1, 10), jnp.int32))
    np.testing.assert_allclose(alone, out[:, 10:], atol=1e-5 * float(jnp.abs(out).max()))


@pytest.mark.quick
def test_gate_of_kimi_linear_and_low_rank_output_gate_act():
    """Both variants run through the same module, and each of their parameters receives a gradient."""
    config = dataclasses.replace(tiny.MODEL, gate_lower_bound=None, output_gate_rank=4, kda_value_dim=8)
    params = lm.init_part(config, "K", jax.random.key(3))["attn"]
    x = jax.random.normal(jax.random.key(4), (1, 9, config.hidden_size))
    segments = jnp.zeros((1, 9), jnp.int32)

    def loss(attn):
        layer = lm.bind(config, "K", lm.init_part(config, "K", jax.random.key(3)) | {"attn": attn})
        return (layer.attn(x, Tokens(segments, segments))[0] ** 2).sum()

    grads = jax.jit(jax.grad(loss))(params)
    assert {"out_gate_down", "out_gate_up"} <= grads.keys() and "out_gate" not in grads
    assert float(jnp.exp(params["a_log"]).min()) >= 1.0  # log U(1, 16), not zeros
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert np.isfinite(grad).all() and np.asarray(grad).any(), path
