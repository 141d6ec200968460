"""The decay gates of K3 (bounded) and of Kimi Linear (unbounded).

B batch, T tokens, H heads, K key dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def kda_gate(
    z: Float[Array, "B T H K"],
    a_log: Float[Array, " H"],
    bias: Float[Array, "H K"],
    *,
    lower_bound: float | None = -5.0,
) -> Float[Array, "B T H K"]:
    """Log decay per token, head and channel, float32 (float64 if z is), never positive.

    lower_bound · sigmoid(exp(a_log) (z + bias)), which stays above `lower_bound` (K3 report, section 2.1);
    without a bound −exp(a_log) softplus(z + bias) (Kimi Linear, arXiv:2510.26692).

    Raises ValueError if lower_bound is not negative, or a_log and bias do not fit z.
    """
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound={lower_bound}: a log decay is bounded below by a negative number; or pass None")
    H, K = z.shape[-2:]
    if a_log.shape != (H,) or bias.shape != (H, K):
        raise ValueError(f"a_log {a_log.shape} and bias {bias.shape} must be ({H},) and ({H}, {K}) for z {z.shape}")
    fp32 = jnp.promote_types(z.dtype, jnp.float32)
    rate_H1 = jnp.exp(a_log.astype(fp32))[:, None]
    shifted = z.astype(fp32) + bias.astype(fp32)
    if lower_bound is None:
        return -rate_H1 * jax.nn.softplus(shifted)
    return lower_bound * jax.nn.sigmoid(rate_H1 * shifted)
