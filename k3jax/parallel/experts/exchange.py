"""Expert parallelism: every rank of the expert axis owns E/R experts and computes the rows that were routed to them.

N local tokens, A tokens of the whole expert group (N·R), L latent, F expert hidden, E experts, R expert ranks,
k experts per token, C rows.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def run_experts(
    z_NL: Float[Array, "N L"],
    experts_Nk: Int[Array, "N k"],
    weights_Nk: Float[Array, "N k"],
    kernels: tuple[jax.Array, jax.Array, jax.Array],
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    num_experts: int,
    axis_name: str | None,
) -> tuple[Float[Array, "N L"], Int[Array, ""]]:
    """Weighted sum over each token's experts, and how many rows this rank computed. No token is ever dropped.

    kernels: gate and up [E/R, L, F], down [E/R, F, L] of the experts of this rank. experts_Nk: global ids, -1 for padding.
    Before: each rank holds its own tokens. After: each rank holds the sums of its own tokens, in float32.
    Collectives over `axis_name`: all-gather of latents, ids and weights, reduce-scatter of sums: every rank sees all
    tokens of the group and keeps the rows of its own experts, so the row buffer has min(k, E/R) rows a group token.
    """
    if axis_name is None:
        return local_experts(z_NL, experts_Nk, weights_Nk, kernels, activation, first_expert=0)
    gather = lambda x: lax.all_gather(x, axis_name, axis=0, tiled=True)
    first = lax.axis_index(axis_name) * (num_experts // lax.axis_size(axis_name))
    u_AL, rows = local_experts(
        gather(z_NL), gather(experts_Nk), gather(weights_Nk), kernels, activation, first_expert=first
    )
    return lax.psum_scatter(u_AL, axis_name, scatter_dimension=0, tiled=True), rows


def local_experts(
    z_AL: Float[Array, "A L"],
    experts_Ak: Int[Array, "A k"],
    weights_Ak: Float[Array, "A k"],
    kernels: tuple[jax.Array, jax.Array, jax.Array],
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    first_expert: int | Int[Array, ""],
) -> tuple[Float[Array, "A L"], Int[Array, ""]]:
    """Contribution of the experts first_expert, first_expert + 1, … to every token's sum; rows computed."""
    gate, up, down = kernels
    E, (A, k) = gate.shape[0], experts_Ak.shape
    fp32 = jnp.promote_types(z_AL.dtype, jnp.float32)
    local_Ak = experts_Ak - first_expert
    mine_Ak = (local_Ak >= 0) & (local_Ak < E)
    # Rows sorted by expert; a token's k experts differ, so at most min(k, E) of its rows are here.
    key = jnp.where(mine_Ak, local_Ak, E).reshape(-1)
    order_C = jnp.argsort(key, stable=True)[: A * min(k, E)]
    group_sizes_E = jnp.bincount(key, length=E + 1)[:E].astype(jnp.int32)
    rows = group_sizes_E.sum()
    token_C, used_C = order_C // k, (jnp.arange(order_C.shape[0]) < rows)[:, None]

    # Rows beyond the last group belong to no expert: their products are unspecified, so they are zeroed on both sides,
    # and so are their gradients.
    x_CL = jnp.where(used_C, z_AL[token_C], 0)
    product = lambda x, w: lax.ragged_dot(x, w, group_sizes_E)
    hidden_CF = jnp.where(used_C, activation(product(x_CL, gate), product(x_CL, up)), 0)
    y_CL = jnp.where(used_C, product(hidden_CF, down).astype(fp32), 0)
    y_CL = y_CL * weights_Ak.reshape(-1)[order_C][:, None]
    return jnp.zeros(z_AL.shape, fp32).at[token_C].add(y_CL), rows
