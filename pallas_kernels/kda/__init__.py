"""Kimi Delta Attention on Hopper."""

from pallas_kernels.kda.api import Gradients, Residuals, backward, forward
from pallas_kernels.kda.decode import Decoded, Token, Weights, decode_token

__all__ = ["Decoded", "Gradients", "Residuals", "Token", "Weights", "backward", "decode_token", "forward"]
