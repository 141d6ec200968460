"""The door to the Hopper kernels of grouped products.

C rows, G groups, D and F widths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from pallas_kernels import grouped_gemm as kernels

Activation = Callable[[jax.Array, jax.Array], jax.Array]
WithSlopes = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
"""An activation and its derivatives by both arguments."""


class Mosaic(NamedTuple):
    """Raises ValueError for what the kernels do not take."""

    interpret: bool = False
    """In Mosaic's interpreter, on CPU."""

    def product(self, x, w, group_sizes, *, dtype, transposed=False, row_weights=None) -> jax.Array:
        """Of tuples x and w the sum over them."""
        how = {"transposed": transposed, "row_weights": row_weights, "dtype": dtype}
        return kernels.grouped_product(x, w, group_sizes, **how, interpret=self.interpret)

    def gated_product(self, x, gate, up, group_sizes, *, activation: Activation) -> jax.Array:
        return kernels.gated_product(x, gate, up, group_sizes, activation=activation, interpret=self.interpret)

    def gated_gradients(self, x, gate, up, da, row_weights, group_sizes, *, with_slopes: WithSlopes):
        how = {"with_slopes": with_slopes, "interpret": self.interpret}
        return tuple(kernels.gated_gradients(x, gate, up, da, row_weights, group_sizes, **how))

    def weight_gradient(self, x, dy, group_sizes, *, dtype) -> jax.Array:
        return kernels.weight_gradient(x, dy, group_sizes, dtype=dtype, interpret=self.interpret)
