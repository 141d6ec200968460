"""A sequence in pieces equals the sequence in one go: carried state, convolution tail, segment maps.

B batch, T tokens, H heads, K key dim, V value dim.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_problems import FORWARD, GRADIENT, definition, error, problem, slow

from k3jax.ops.kda import compose, kda, summarize
from k3jax.ops.short_conv import short_conv

T = 130


def layer(x, filters, g, beta, state, tail, segment_ids, tail_ids):
    """Short convolution and KDA, as in a layer: (o, state, rows for the next piece's halo)."""
    W, K = filters.shape[0], g.shape[-1]
    y = short_conv(x, filters, segment_ids, halo=tail, halo_segment_ids=tail_ids)
    q, k, v = jnp.split(y, [K, 2 * K], -1)
    o, state = kda(q, k, v, g, beta, initial_state=state, segment_ids=segment_ids)
    rows = jnp.concatenate([tail, x], 1)[:, -(W - 1) :]
    return o, state, rows, jnp.concatenate([tail_ids, segment_ids], 1)[:, -(W - 1) :]


def piecewise(split, x, filters, g, beta, state, segment_ids):
    tail = jnp.zeros((x.shape[0], filters.shape[0] - 1, *x.shape[2:]))
    tail_ids = jnp.zeros(tail.shape[:2], jnp.int32)
    outputs = []
    for piece in [slice(0, split), slice(split, T)][: 1 if split == T else 2]:
        o, state, tail, tail_ids = layer(
            x[:, piece], filters, g[:, piece], beta[:, piece], state, tail, segment_ids[:, piece], tail_ids
        )
        outputs.append(o)
    return jnp.concatenate(outputs, 1), state


@pytest.fixture(scope="module")
def inputs():
    p = problem([-0.05, -2.0], 0.5, T=T, K=8, V=4, documents=(40, 100))
    filters = np.random.default_rng(2).normal(size=(4, 2, 20)).astype(np.float32)
    x = np.concatenate([p.q, p.k, p.v], -1)
    return tuple(map(jnp.asarray, (x, filters, p.g, p.beta, p.state, p.segment_ids)))


@pytest.fixture(scope="module")
def whole(inputs):
    return value_and_grads(T, inputs)


def value_and_grads(split, inputs):
    def loss(*arrays):
        o, state = piecewise(split, *arrays, inputs[-1])
        weight = jnp.cos(jnp.arange(o.size)).reshape(o.shape)
        return jnp.sum(o * weight) + jnp.sum(jnp.sin(state)), (o, state)

    return jax.jit(jax.value_and_grad(loss, argnums=range(5), has_aux=True))(*inputs[:-1])


@pytest.mark.parametrize("split", [1, 65, *slow(16)])
def test_two_pieces_equal_one_go(split, inputs, whole):
    o, state = jax.jit(piecewise, static_argnums=0)(split, *inputs)
    assert error(o, whole[0][1][0]) <= FORWARD
    assert error(state, whole[0][1][1]) <= FORWARD


@pytest.mark.parametrize("split", [64, *slow(1, 2, 15, 16, 17, 63, 65, 129)])
def test_gradients_flow_through_the_split(split, inputs, whole):
    (_, (o, state)), grads = value_and_grads(split, inputs)
    assert error(o, whole[0][1][0]) <= FORWARD
    assert error(state, whole[0][1][1]) <= FORWARD
    for got, right in zip(grads, whole[1], strict=True):
        assert error(got, right) <= GRADIENT


def test_summary_is_the_map_of_the_state():
    p = problem([-0.05, -1.0, -40.0], 0.5, T=70)
    k, v, g, beta = map(jnp.asarray, p[1:5])
    M, S = jax.jit(summarize)(k, v, g, beta)
    assert M.shape == (3, 2, 16, 16) and S.shape == (3, 2, 16, 8) and M.dtype == S.dtype == jnp.float32
    assert error(M @ p.state + S, definition(p)[1][-1]) <= FORWARD


def test_summaries_of_consecutive_segments_compose():
    p = problem([-0.05, -1.0], 0.5, T=64)
    halves = jax.jit(lambda *a: [summarize(*(x[:, half] for x in a)) for half in (slice(0, 32), slice(32, 64))])
    earlier, later = halves(*map(jnp.asarray, p[1:5]))
    M, S = compose(later, earlier)
    assert error(M @ p.state + S, definition(p)[1][-1]) <= FORWARD
    # Not commutative.
    M, S = compose(earlier, later)
    assert error(M @ p.state + S, definition(p)[1][-1]) > 0.01


@pytest.mark.parametrize(
    "place, said",
    [
        ("later M", r"later M has shape \(2, 4, 5\).*must be \(2, 4, 4\)"),
        ("earlier M", r"earlier M has shape \(2, 5, 4\).*must be \(2, 4, 4\)"),
        ("earlier S", r"earlier S has shape \(2, 4, 2\).*\[..., K, V\] = \(2, 4, 3\).*must be \(2, 4, 3\)"),
    ],
)
def test_maps_that_do_not_fit_are_refused_by_name(place, said):
    shapes = {"later M": (2, 4, 4), "later S": (2, 4, 3), "earlier M": (2, 4, 4), "earlier S": (2, 4, 3)}
    shapes |= {place: {"later M": (2, 4, 5), "earlier M": (2, 5, 4), "earlier S": (2, 4, 2)}[place]}
    M_later, S_later, M_earlier, S_earlier = map(jnp.zeros, shapes.values())
    with pytest.raises(ValueError, match=said):
        compose.__wrapped__((M_later, S_later), (M_earlier, S_earlier))


def test_a_document_that_starts_inside_forgets_what_enters():
    p = problem([-0.05, -1.0], 0.5, T=70, documents=(66,))
    M, S = jax.jit(lambda *a: summarize(*a, segment_ids=jnp.asarray(p.segment_ids)))(*map(jnp.asarray, p[1:5]))
    assert not M.any()
    assert error(S, definition(p)[1][-1]) <= FORWARD
