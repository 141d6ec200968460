"""The routed experts of a mixture: u = Σ p_i y_i, y_i = a_i W_down, a = act(x W_gate, x W_up), with its own gradient.

N local tokens, L latent, F expert hidden, k experts a token, C rows of a rank, E experts, R expert ranks.

Backward keeps what went in and the plan. It dispatches again, and needs no y: with a′_i = (∂u) W_downᵀ, which ∂a_i = p_i a′_i
needs anyway, ∂p_i = ⟨a′_i, a_i⟩. K3 report, memory-efficient MoE; the same idea as SonicMoE (arXiv:2512.14080).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from k3jax.compat import vary_like
from k3jax.ops.grouped_gemm import grouped_gemm, input_gradient, weight_gradient
from k3jax.parallel.experts.exchange import Group, Rows

Activation = Callable[[jax.Array, jax.Array], jax.Array]
Kernels = tuple[jax.Array, jax.Array, jax.Array]


def run_experts(
    z_NL: Float[Array, "N L"],
    experts_Nk: Int[Array, "N k"],
    weights_Nk: Float[Array, "N k"],
    kernels: Kernels,
    activation: Activation,
    *,
    num_experts: int,
    axis_name: str | None,
) -> tuple[Float[Array, "N L"], Int[Array, ""]]:
    """Weighted sum over each token's experts, and how many rows this rank computed. No token is ever dropped.

    kernels: gate and up [E/R, L, F], down [E/R, F, L] of the home experts of this rank. experts_Nk: global ids, distinct for
    a token, −1 for padding. activation: of gate and up, elementwise; the same function in every call.
    Before: each rank holds its own tokens. After: each rank holds the sums of its own tokens, in float32, and every rank has
    computed equally many rows: N·k, or what is left of it without padding, to within one.
    """
    group = Group(axis_name, num_experts)
    rows = jax.tree.map(lambda x: checkpoint_name(x, "moe.plan"), group.rows(experts_Nk))
    arrays = z_NL, weights_Nk, *kernels
    z_NL, weights_Nk, *kernels = (vary_like(x, *arrays) for x in arrays)
    return mixture((group, activation), z_NL, weights_Nk, tuple(kernels), rows), rows.group_sizes.sum()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def mixture(how: tuple[Group, Activation], z_NL, weights_Nk, kernels: Kernels, rows: Rows):
    return _forward(how, z_NL, weights_Nk, kernels, rows)[0]


def _forward(how, z_NL, weights_Nk, kernels, rows):
    group, activation = how
    *_, down = kernels
    p_C1 = group.to_rows(weights_Nk, rows)[:, None]
    hidden_CF, _ = _hidden(how, group.dispatch(z_NL, rows), kernels, rows)
    y_CL = grouped_gemm(hidden_CF, group.with_replicas(down, rows), rows.group_sizes)
    u_NL = group.combine(_used(rows, y_CL).astype(p_C1.dtype) * p_C1, rows)
    return u_NL, (z_NL, weights_Nk, kernels, rows)


def _hidden(how, x_CL, kernels, rows):
    """The activations of all rows, and the pullback to the two products."""
    group, activation = how
    products = [grouped_gemm(x_CL, group.with_replicas(w, rows), rows.group_sizes) for w in kernels[:2]]
    return jax.vjp(activation, *(_used(rows, product) for product in products))


def _backward(how, residuals, du_NL):
    z_NL, weights_Nk, kernels, rows = residuals
    group, _ = how
    sizes, dtype = rows.group_sizes, z_NL.dtype
    gate, up, down = (group.with_replicas(w, rows) for w in kernels)
    x_CL, p_C1 = group.dispatch(z_NL, rows), group.to_rows(weights_Nk, rows)[:, None]
    hidden_CF, to_products = _hidden(how, x_CL, kernels, rows)
    du_CL = group.dispatch(du_NL, rows).astype(dtype)
    da_CF = _used(rows, input_gradient(du_CL, down, sizes)).astype(p_C1.dtype)
    d_weights = group.from_rows((da_CF * hidden_CF).sum(-1), rows)
    d_down = weight_gradient((p_C1 * hidden_CF).astype(dtype), du_CL, sizes)
    d_gate_CF, d_up_CF = to_products((p_C1 * da_CF).astype(dtype))
    dx_CL = sum(_used(rows, input_gradient(dy, w, sizes)) for dy, w in ((d_gate_CF, gate), (d_up_CF, up)))
    d_kernels = weight_gradient(x_CL, d_gate_CF, sizes), weight_gradient(x_CL, d_up_CF, sizes), d_down
    return group.combine(dx_CL, rows), d_weights, tuple(group.to_owners(d, rows) for d in d_kernels), None


mixture.defvjp(_forward, _backward)


def _used(rows: Rows, x: jax.Array) -> jax.Array:
    """x, 0 in rows of no expert: their products are unspecified."""
    return jnp.where(rows.used_C[:, None], x, 0)
