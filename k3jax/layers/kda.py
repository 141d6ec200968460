"""The KDA layer: short convolutions, decay gate, delta rule, output norm and gate.

B batch, T local tokens, D model, H heads, K key dim, V value dim, R width of a low-rank gate, W conv width.
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
from jaxtyping import Array, Float

from k3jax.configs import ModelConfig
from k3jax.layers.common import Draw, RMSNorm, Tokens, at_least_fp32, param
from k3jax.ops.kda import kda, kda_gate
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
        c = self.config
        dtype, fp32 = x_BTD.dtype, at_least_fp32(x_BTD)
        H, K, V = c.num_heads, c.kda_key_dim, c.kda_value_dim
        x32_BTD = x_BTD.astype(fp32)

        # q, k and v pass the convolution together: one halo exchange instead of three.
        weights = jnp.concatenate([self.q_proj[...], self.k_proj[...], self.v_proj[...]], -1)
        filters = jnp.concatenate([self.q_conv[...], self.k_conv[...], self.v_conv[...]], -1)
        qkv = checkpoint_name(jnp.einsum("btd,hdk->bthk", x_BTD, weights), "kda.qkv")
        if tokens.axes.context is None:
            qkv = short_conv(qkv, filters, tokens.segment_ids)
        else:
            qkv = short_conv_context_parallel(qkv, filters, tokens.segment_ids, axis_name=tokens.axes.context)
        q, k, v = jnp.split(jax.nn.silu(qkv.astype(fp32)), [K, 2 * K], -1)
        q, k = l2_normalize(q).astype(dtype), l2_normalize(k).astype(dtype)

        # Everything about the gate in float32, on GPUs too.
        matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
        z = checkpoint_name(matmul(matmul(x32_BTD, self.gate_down[...]), self.gate_up[...]), "kda.gate")
        g = kda_gate(
            z.reshape(*z.shape[:2], H, K), self.a_log[...], self.gate_bias[...], lower_bound=c.gate_lower_bound
        )
        beta = jax.nn.sigmoid(matmul(x32_BTD, self.beta_proj[...]))

        run = kda
        if tokens.axes.context is not None:
            run = functools.partial(kda_context_parallel, axis_name=tokens.axes.context)
        o, _ = run(q, k, v.astype(dtype), g, beta, segment_ids=tokens.segment_ids, gate_lower_bound=c.gate_lower_bound)
        o = checkpoint_name(o, "kda.o")
        if c.output_gate_rank is None:
            gate = x_BTD @ self.out_gate[...]
        else:
            gate = (x_BTD @ self.out_gate_down[...]) @ self.out_gate_up[...]
        gate = checkpoint_name(gate, "kda.out_gate")
        o = self.out_norm(o.astype(fp32)).reshape(*o.shape[:2], H * V) * jax.nn.sigmoid(gate.astype(fp32))
        return o.astype(dtype) @ self.out_proj[...], None


def initial_gate_bias(draw: Draw, H: int, K: int) -> jax.Array:
    """Inverse softplus of step sizes drawn log-uniformly from [1e-3, 0.1], as in Mamba-2; [H, K]."""
    dt = jnp.maximum(jnp.exp(draw.uniform(math.log(1e-3), math.log(0.1), H, K)), 1e-4)
    return dt + jnp.log(-jnp.expm1(-dt))
