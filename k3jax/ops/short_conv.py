"""Depthwise causal convolution over a few tokens, inside documents.

B batch, T tokens, C channel dims, W conv width.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def short_conv(
    x: Float[Array, "B T *C"],
    w: Float[Array, " W *C"],
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    halo: Float[Array, "B halo *C"] | None = None,
    halo_segment_ids: Int[Array, "B halo"] | None = None,
) -> Float[Array, "B T *C"]:
    """y_t = Σ_i w[i] x_{t−(W−1)+i}: w[W−1] weighs the token itself, each channel has its own weights. In x's dtype.

    Tokens of another document count as zero. `halo`: the W−1 rows before the first token (zeros if not given) and,
    with segment_ids, their documents. Sums are float32. No activation. K3 report, section 2.1.

    Raises ValueError if the halo does not have W−1 rows, or has documents only on one side.
    """
    W, T = w.shape[0], x.shape[1]
    fp32 = jnp.promote_types(jnp.promote_types(x.dtype, w.dtype), jnp.float32)
    if halo is None:
        rows = jnp.pad(x, ((0, 0), (W - 1, 0)) + ((0, 0),) * (x.ndim - 2))
        ids = None if segment_ids is None else jnp.pad(segment_ids, ((0, 0), (W - 1, 0)), mode="edge")
    else:
        if halo.shape[1] != W - 1:
            raise ValueError(f"halo has {halo.shape[1]} rows; a convolution of width {W} needs the {W - 1} rows before")
        if (segment_ids is None) != (halo_segment_ids is None):
            raise ValueError("segment_ids and halo_segment_ids go together: got only one of them")
        rows = jnp.concatenate([halo.astype(x.dtype), x], 1)
        ids = None
        if segment_ids is not None and halo_segment_ids is not None:
            ids = jnp.concatenate([halo_segment_ids, segment_ids], 1)
    y = jnp.zeros((), fp32)
    for i in range(W):
        tap = rows[:, i : i + T].astype(fp32)
        if ids is not None:
            same = ids[:, i : i + T] == segment_ids
            tap = jnp.where(same.reshape(*same.shape, *(1,) * (x.ndim - 2)), tap, 0)
        y = y + tap * w[i].astype(fp32)
    return y.astype(x.dtype)
