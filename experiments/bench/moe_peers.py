"""Expert exchanges to compare MoonEP with: what others do, in its plainest form.

N local tokens, A tokens of the whole expert group (N·R), L latent, F expert hidden, E experts, R expert ranks,
k experts per token, C rows.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.ops.glu import gated_activation
from k3jax.ops.grouped_gemm import grouped_gemm

AXIS = "expert"


def at_home(z_NL, experts_Nk, weights_Nk, kernels, *, betas, num_experts: int):
    """Exact: every rank gathers all tokens and computes all rows of its own experts, in a buffer for the worst case.

    Returns sums [N, L], rows computed, assignments dropped.
    """
    gather = lambda x: lax.all_gather(x, AXIS, tiled=True)
    z_AL, experts_Ak, weights_Ak = gather(z_NL), gather(experts_Nk), gather(weights_Nk)
    E, k = len(kernels[0]), experts_Ak.shape[1]
    local_Ak = experts_Ak - lax.axis_index(AXIS) * (num_experts // lax.axis_size(AXIS))
    key = jnp.where((local_Ak >= 0) & (local_Ak < E), local_Ak, E).reshape(-1)
    # A token's experts differ, so at most min(k, E) of its rows are here.
    order_C = jnp.argsort(key, stable=True)[: len(z_AL) * min(k, E)]
    sizes = jnp.bincount(key, length=E + 1)[:E].astype(jnp.int32)
    token_C, used_C1 = order_C // k, (jnp.arange(len(order_C)) < sizes.sum())[:, None]
    only_used = lambda x: jnp.where(used_C1, x, 0)
    gate, up = (only_used(grouped_gemm(only_used(z_AL[token_C]), w, sizes)) for w in kernels[:2])
    hidden_CF = gated_activation(gate, up, beta=betas[0], linear_beta=betas[1])
    y_CL = only_used(grouped_gemm(hidden_CF, kernels[2], sizes)) * weights_Ak.reshape(-1)[order_C][:, None]
    u_AL = jnp.zeros_like(z_AL).at[token_C].add(y_CL)
    return lax.psum_scatter(u_AL, AXIS, tiled=True), sizes.sum(), jnp.zeros((), jnp.int32)


def with_drops(z_NL, experts_Nk, weights_Nk, kernels, *, betas, num_experts: int, factor: float):
    """An all-to-all of `factor` times an expert's mean share of a rank's assignments; what is beyond is dropped.

    Returns sums [N, L], rows of the buffers that hold a token, assignments dropped.
    """
    (N, k), R = experts_Nk.shape, lax.axis_size(AXIS)
    capacity = math.ceil(factor * N * k / num_experts)
    expert = experts_Nk.reshape(-1)
    earlier = jnp.cumsum(jax.nn.one_hot(expert, num_experts, dtype=jnp.int32), 0)
    position = earlier[jnp.arange(N * k), expert] - 1
    kept = position < capacity
    place = jnp.where(kept, expert * capacity + position, num_experts * capacity)
    token = jnp.arange(N * k) // k
    sent = jnp.zeros((num_experts * capacity, z_NL.shape[1]), z_NL.dtype).at[place].set(z_NL[token], mode="drop")
    # [R of experts, E/R · capacity, L] -> [E/R, R of tokens · capacity, L] and back.
    swap = lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True)
    split = lambda x: x.reshape(R, -1, capacity, x.shape[-1])
    x = split(swap(sent)).transpose(1, 0, 2, 3).reshape(num_experts // R, R * capacity, -1)
    gate, up, down = kernels
    y = gated_activation(x @ gate, x @ up, beta=betas[0], linear_beta=betas[1]) @ down
    back = swap(y.reshape(-1, R, capacity, y.shape[-1]).transpose(1, 0, 2, 3).reshape(sent.shape))
    rows = back.at[place].get(mode="fill", fill_value=0) * weights_Nk.reshape(-1)[:, None]
    held = swap(jnp.zeros(num_experts * capacity, jnp.int32).at[place].set(1, mode="drop"))
    return rows.reshape(N, k, -1).sum(1), held.sum(), (~kept).sum()
