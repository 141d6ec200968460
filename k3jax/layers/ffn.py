"""Feed-forward layers: the dense one of the first layers, and the Stable LatentMoE of all others.

B batch, T local tokens, D model, F hidden width, E experts, L latent, k experts per token. K3 report section 2.4.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from k3jax.configs import ModelConfig
from k3jax.layers.common import Draw, RMSNorm, Tokens, param
from k3jax.ops.glu import gated_activation
from k3jax.parallel.experts import Load, run_experts
from k3jax.parallel.routing import histogram, route


def betas(config: ModelConfig) -> tuple[float | None, float | None]:
    """Of `gated_activation`."""
    return (None, None) if config.activation == "swiglu" else (config.situ_beta, config.situ_linear_beta)


class DenseFFN(nnx.Module):
    """down(act(gate x, up x)); `sharded`: hidden width split over the expert axis, gathered on use."""

    def __init__(self, config: ModelConfig, width: int, *, sharded: bool, name: str, draw: Draw):
        D, std = config.hidden_size, config.init_range
        self.config, self.sharded, self.name = config, sharded, name
        split = lambda dim: dim if sharded else None
        self.gate = param(draw.normal(std, D, width, alone=sharded), expert_dim=split(1))
        self.up = param(draw.normal(std, D, width, alone=sharded), expert_dim=split(1))
        self.down = param(draw.normal(std, width, D, alone=sharded), expert_dim=split(0))

    def __call__(self, x_BTD: Float[Array, "B T D"], tokens: Tokens) -> Float[Array, "B T D"]:
        def whole(weight, dim):
            if self.sharded and tokens.axes.expert is not None:
                return lax.all_gather(weight[...], tokens.axes.expert, axis=dim, tiled=True)
            return weight[...]

        gate = checkpoint_name(x_BTD @ whole(self.gate, 1), f"{self.name}.gate")
        up = checkpoint_name(x_BTD @ whole(self.up, 1), f"{self.name}.up")
        beta, linear_beta = betas(self.config)
        return gated_activation(gate, up, beta=beta, linear_beta=linear_beta) @ whole(self.down, 0)


class MoEStats(NamedTuple):
    """Integer counts of one MoE layer over local tokens: sums, never differentiated."""

    histogram_EN: Int[Array, "E N"]
    """Quantile balancing's histogram of cutoff minus score, N bins."""
    load: Load
    """Rows of this rank's experts."""


class LatentMoE(nnx.Module):
    """Routed experts in a latent, normed between aggregation and up-projection, plus shared experts on the full width."""

    def __init__(self, config: ModelConfig, *, draw: Draw):
        c, std = config, config.init_range
        D, E, L, F = c.hidden_size, c.num_experts, c.expert_dim, c.expert_width
        self.config = config
        self.router = param(draw.normal(std, D, E), fp32=True)
        if c.latent_size is not None:
            self.latent_down = param(draw.normal(std, D, L))
            self.latent_norm = RMSNorm(L, c.norm_eps)
            self.latent_up = param(draw.normal(std, L, D))
        self.expert_gate = param(draw.normal(std, E, L, F, alone=True), expert_dim=0)
        self.expert_up = param(draw.normal(std, E, L, F, alone=True), expert_dim=0)
        self.expert_down = param(draw.normal(std, E, F, L, alone=True), expert_dim=0)
        if c.shared_experts:
            self.shared = DenseFFN(c, c.shared_width, sharded=False, name="shared", draw=draw)

    def __call__(
        self, x_BTD: Float[Array, "B T D"], bias_E: Float[Array, " E"], tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], MoEStats]:
        """bias_E: quantile balancing's selection bias, which chooses experts but does not weigh them."""
        c = self.config
        B, T, D = x_BTD.shape
        x_ND, real_N = x_BTD.reshape(B * T, D), tokens.real.reshape(B * T)
        with jax.named_scope("moe.router"):
            routes = route(x_ND, self.router[...], bias_E, real_N, k=c.experts_per_token, scaling=c.routed_scaling)
        with jax.named_scope("moe.latent_down"):
            z_NL = x_ND if c.latent_size is None else x_ND @ self.latent_down[...]
        z_NL = checkpoint_name(z_NL, "moe.dispatch_in")
        shared_ND = None
        if c.shared_experts:
            with jax.named_scope("moe.shared"):
                shared_ND = self.shared(x_BTD, tokens).reshape(B * T, D)
        u_NL, load = run_experts(
            z_NL,
            routes.experts_Nk,
            routes.weights_Nk,
            (self.expert_gate[...], self.expert_up[...], self.expert_down[...]),
            betas=betas(c),
            num_experts=c.num_experts,
            axis_name=tokens.axes.expert,
            exchange=tokens.axes.exchange,
            beside=shared_ND,
        )
        u_NL = checkpoint_name(u_NL, "moe.combined")
        if c.latent_size is None:
            y_ND = u_NL.astype(x_ND.dtype)
        else:
            with jax.named_scope("moe.latent_up"):
                y_ND = self.latent_norm(u_NL).astype(x_ND.dtype) @ self.latent_up[...]
        if shared_ND is not None:
            y_ND = y_ND + shared_ND
        stats = MoEStats(histogram(routes, bias_E, real_N, bins=c.balance_bins), load)
        return y_ND.reshape(B, T, D), jax.tree.map(lax.stop_gradient, stats)


def no_stats(config: ModelConfig) -> MoEStats:
    """What a layer without experts counts."""
    none = lambda *shape: jnp.zeros(shape, jnp.int32)
    E = config.num_experts
    return MoEStats(none(E, config.balance_bins), Load(none(), none(), none(E)))
