"""Causal attention inside documents, softmax in float32.

B batch, T query tokens, S key tokens, H heads, K key dim, V value dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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
    first query among the keys. Materialises the [B, H, T, S] scores.
    """
    fp32 = jnp.promote_types(q_BTHK.dtype, jnp.float32)
    T, S = q_BTHK.shape[1], k_BSHK.shape[1]
    scores = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK, preferred_element_type=fp32) * scale
    causal = (q_offset + jnp.arange(T))[:, None] >= jnp.arange(S)[None]
    allowed = causal & (q_segments[:, :, None] == k_segments[:, None, :])
    # A query always sees itself, so no row is empty and a large negative number is as good as -inf.
    scores = jnp.where(allowed[:, None], scores, jnp.finfo(fp32).min)
    o_BTHV = jnp.einsum(
        "bhts,bshv->bthv", jax.nn.softmax(scores, -1).astype(v_BSHV.dtype), v_BSHV, preferred_element_type=fp32
    )
    return o_BTHV, jax.lax.stop_gradient(scores).max(-1)
