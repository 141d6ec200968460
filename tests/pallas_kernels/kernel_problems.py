"""KDA problems for kernels that take bfloat16, and the definition in float64 to compare with.

B batch, T tokens, H heads, K key dim, V value dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BOUND = -5.0
# Operands of products are rounded to bfloat16 (2^-9 each); what is left of it in the norm of a whole result.
CLOSE = 1e-2


class Problem(NamedTuple):
    """Inputs float64, rounded to what the kernels are given."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray
    state: np.ndarray
    segment_ids: np.ndarray | None


def problem(gates, cosine=0.0, *, T, K, V, H=2, documents=None, seed=0) -> Problem:
    """One batch row per array of gates (broadcast to [T, H, K]); `cosine` between any two keys of a head."""
    rng = np.random.default_rng(seed)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    B = len(gates)
    common, own = (unit(rng.normal(size=(B, t, H, K))) for t in (1, T))
    beta = rng.random((B, T, H))
    beta[:, ::7], beta[:, 3::11] = 1, 0
    half = unit(rng.normal(size=(B, T, H, K))), unit(cosine**0.5 * common + (1 - cosine) ** 0.5 * own)
    half = (*half, rng.normal(size=(B, T, H, V)))
    full = np.stack([np.broadcast_to(g, (T, H, K)) for g in gates]), beta, rng.normal(size=(B, H, K, V))
    ids = None
    if documents is not None:
        ids = np.broadcast_to(np.searchsorted(documents, np.arange(T), "right"), (B, T)).astype(np.int32)
    rounded = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in half]
    return Problem(*rounded, *(x.astype(np.float32).astype(np.float64) for x in full), ids)


def kernel_inputs(p: Problem):
    """(q, k, v, g, beta, initial state, segment ids) as the kernels take them."""
    dtypes = [jnp.bfloat16] * 3 + [jnp.float32] * 3
    arrays = [jnp.asarray(x, dtype) for x, dtype in zip(p[:6], dtypes, strict=True)]
    return *arrays, None if p.segment_ids is None else jnp.asarray(p.segment_ids)


def definition(q, k, v, g, beta, state, *, segment_ids, scale):
    """(o, final state): decay, read the error, write, then output, token by token, in the inputs' dtype."""
    ids = jnp.zeros(q.shape[:2], jnp.int32) if segment_ids is None else jnp.asarray(segment_ids)
    starts = jnp.diff(ids, axis=1, prepend=ids[:, :1]) != 0

    def token(S, inputs):
        start, q, k, v, g, beta = inputs
        S = jnp.exp(g)[..., None] * jnp.where(start[:, None, None, None], 0, S)
        error = v - jnp.einsum("bhkv,bhk->bhv", S, k)
        S = S + k[..., None] * (beta[..., None] * error)[..., None, :]
        return S, scale * jnp.einsum("bhkv,bhk->bhv", S, q)

    final, o = jax.lax.scan(token, state, tuple(jnp.moveaxis(x, 1, 0) for x in (starts, q, k, v, g, beta)))
    return jnp.moveaxis(o, 0, 1), final


def right_answers(p: Problem, cotangents=None, scale=None):
    """(o, final state) of a problem in float64; with cotangents of both also the gradients of its six arrays."""
    scale = p.q.shape[-1] ** -0.5 if scale is None else scale
    with jax.enable_x64(True):
        run = lambda *arrays: definition(*arrays, segment_ids=p.segment_ids, scale=scale)
        out, pullback = jax.vjp(jax.jit(run), *map(jnp.asarray, p[:6]))
        gradients = () if cotangents is None else pullback(tuple(map(jnp.asarray, cotangents)))
        return [np.asarray(x) for x in (*out, *gradients)]


def distance(got, right):
    """Largest relative distance of a batch row."""
    got, right = (np.asarray(x, np.float64).reshape(len(x), -1) for x in (got, right))
    assert np.isfinite(got).all()
    norm = np.linalg.norm(right, axis=-1)
    # A right answer may vanish (nothing reaches the initial state through strong decay): then up to rounding of 1.
    return float((np.linalg.norm(got - right, axis=-1) / np.where(norm > 1e-12, norm, 1)).max())
