"""Grouped products as XLA's ragged products, on any backend.

C rows, G groups, D and F widths.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.ops.grouped_gemm.mosaic import Activation

_OVER_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


class Xla:
    """The same methods as `Mosaic`."""

    def product(self, x, w, group_sizes, *, dtype, transposed=False, row_weights=None) -> jax.Array:
        y = lax.ragged_dot(x, w.mT if transposed else w, group_sizes, preferred_element_type=wide(x.dtype))
        return (y if row_weights is None else y * row_weights[:, None]).astype(dtype)

    def gated_product(self, x, gate, up, group_sizes, *, activation: Activation) -> jax.Array:
        products = (self.product(x, w, group_sizes, dtype=wide(x.dtype)) for w in (gate, up))
        return activation(*products).astype(x.dtype)

    def weight_gradient(self, x, dy, group_sizes, *, dtype) -> jax.Array:
        kind = wide(x.dtype)
        return lax.ragged_dot_general(x, dy, group_sizes, _OVER_ROWS, preferred_element_type=kind).astype(dtype)


def wide(dtype):
    """What sums are made in: float32, or float64."""
    return jnp.promote_types(dtype, jnp.float32)
