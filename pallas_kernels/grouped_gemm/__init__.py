"""Products of groups of consecutive rows with a matrix each, on Hopper GPUs."""

from pallas_kernels.grouped_gemm.api import NotTaken, gated_product, grouped_product, weight_gradient

__all__ = ["NotTaken", "gated_product", "grouped_product", "weight_gradient"]
