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


def activation_and_slopes(
    gate: Float[Array, "*shape"], up: Float[Array, "*shape"], *, beta: float | None, linear_beta: float | None
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"], Float[Array, "*shape"]]:
    """`gated_activation` and its derivatives by gate and by up, in float32 (float64 of float64)."""
    fp32 = jnp.promote_types(gate.dtype, jnp.float32)
    g, u = gate.astype(fp32), up.astype(fp32)
    sigmoid = jax.nn.sigmoid(g)
    bounded_g, slope_g = _bounded(g, beta)
    bounded_u, slope_u = _bounded(u, linear_beta)
    left = bounded_g * sigmoid
    return left * bounded_u, (slope_g * sigmoid + left * (1 - sigmoid)) * bounded_u, left * slope_u


def _bounded(x: jax.Array, bound: float | None) -> tuple[jax.Array, jax.Array]:
    """bound · tanh(x / bound), or x without a bound, and its derivative."""
    if bound is None:
        return x, jnp.ones_like(x)
    tanh = jnp.tanh(x / bound)
    return bound * tanh, 1 - tanh * tanh
