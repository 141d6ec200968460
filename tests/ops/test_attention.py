"""Attention over keys in parts is attention over all of them, and what no query may see leaves no trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops.attention import KeyPart, attention, attention_in_parts

pytestmark = pytest.mark.quick
B, T, H, K, V, S, SIZE = 2, 5, 4, 6, 3, 24, 4  # queries are the last of 19 tokens; behind them, nothing


def arrays(G):
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(2 * random.normal(size=shape), jnp.float32)
    return draw(B, T, H, K), draw(B, S, G, K), draw(B, S, G, V)


def in_parts(q, k, v, parts):
    at_T = 14 + jnp.arange(T)

    @jax.jit
    def run(q, k, v):
        def part(i):
            cut = lambda a: jax.lax.dynamic_slice_in_dim(a, i * SIZE, SIZE, 1)
            allowed = (i * SIZE + jnp.arange(SIZE))[None] <= at_T[:, None]
            return KeyPart(cut(k), cut(v), jnp.broadcast_to(allowed, (B, T, SIZE)))

        return attention_in_parts(q, part, parts=parts, scale=0.4)

    return np.asarray(run(q, k, v))


@pytest.mark.parametrize("G", [1, 2, 4])
def test_parts_make_the_whole_whatever_heads_share(G):
    q, k, v = arrays(G)
    shared = lambda a: jnp.repeat(a, H // G, 2)
    ids = lambda n: jnp.zeros((B, n), jnp.int32)
    want, _ = attention(q, shared(k), shared(v), scale=0.4, q_segments=ids(T), k_segments=ids(S), q_offset=14)
    got = in_parts(q, k, v, 5)
    np.testing.assert_allclose(got, want, atol=2e-6)
    np.testing.assert_array_equal(in_parts(q, k, v, 6), got)  # a part that is not seen: not a bit
    loud = lambda a: a.at[:, 19:].set(1e30)
    np.testing.assert_array_equal(in_parts(q, loud(k), loud(v), 6), got)
    assert np.abs(in_parts(q, loud(k)[:, ::-1], v, 6) - got).max() > 0.1


def test_a_query_that_sees_nothing_gets_zeros():
    q, k, v = arrays(1)
    none = lambda i: KeyPart(k[:, :SIZE], v[:, :SIZE], jnp.zeros((B, T, SIZE), bool))
    assert not np.asarray(attention_in_parts(q, none, parts=3, scale=1.0)).any()
