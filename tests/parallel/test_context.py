"""A sequence on several ranks equals the sequence on one: outputs, states, and each rank's raw gradients.

B batch, T tokens, H heads, K key dim, V value dim, C channels, W conv width, R ranks.
"""

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from k3jax.ops.kda import kda
from k3jax.ops.short_conv import short_conv
from k3jax.parallel.context import kda_context_parallel, shard_length, short_conv_context_parallel
from k3jax.plan.hlo import collectives

B, T, H, K, V = 2, 72, 2, 8, 4
# Documents that end inside, on and across the borders of 2 and 4 ranks (36; 18, 36, 54), and one of a single token.
DOCUMENTS = ([5, 36, 37, 60], [18, 19, 54])


def mesh_of(R):
    return jax.make_mesh((R,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:R])


def relative_error(got, right):
    assert np.isfinite(got).all()
    return np.linalg.norm(np.asarray(got) - np.asarray(right)) / np.linalg.norm(right)


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    q, k, g = (rng.normal(size=(B, T, H, K)).astype(np.float32) for _ in range(3))
    v, state = rng.normal(size=(B, T, H, V)).astype(np.float32), rng.normal(size=(B, H, K, V)).astype(np.float32)
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    # Slow and fast channels: states live across ranks.
    return q, k, v, np.maximum(-(np.abs(g) ** 5), -5), rng.random((B, T, H)).astype(np.float32), state


# Large ids: all their bits must arrive.
SEGMENT_IDS = np.stack([np.searchsorted(d, np.arange(T), "right") * 123_456_789 for d in DOCUMENTS]).astype(np.int32)
ONE_DOCUMENT = np.zeros((B, T), np.int32)


def cotangents():
    rng = np.random.default_rng(1)
    return rng.normal(size=(B, T, H, V)).astype(np.float32), rng.normal(size=(B, H, K, V)).astype(np.float32)


@jax.jit
def on_one_device(inputs, segment_ids, cotangents):
    def run(q, k, v, g, beta, state):
        return kda(q, k, v, g, beta, initial_state=state, segment_ids=segment_ids, implementation="recurrent")

    (o, final), pullback = jax.vjp(run, *inputs)
    return o, final, pullback(cotangents)


def spread(R, **options):
    """The same on R ranks; `segment_ids` None if not used. States and their gradients come back from every rank."""
    tokens, states = P(None, "context"), P("context")

    def local(inputs, segment_ids, cotangents):
        def run(*inputs):
            return kda_context_parallel(*inputs[:5], initial_state=inputs[5], segment_ids=segment_ids, **options)

        *sharded, state = inputs
        # As in the training step: inputs vary over all axes, so gradients are local cotangents, summed once outside.
        (o, final), pullback = jax.vjp(run, *sharded, lax.pcast(state, "context", to="varying"))
        last = lax.axis_index("context") == R - 1
        *grads, d_state = pullback((cotangents[0], jnp.where(last, cotangents[1], 0)))
        return o, final[None], (*grads, d_state[None])

    return jax.jit(
        jax.shard_map(
            local,
            mesh=mesh_of(R),
            in_specs=((tokens,) * 5 + (P(),), tokens, (tokens, P())),
            out_specs=(tokens, states, (tokens,) * 5 + (states,)),
        )
    )


