"""Public functions: they check, choose an implementation and keep the dtypes' contract.

C rows, sorted by group; G groups of any sizes, also empty ones; D width of a row, F width of a result.

Rows after the last group belong to none: what they hold is not used, and what results hold there is unspecified.

implementation: "xla" (the default everywhere; any dtype), "mosaic_gpu" (Hopper kernels, on request until they have run on a
GPU: bfloat16 matrices, float32 row weights, widths that are multiples of 128). Sums are made in float32
(float64 of float64). All raise ValueError for shapes that do not fit together, an unknown implementation, and one that does
not take these arrays. K3 report, sections 2.4 and 5.2 (memory-efficient mixture).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax.compat import vary_like
from k3jax.ops.glu import activation_and_slopes, gated_activation
from k3jax.ops.grouped_gemm.mosaic import Mosaic
from k3jax.ops.grouped_gemm.xla import Xla

IMPLEMENTATIONS: dict[str, Any] = {"xla": Xla(), "mosaic_gpu": Mosaic()}


def grouped_gemm(
    x: Float[Array, "C D"],
    w: Float[Array, "G D F"],
    group_sizes: Int[Array, " G"],
    *,
    implementation: str | None = None,
) -> Float[Array, "C F"]:
    """Row i of group g is x_i w_g, in x's dtype. Differentiable; the gradient is 0 in rows of no group."""
    check(group_sizes, x=(x, "CD"), w=(w, "GDF"))
    x, w, group_sizes = alike(x, w, group_sizes)
    return run(implementation, lambda ops: _product(ops, x, w, group_sizes))


def input_gradient(
    dy: Float[Array, "C F"],
    w: Float[Array, "G D F"],
    group_sizes: Int[Array, " G"],
    *,
    implementation: str | None = None,
) -> Float[Array, "C D"]:
    """Row i of group g is dy_i w_gᵀ, in dy's dtype."""
    check(group_sizes, dy=(dy, "CF"), w=(w, "GDF"))
    return run(implementation, lambda ops: ops.product(dy, w, group_sizes, transposed=True, dtype=dy.dtype))


def weight_gradient(
    x: Float[Array, "C D"], dy: Float[Array, "C F"], group_sizes: Int[Array, " G"], *, implementation: str | None = None
) -> Float[Array, "G D F"]:
    """xᵀ dy of each group's rows, in x's dtype; 0 for a group without rows."""
    check(group_sizes, x=(x, "CD"), dy=(dy, "CF"))
    return run(implementation, lambda ops: ops.weight_gradient(x, dy, group_sizes, dtype=x.dtype))


def expert_hidden(
    x: Float[Array, "C D"],
    gate: Float[Array, "G D F"],
    up: Float[Array, "G D F"],
    group_sizes: Int[Array, " G"],
    *,
    beta: float | None,
    linear_beta: float | None,
    implementation: str | None = None,
) -> Float[Array, "C F"]:
    """`gated_activation` of x_i gate_g and x_i up_g, in x's dtype; the two products are not rounded before it."""
    check(group_sizes, x=(x, "CD"), gate=(gate, "GDF"), up=(up, "GDF"))
    activation = functools.partial(gated_activation, beta=beta, linear_beta=linear_beta)
    return run(implementation, lambda ops: ops.gated_product(x, gate, up, group_sizes, activation=activation))


def weighted_gemm(
    x: Float[Array, "C D"],
    w: Float[Array, "G D F"],
    row_weights: Float[Array, " C"],
    group_sizes: Int[Array, " G"],
    *,
    implementation: str | None = None,
) -> Float[Array, "C F"]:
    """Row i of group g is p_i x_i w_g, in the dtype of the row weights p."""
    check(group_sizes, x=(x, "CD"), w=(w, "GDF"), row_weights=(row_weights, "C"))
    how = {"row_weights": row_weights, "dtype": row_weights.dtype}
    return run(implementation, lambda ops: ops.product(x, w, group_sizes, **how))


