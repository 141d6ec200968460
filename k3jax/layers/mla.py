"""Gated multi-head latent attention without positional encoding.

B batch, T local tokens, S tokens of all context shards, D model, H heads, G heads with keys of their own, L latent, N key
dims per head, P key dims that all heads share, V value dim. K3 report section 2.2; DeepSeek-V2 for the latent form.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from k3jax.configs import ModelConfig
from k3jax.layers.common import Draw, RMSNorm, Tokens, at_least_fp32, param
from k3jax.ops.attention import attention


class MLA(nnx.Module):
    """Keys and values are expanded from a latent per token; the latent is what context parallelism gathers."""

    def __init__(self, config: ModelConfig, *, draw: Draw):
        c, std = config, config.init_range
        D, H, L, N, P, V = c.hidden_size, c.num_heads, c.kv_lora_rank, c.qk_nope_dim, c.qk_rope_dim, c.v_head_dim
        self.config = config
        if c.q_lora_rank is None:
            self.q_proj = param(draw.normal(std, H, D, N + P))
        else:
            self.q_down = param(draw.normal(std, D, c.q_lora_rank))
            self.q_norm = RMSNorm(c.q_lora_rank, c.latent_norm_eps)
            self.q_up = param(draw.normal(std, H, c.q_lora_rank, N + P))
        self.kv_down = param(draw.normal(std, D, L + P))
        self.kv_norm = RMSNorm(L, c.latent_norm_eps)
        self.k_up = param(draw.normal(std, H, L, N))
        self.v_up = param(draw.normal(std, H, L, V))
        if c.mla_output_gate:
            self.out_gate = param(draw.normal(std, D, H * V))
        self.out_proj = param(draw.normal(std, H * V, D))

    def __call__(
        self, x_BTD: Float[Array, "B T D"], tokens: Tokens, *, absorbed: bool = False
    ) -> tuple[Float[Array, "B T D"], Float[Array, " H"]]:
        """Attention output, and each head's largest scaled logit, over all real queries and what they see (for QK-clip).

        −inf if there is no real token. Padding is a segment of its own, so that no real query sees it.

        absorbed: attend in the latent, with k_up folded into the queries and v_up applied after the mean. The same
        function, cheaper per token when keys are read from a cache of latents.
        """
        q_BTHK, kv = self.queries(x_BTD, absorbed=absorbed), self.latents(x_BTD)
        segments_BT, offset = tokens.segment_ids, 0
        if tokens.axes.context is not None:
            # Before: this shard's latents. After: those of all shards, (L + P) numbers a token.
            kv = lax.all_gather(kv, tokens.axes.context, axis=1, tiled=True)
            segments_BS = lax.all_gather(segments_BT, tokens.axes.context, axis=1, tiled=True)
            offset = lax.axis_index(tokens.axes.context) * x_BTD.shape[1]
        else:
            segments_BS = segments_BT
        k_BSGK, v_BSGV = self.keys_and_values(kv, absorbed=absorbed)
        every_head = lambda a: jnp.broadcast_to(a, (*a.shape[:2], self.config.num_heads, a.shape[-1]))
        o, top_BHT = attention(
            q_BTHK,
            every_head(k_BSGK),
            every_head(v_BSGV),
            scale=self.scale,
            q_segments=segments_BT,
            k_segments=segments_BS,
            q_offset=offset,
        )
        max_logit_H = jnp.where(tokens.real[:, None], top_BHT, -jnp.inf).max((0, 2))
        return self.output(x_BTD, o, absorbed=absorbed), max_logit_H

    @property
    def scale(self) -> float:
        return (self.config.qk_nope_dim + self.config.qk_rope_dim) ** -0.5

    def absorbs(self, T: int) -> bool:
        """Whether the absorbed form takes fewer operations for T queries that read latents: expanding a key has its price."""
        c = self.config
        in_latent, expanded = 2 * c.kv_lora_rank + c.qk_rope_dim, c.qk_nope_dim + c.qk_rope_dim + c.v_head_dim
        return T * (in_latent - expanded) < c.kv_lora_rank * (c.qk_nope_dim + c.v_head_dim)

    def queries(self, x_BTD: Float[Array, "B T D"], *, absorbed: bool = False) -> Float[Array, "B T H K"]:
        """Of every head; absorbed: in the latent, K = L + P, else K = N + P."""
        c = self.config
        if c.q_lora_rank is None:
            q_BTHK = jnp.einsum("btd,hdk->bthk", x_BTD, self.q_proj[...])
        else:
            q_BTHK = jnp.einsum("btr,hrk->bthk", self.q_norm(x_BTD @ self.q_down[...]), self.q_up[...])
        q_BTHK = checkpoint_name(q_BTHK, "mla.q")
        if not absorbed:
            return q_BTHK
        q_BTHN, q_BTHP = jnp.split(q_BTHK, [c.qk_nope_dim], -1)
        return jnp.concatenate([jnp.einsum("bthn,hln->bthl", q_BTHN, self.k_up[...]), q_BTHP], -1)

    def latents(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T LP"]:
        """All that later tokens need of each: the normed latent and the shared key dims."""
        latent_BTL, shared_BTP = jnp.split(x_BTD @ self.kv_down[...], [self.config.kv_lora_rank], -1)
        return checkpoint_name(jnp.concatenate([self.kv_norm(latent_BTL), shared_BTP], -1), "mla.latent")

    def keys_and_values(
        self, kv_BSL: Float[Array, "B S LP"], *, absorbed: bool = False
    ) -> tuple[Float[Array, "B S G K"], Float[Array, "B S G V"]]:
        """From latents; absorbed: they are the keys and values themselves, the same for all heads (G = 1), else G = H."""
        latent_BSL, shared_BSP = jnp.split(kv_BSL, [self.config.kv_lora_rank], -1)
        if absorbed:
            return kv_BSL[:, :, None], latent_BSL[:, :, None]
        k_BSHN = jnp.einsum("bsl,hln->bshn", latent_BSL, self.k_up[...])
        v_BSHV = jnp.einsum("bsl,hlv->bshv", latent_BSL, self.v_up[...])
        shared_BSHP = jnp.broadcast_to(shared_BSP[:, :, None], (*k_BSHN.shape[:3], shared_BSP.shape[-1]))
        return jnp.concatenate([k_BSHN, shared_BSHP], -1), v_BSHV

    def output(
        self, x_BTD: Float[Array, "B T D"], o: Float[Array, "B T H V"], *, absorbed: bool = False
    ) -> Float[Array, "B T D"]:
        """Output gate and last projection of what attention gives."""
        if absorbed:
            o = jnp.einsum("bthl,hlv->bthv", o, self.v_up[...])
        o = checkpoint_name(o, "mla.o").reshape(*x_BTD.shape[:2], -1)
        if self.config.mla_output_gate:
            gate = checkpoint_name(x_BTD @ self.out_gate[...], "mla.out_gate")
            o = o * jax.nn.sigmoid(gate.astype(at_least_fp32(x_BTD)))
        return o.astype(x_BTD.dtype) @ self.out_proj[...]


def qk_powers(config: ModelConfig) -> dict[str, float | np.ndarray]:
    """How each weight takes part in capping its head's logits by a factor, for `k3jax.optim.qk_clip`: {name: power}.

    Query and key share it where keys are a head's own; where all heads share the keys, the query takes all of it.
    """
    query = "q_proj" if config.q_lora_rank is None else "q_up"
    return {query: np.repeat([0.5, 1.0], [config.qk_nope_dim, config.qk_rope_dim]), "k_up": 0.5}
