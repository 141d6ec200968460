"""Attention residuals: the input of a sub-layer is a softmax-weighted mean over depth.

B batch, T tokens, D model, N stored blocks, S sites that mix. arXiv:2603.15031; K3 report section 2.3.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
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

    @property
    def direction(self) -> Float[Array, "*stack D"]:
        """What a normalised source is projected on to get its score; of stacked parameters, of each."""
        return self.query[...] * self.norm.weight[...]

    def merge(self, mixed: BlockMix, site: Int[Array, ""], prefix_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """`__call__`, if the blocks are mixed already: the second phase of two."""
        top, total, sums = (lax.dynamic_index_in_dim(a, site, keepdims=False) for a in mixed)
        prefix = prefix_BTD.astype(top.dtype)
        own = _scores(self.direction[None], prefix[None], self.norm.eps)[0, 0]
        new_top = jnp.maximum(top, own)
        of_blocks, of_prefix = jnp.exp(top - new_top), jnp.exp(own - new_top)
        h = sums * of_blocks[..., None] + prefix * of_prefix[..., None]
        return (h / (total * of_blocks + of_prefix)[..., None]).astype(prefix_BTD.dtype)


class BlockMix(NamedTuple):
    """The stored blocks, mixed for several sites at once: an online softmax that waits for its last source."""

    top_SBT: Float[Array, "S B T"]
    """Largest score."""
    total_SBT: Float[Array, "S B T"]
    """Sum of exp(score − top); 0 if there is no block."""
    sum_SBTD: Float[Array, "S B T D"]
    """Sum of the blocks, weighted with exp(score − top)."""

    @classmethod
    def of_none(cls, sites: int, prefix_BTD: Float[Array, "B T D"]) -> BlockMix:
        """Of no block."""
        fp32, BT = at_least_fp32(prefix_BTD), prefix_BTD.shape[:2]
        nothing = jnp.zeros((sites, *prefix_BTD.shape), fp32)
        return cls(jnp.full((sites, *BT), jnp.finfo(fp32).min), nothing[..., 0], nothing)

    @classmethod
    def of(
        cls,
        directions_SD: Float[Array, "S D"],
        blocks_NBTD: Float[Array, "N B T D"],
        count: int | Int[Array, ""],
        *,
        eps: float,
    ) -> BlockMix:
        """Of the first `count` blocks: the first phase of two, which reads blocks once for all sites that meet the same ones.

        K3 report, inference of attention residuals.
        """
        blocks = blocks_NBTD.astype(at_least_fp32(blocks_NBTD))
        scores = _scores(directions_SD, blocks, eps)
        exists = (jnp.arange(len(blocks)) < count)[:, None, None]
        scores = jnp.where(exists, scores, jnp.finfo(scores.dtype).min)
        top = scores.max(1)
        shares = jnp.where(exists, jnp.exp(scores - top[:, None]), 0)
        return cls(top, shares.sum(1), jnp.einsum("snbt,nbtd->sbtd", shares, blocks))


def _scores(directions_SD: jax.Array, sources_NBTD: jax.Array, eps: float) -> Float[Array, "S N B T"]:
    """directionᵀ RMSNorm(source), the norm without weight."""
    scale = lax.rsqrt(jnp.mean(sources_NBTD * sources_NBTD, -1) + eps)
    return jnp.einsum("nbtd,sd->snbt", sources_NBTD, directions_SD) * scale