@pytest.mark.parametrize(
    "R, ids, options",
    [
        pytest.param(2, SEGMENT_IDS, {}, marks=pytest.mark.quick),
        (4, SEGMENT_IDS, {"gate_lower_bound": -5.0}),
        (4, None, {}),
        (8, SEGMENT_IDS, {"save_states": False}),
        # Segments on ranks: the first of each may continue the rank before, the others the segment before.
        (2, SEGMENT_IDS, {"segments": 3, "chunk_size": 16}),
    ],
)
def test_kda_on_several_ranks_is_kda_on_one(R, ids, options, inputs):
    o, final, grads = on_one_device(inputs, ONE_DOCUMENT if ids is None else ids, cotangents())
    got_o, got_final, got_grads = spread(R, **options)(inputs, ids, cotangents())
    # float32, per rank, so that an error of one rank is not hidden by the others.
    for rank in range(R):
        own = slice(rank * T // R, (rank + 1) * T // R)
        assert relative_error(got_o[:, own], o[:, own]) <= 1e-5
        assert relative_error(got_final[rank], final) <= 1e-5
        for got, right in zip(got_grads[:5], grads[:5], strict=True):
            assert relative_error(got[:, own], right[:, own]) <= 1e-4
    assert relative_error(got_grads[5].sum(0), grads[5]) <= 1e-4


def test_gradient_of_an_unvarying_state_is_summed_over_the_ranks(inputs):
    def local(inputs, cotangent):
        def run(state):
            return kda_context_parallel(*inputs[:5], initial_state=state)[0]

        return jax.vjp(run, inputs[5])[1](cotangent)[0]

    tokens = P(None, "context")
    specs = ((tokens,) * 5 + (P(),), tokens)
    got = jax.jit(jax.shard_map(local, mesh=mesh_of(2), in_specs=specs, out_specs=P()))(inputs, cotangents()[0])
    _, _, grads = on_one_device(inputs, ONE_DOCUMENT, (cotangents()[0], np.zeros((B, H, K, V), np.float32)))
    assert relative_error(got, grads[5]) <= 1e-4


def test_every_rank_may_use_the_last_state(inputs):
    # Each rank holds the last state, and the cotangents of all of them count.
    tokens = P(None, "context")

    def local(inputs, cotangents):
        run = lambda *a: kda_context_parallel(*a)[1]
        return jax.vjp(run, *inputs)[1](cotangents[0])

    parts = np.random.default_rng(2).normal(size=(4, B, H, K, V)).astype(np.float32)
    specs = ((tokens,) * 5, P("context"))
    got = jax.jit(jax.shard_map(local, mesh=mesh_of(4), in_specs=specs, out_specs=(tokens,) * 5))(inputs[:5], parts)
    no_state = (*inputs[:5], np.zeros_like(inputs[5]))
    _, _, right = on_one_device(no_state, ONE_DOCUMENT, (np.zeros((B, T, H, V), np.float32), parts.sum(0)))
    for a, b in zip(got, right[:5], strict=True):
        # The queries do not reach the state.
        assert relative_error(a, b) <= 1e-4 if b.any() else not np.asarray(a).any()


def compiled_collectives(length, backward):
    """Kinds of all collectives in the compiled program, on 4 ranks, and bytes of their results."""
    tokens = P(None, "context")

    def local(q, k, v, g, beta, ids):
        run = lambda *a: kda_context_parallel(*a, segment_ids=ids)[0]
        return jax.vjp(run, q, k, v, g, beta)[1](v) if backward else run(q, k, v, g, beta)

    shapes = [(B, length, H, K), (B, length, H, K), (B, length, H, V), (B, length, H, K), (B, length, H)]
    arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes] + [jax.ShapeDtypeStruct((B, length), jnp.int32)]
    program = jax.shard_map(local, mesh=mesh_of(4), in_specs=(tokens,) * 6, out_specs=tokens)
    return collectives(jax.jit(program).lower(*arrays).compile().as_text())


def test_compiled_program_gathers_once_each_way_whatever_the_length():
    forward, both = (compiled_collectives(256, backward) for backward in (False, True))
    # M and S of all ranks, and 8 numbers of each sequence's documents.
    assert [c.kind for c in forward] == ["all-gather"]
    assert [c.kind for c in both] == ["all-gather"] * 2
    maps = 4 * B * H * K * (K + V)
    assert sorted(c.result for c in both) == [4 * maps, 4 * (maps + 4 * B * 8)]
    assert compiled_collectives(4096, backward=False) == forward
    assert compiled_collectives(4096, backward=True) == both


def traced_collectives(run, R, *arrays):
    tokens = P(None, "context")
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    specs = tuple(tokens if x.ndim > 1 and x.shape[0] == B else P() for x in arrays)
    jaxpr = jax.make_jaxpr(jax.shard_map(run, mesh=mesh_of(R), in_specs=specs, out_specs=tokens))(*shapes)
    return Counter(re.findall(r"\b(all_gather|all_to_all|ppermute|psum\w*|reduce_scatter)\[", str(jaxpr)))


