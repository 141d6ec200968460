"""KDA's backward kernels, in Mosaic's interpreter, against gradients of the definition in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from kernel_problems import BOUND, CLOSE, distance, kernel_inputs, problem, right_answers

from k3jax.ops.kda import kda
from pallas_kernels import mosaic
from pallas_kernels.kda import backward, chunk_gradients, forward, pair_gradients, reverse
from pallas_kernels.kda.chunk_gradients import ChunkGradients
from pallas_kernels.kda.prepare import prepare
from pallas_kernels.kda.recurrence import recurrence


def cotangents_of(p, size=1.0):
    rng = np.random.default_rng(1)
    do, dfinal = (size * rng.normal(size=x.shape) for x in (p.v, p.state))
    return np.asarray(jnp.asarray(do, jnp.bfloat16), np.float64), dfinal.astype(np.float32).astype(np.float64)


def run(p, cotangents, interpret=True):
    q, k, v, g, beta, state, ids = kernel_inputs(p)
    how = {"scale": q.shape[-1] ** -0.5, "gate_lower_bound": BOUND, "interpret": interpret}
    _, _, residuals = forward(q, k, v, g, beta, initial_state=state, segment_ids=ids, **how)
    do, dfinal = cotangents
    return backward(residuals, jnp.asarray(do, jnp.bfloat16), jnp.asarray(dfinal, jnp.float32))


uniform_gates = lambda T, K, H=2: BOUND * np.random.default_rng(3).random((T, H, K))
CASES = {
    "saturated, several key blocks": (partial(problem, [BOUND], 0.9, T=29, K=128, V=64), 2.0**16),
    "documents": (
        partial(problem, [uniform_gates(70, 64, 1)], 0.5, T=70, K=64, V=128, H=1, documents=(20, 40, 64)),
        1.0,
    ),
    # Keys nearly parallel, next to nothing forgotten: gradients of v and beta come from what differs between the keys.
    "keys that cancel": (partial(problem, [-0.001], 0.99, T=130, K=64, V=64, H=1), 1.0),
}
BORDERS = (1, 15, 16, 128, 190)
SWEEP = {
    f"{gate}, cosine {cosine}, documents {documents}": (
        partial(problem, [gate], cosine, T=197, K=128, V=128, documents=documents),
        1.0,
    )
    for gate, cosine, documents in (
        (-0.001, 0.9, None),
        (-0.01, 0.9, BORDERS),
        (-0.5, 0.0, None),
        (-1.4, 0.9, BORDERS),
        (-3.0, 0.9, None),
        (-5.0, 0.9, BORDERS),
    )
}


@pytest.mark.parametrize(("make", "size"), [*CASES.values(), *(pytest.param(*x, marks=pytest.mark.slow) for x in SWEEP.values())],
                         ids=[*CASES, *SWEEP])  # fmt: skip
def test_gradients_are_those_of_the_recurrence(make, size):
    p = make()
    cotangents = cotangents_of(p, size)
    got, (*_, q, k, v, g, beta, state) = run(p, cotangents), right_answers(p, cotangents)
    far = {name: distance(a, b) for name, a, b in zip(got._fields, got, (q, k, v, g, beta, state), strict=True)}
    assert max(far.values()) <= CLOSE, far


def test_pairs_behind_a_token_cancel_in_the_gradient_of_its_decay():
    p = problem([BOUND], 0.5, T=64, K=64, V=64, H=1)
    q, k, v, g, beta, *_ = kernel_inputs(p)
    begin = 20
    half = lambda x: jnp.asarray(x, jnp.bfloat16)
    pairs = half(np.tril(np.random.default_rng(1).normal(size=(2, 1, 1, 1, 64, 64)), -1)).at[..., :begin].set(0)
    nothing = half(jnp.zeros((1, 1, 1, 64, 64)))
    given = ChunkGradients(v, *pairs, q=nothing, k_end=nothing, k_start=nothing, decay=jnp.zeros((1, 1, 1, 64)))
    how = {"scale": 0.1, "gate_lower_bound": BOUND, "interpret": True}
    dg = np.abs(pair_gradients.pair_gradients(q, k, g, beta.swapaxes(1, 2), None, given, **how)[2])
    # Sums of 63 terms, float32; rounded to bfloat16 apart, a pair's row and column would leave 4e-3.
    assert dg[:, : begin + 1].max() <= 1e-5 * dg.max()


def test_a_cotangent_is_not_rounded_before_betas_gradient_is_summed_over_values():
    # A single token: its gradient has no others to average with, and its terms nearly cancel.
    p = problem([BOUND], T=1, K=64, V=64, H=1)
    k, v = p.k[0, 0, 0], p.v[0, 0, 0]
    worth = np.random.default_rng(2).normal(size=64)
    worth += (0.1 - worth @ v) / (v @ v) * v
    p = p._replace(state=0 * p.state)
    cotangents = np.zeros(p.v.shape), np.outer(k, worth)[None, None].astype(np.float32).astype(np.float64) / (k @ k)
    right = right_answers(p, cotangents)
    # The state's cotangent in two bfloat16 pieces; rounded to one, it would be off by 5e-2.
    assert distance(run(p, cotangents).beta, right[6]) <= 1e-3


@pytest.mark.quick
def test_a_custom_rule_lowers_for_cuda_inside_shard_map():
    # shard_map compares the types of gradients and inputs: those of kernels must vary over the axis as their inputs do.
    p = problem([-1.0] * 2, T=70, K=128, V=64, documents=(9,))
    q, k, v, g, beta, _, ids = kernel_inputs(p)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    state = jnp.zeros((1, 2, 128, 64))

    def loss(q, *x):
        given = [lax.pcast(a, "data", to="varying") for a in (state, ids[:1])]
        options = {"initial_state": given[0], "segment_ids": given[1], "gate_lower_bound": BOUND}
        return sum(y.astype(jnp.float32).sum() for y in kda(q, *x, **options, implementation="mosaic_gpu"))

    step = jax.grad(loss, argnums=(0, 1, 2, 3, 4))
    sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data")))
    text = sharded.trace(q, k, v, g, beta).lower(lowering_platforms=("cuda",)).as_text()
    for name in ("kda_prepare", "kda_recurrence", "kda_reverse", "kda_chunk_gradients", "kda_pair_gradients"):
        assert name in text


def test_gradients_have_the_inputs_shapes_and_dtypes():
    p = problem([-1.0], T=70, K=128, V=64)
    *inputs, _, _ = kernel_inputs(p)

    def step(q, k, v, g, beta):
        how = {"scale": 0.1, "gate_lower_bound": BOUND}
        o, final, residuals = forward(q, k, v, g, beta, initial_state=None, segment_ids=None, **how)
        return backward(residuals, o, final)

    got = jax.eval_shape(step, *inputs)
    assert [(x.shape, x.dtype) for x in got[:5]] == [(x.shape, x.dtype) for x in inputs]
    assert (got.initial_state.shape, got.initial_state.dtype) == ((1, 2, 128, 64), jnp.float32)


@pytest.mark.slow
def test_what_each_kernel_hands_on_is_what_its_plain_function_says():
    p = problem([0.1 * uniform_gates(64, 64, 1)], 0.5, T=64, K=64, V=64, H=1)
    q, k, v, g, beta, state, _ = kernel_inputs(p)
    do, dfinal = cotangents_of(p)
    do, dfinal, beta = jnp.asarray(do, jnp.bfloat16), jnp.asarray(dfinal, jnp.float32), beta.swapaxes(1, 2)
    first = jnp.asarray(np.where(np.arange(64) < 20, -1, 20).astype(np.int32))[None]
    gate = {"scale": 0.1, "gate_lower_bound": BOUND, "interpret": True}
    chunks = prepare(q, k, v, g, beta, first, keep_inverse=True, **gate)
    passed = recurrence(chunks, state, keep=True, interpret=True)
    back = reverse.reverse(chunks, passed.errors, do, dfinal, interpret=True)
    given = chunk_gradients.chunk_gradients(beta, first, chunks.decay, passed, do, back, interpret=True)
    got = pair_gradients.pair_gradients(q, k, g, beta, first, given, **gate)
    with jax.enable_x64(True):
        widen = lambda x: jnp.asarray(np.asarray(x, np.float64 if jnp.issubdtype(x.dtype, jnp.floating) else np.int32))
        wide = lambda *tree: jax.tree.map(widen, tree)
        stages = [
            (back, reverse.reference(*wide(chunks, passed.errors, do, dfinal))),
            (given, chunk_gradients.reference(*wide(beta, first, chunks.decay, passed, do, back))),
            (got, pair_gradients.reference(*wide(q, k, g, beta, first, given), scale=0.1)),
        ]
        for stage, (results, right) in enumerate(stages):
            for index, (a, b) in enumerate(zip(results, right, strict=True)):
                assert distance(a, b) <= CLOSE, (stage, index)


@pytest.mark.slow
def test_no_two_accesses_of_shared_memory_race(monkeypatch):
    # The detector raises at the first race; copies, products and stores of all kernels pass by it.
    monkeypatch.setattr(mosaic, "InterpretParams", partial(mosaic.InterpretParams, detect_races=True))
    p = problem([-1.0], 0.5, T=130, K=64, V=128, H=1, documents=(70,))
    jax.block_until_ready(run(p, cotangents_of(p)))
