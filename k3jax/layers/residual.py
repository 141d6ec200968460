"""Attention residuals: the input of a sub-layer is a softmax-weighted mean over depth.

B batch, T tokens, D model, N stored blocks. arXiv:2603.15031; K3 report section 2.3.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from k3jax.layers.common import RMSNorm, at_least_fp32, param


class DepthMix(nnx.Module):
    """softmax_i(queryᵀ RMSNorm(v_i)) over the live prefix and the first `count` blocks; the values are the raw v_i.

    The query starts at zero: a uniform mean. Computed in float32, returned in the prefix's dtype.
    """

    def __init__(self, size: int, eps: float):
        self.query = param(jnp.zeros(size), fp32=True)
        self.norm = RMSNorm(size, eps)

    def __call__(
        self,
        prefix_BTD: Float[Array, "B T D"],
        blocks_NBTD: Float[Array, "N B T D"],
        count: int | Int[Array, ""],
    ) -> Float[Array, "B T D"]:
        if isinstance(count, int):  # no reason to read blocks that do not exist yet
            blocks_NBTD = blocks_NBTD[:count]
        if blocks_NBTD.shape[0] == 0:
            return prefix_BTD
        N, fp32 = blocks_NBTD.shape[0], at_least_fp32(prefix_BTD)
        sources = jnp.concatenate([blocks_NBTD, prefix_BTD[None]]).astype(fp32)
        scores = jnp.einsum("nbtd,d->nbt", self.norm(sources), self.query[...])
        if not isinstance(count, int):
            exists = (jnp.arange(N + 1) < count) | (jnp.arange(N + 1) == N)
            scores = jnp.where(exists[:, None, None], scores, jnp.finfo(fp32).min)
        return jnp.einsum("nbt,nbtd->btd", jax.nn.softmax(scores, 0), sources).astype(prefix_BTD.dtype)
