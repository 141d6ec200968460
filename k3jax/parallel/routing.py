"""The router and quantile balancing: which experts a token visits, and the bias that evens their loads.

N tokens, D model, E experts, k experts per token, B bins. K3 report section 2.4 (router) and 2.5 (quantile balancing).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int


class Routes(NamedTuple):
    """Decisions of the router for local tokens."""

    experts_Nk: Int[Array, "N k"]
    """Chosen experts; -1 for padding tokens."""
    weights_Nk: Float[Array, "N k"]
    """Combine weights; 0 for padding tokens."""
    scores_NE: Float[Array, "N E"]
    cutoff_N: Float[Array, " N"]
    """The (k+1)-th biased score: an expert is chosen when its biased score exceeds it."""


def route(
    x_ND: Float[Array, "N D"],
    router_DE: Float[Array, "D E"],
    bias_E: Float[Array, " E"],
    real_N: Bool[Array, " N"],
    *,
    k: int,
    scaling: float,
) -> Routes:
    """Sigmoid scores in float32; the top k of score + bias are chosen, and weigh by their unbiased, renormalised scores.

    Ties go to the lower index. The choice is tagged `moe.experts`, a name that is always kept: recomputed scores could
    differ in the last bit and break a near tie the other way.
    """
    fp32 = jnp.promote_types(x_ND.dtype, jnp.float32)
    logits_NE = jnp.matmul(x_ND.astype(fp32), router_DE.astype(fp32), precision=lax.Precision.HIGHEST)
    scores_NE = jax.nn.sigmoid(logits_NE)
    best, experts = lax.top_k(lax.stop_gradient(scores_NE) + bias_E, k + 1)
    experts_Nk = checkpoint_name(experts[:, :k], "moe.experts")
    chosen_Nk = jnp.take_along_axis(scores_NE, experts_Nk, 1)
    weights_Nk = scaling * chosen_Nk / (chosen_Nk.sum(-1, keepdims=True) + 1e-20)
    return Routes(
        jnp.where(real_N[:, None], experts_Nk, -1),
        jnp.where(real_N[:, None], weights_Nk, 0.0),
        scores_NE,
        best[:, k],
    )


def histogram(routes: Routes, bias_E: Float[Array, " E"], real_N: Bool[Array, " N"], *, bins: int) -> Int[Array, "E B"]:
    """Counts of cutoff - score per expert, in uniform bins over [min bias - 1, max bias + 1]; padding is not counted."""
    E = bias_E.shape[0]
    low, width = bin_edges(bias_E, bins)
    margin_NE = routes.cutoff_N[:, None] - routes.scores_NE
    bin_NE = jnp.clip(((margin_NE - low) / width).astype(jnp.int32), 0, bins - 1)
    slot_NE = jnp.arange(E) * bins + bin_NE
    counted = jnp.broadcast_to(real_N[:, None], slot_NE.shape).astype(jnp.int32)
    return jnp.zeros(E * bins, jnp.int32).at[slot_NE.ravel()].add(counted.ravel()).reshape(E, bins)


def bin_edges(bias_E: jax.Array, bins: int) -> tuple[jax.Array, jax.Array]:
    """Lower end and width of the bins; scores lie in [0, 1], so every margin falls inside."""
    low = bias_E.min(-1) - 1.0
    return low, (bias_E.max(-1) + 1.0 - low) / bins


def balanced_bias(histogram_EB: Int[Array, "E B"], bias_E: Float[Array, " E"], *, k: int) -> Float[Array, " E"]:
    """Bias for the next step: the k/E quantile of cutoff - score per expert, mean-centred.

    With m tokens counted the quantile is the ⌈m k / E⌉-th smallest margin, found to within one bin (linear inside it):
    then about m k / E tokens prefer the expert to their cutoff. With no tokens counted the bias stays.
    """
    E, bins = histogram_EB.shape
    low, width = bin_edges(bias_E, bins)
    cumulative_EB = jnp.cumsum(histogram_EB, -1)
    tokens = cumulative_EB[0, -1]
    # ⌈m k / E⌉ without the product m k, which overflows int32 for a large step.
    target = (tokens // E) * k + (tokens % E * k + E - 1) // E
    bin_E = jnp.argmax(cumulative_EB >= target, -1)
    take = lambda table: jnp.take_along_axis(table, bin_E[:, None], -1)[:, 0]
    inside_E = take(histogram_EB)
    before_E = take(cumulative_EB) - inside_E
    fraction_E = (target - before_E) / jnp.maximum(inside_E, 1)
    new_E = low + width * (bin_E + fraction_E)
    return jnp.where(tokens > 0, new_E - new_E.mean(), bias_E).astype(bias_E.dtype)
