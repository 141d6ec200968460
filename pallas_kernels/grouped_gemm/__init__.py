"""Products of groups of consecutive rows with a matrix each, on Hopper GPUs."""

from pallas_kernels.grouped_gemm.api import (
    GatedGradients,
    gated_gradients,
    gated_product,
    grouped_product,
    weight_gradient,
)

__all__ = ["GatedGradients", "gated_gradients", "gated_product", "grouped_product", "weight_gradient"]
