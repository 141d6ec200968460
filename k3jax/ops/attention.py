"""Causal attention inside documents, softmax in float32.

B batch, T query tokens, S key tokens, H heads, K key dim, V value dim.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

BLOCK = 512
"""Queries whose scores exist at one time."""


def attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BSHK: Float[Array, "B S H K"],
    v_BSHV: Float[Array, "B S H V"],
    *,
    scale: float,
    q_segments: Int[Array, "B T"],
    k_segments: Int[Array, "B S"],
    q_offset: int | Int[Array, ""] = 0,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H T"]]:
    """Softmax attention over earlier tokens of the same document, and each query's largest scaled logit among them.

    Both float32 (float64 for float64 inputs); no gradient passes through the logits. `q_offset` is the position of the
    first query among the keys. More than BLOCK queries go in blocks of equal size: of the [B, H, T, S] scores one block's
    exist at a time, in backward too, which makes them again.
    """
    T = q_BTHK.shape[1]
    run = functools.partial(_attention, k_BSHK, v_BSHV, k_segments, scale)
    blocks = -(-T // BLOCK)
    if blocks == 1:
        return run(q_BTHK, q_segments, q_offset + jnp.arange(T))
    size = -(-T // blocks)
    pad = lambda x: jnp.pad(x, [(0, 0), (0, blocks * size - T), *[(0, 0)] * (x.ndim - 2)])
    apart = lambda x: jnp.moveaxis(pad(x).reshape(x.shape[0], blocks, size, *x.shape[2:]), 1, 0)
    positions = q_offset + jnp.arange(blocks * size).reshape(blocks, size)
    one = jax.checkpoint(lambda block: run(*block))
    o, top = lax.map(one, (apart(q_BTHK), apart(q_segments), positions))
    o_BTHV = jnp.moveaxis(o, 0, 1).reshape(o.shape[1], blocks * size, *o.shape[3:])
    top_BHT = jnp.moveaxis(top, 0, 2).reshape(*top.shape[1:3], blocks * size)
    return o_BTHV[:, :T], top_BHT[:, :, :T]


def _attention(k_BSHK, v_BSHV, k_segments, scale, q_BTHK, q_segments, positions):
    """Of queries at these positions among the keys, [T]."""
    fp32 = jnp.promote_types(q_BTHK.dtype, jnp.float32)
    scores = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK, preferred_element_type=fp32) * scale
    causal = positions[:, None] >= jnp.arange(k_BSHK.shape[1])[None]
    allowed = causal & (q_segments[:, :, None] == k_segments[:, None, :])
    # A query always sees itself, so no row is empty and a large negative number is as good as -inf.
    scores = jnp.where(allowed[:, None], scores, jnp.finfo(fp32).min)
    o_BTHV = jnp.einsum(
        "bhts,bshv->bthv", jax.nn.softmax(scores, -1).astype(v_BSHV.dtype), v_BSHV, preferred_element_type=fp32
    )
    return o_BTHV, lax.stop_gradient(scores).max(-1)
