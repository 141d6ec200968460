"""Grouped products: rows sorted by group, each group times a matrix of its own."""

from k3jax.ops.grouped_gemm.api import (
    expert_hidden,
    expert_hidden_gradients,
    expert_input_gradient,
    grouped_gemm,
    input_gradient,
    weight_gradient,
    weighted_gemm,
)

__all__ = [
    "expert_hidden",
    "expert_hidden_gradients",
    "expert_input_gradient",
    "grouped_gemm",
    "input_gradient",
    "weight_gradient",
    "weighted_gemm",
]
