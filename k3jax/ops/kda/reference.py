"""KDA token by token: the definition, slow and in any precision.

B batch, T tokens, H heads, K key dim, V value dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def step(state_BHKV, q_BHK, k_BHK, v_BHV, g_BHK, beta_BH):
    """One token: decay, read the error, write, then output; q is scaled."""
    state_BHKV = jnp.exp(g_BHK)[..., None] * state_BHKV
    error_BHV = v_BHV - jnp.einsum("bhkv,bhk->bhv", state_BHKV, k_BHK, precision=lax.Precision.HIGHEST)
    state_BHKV = state_BHKV + k_BHK[..., None] * (beta_BH[..., None] * error_BHV)[..., None, :]
    o_BHV = jnp.einsum("bhkv,bhk->bhv", state_BHKV, q_BHK, precision=lax.Precision.HIGHEST)
    return o_BHV, state_BHKV


def recurrent(q, k, v, g, beta, *, initial_state, segment_ids):
    """(o, final_state) of `kda` by a scan over tokens; q is scaled; all inputs in one dtype, float32 or float64."""
    if segment_ids is None:
        segment_ids = jnp.zeros(q.shape[:2], jnp.int32)
    starts_BT = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0

    def token(state, inputs):
        start_B, *inputs = inputs
        state = jnp.where(start_B[:, None, None, None], 0, state)
        o, state = step(state, *inputs)
        return state, o

    by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (starts_BT, q, k, v, g, beta))
    final, o = lax.scan(token, initial_state, by_time)
    return jnp.moveaxis(o, 0, 1), final
