"""Grouped products for arrays of any number of rows; what the kernels do not take is refused here.

C rows, sorted by group; G groups of any sizes, also empty ones; D and F widths.

Rows after the last group: what they hold is not used, and of results they are not written (unspecified).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_gemm import products
from pallas_kernels.grouped_gemm import weight_gradients
from pallas_kernels.grouped_gemm.plan import ALIGN
from pallas_kernels.grouped_gemm.products import BLOCKS, Activation


class NotTaken(ValueError):
    """These kernels do not take such arrays; another implementation may."""


DTYPES = (jnp.bfloat16, jnp.float32)
"""Of results."""


def grouped_product(
    x: Float[Array, "C D"],
    w: Float[Array, "G _ _"],
    group_sizes: Int[Array, " G"],
    *,
    transposed: bool = False,
    row_weights: Float[Array, " C"] | None = None,
    dtype: Any = jnp.bfloat16,
    interpret: bool = False,
) -> Float[Array, "C F"]:
    """Row i of group g is p_i x_i w_g (p_i = 1 without row_weights), summed and weighted in float32, in `dtype`.

    x and w bfloat16, w [G, D, F], or [G, F, D] if transposed; row_weights float32; group_sizes int32, at most C in all.
    dtype: bfloat16 or float32. interpret: run in Mosaic's interpreter on CPU.

    Raises NotTaken, a ValueError, for other dtypes, and unless D is a multiple of 64 and F of 128.
    """
    check_product(x, (w,), group_sizes, transposed=transposed, row_weights=row_weights, dtype=dtype)
    row_weights = None if row_weights is None else filled_up(row_weights)
    how = {"transposed": transposed, "row_weights": row_weights, "dtype": dtype, "interpret": interpret}
    return products.product(filled_up(x), (w,), group_sizes, **how)[: len(x)]


def gated_product(
    x: Float[Array, "C D"],
    gate: Float[Array, "G D F"],
    up: Float[Array, "G D F"],
    group_sizes: Int[Array, " G"],
    *,
    activation: Activation,
    interpret: bool = False,
) -> Float[Array, "C F"]:
    """Row i of group g is activation(x_i gate_g, x_i up_g), of float32 sums, in bfloat16. activation: elementwise.

    Raises NotTaken as `grouped_product` does. K3 report, section 2.4 (SiTU-GLU).
    """
    check_product(x, (gate, up), group_sizes)
    y = products.product(filled_up(x), (gate, up), group_sizes, activation=activation, interpret=interpret)
    return y[: len(x)]


def weight_gradient(
    x: Float[Array, "C D"],
    dy: Float[Array, "C F"],
    group_sizes: Int[Array, " G"],
    *,
    dtype: Any = jnp.bfloat16,
    interpret: bool = False,
) -> Float[Array, "G D F"]:
    """xᵀ dy of each group's rows, summed in float32, in `dtype` (bfloat16 or float32); 0 for a group without rows.

    Raises NotTaken unless x and dy are bfloat16, and D and F multiples of 128.
    """
    check_weight_gradient(x, dy, group_sizes, dtype=dtype)
    return weight_gradients.weight_gradient(filled_up(x), filled_up(dy), group_sizes, dtype=dtype, interpret=interpret)


def filled_up(x: jax.Array) -> jax.Array:
    """x with as many rows as kernels need: whole tiles of shared memory, and an item's at least."""
    C = len(x)
    needed = max(-(-C // ALIGN) * ALIGN, BLOCKS["rows"])
    return x if needed == C else jnp.pad(x, [(0, needed - C)] + [(0, 0)] * (x.ndim - 1))


def check_product(x, matrices, group_sizes, *, transposed=False, row_weights=None, dtype=jnp.bfloat16):
    """Raises NotTaken, naming what was got and what is needed."""
    check_ranks({"x": (x, 2), "w": (matrices[0], 3)}, group_sizes)
    (C, D), (G, *sides) = x.shape, matrices[0].shape
    F = sides[0 if transposed else 1]
    check_widths({"D": (D, BLOCKS["depth"]), "F": (F, BLOCKS["columns"])})
    shape = (G, F, D) if transposed else (G, D, F)
    needed = {f"w{n or ''}": (w, shape, jnp.bfloat16) for n, w in enumerate(matrices)}
    needed["row_weights"] = (row_weights, (C,), jnp.float32)
    check_arrays(x, needed, group_sizes, G, dtype)


def check_weight_gradient(x, dy, group_sizes, *, dtype=jnp.bfloat16):
    """Raises NotTaken, naming what was got and what is needed."""
    check_ranks({"x": (x, 2), "dy": (dy, 2)}, group_sizes)
    (C, D), F = x.shape, dy.shape[1]
    check_widths({"D": (D, weight_gradients.BLOCKS["rows"]), "F": (F, weight_gradients.BLOCKS["columns"])})
    check_arrays(x, {"dy": (dy, (C, F), jnp.bfloat16)}, group_sizes, len(group_sizes), dtype)


def check_ranks(arrays: dict[str, tuple[Any, int]], group_sizes) -> None:
    for name, (array, rank) in (arrays | {"group_sizes": (group_sizes, 1)}).items():
        if array.ndim != rank or 0 in array.shape[: rank > 1]:
            raise NotTaken(f"{name} has shape {array.shape}; it must have {rank} dims, and at least one row or group")


def check_widths(widths: dict[str, tuple[int, int]]) -> None:
    for name, (width, multiple) in widths.items():
        if width == 0 or width % multiple:
            raise NotTaken(f"{name} = {width}; these kernels need a multiple of {multiple}. Use another implementation")


def check_arrays(x, needed: dict[str, tuple[Any, tuple, Any]], group_sizes, groups: int, dtype) -> None:
    if jnp.dtype(dtype) not in map(jnp.dtype, DTYPES):
        raise NotTaken(f"dtype={jnp.dtype(dtype)}: these kernels write bfloat16 and float32. Use another implementation")
    needed = {"x": (x, x.shape, jnp.bfloat16), **needed, "group_sizes": (group_sizes, (groups,), jnp.int32)}
    for name, (array, shape, kind) in needed.items():
        if array is not None and (array.shape != shape or array.dtype != kind):
            raise NotTaken(
                f"{name} is {array.dtype}{list(array.shape)}; with x {list(x.shape)} and {groups} groups these kernels need "
                f"{jnp.dtype(kind)}{list(shape)}"
            )
