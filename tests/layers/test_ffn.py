"""Routing, quantile balancing and the mixture: exact against dense references, blind to padding, safe when empty."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax import lax
from jax.sharding import PartitionSpec as P

from k3jax import model as lm
from k3jax.activations.policy import ActivationPolicy
from k3jax.layers.common import Tokens
from k3jax.ops.glu import gated_activation
from k3jax.parallel import routing
from k3jax.parallel.experts import run_experts
from k3jax.sharding import reduce_gradients
from meshes import MeshSpec

N, L, F, E, K = 12, 5, 7, 8, 3

# Compiled whole: operation by operation they would take far longer.
route = jax.jit(routing.route, static_argnames=("k", "scaling"))
histogram = jax.jit(routing.histogram, static_argnames="bins")
balanced_bias = jax.jit(routing.balanced_bias, static_argnames="k")


def problem(seed=0):
    keys = jax.random.split(jax.random.key(seed), 6)
    draw = lambda i, *shape: jax.random.normal(keys[i], shape)
    kernels = draw(1, E, L, F), draw(2, E, L, F), draw(3, E, F, L)
    experts = jnp.argsort(draw(4, N, E))[:, :K]
    return draw(0, N, L), experts, jax.nn.softmax(draw(5, N, K)), kernels


@pytest.mark.quick
def test_empty_experts_and_unused_rows_never_matter():
    """Groups [3, 0, 2, 0]; the tokens behind the unused rows are nan."""
    z = jnp.concatenate([jnp.ones((5, L)), jnp.full((3, L), jnp.nan)])
    experts = jnp.array([0, 0, 0, 2, 2, -1, -1, -1])[:, None]
    weights = jnp.ones((8, 1))
    kernels = tuple(k[:4] for k in problem()[3])

    def run(z, kernels):
        out, rows = run_experts(z, experts, weights, kernels, betas=(None, None), num_experts=4, axis_name=None)
        return jnp.where(experts >= 0, out, 0).sum(), rows.computed

    (value, rows), (dz, dk) = jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))(z, kernels)
    assert rows == 5 and np.isfinite(value) and np.isfinite(dz).all()
    assert all(np.isfinite(g).all() and not np.asarray(g[jnp.array([1, 3])]).any() for g in dk)
    assert all(np.asarray(g[0]).any() for g in dk)


@pytest.mark.quick
def test_router_scores_stay_in_float32():
    """Rounded to bfloat16 both logits are 1.0 and the lower index would win."""
    logits = jnp.array([[1.0, 1.003, 0.5, 0.2]])
    x = jnp.ones((1, 1), jnp.bfloat16)
    routes = route(x, logits, jnp.zeros(4), jnp.array([True]), k=1, scaling=1.0)
    assert routes.experts_Nk.tolist() == [[1]] and routes.weights_Nk.dtype == jnp.float32


@pytest.mark.quick
def test_bias_selects_but_does_not_weigh():
    logits = jnp.array([[2.0, 1.0, 0.0, -1.0]])
    bias = jnp.array([0.0, 0.0, 0.0, 5.0])
    routes = route(jnp.ones((1, 1)), logits, bias, jnp.array([True]), k=2, scaling=2.446)
    assert routes.experts_Nk.tolist() == [[3, 0]]
    scores = jax.nn.sigmoid(logits[0, jnp.array([3, 0])])
    np.testing.assert_allclose(routes.weights_Nk[0], 2.446 * scores / scores.sum(), rtol=1e-6)


@pytest.mark.quick
def test_ties_go_to_the_lower_index_also_when_recomputed():
    """With all logits equal the choice is arbitrary; backward must use the one that forward made."""
    step = {policy: tiny_moe_gradient(policy) for policy in ("keep", "recompute")}
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), step["keep"], step["recompute"])


def tiny_moe_gradient(policy):
    config = tiny.MODEL
    params = jax.jit(lambda: lm.init_part(config, "M", jax.random.key(0)))()["moe"]
    params["router"] = jnp.zeros_like(params["router"])
    x = jax.random.normal(jax.random.key(1), (2, 6, config.hidden_size))
    tokens = Tokens(jnp.zeros((2, 6), jnp.int32), jnp.zeros((2, 6), jnp.int32))

    def moe(params, x):
        return lm.bind(config, "M", params, inside="moe")(x, jnp.zeros(config.num_experts), tokens)

    names = ("moe.experts", "moe.dispatch_in", "moe.combined", "shared.gate", "shared.up")
    wrapped = ActivationPolicy.parse(f"*={policy}").checkpoint(moe, names)
    grads, stats = jax.jit(jax.grad(lambda p, x: (lambda y, s: (y.sum(), s))(*wrapped(p, x)), (0, 1), has_aux=True))(
        params, x
    )
    load = np.asarray(stats.histogram_EN.sum(-1))
    assert (load == 12).all() and int(stats.load.computed) == 24
    for name in ("expert_gate", "expert_up", "expert_down"):
        used = np.asarray(jnp.abs(grads[0][name]).sum((1, 2)) > 0)
        assert used.tolist() == [True, True] + [False] * (config.num_experts - 2)
    return grads


@pytest.mark.quick
@pytest.mark.parametrize("pads", [0, 8, 24])
def test_padding_is_neither_routed_nor_counted(pads):
    config = tiny.MODEL
    x = jax.random.normal(jax.random.key(2), (8, 16))
    x = jnp.concatenate([x, jnp.full((pads, 16), 7.0)])
    real = jnp.arange(8 + pads) < 8
    router = jax.random.normal(jax.random.key(3), (16, config.num_experts))
    bias = jnp.zeros(config.num_experts)
    routes = route(x, router, bias, real, k=2, scaling=1.0)
    counts = histogram(routes, bias, real, bins=100)
    alone = route(x[:8], router, bias, real[:8], k=2, scaling=1.0)
    counts_alone = histogram(alone, bias, real[:8], bins=100)
    assert (counts == counts_alone).all()
    assert (routes.experts_Nk[8:] == -1).all() and not routes.weights_Nk[8:].any()
    np.testing.assert_array_equal(balanced_bias(counts, bias, k=2), balanced_bias(counts_alone, bias, k=2))
    np.testing.assert_array_equal(routes.experts_Nk[:8], alone.experts_Nk)


@pytest.mark.quick
@pytest.mark.parametrize(("tokens", "experts", "k"), [(4096, 8, 2), (1000, 16, 3), (37, 8, 1)])
def test_balanced_bias_is_the_quantile_within_one_bin(tokens, experts, k):
    scores = jax.nn.sigmoid(jax.random.normal(jax.random.key(4), (tokens, experts)) + jnp.linspace(-1, 2, experts))
    bias = jnp.linspace(-0.1, 0.2, experts)
    routes = route(jnp.log(scores / (1 - scores)), jnp.eye(experts), bias, jnp.ones(tokens, bool), k=k, scaling=1.0)
    counts = histogram(routes, bias, jnp.ones(tokens, bool), bins=1000)
    assert (counts.sum(-1) == tokens).all()
    margins = np.asarray(routes.cutoff_N[:, None] - routes.scores_NE)
    want = np.quantile(margins, k / experts, axis=0, method="inverted_cdf")
    width = float(bias.max() - bias.min() + 2) / 1000
    got = balanced_bias(counts, bias, k=k)
    # One bin of the histogram, on every expert before the common mean is taken away.
    assert np.abs(np.asarray(got) - (want - want.mean())).max() <= 2 * width
    assert abs(float(got.mean())) < 1e-6


@pytest.mark.quick
def test_balancing_evens_a_skewed_router():
    """The sign is right: the flipped one keeps the load as uneven as it was."""
    experts, k, tokens = 16, 2, 4096
    skew = jnp.linspace(0, 3, experts)
    bias, loads = jnp.zeros(experts), []
    for step in range(10):
        logits = jax.random.normal(jax.random.key(step), (tokens, experts)) + skew
        routes = route(logits, jnp.eye(experts), bias, jnp.ones(tokens, bool), k=k, scaling=1.0)
        load = np.bincount(np.asarray(routes.experts_Nk).ravel(), minlength=experts)
        loads.append(load.max() / load.mean())
        bias = balanced_bias(histogram(routes, bias, jnp.ones(tokens, bool), bins=1000), bias, k=k)
    assert loads[0] > 3 and loads[-1] < 1.2


@pytest.mark.quick
def test_balance_counts_add_over_microbatches_and_ranks_and_act_once():
    """Counts are summed first, the bias moves once: two halves give what the whole gives, and no tokens change nothing."""
    experts, k = 4, 1
    logits = jax.random.normal(jax.random.key(5), (8, experts)).at[:6, 0].add(3.0)
    bias, ones = jnp.zeros(experts), jnp.ones(8, bool)
    whole = histogram(route(logits, jnp.eye(experts), bias, ones, k=k, scaling=1.0), bias, ones, bins=100)
    halves = sum(
        histogram(route(part, jnp.eye(experts), bias, ones[:4], k=k, scaling=1.0), bias, ones[:4], bins=100)
        for part in (logits[:4], logits[4:])
    )
    assert (whole == halves).all()
    moved = balanced_bias(whole, bias, k=k)
    assert float(moved[0]) < 0 < float(moved[1:].mean())
    np.testing.assert_array_equal(balanced_bias(jnp.zeros_like(whole), moved, k=k), moved)


@pytest.mark.quick
def test_one_rule_for_gradients_of_replicated_parameters():
    """Loss w·x with x = [1, 2] on two devices: the gradient is 3 on both, not 1.5, 2, 4 or 6."""
    mesh = MeshSpec.parse("data=2").build()

    def local(w, x):
        w = lax.pcast(w, ("data", "pipe", "expert", "context"), to="varying")
        x = lax.pcast(x, ("pipe", "expert", "context"), to="varying")
        return reduce_gradients({"w": jax.grad(lambda w: (w * x).sum())(w)}, {"w": P()})["w"]

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    grad = run(jnp.float32(1), jnp.array([1.0, 2.0]))
    assert float(grad) == 3.0


@pytest.mark.quick
def test_situ_is_bounded_and_becomes_swiglu():
    gate, up = jnp.meshgrid(jnp.linspace(-200, 200, 41), jnp.linspace(-200, 200, 41))
    assert float(jnp.abs(gated_activation(gate, up, beta=4.0, linear_beta=25.0)).max()) <= 100.0
    small = jnp.linspace(-3, 3, 13)
    wide = gated_activation(small, small, beta=1e4, linear_beta=1e4)
    np.testing.assert_allclose(wide, gated_activation(small, small, beta=None, linear_beta=None), rtol=1e-5)
    assert gated_activation(small.astype(jnp.bfloat16), small, beta=4.0, linear_beta=25.0).dtype == jnp.bfloat16


@pytest.mark.quick
def test_latent_norm_sits_between_aggregation_and_up_projection():
    """Scaling every expert's output leaves the routed part unchanged: only a norm after the sum does that."""
    config = dataclasses.replace(tiny.MODEL, shared_experts=0)
    params = jax.jit(lambda: lm.init_part(config, "M", jax.random.key(0)))()["moe"]
    tokens = Tokens(jnp.zeros((1, 6), jnp.int32), jnp.zeros((1, 6), jnp.int32))
    x = jax.random.normal(jax.random.key(1), (1, 6, config.hidden_size))
    run = jax.jit(lambda params: lm.bind(config, "M", params, inside="moe")(x, jnp.zeros(8), tokens)[0])
    scaled = params | {"expert_down": params["expert_down"] * 1e7}
    base = params | {"expert_down": params["expert_down"] * 1e6}  # far above the epsilon
    np.testing.assert_allclose(run(scaled), run(base), rtol=1e-3, atol=1e-5)
