"""A mixture's layer with its experts spread over ranks: outputs and raw gradients of a dense layer on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax import lax
from jax.sharding import PartitionSpec as P

from k3jax import model as lm
from k3jax.layers.common import Axes, Tokens
from k3jax.ops.glu import gated_activation
from k3jax.sharding import module_specs
from meshes import MeshSpec

T = 11
CONFIG = dataclasses.replace(tiny.MODEL, num_experts=16, experts_per_token=3)
E, D = CONFIG.num_experts, CONFIG.hidden_size
BETAS = {"beta": CONFIG.situ_beta, "linear_beta": CONFIG.situ_linear_beta}


def problem(ranks):
    """Parameters of the layer and of a matrix before it, inputs, and what the outputs are projected on."""
    keys = jax.random.split(jax.random.key(0), 5)
    params = jax.tree.map(lambda a: 5 * a, lm.init_part(CONFIG, "M", keys[0])["moe"])  # apart from rounding
    before = jax.random.normal(keys[1], (D, D)) / D**0.5
    return params, before, *(jax.random.normal(key, (ranks, T, D)) for key in keys[2:4])


# Changes of (params, bias [E], ids [ranks, T]).
ROUTINGS = {
    "uniform": lambda params, bias, ids: (params, bias, ids),
    "all tokens to one expert": lambda params, bias, ids: (params, bias.at[5].add(2), ids),
    "one rank idle": lambda params, bias, ids: (params, bias.at[: E // ids.shape[0]].add(-2), ids),
    "empty experts": lambda params, bias, ids: (params, bias.at[::3].add(-2), ids),
    "ties": lambda params, bias, ids: (params | {"router": 0 * params["router"]}, bias, ids),
    "padding": lambda params, bias, ids: (params, bias, ids.at[:, 4:].set(-1).at[-1].set(-1)),
}


def dense_layer(params, x, bias, ids):
    """Every expert on every token."""
    scores = jax.nn.sigmoid(x @ params["router"])
    chosen = jax.nn.one_hot(lax.top_k(lax.stop_gradient(scores) + bias, CONFIG.experts_per_token)[1], E).sum(-2)
    weights = jnp.where((ids >= 0)[..., None], scores * chosen, 0)
    weights = CONFIG.routed_scaling * weights / (weights.sum(-1, keepdims=True) + 1e-20)
    z = x @ params["latent_down"]
    gate, up = (jnp.einsum("btl,elf->betf", z, params[f"expert_{name}"]) for name in ("gate", "up"))
    y = jnp.einsum("betf,efl->betl", gated_activation(gate, up, **BETAS), params["expert_down"])
    u = jnp.einsum("betl,bte->btl", y, weights)
    norm, shared = params["latent_norm"]["weight"], params["shared"]
    normed = norm * u * lax.rsqrt((u * u).mean(-1, keepdims=True) + CONFIG.norm_eps)
    return (
        normed @ params["latent_up"] + gated_activation(x @ shared["gate"], x @ shared["up"], **BETAS) @ shared["down"]
    )


def sharded_layer(ranks):
    """The model's layer in shard_map; its parameters of experts lie over ranks, all others on each."""

    def local(params, x, bias, ids):
        layer = lm.bind(CONFIG, "M", params, inside="moe")
        y, stats = layer(x, bias, Tokens(jnp.zeros_like(ids), ids, Axes(expert="expert")))
        return y, stats.load.computed[None]

    mesh = MeshSpec.parse(f"expert={ranks}").build(jax.devices()[:ranks])
    tokens, specs = P("expert"), module_specs(CONFIG, "M")["moe"]
    return jax.shard_map(local, mesh=mesh, in_specs=(specs, tokens, P(), tokens), out_specs=(tokens, tokens))


def gradients(layer):
    """((_, (output, rows)), gradients by parameters, the matrix before and the inputs) of a projection of the output."""

    def loss(params, before, x, bias, ids, projection):
        y, rows = layer(params, x @ before, bias, ids)
        return (y * projection).sum(), (y, rows)

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))


@pytest.mark.parametrize("ranks", [4, pytest.param(2, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_the_layer_equals_a_dense_one_with_raw_gradients_whatever_the_routing(ranks):
    params, before, x, projection = problem(ranks)
    sharded, dense = gradients(sharded_layer(ranks)), gradients(lambda *a: (dense_layer(*a), 0))
    for name, change in ROUTINGS.items():
        routed, bias, ids = change(params, jnp.zeros(E), jnp.zeros((ranks, T), jnp.int32))
        given = routed, before, x, bias, ids, projection
        (_, (y, rows)), got = sharded(*given)
        (_, (want_y, _)), want = dense(*given)
        real = np.asarray(ids >= 0)[..., None]
        np.testing.assert_allclose(y * real, want_y * real, atol=1e-5 * np.abs(want_y).max(), err_msg=name)
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
            norm = np.linalg.norm(b)
            assert np.linalg.norm(a - b) <= 1e-4 * norm, (name, path)
            assert norm > 0, (name, path)
        assert rows.sum() == 3 * real.sum() and np.ptp(rows) <= 1, name
