"""The routed experts of a mixture: u = Σ p_i y_i, y_i = a_i W_down, a = act(x W_gate, x W_up), with its own gradient.

N local tokens, L latent, F expert hidden, k experts a token, C rows of a rank, E experts, R expert ranks.

Backward keeps what went in and the plan. It dispatches again, and needs no y: with a′_i = (∂u) W_downᵀ, which ∂a_i = p_i a′_i
needs anyway, ∂p_i = ⟨a′_i, a_i⟩. K3 report, memory-efficient MoE; the same idea as SonicMoE (arXiv:2512.14080).
"""

from __future__ import annotations

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from k3jax.compat import vary_like
from k3jax.ops import grouped_gemm as ops
from k3jax.parallel.experts.exchange import AllGather, Part
from k3jax.parallel.experts.load import Load
from k3jax.parallel.experts.planner import counts
from k3jax.parallel.experts.ragged import RaggedAllToAll, after

Kernels = tuple[jax.Array, jax.Array, jax.Array]
Betas = tuple[float | None, float | None]
Exchange = AllGather | RaggedAllToAll
EXCHANGES = {"all_gather": AllGather, "ragged_all_to_all": RaggedAllToAll}


def run_experts(
    z_NL: Float[Array, "N L"],
    experts_Nk: Int[Array, "N k"],
    weights_Nk: Float[Array, "N k"],
    kernels: Kernels,
    *,
    betas: Betas,
    num_experts: int,
    axis_name: str | None,
    exchange: str = "all_gather",
    beside: jax.Array | None = None,
) -> tuple[Float[Array, "N L"], Load]:
    """Weighted sum over each token's experts, and this rank's load. No token is ever dropped.

    kernels: gate and up [E/R, L, F], down [E/R, F, L] of the home experts of this rank. experts_Nk: global ids, distinct for
    a token, −1 for padding. betas: of `ops.glu.gated_activation`.
    Before: each rank holds its own tokens. After: each rank holds the sums of its own tokens, in float32, and every rank has
    computed equally many rows: N·k, or what is left of it without padding, to within one. exchange: a name of EXCHANGES;
    its class says what it sends. Raises ValueError for another. beside: what else is made of the tokens, best while the first
    rows travel. K3 report, MoonEP.
    """
    chosen = exchange_of(exchange, axis_name, num_experts)
    plan = jax.tree.map(lambda x: checkpoint_name(x, "moe.plan"), chosen.plan(experts_Nk))
    arrays = z_NL, weights_Nk, *kernels
    z_NL, weights_Nk, gate, up, down = (vary_like(x, *arrays) for x in arrays)
    replicas = (chosen.own_replicas(plan) >= 0).sum(dtype="int32")
    load = Load(plan.group_sizes.sum(dtype="int32"), replicas, counts(experts_Nk, num_experts))
    return mixture((chosen, betas), z_NL, weights_Nk, (gate, up, down), plan, beside), load


def best_exchange(platform: str) -> str:
    """The name of the exchange for devices of this platform: CPU has no ragged all-to-all."""
    return "all_gather" if platform == "cpu" else "ragged_all_to_all"


def exchange_of(name: str, axis: str | None, num_experts: int) -> Exchange:
    """By name; one rank alone exchanges nothing."""
    if name not in EXCHANGES:
        raise ValueError(f"exchange={name!r} is not known: choose one of {', '.join(EXCHANGES)}")
    alone = axis is None or lax.axis_size(axis) == 1
    return AllGather(None, num_experts) if alone else EXCHANGES[name](axis, num_experts)


def plain_mixture(how: tuple[Exchange, Betas], z_NL, weights_Nk, kernels: Kernels, plan, beside=None):
    """The sums, with whatever gradient autodiff finds: it keeps rows times width several times over."""
    return _forward(how, z_NL, weights_Nk, kernels, plan, beside)[0]


mixture = jax.custom_vjp(plain_mixture, nondiff_argnums=(0,))


def _forward(how, z_NL, weights_Nk, kernels, plan, beside):
    exchange, (beta, linear_beta) = how
    gate, up, down = exchange.with_replicas(plan, *kernels)
    parts, y_CL = exchange.dispatch(plan, weights_Nk, z_NL, beside=beside), []
    for i, part in enumerate(parts):
        part = part._replace(tokens=after(part.tokens, y_CL[-1])) if y_CL else part
        with jax.named_scope(f"moe.experts.part{i}"):
            (x_CL,), sizes = part.tokens, part.group_sizes
            hidden_CF = ops.expert_hidden(x_CL, gate, up, sizes, beta=beta, linear_beta=linear_beta)
            y = ops.weighted_gemm(hidden_CF, down, part.weights_C, sizes)
            y_CL.append(y.astype(z_NL.dtype))
    (u_NL,) = exchange.combine(plan, parts, y_CL)
    return u_NL, (z_NL, weights_Nk, kernels, plan)


def _backward(how, residuals, du_NL):
    z_NL, weights_Nk, kernels, plan = residuals
    exchange, betas = how
    weights = exchange.with_replicas(plan, *kernels)
    parts = exchange.dispatch(plan, weights_Nk, z_NL, du_NL.astype(z_NL.dtype))
    of_parts = []
    for i, part in enumerate(parts):
        part = part._replace(tokens=after(part.tokens, of_parts[-1][:2])) if of_parts else part
        with jax.named_scope(f"moe.experts.part{i}"):
            of_parts.append(_part_gradients(betas, part, weights))
    dx_CL, dp_C, d_weights = zip(*of_parts, strict=True)
    dz_NL, dp_Nk = exchange.combine(plan, parts, dx_CL, dp_C)
    d_weights = jax.tree.map(lambda *parts: sum(parts), *d_weights)
    return dz_NL.astype(z_NL.dtype), dp_Nk, exchange.to_owners(plan, *d_weights), None, None


def _part_gradients(betas: Betas, part: Part, weights: Kernels):
    """Of a part's rows: cotangents of their tokens and of their weights, and of the experts' weights."""
    (gate, up, down), (beta, linear_beta), sizes = weights, betas, part.group_sizes
    x_CL, du_CL = part.tokens
    da_CF = ops.input_gradient(du_CL, down, sizes)
    pa_CF, d_gate_CF, d_up_CF, dp_C = ops.expert_hidden_gradients(
        x_CL, gate, up, da_CF, part.weights_C, sizes, beta=beta, linear_beta=linear_beta
    )
    dx_CL = ops.expert_input_gradient(d_gate_CF, d_up_CF, gate, up, sizes)
    of_weights = (x_CL, d_gate_CF), (x_CL, d_up_CF), (pa_CF, du_CL)
    return dx_CL, dp_C, tuple(ops.weight_gradient(*pair, sizes) for pair in of_weights)


mixture.defvjp(_forward, _backward)
