"""Kimi Delta Attention on Hopper."""

from pallas_kernels.kda.api import Gradients, Residuals, Rows, backward, check, forward, gradients, rows
from pallas_kernels.kda.decode import Decoded, Token, Weights, decode_token

__all__ = [
    "Decoded",
    "Gradients",
    "Residuals",
    "Rows",
    "Token",
    "Weights",
    "backward",
    "check",
    "decode_token",
    "forward",
    "gradients",
    "rows",
]
