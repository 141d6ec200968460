"""Gated activations of the feed-forward layers, computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def gated_activation(
    gate: Float[Array, "*shape"], up: Float[Array, "*shape"], *, beta: float | None, linear_beta: float | None
) -> Float[Array, "*shape"]:
    """SiTU-GLU, [beta tanh(gate/beta) sigmoid(gate)] · [linear_beta tanh(up/linear_beta)]; None: SwiGLU, its limit.

    Bounded by beta · linear_beta. Returned in gate's dtype. K3 report section 2.4.
    """
    fp32 = jnp.promote_types(gate.dtype, jnp.float32)
    g, u = gate.astype(fp32), up.astype(fp32)
    left = (g if beta is None else beta * jnp.tanh(g / beta)) * jax.nn.sigmoid(g)
    right = u if linear_beta is None else linear_beta * jnp.tanh(u / linear_beta)
    return (left * right).astype(gate.dtype)