@pytest.mark.parametrize("R, expected", [(1, {}), (4, {"all_gather": 1})])
def test_kda_gathers_once_and_one_rank_not_at_all(R, expected, inputs):
    def run(q, k, v, g, beta, ids):
        return kda_context_parallel(q, k, v, g, beta, segment_ids=ids)[0]

    assert traced_collectives(run, R, *inputs[:5], SEGMENT_IDS) == expected


# [(W, local T, borders of documents)] on 4 ranks
CONVOLUTIONS = [
    pytest.param(4, 2, [3], id="halo spans two ranks"),
    pytest.param(4, 2, [4], id="document starts on a border"),
    pytest.param(4, 5, [3, 9, 10, 16], id="halo of one rank"),
    pytest.param(8, 2, [1], id="wider than the sequence before"),
    pytest.param(4, 1, [], id="one token a rank"),
    pytest.param(1, 2, [3], id="width one"),
]


def convolution_inputs(W, local_T, borders, dtype=np.float32):
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=(B, 4 * local_T, 3)).astype(dtype) for _ in range(2))
    ids = np.searchsorted(borders, np.arange(4 * local_T), "right").astype(np.int32) * 70_000
    return x, rng.normal(size=(W, 3)).astype(np.float32), np.stack([ids, np.zeros_like(ids)]), dy


def convolve(run, x, w, ids, dy):
    y, pullback = jax.vjp(lambda x, w: run(x, w, ids), x, w)
    return y, *pullback(dy)


@pytest.mark.parametrize("W, local_T, borders", CONVOLUTIONS)
def test_convolution_on_several_ranks_is_the_convolution_on_one(W, local_T, borders):
    x, w, ids, dy = map(jnp.asarray, convolution_inputs(W, local_T, borders))
    y, dx, dw = jax.jit(partial(convolve, short_conv))(x, w, ids, dy)
    tokens = P(None, "context")

    def local(x, w, ids, dy):
        y, dx, dw = convolve(short_conv_context_parallel, x, lax.pcast(w, "context", to="varying"), ids, dy)
        return y, dx, dw[None]

    got_y, got_dx, got_dw = jax.jit(
        jax.shard_map(
            local, mesh=mesh_of(4), in_specs=(tokens, P(), tokens, tokens), out_specs=(tokens, tokens, P("context"))
        )
    )(x, w, ids, dy)
    # float32 sums of W terms (of W, B and T terms for dw).
    np.testing.assert_allclose(got_y, y, atol=1e-6)
    np.testing.assert_allclose(got_dx, dx, atol=1e-6)
    np.testing.assert_allclose(got_dw.sum(0), dw, atol=1e-5)


def test_convolution_of_bfloat16_rows_still_knows_its_documents():
    # Document ids travel with the rows: bfloat16 holds whole numbers only up to 256.
    x, w, _, dy = convolution_inputs(4, 2, [])
    ids = jnp.asarray(np.stack([[256, 256, 256, 257, 257, 257, 2**30, 2**30 + 1], [0] * 8]), jnp.int32)
    x = jnp.asarray(x, jnp.bfloat16)
    tokens = P(None, "context")
    run = jax.shard_map(short_conv_context_parallel, mesh=mesh_of(4), in_specs=(tokens, P(), tokens), out_specs=tokens)
    got = jax.jit(run)(x, jnp.asarray(w), ids)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, jax.jit(short_conv)(x, jnp.asarray(w), ids))


@pytest.mark.parametrize("R, W, expected", [(4, 4, {"all_gather": 1}), (4, 1, {}), (1, 4, {})])
def test_convolution_gathers_once_and_only_if_it_must(R, W, expected):
    x, w, ids, _ = convolution_inputs(W, 2, [3])
    assert traced_collectives(short_conv_context_parallel, R, x, w, ids) == expected


def test_sequences_that_do_not_divide_are_refused_with_the_numbers():
    assert shard_length(64, 4) == 16
    for length in (3, 66, 0):
        with pytest.raises(ValueError, match=f"T={length} .*context=4"):
            shard_length(length, 4)
    with pytest.raises(ValueError, match="context=0 ranks for T=8 tokens"):
        shard_length(8, 0)
