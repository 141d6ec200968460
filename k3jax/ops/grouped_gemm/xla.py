"""Grouped products as XLA's ragged products, on any backend.

C rows, G groups, D and F widths.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.ops.grouped_gemm.mosaic import Activation, WithSlopes

_OVER_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


class Xla:
    """The same methods as `Mosaic`."""

    def product(self, x, w, group_sizes, *, dtype, transposed=False, row_weights=None) -> jax.Array:
        pairs = zip(x, w, strict=True) if isinstance(x, tuple) else [(x, w)]
        terms = [wide_product(x, w.mT if transposed else w, group_sizes) for x, w in pairs]
        y = sum(terms[1:], start=terms[0])
        return (y if row_weights is None else y * row_weights[:, None]).astype(dtype)

    def gated_product(self, x, gate, up, group_sizes, *, activation: Activation) -> jax.Array:
        return activation(*(wide_product(x, w, group_sizes) for w in (gate, up))).astype(x.dtype)

    def gated_gradients(self, x, gate, up, da, row_weights, group_sizes, *, with_slopes: WithSlopes):
        p, wide_da = row_weights[:, None], da.astype(wide(da.dtype))
        a, *slopes = with_slopes(*(wide_product(x, w, group_sizes) for w in (gate, up)))
        results = a, *(wide_da * slope for slope in slopes)
        return *((p * y).astype(x.dtype) for y in results), (wide_da * a).sum(-1).astype(row_weights.dtype)

    def weight_gradient(self, x, dy, group_sizes, *, dtype) -> jax.Array:
        kind = wide(x.dtype)
        return lax.ragged_dot_general(x, dy, group_sizes, _OVER_ROWS, preferred_element_type=kind).astype(dtype)


def wide_product(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return lax.ragged_dot(x, w, group_sizes, preferred_element_type=wide(x.dtype))


def wide(dtype):
    """What sums are made in: float32, or float64."""
    return jnp.promote_types(dtype, jnp.float32)
