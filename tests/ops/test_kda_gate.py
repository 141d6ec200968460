"""The decay gates are the published formulas, and every parameter of theirs learns.

B batch, T tokens, H heads, K key dim.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from k3jax.ops.kda import kda_gate

X = np.array([-8.0, -1.0, 0.0, 1.0, 8.0], np.float32)


@pytest.mark.quick
def test_bounded_gate_is_a_scaled_sigmoid_and_no_clamp():
    def gate(x):
        return kda_gate(x.reshape(1, 5, 1, 1), jnp.zeros(1), jnp.zeros((1, 1)), lower_bound=-5.0).reshape(5)

    np.testing.assert_allclose(gate(jnp.asarray(X)), [-0.001677, -1.344707, -2.5, -3.655293, -4.998323], atol=1e-6)
    assert (jax.grad(lambda x: gate(x).sum())(jnp.asarray(X)) < 0).all()


def test_unbounded_gate_is_kimi_linears_softplus():
    a_log, bias = np.array([0.0, 1.5], np.float32), np.array([[0.0, 1.0, -2.0]] * 2, np.float32)
    z = np.random.default_rng(0).normal(size=(2, 4, 2, 3)).astype(np.float32) * 4
    expected = -np.exp(a_log)[:, None] * np.log1p(np.exp(z.astype(np.float64) + bias))
    np.testing.assert_allclose(kda_gate(*map(jnp.asarray, (z, a_log, bias)), lower_bound=None), expected, rtol=1e-5)


def test_rate_is_per_head_and_bias_per_channel_summed_over_batch_time_and_shards():
    rng = np.random.default_rng(1)
    z, weight = (rng.normal(size=(2, 6, 3, 4)).astype(np.float32) for _ in range(2))
    a_log, bias = rng.normal(size=3).astype(np.float32), rng.normal(size=(3, 4)).astype(np.float32)
    s = 1 / (1 + np.exp(-np.exp(a_log)[:, None] * (z.astype(np.float64) + bias)))
    through = -5 * s * (1 - s) * np.exp(a_log)[:, None] * weight

    def local_grads(z, weight, a_log, bias):
        return jax.grad(lambda a, b: jnp.sum(kda_gate(z, a, b) * weight), (0, 1))(a_log, bias)

    mesh = jax.make_mesh((2,), ("context",), axis_types=(AxisType.Auto,))
    spec = P(None, "context")
    grads = jax.jit(jax.shard_map(local_grads, mesh=mesh, in_specs=(spec, spec, P(), P()), out_specs=P()))
    d_a_log, d_bias = grads(z, weight, a_log, bias)
    np.testing.assert_allclose(d_bias, through.sum((0, 1)), rtol=1e-4)
    np.testing.assert_allclose(d_a_log, (through * (z + bias)).sum((0, 1, 3)), rtol=1e-4)


def test_gate_is_float32_for_bfloat16_projections():
    g = kda_gate(jnp.zeros((1, 1, 1, 1), jnp.bfloat16), jnp.zeros(1, jnp.bfloat16), jnp.zeros((1, 1), jnp.bfloat16))
    assert g.dtype == jnp.float32


@pytest.mark.parametrize(("a_log", "bias"), [((3,), (2, 4)), ((2,), (4,)), ((1,), (2, 4))])
def test_parameters_of_other_heads_or_channels_are_refused(a_log, bias):
    with pytest.raises(ValueError, match=r"must be \(2,\) and \(2, 4\)"):
        kda_gate.__wrapped__(jnp.zeros((1, 3, 2, 4)), jnp.zeros(a_log), jnp.zeros(bias))


def test_a_bound_that_is_not_negative_is_refused():
    with pytest.raises(ValueError, match="lower_bound=5.0"):
        kda_gate(jnp.zeros((1, 1, 1, 1)), jnp.zeros(1), jnp.zeros((1, 1)), lower_bound=5.0)
