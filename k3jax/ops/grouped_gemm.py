"""Products of groups of consecutive rows with a matrix each.

C rows, G groups, D width of a row, F width of a result.
"""

from __future__ import annotations

from jax import lax
from jaxtyping import Array, Float, Int


def grouped_gemm(
    x: Float[Array, "C D"], w: Float[Array, "G D F"], group_sizes: Int[Array, " G"]
) -> Float[Array, "C F"]:
    """Row i of group g is x_i w_g, in x's dtype; rows after the last group are unspecified. Differentiable."""
    return lax.ragged_dot(x, w, group_sizes)


def input_gradient(
    dy: Float[Array, "C F"], w: Float[Array, "G D F"], group_sizes: Int[Array, " G"]
) -> Float[Array, "C D"]:
    """Row i of group g is dy_i w_gᵀ; rows after the last group are unspecified."""
    return lax.ragged_dot(dy, w.mT, group_sizes)


def weight_gradient(
    x: Float[Array, "C D"], dy: Float[Array, "C F"], group_sizes: Int[Array, " G"]
) -> Float[Array, "G D F"]:
    """xᵀ dy of each group's rows; rows after the last group belong to none."""
    return lax.ragged_dot_general(x, dy, group_sizes, _ROWS_CONTRACTED)


_ROWS_CONTRACTED = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)
