"""Kimi Delta Attention on Hopper."""

from pallas_kernels.kda.api import Gradients, Residuals, backward, forward

__all__ = ["Gradients", "Residuals", "backward", "forward"]
