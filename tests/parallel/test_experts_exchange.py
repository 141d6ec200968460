"""Experts spread over ranks equal a dense mixture, whatever the routing and however rows travel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.bench.moe import BenchMoe, saved_for_backward
from k3jax.ops.grouped_gemm import api
from k3jax.ops.grouped_gemm.xla import Xla
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


class SpoiltXla(Xla):
    """Whose results are no numbers in rows of no expert, which operations may leave as they like."""

    def product(self, *arrays, **how):
        return spoilt(super().product(*arrays, **how), arrays[-1])

    def gated_product(self, *arrays, **how):
        return spoilt(super().gated_product(*arrays, **how), arrays[-1])

    def gated_gradients(self, *arrays, **how):
        return tuple(spoilt(x, arrays[-1]) for x in super().gated_gradients(*arrays, **how))


def spoilt(rows_C, group_sizes):
    unused_C = jnp.arange(len(rows_C)) >= group_sizes.sum()
    return jnp.where(unused_C.reshape(-1, *[1] * (rows_C.ndim - 1)), jnp.nan, rows_C)


@pytest.fixture
def exchanges(monkeypatch):
    """Both exchanges on CPU, and one whose rows come in parts."""
    monkeypatch.setitem(api.IMPLEMENTATIONS, "xla", SpoiltXla())
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


@pytest.mark.parametrize(
    ("mesh", "exchange"),
    [
        pytest.param("data=2,expert=4", "all_gather", marks=pytest.mark.quick),
        ("expert=4", "in parts"),
        *[pytest.param(f"expert={r}", e, marks=pytest.mark.slow) for r in (2, 8) for e in ("all_gather", "in parts")],
        *[pytest.param(f"expert={r}", "ragged_all_to_all", marks=pytest.mark.slow) for r in (2, 4, 8)],
    ],
)
def test_every_exchange_equals_the_dense_mixture_with_raw_gradients(mesh, exchange, exchanges):
    """A ratio of 2 in expert gradients is invisible under Adam (pytorch/pytorch#160285)."""
    spec = MeshSpec.parse(mesh)
    built, tokens = spec.build(jax.devices()[: spec.num_devices]), P(("data", "expert"))
    z, chosen, drawn, kernels = problem(spec.num_devices)
    projection = jax.random.normal(jax.random.key(9), z.shape)

    def local(z, weights, kernels, experts):
        how = {"betas": (None, None), "num_experts": E, "axis_name": "expert", "exchange": exchange}
        out, load = run_experts(z, experts, weights, kernels, **how)
        return out, load.computed[None]

    specs = (tokens, tokens, P("expert"), tokens)
    sharded = jax.shard_map(local, mesh=built, in_specs=specs, out_specs=(tokens, tokens))

    def with_gradients(function):
        def projected(z, weights, kernels, experts):
            out, rows = function(z, weights, kernels, experts)
            return (out * projection).sum(), (out, rows)

        return jax.jit(jax.value_and_grad(projected, (0, 1, 2), has_aux=True))

    run, reference = with_gradients(sharded), with_gradients(lambda z, w, k, e: (dense_mixture(z, e, w, k), 0))
    for name, change in ROUTINGS.items():
        experts = change(chosen)
        weights = jnp.where(experts >= 0, drawn, 0)
        (_, (out, rows)), got = run(z, weights, kernels, experts)
        (_, (want_out, _)), want = reference(z, weights, kernels, experts)
        np.testing.assert_allclose(out, want_out, rtol=1e-5, atol=1e-5, err_msg=name)
        want = (want[0], jnp.where(experts >= 0, want[1], 0), want[2])
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=name)
        unused = np.setdiff1d(np.arange(E), experts)  # exactly zero, not merely small
        assert not any(np.asarray(kernel)[unused].any() for kernel in got[2])
        by_group = np.asarray(rows).reshape(-1, spec.expert)
        assert rows.sum() == (experts >= 0).sum() and (np.ptp(by_group, axis=1) <= 1).all(), name


@pytest.mark.quick
def test_a_part_travels_while_the_one_before_is_computed():
    """Of each message, which earlier ones it waits for; and what is made beside the first rows is there before products."""
    exchange = RaggedAllToAll("expert", E)

    def run(z, experts, weights, kernels, beside):
        how = exchange, (4.0, 25.0)
        return mixture.plain_mixture(how, z, weights, kernels, exchange.plan(experts), beside)

    z, experts, weights, kernels = problem(1)
    given = z, experts, weights, tuple(kernel[: E // 4] for kernel in kernels), jnp.ones(3)
    program = jax.make_jaxpr(run, axis_env=[("expert", 4)])(*given).jaxpr
    behind, waits_for = {program.invars[-1]: {"beside"}}, []
    for eqn in program.eqns:
        before = set().union(*(behind.get(x, ()) for x in eqn.invars if not hasattr(x, "val")))
        if eqn.primitive.name == "ragged_all_to_all":
            waits_for.append(before)
            before = before | {len(waits_for) - 1}
        behind |= dict.fromkeys(eqn.outvars, before)
    weights, labels, first, second, *back = {0, 1, 2}, 3, 4, 5, 6, 7
    assert not waits_for[first] and waits_for[second] == {first}
    assert waits_for[back[0]] == {*weights, labels, first, "beside"}
    assert waits_for[back[1]] == {*weights, labels, first, second, back[0], "beside"}


@pytest.mark.quick
def test_the_exchange_of_gpus_lowers_with_its_gradient():
    """Twice labels, tokens in two parts, replicas of three weights; twice sums in two parts; numbers; a loop for gradients."""
    z, experts, weights, kernels = problem(4)
    mesh = MeshSpec.parse("expert=4").build(jax.devices()[:4])
    how = {"betas": (4.0, 25.0), "num_experts": E, "axis_name": "expert", "exchange": "ragged_all_to_all"}

    def local(z, experts, weights, kernels):
        run = lambda *a: run_experts(a[0], experts, *a[1:], **how)[0]
        out, pullback = jax.vjp(run, z, weights, kernels)
        return pullback(out)

    tokens = P("expert")
    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(tokens,) * 4, out_specs=tokens))
    text = program.trace(z, experts, weights, kernels).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@ragged_all_to_all") == 2 * (1 + 2 + 3) + 2 * 2 + 1 + 3


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
