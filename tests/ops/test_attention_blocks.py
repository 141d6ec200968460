"""Attention in blocks of queries is attention at once: outputs, largest logits and gradients, and no scores of all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.activations.leaves import subjaxprs
from k3jax.ops import attention as module
from k3jax.ops.attention import attention


def problem(T, S):
    q, k, v = (jax.random.normal(jax.random.key(i), (2, n, 3, d)) for i, (n, d) in enumerate([(T, 8), (S, 8), (S, 5)]))
    segments = jnp.cumsum(jnp.zeros((2, S), jnp.int32).at[:, [3, 11, 12]].set(1), 1)
    return q, k, v, segments[:, S - T :], segments


def run(q, k, v, q_segments, k_segments):
    options = dict(q_segments=q_segments, k_segments=k_segments, q_offset=k.shape[1] - q.shape[1])
    loss = lambda q, k, v: (jnp.sin(attention(q, k, v, scale=0.4, **options)[0]) ** 2).sum()
    return attention(q, k, v, scale=0.4, **options), jax.grad(loss, (0, 1, 2))(q, k, v)


@pytest.mark.quick
@pytest.mark.parametrize("T", [16, 19])  # 19 queries: the last block is padded
def test_blocks_are_attention_at_once(monkeypatch, T):
    values = problem(T, 23)
    want = jax.jit(run)(*values)
    monkeypatch.setattr(module, "BLOCK", 5)
    got = jax.jit(lambda *values: run(*values))(*values)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), got, want)


def test_scores_of_all_queries_never_exist(monkeypatch):
    """Forward and backward, in the traced program."""
    monkeypatch.setattr(module, "BLOCK", 64)
    values = problem(512, 512)
    sizes = []

    def search(jaxpr):
        for eqn in jaxpr.eqns:
            sizes.extend(v.aval.size for v in eqn.outvars)
            for sub in subjaxprs(eqn):
                search(sub)

    search(jax.make_jaxpr(run)(*values).jaxpr)
    assert max(sizes) < 2 * 3 * 512 * 512