def expert_hidden_gradients(
    x: Float[Array, "C D"],
    gate: Float[Array, "G D F"],
    up: Float[Array, "G D F"],
    da: Float[Array, "C F"],
    row_weights: Float[Array, " C"],
    group_sizes: Int[Array, " G"],
    *,
    beta: float | None,
    linear_beta: float | None,
    implementation: str | None = None,
) -> tuple[Float[Array, "C F"], Float[Array, "C F"], Float[Array, "C F"], Float[Array, " C"]]:
    """Backward of a = `expert_hidden` whose rows are weighted by p after the down product: (p a, d_gate, d_up, dp).

    da is the cotangent of a for p = 1: of u = Σ_i p_i a_i W it is ∂u Wᵀ. d_gate and d_up are the gradients of the products
    x gate and x up, in x's dtype; dp_i = ⟨da_i, a_i⟩, in that of p. Nothing but the inputs was kept: both products are made
    again. p a gives W's gradient. K3 report, memory-efficient mixture; SonicMoE, arXiv:2512.14080.
    """
    check(group_sizes, x=(x, "CD"), gate=(gate, "GDF"), up=(up, "GDF"), da=(da, "CF"), row_weights=(row_weights, "C"))
    with_slopes = functools.partial(activation_and_slopes, beta=beta, linear_beta=linear_beta)
    arrays = x, gate, up, da, row_weights, group_sizes
    return run(implementation, lambda ops: ops.gated_gradients(*arrays, with_slopes=with_slopes))


def expert_input_gradient(
    d_gate: Float[Array, "C F"],
    d_up: Float[Array, "C F"],
    gate: Float[Array, "G D F"],
    up: Float[Array, "G D F"],
    group_sizes: Int[Array, " G"],
    *,
    implementation: str | None = None,
) -> Float[Array, "C D"]:
    """Row i of group g is d_gate_i gate_gᵀ + d_up_i up_gᵀ, in d_gate's dtype, rounded once."""
    check(group_sizes, d_gate=(d_gate, "CF"), d_up=(d_up, "CF"), gate=(gate, "GDF"), up=(up, "GDF"))
    how = {"transposed": True, "dtype": d_gate.dtype}
    return run(implementation, lambda ops: ops.product((d_gate, d_up), (gate, up), group_sizes, **how))


def run(implementation: str | None, call: Callable[[Any], Any]) -> Any:
    """`call` of the implementation's operations."""
    operations = IMPLEMENTATIONS.get(implementation or "xla")
    if operations is None:
        raise ValueError(f"implementation={implementation!r} is unknown; choose one of {', '.join(IMPLEMENTATIONS)}")
    return call(operations)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(operations, x, w, group_sizes):
    return operations.product(x, w, group_sizes, dtype=x.dtype)


def _forward(operations, *arrays):
    return _product(operations, *arrays), arrays


def _backward(operations, arrays, dy):
    x, w, group_sizes = arrays
    dx = operations.product(dy, w, group_sizes, transposed=True, dtype=x.dtype)
    used = jnp.arange(len(x)) < group_sizes.sum()
    return jnp.where(used[:, None], dx, 0), operations.weight_gradient(x, dy, group_sizes, dtype=w.dtype), None


_product.defvjp(_forward, _backward)


def alike(*arrays: jax.Array) -> list[jax.Array]:
    """All varying over the same mesh axes: the sum of cotangents over others is not a rule's business."""
    return [vary_like(x, *arrays) for x in arrays]


def check(group_sizes, **arrays: tuple[Any, str]) -> None:
    """Raises ValueError unless dims of the same letter have the same size."""
    sizes: dict[str, int] = {}
    arrays["group_sizes"] = group_sizes, "G"
    for name, (array, dims) in arrays.items():
        if array.ndim != len(dims) or any(sizes.setdefault(d, n) != n for d, n in zip(dims, array.shape, strict=True)):
            known = ", ".join(f"{dim} = {size}" for dim, size in sizes.items())
            raise ValueError(f"{name} has shape {array.shape}; it must be [{','.join(dims)}] with {known}")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"group_sizes are {group_sizes.dtype}; they must be integers")
