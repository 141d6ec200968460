"""Grouped products for arrays of any number of rows; what the kernels do not take is refused here.

C rows, sorted by group; G groups of any sizes, also empty ones; D and F widths.

x, dy and all matrices are bfloat16, row weights float32, group sizes int32 and at most C in all. Sums are made in float32.
Rows after the last group: what they hold is not used, and of results they are not written (unspecified). `interpret`: run in
Mosaic's interpreter on CPU. All functions raise ValueError for other dtypes and for widths that are not whole
blocks: of 64 where they are summed over, else of 128.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_gemm import gated_gradients as backward
from pallas_kernels.grouped_gemm import products, weight_gradients
from pallas_kernels.grouped_gemm.gated_gradients import GatedGradients, WithSlopes
from pallas_kernels.grouped_gemm.plan import ALIGN
from pallas_kernels.grouped_gemm.products import Activation
from pallas_kernels.grouped_gemm.tiles import COLUMNS, DEPTH, ROWS


def grouped_product(
    x: Float[Array, "C D"] | tuple[Float[Array, "C D"], ...],
    w: Float[Array, "G _ _"] | tuple[Float[Array, "G _ _"], ...],
    group_sizes: Int[Array, " G"],
    *,
    transposed: bool = False,
    row_weights: Float[Array, " C"] | None = None,
    dtype: Any = jnp.bfloat16,
    interpret: bool = False,
) -> Float[Array, "C F"]:
    """Row i of group g is p_i x_i w_g (p_i = 1 without row_weights), in `dtype`: bfloat16 or float32.

    w [G, D, F], or [G, F, D] if transposed. Of several x and as many w the sum over them.
    """
    xs, ws = (x if isinstance(x, tuple) else (x,)), (w if isinstance(w, tuple) else (w,))
    G, *sides = ws[0].shape
    (C, D), F = xs[0].shape, sides[0 if transposed else 1]
    shape = (G, F, D) if transposed else (G, D, F)
    check(
        {f"x{n or ''}": (x, (C, D)) for n, x in enumerate(xs)} | {f"w{n or ''}": (w, shape) for n, w in enumerate(ws)},
        row_weights=row_weights,
        group_sizes=(group_sizes, G),
        widths={"D": (D, DEPTH), "F": (F, COLUMNS)},
        dtype=dtype,
    )
    weights = None if row_weights is None else filled_up(row_weights)
    how = {"transposed": transposed, "row_weights": weights, "dtype": dtype, "interpret": interpret}
    return products.product(tuple(map(filled_up, xs)), ws, group_sizes, **how)[:C]


def gated_product(
    x: Float[Array, "C D"],
    gate: Float[Array, "G D F"],
    up: Float[Array, "G D F"],
    group_sizes: Int[Array, " G"],
    *,
    activation: Activation,
    interpret: bool = False,
) -> Float[Array, "C F"]:
    """Row i of group g is activation(x_i gate_g, x_i up_g), of float32 sums and elementwise, in bfloat16.

    K3 report, section 2.4 (SiTU-GLU).
    """
    check_gated(x, gate, up, group_sizes)
    how = {"activation": activation, "interpret": interpret}
    return products.product((filled_up(x),), (gate, up), group_sizes, **how)[: len(x)]


def gated_gradients(
    x: Float[Array, "C D"],
    gate: Float[Array, "G D F"],
    up: Float[Array, "G D F"],
    da: Float[Array, "C F"],
    row_weights: Float[Array, " C"],
    group_sizes: Int[Array, " G"],
    *,
    with_slopes: WithSlopes,
    interpret: bool = False,
) -> GatedGradients:
    """Of a = `gated_product` with rows then weighted by p: p a, gradients of both products from p da, and of p, Σ_F da a.

    with_slopes: of two arrays the activation and its derivatives by each.
    K3 report, section on the memory-efficient mixture; SonicMoE, arXiv:2512.14080.
    """
    C, F = len(x), gate.shape[-1]
    check_gated(x, gate, up, group_sizes, row_weights=row_weights, more={"da": (da, (C, F))})
    how = {"with_slopes": with_slopes, "interpret": interpret}
    x, da, row_weights = map(filled_up, (x, da, row_weights))
    return GatedGradients(*(y[:C] for y in backward.gated_gradients(x, gate, up, da, row_weights, group_sizes, **how)))


def weight_gradient(
    x: Float[Array, "C D"],
    dy: Float[Array, "C F"],
    group_sizes: Int[Array, " G"],
    *,
    dtype: Any = jnp.bfloat16,
    interpret: bool = False,
) -> Float[Array, "G D F"]:
    """xᵀ dy of each group's rows, in `dtype` (bfloat16 or float32); 0 for a group without rows. All widths of 128."""
    (C, D), F = x.shape, dy.shape[1]
    arrays, sizes = {"x": (x, (C, D)), "dy": (dy, (C, F))}, (group_sizes, len(group_sizes))
    check(arrays, group_sizes=sizes, widths={"D": (D, ROWS), "F": (F, COLUMNS)}, dtype=dtype)
    return weight_gradients.weight_gradient(filled_up(x), filled_up(dy), group_sizes, dtype=dtype, interpret=interpret)


def filled_up(x: jax.Array) -> jax.Array:
    """x with as many rows as kernels need: whole tiles of shared memory, and an item's at least."""
    C = len(x)
    needed = max(-(-C // ALIGN) * ALIGN, ROWS)
    return x if needed == C else jnp.pad(x, [(0, needed - C)] + [(0, 0)] * (x.ndim - 1))


def check_gated(x, gate, up, group_sizes, *, row_weights=None, more=None) -> None:
    (C, D), (G, _, F) = x.shape, gate.shape
    arrays = {"x": (x, (C, D)), "gate": (gate, (G, D, F)), "up": (up, (G, D, F))} | (more or {})
    widths = {"D": (D, DEPTH), "F": (F, COLUMNS)}
    check(arrays, row_weights=row_weights, group_sizes=(group_sizes, G), widths=widths)


def check(arrays, *, group_sizes, widths, row_weights=None, dtype=jnp.bfloat16) -> None:
    """Raises ValueError, naming what was got and what is needed; arrays by name, each with the shape it must have."""
    for name, (width, multiple) in widths.items():
        if width == 0 or width % multiple:
            raise ValueError(
                f"{name} = {width}; these kernels need a multiple of {multiple}. Use another implementation"
            )
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        raise ValueError(
            f"dtype={jnp.dtype(dtype)}: these kernels write bfloat16 and float32. Use another implementation"
        )
    sizes, groups = group_sizes
    rows = next(iter(arrays.values()))[1][0]
    if rows == 0 or groups == 0:
        raise ValueError(f"{rows} rows and {groups} groups; these kernels need one of each. Use another implementation")
    needed = {name: (array, shape, jnp.bfloat16) for name, (array, shape) in arrays.items()}
    needed |= {"row_weights": (row_weights, (rows,), jnp.float32), "group_sizes": (sizes, (groups,), jnp.int32)}
    for name, (array, shape, kind) in needed.items():
        if array is not None and (array.shape != shape or array.dtype != kind):
            got, right = f"{array.dtype}{list(array.shape)}", f"{jnp.dtype(kind)}{list(shape)}"
            raise ValueError(f"{name} is {got}; these kernels need {right} here. Use another implementation")
