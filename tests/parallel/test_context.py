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


def collectives(run, R, *arrays):
    tokens = P(None, "context")
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    specs = tuple(tokens if x.ndim > 1 and x.shape[0] == B else P() for x in arrays)
    jaxpr = jax.make_jaxpr(jax.shard_map(run, mesh=mesh_of(R), in_specs=specs, out_specs=tokens))(*shapes)
    return Counter(re.findall(r"\b(all_gather|all_to_all|ppermute|psum\w*|reduce_scatter)\[", str(jaxpr)))


@pytest.mark.parametrize("R, expected", [(1, {}), (4, {"all_gather": 1})])
def test_kda_gathers_once_and_one_rank_not_at_all(R, expected, inputs):
    def run(q, k, v, g, beta, ids):
        return kda_context_parallel(q, k, v, g, beta, segment_ids=ids)[0]

    assert collectives(run, R, *inputs[:5], SEGMENT_IDS) == expected


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
    assert collectives(short_conv_context_parallel, R, x, w, ids) == expected


def test_sequences_that_do_not_divide_are_refused_with_the_numbers():
    assert shard_length(64, 4) == 16
    for length in (3, 66, 0):
        with pytest.raises(ValueError, match=f"T={length} .*context=4"):
            shard_length(length, 4)
