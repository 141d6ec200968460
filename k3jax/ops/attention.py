"""Causal attention inside documents, and over keys that come in parts; softmax in float32.

B batch, T query tokens, S key tokens, H heads, G heads of keys, K key dim, V value dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from k3jax.compat import vary_like

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


class KeyPart(NamedTuple):
    """Some of the keys that queries read; all finite, also those that no query may see."""

    k_BSGK: Float[Array, "B S G K"]
    v_BSGV: Float[Array, "B S G V"]
    allowed_BTS: Bool[Array, "B T S"]


def attention_in_parts(
    q_BTHK: Float[Array, "B T H K"],
    part: Callable[[Int[Array, ""]], KeyPart],
    *,
    parts: int,
    scale: float,
) -> Float[Array, "B T H V"]:
    """Softmax attention over the keys of `part(0)` … `part(parts − 1)`, which lie anywhere; float32 (float64 for float64).

    Each part is met once, by an online softmax; every H/G heads share a head of keys. A part of which a query may see
    nothing changes nothing of its result, not even rounding: the result does not depend on how many such parts there are.
    A query that sees nothing at all gets zeros.
    """
    fp32 = jnp.promote_types(q_BTHK.dtype, jnp.float32)
    (B, T, H, _), like = q_BTHK.shape, jax.eval_shape(part, jax.ShapeDtypeStruct((), jnp.int32))
    G, V = like.v_BSGV.shape[2:]
    q_BTGHK = q_BTHK.reshape(B, T, G, H // G, -1)
    lowest = jnp.finfo(fp32).min

    def meet(i, state):
        top, total, o = state
        k, v, allowed_BTS = part(i)
        allowed = allowed_BTS[:, None, None]
        scores = jnp.einsum("btghk,bsgk->bghts", q_BTGHK, k, preferred_element_type=fp32) * scale
        scores = jnp.where(allowed, scores, lowest)
        new_top = jnp.maximum(top, scores.max(-1))
        shares = jnp.where(allowed, jnp.exp(scores - new_top[..., None]), 0)
        rescale = jnp.exp(top - new_top)
        read = jnp.einsum("bghts,bsgv->bghtv", shares.astype(v.dtype), v, preferred_element_type=fp32)
        return new_top, total * rescale + shares.sum(-1), o * rescale[..., None] + read

    start = jnp.full((B, G, H // G, T), lowest, fp32), jnp.zeros((B, G, H // G, T), fp32)
    state = *start, jnp.zeros((B, G, H // G, T, V), fp32)
    _, total, o = lax.fori_loop(0, parts, meet, jax.tree.map(lambda x: vary_like(x, q_BTHK), state))
    o = o / jnp.where(total > 0, total, 1)[..., None]
    return jnp.moveaxis(o, 3, 1).reshape(B, T, H, V)
