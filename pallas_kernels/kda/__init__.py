"""Kimi Delta Attention on Hopper."""

from pallas_kernels.kda.api import Residuals, forward

__all__ = ["Residuals", "forward"]
