"""Experts spread over ranks equal a dense mixture, whatever the routing and however rows travel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.bench.moe import BenchMoe, saved_for_backward
from k3jax.parallel.experts import mixture, run_experts
from k3jax.parallel.experts.ragged import RaggedAllToAll
from meshes import MeshSpec

N, L, F, E, K = 11, 5, 7, 16, 3


def silu_product(gate, up):
    return jax.nn.silu(gate) * up


def ragged_all_to_all(operand, output, begin, rows, to, expected, *, axis_name):
    """What lax.ragged_all_to_all says it does, for backends that do not have it; wrong sizes and overlaps spoil all."""
    ranks, rank = lax.axis_size(axis_name), lax.axis_index(axis_name)
    every, updates = lax.all_gather((operand, jnp.stack([begin, rows, to])), axis_name)
    slots = len(begin) // ranks
    begin, rows, to = lax.dynamic_slice_in_dim(updates, rank * slots, slots, 2).transpose(1, 0, 2).reshape(3, -1)
    at = jnp.arange(len(output))[:, None]
    covered = (at >= to) & (at < to + rows)
    update = covered.argmax(1)
    values = every[update // slots, begin[update] + at[:, 0] - to[update]]
    shape = (-1, *[1] * (output.ndim - 1))
    result = jnp.where(covered.any(1).reshape(shape), values, output)
    lawful = (expected == rows).all() & (covered.sum(1) <= 1).all() & (covered.sum() == rows.sum())
    return jnp.where(lawful, result, -(2**30))


@pytest.fixture
def exchanges(monkeypatch):
    """Both exchanges on CPU, and one whose rows come in parts."""
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)
    in_parts = functools.partial(RaggedAllToAll, parts=3)
    monkeypatch.setattr(mixture, "EXCHANGES", mixture.EXCHANGES | {"in parts": in_parts})


def problem(ranks):
    keys = jax.random.split(jax.random.key(0), 6)
    draw = lambda i, *shape: jax.random.normal(keys[i], shape)
    kernels = draw(1, E, L, F), draw(2, E, L, F), draw(3, E, F, L)
    experts = jnp.argsort(draw(4, N * ranks, E))[:, :K].astype(jnp.int32)
    return draw(0, N * ranks, L), experts, jax.nn.softmax(draw(5, N * ranks, K)), kernels


def dense_mixture(z, experts, weights, kernels):
    """Every expert on every token, weighted; padding ids select nothing."""
    gate, up, down = kernels
    hidden = silu_product(jnp.einsum("nl,elf->enf", z, gate), jnp.einsum("nl,elf->enf", z, up))
    share = (jax.nn.one_hot(experts, E) * weights[..., None]).sum(1)
    return jnp.einsum("enf,efl,ne->nl", hidden, down, share)


ROUTINGS = {
    "uniform": lambda experts: experts,
    "one hot expert": lambda experts: experts.at[:, 0].set(5).at[:, 1:].set(jnp.array([6, 7])),
    "one idle rank": lambda experts: experts.at[:].set(jnp.array([0, 1, 3])),
    "all of a token on one rank": lambda experts: (experts[:, :1] // 4 * 4 + jnp.array([2, 0, 3])).astype(jnp.int32),
    "padding": lambda experts: experts.at[1:9].set(-1),
    "nothing but padding": lambda experts: experts.at[:].set(-1),
}


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("ranks", "exchange"),
    [
        (4, "all_gather"),
        (4, "in parts"),
        *[pytest.param(r, e, marks=pytest.mark.slow) for r in (2, 8) for e in ("all_gather", "in parts")],
        *[pytest.param(r, "ragged_all_to_all", marks=pytest.mark.slow) for r in (2, 4, 8)],
    ],
)
def test_every_exchange_equals_the_dense_mixture_with_raw_gradients(ranks, exchange, routing, exchanges):
    z, experts, weights, kernels = problem(ranks)
    experts = ROUTINGS[routing](experts)
    weights = jnp.where(experts >= 0, weights, 0)
    mesh = MeshSpec.parse(f"expert={ranks}").build(jax.devices()[:ranks])
    projection = jax.random.normal(jax.random.key(9), z.shape)

    def local(z, experts, weights, kernels):
        how = dict(num_experts=E, axis_name="expert", exchange=exchange)
        out, load = run_experts(z, experts, weights, kernels, betas=(None, None), **how)
        return out, load.computed[None]

    tokens = P("expert")
    sharded = jax.shard_map(local, mesh=mesh, in_specs=(tokens,) * 4, out_specs=(tokens, tokens))

    def loss(function):
        def projected(z, weights, kernels):
            out = function(z, experts, weights, kernels)
            return (out * projection).sum(), out

        return jax.jit(jax.value_and_grad(projected, (0, 1, 2), has_aux=True))

    (_, out), got = loss(lambda *a: sharded(*a)[0])(z, weights, kernels)
    (_, want_out), want = loss(dense_mixture)(z, weights, kernels)
    np.testing.assert_allclose(out, want_out, atol=1e-5)
    want = (want[0], jnp.where(experts >= 0, want[1], 0), want[2])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), got, want)
    rows = jax.jit(sharded)(z, experts, weights, kernels)[1]
    assert rows.sum() == (experts >= 0).sum() and np.ptp(rows) <= 1


def test_backward_keeps_what_went_in_and_the_plan():
    """By name, and nothing of the size of rows times width."""
    config = BenchMoe(tokens=64, experts=8, latent=32, hidden=24)
    saved, rows = saved_for_backward(config), 64 * config.experts_per_token
    inputs = {"moe.dispatch_in": 4 * 64 * 32, "moe.weights": 4 * rows}
    assert {name: saved["by_name"][name] for name in inputs} == inputs
    assert saved["by_name"].keys() - inputs.keys() == {"moe.plan"}
    assert saved["by_name"]["moe.plan"] < 4 * (rows + 4 * config.experts)
    # Plain autodiff keeps rows times width several times over: inputs, two products, activation, weighted outputs.
    assert saved["plain_autodiff"] > 4 * rows * (2 * 32 + 3 * 24) > 5 * sum(saved["by_name"].values())
