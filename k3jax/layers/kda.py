"""The KDA layer: short convolutions, decay gate, delta rule, output norm and gate.

B batch, T local tokens, D model, H heads, K key dim, V value dim, C = 2K + V, R width of a low-rank gate, W conv width.
K3 report section 2.1; Kimi Linear, arXiv:2510.26692.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from k3jax.configs import ModelConfig
from k3jax.layers.common import Draw, RMSNorm, Tokens, at_least_fp32, param
from k3jax.ops.kda import kda, kda_gate, kda_step
from k3jax.ops.short_conv import short_conv
from k3jax.parallel.context import kda_context_parallel, short_conv_context_parallel


def l2_normalize(x: jax.Array) -> jax.Array:
    """x · rsqrt(Σ x² + 1e-6) over the last dim."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


class KDA(nnx.Module):
    """Kimi Delta Attention; Q, K, V are stored per head, so that Muon sees one matrix a head."""

    def __init__(self, config: ModelConfig, *, draw: Draw):
        c, std = config, config.init_range
        D, H, K, V = c.hidden_size, c.num_heads, c.kda_key_dim, c.kda_value_dim
        self.config = config
        self.q_proj = param(draw.normal(std, H, D, K))
        self.k_proj = param(draw.normal(std, H, D, K))
        self.v_proj = param(draw.normal(std, H, D, V))
        bound = c.conv_width**-0.5
        filters = lambda dim: param(draw.uniform(-bound, bound, c.conv_width, H, dim), fp32=True)
        self.q_conv, self.k_conv, self.v_conv = filters(K), filters(K), filters(V)
        self.beta_proj = param(draw.normal(std, D, H), fp32=True)
        self.gate_down = param(draw.normal(std, D, c.gate_rank), fp32=True)
        self.gate_up = param(draw.normal(std, c.gate_rank, H * K), fp32=True)
        self.gate_bias = param(initial_gate_bias(draw, H, K), fp32=True)
        if c.gate_lower_bound is None:
            self.a_log = param(jnp.log(draw.uniform(1.0, 16.0, H)), fp32=True)
        else:
            self.a_log = param(jnp.zeros(H), fp32=True)
        if c.output_gate_rank is None:
            self.out_gate = param(draw.normal(std, D, H * V))
        else:
            self.out_gate_down = param(draw.normal(std, D, c.output_gate_rank))
            self.out_gate_up = param(draw.normal(std, c.output_gate_rank, H * V))
        self.out_norm = RMSNorm(V, c.norm_eps)
        self.out_proj = param(draw.normal(std, H * V, D))

    def __call__(self, x_BTD: Float[Array, "B T D"], tokens: Tokens) -> tuple[Float[Array, "B T D"], None]:
        """Output, and nothing where MLA reports its logits: normalised queries and keys bound theirs."""
        rows, filters = self.rows(x_BTD), self.filters
        if tokens.axes.context is None:
            rows = short_conv(rows, filters, tokens.segment_ids)
        else:
            rows = short_conv_context_parallel(rows, filters, tokens.segment_ids, axis_name=tokens.axes.context)
        q, k, v = self.heads(rows)
        g, beta = self.gates(x_BTD)
        run = kda
        if tokens.axes.context is not None:
            run = functools.partial(kda_context_parallel, axis_name=tokens.axes.context)
        bound = self.config.gate_lower_bound
        o, _ = run(q, k, v, g, beta, segment_ids=tokens.segment_ids, gate_lower_bound=bound)
        return self.output(x_BTD, o), None

    def resume(
        self,
        x_BTD: Float[Array, "B T D"],
        real_BT: Bool[Array, "B T"],
        state_BHKV: Float[Array, "B H K V"],
        tail_BWHC: Float[Array, "B tail H C"],
        *,
        chunk_size: int,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B H K V"], Float[Array, "B tail H C"]]:
        """The next tokens of sequences whose state and last W − 1 rows before the convolution are given: output, state, tail.

        Padding stands behind a sequence's tokens, and changes neither its state nor its tail. Chunks of `chunk_size` tokens
        begin with the first token; a single token takes the recurrence itself. K3 report, section 2.1 (decode).
        """
        rows = self.rows(x_BTD)
        q, k, v = self.heads(short_conv(rows, self.filters, halo=tail_BWHC))
        g, beta = self.gates(x_BTD)
        g, beta = jnp.where(real_BT[..., None, None], g, 0), jnp.where(real_BT[..., None], beta, 0)
        if x_BTD.shape[1] == 1:
            o, state_BHKV = kda_step(state_BHKV, *(a[:, 0] for a in (q, k, v, g, beta)))
            o = o[:, None]
        else:
            bound = self.config.gate_lower_bound
            o, state_BHKV = kda(
                q, k, v, g, beta, initial_state=state_BHKV, gate_lower_bound=bound, chunk_size=chunk_size
            )
        rows = jnp.concatenate([tail_BWHC, rows], 1)
        last = real_BT.sum(1)[:, None] + jnp.arange(tail_BWHC.shape[1])
        return self.output(x_BTD, o), state_BHKV, jnp.take_along_axis(rows, last[..., None, None], 1)

    def rows(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T H C"]:
        """q, k and v before the convolution, side by side: they pass it together, by one halo exchange instead of three."""
        weights = jnp.concatenate([self.q_proj[...], self.k_proj[...], self.v_proj[...]], -1)
        return checkpoint_name(jnp.einsum("btd,hdk->bthk", x_BTD, weights), "kda.qkv")

    @property
    def filters(self) -> Float[Array, "W H C"]:
        return jnp.concatenate([self.q_conv[...], self.k_conv[...], self.v_conv[...]], -1)

    def heads(
        self, rows_BTHC: Float[Array, "B T H C"]
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H K"], Float[Array, "B T H V"]]:
        """q, k and v from what left the convolution."""
        dtype, K = rows_BTHC.dtype, self.config.kda_key_dim
        q, k, v = jnp.split(jax.nn.silu(rows_BTHC.astype(at_least_fp32(rows_BTHC))), [K, 2 * K], -1)
        return l2_normalize(q).astype(dtype), l2_normalize(k).astype(dtype), v.astype(dtype)

    def gates(self, x_BTD: Float[Array, "B T D"]) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
        """Log decay and β. Everything about them in float32, on GPUs too."""
        c = self.config
        x32_BTD = x_BTD.astype(at_least_fp32(x_BTD))
        matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
        z = checkpoint_name(matmul(matmul(x32_BTD, self.gate_down[...]), self.gate_up[...]), "kda.gate")
        z = z.reshape(*z.shape[:2], c.num_heads, c.kda_key_dim)
        g = kda_gate(z, self.a_log[...], self.gate_bias[...], lower_bound=c.gate_lower_bound)
        return g, jax.nn.sigmoid(matmul(x32_BTD, self.beta_proj[...]))

    def output(self, x_BTD: Float[Array, "B T D"], o: Float[Array, "B T H V"]) -> Float[Array, "B T D"]:
        """Norm, output gate and last projection of what the recurrence gives."""
        c, dtype, fp32 = self.config, x_BTD.dtype, at_least_fp32(x_BTD)
        o = checkpoint_name(o, "kda.o")
        if c.output_gate_rank is None:
            gate = x_BTD @ self.out_gate[...]
        else:
            gate = (x_BTD @ self.out_gate_down[...]) @ self.out_gate_up[...]
        gate = checkpoint_name(gate, "kda.out_gate")
        o = self.out_norm(o.astype(fp32)).reshape(*o.shape[:2], -1) * jax.nn.sigmoid(gate.astype(fp32))
        return o.astype(dtype) @ self.out_proj[...]


def initial_gate_bias(draw: Draw, H: int, K: int) -> jax.Array:
    """Inverse softplus of step sizes drawn log-uniformly from [1e-3, 0.1], as in Mamba-2; [H, K]."""
    dt = jnp.maximum(jnp.exp(draw.uniform(math.log(1e-3), math.log(0.1), H, K)), 1e-4)
    return dt + jnp.log(-jnp.expm1(-dt))
