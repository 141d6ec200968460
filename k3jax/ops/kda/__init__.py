"""Kimi Delta Attention: S ← (I − β k kᵀ) Diag(exp g) S + β k vᵀ, o = scale · Sᵀ q, token by token and head by head."""

from k3jax.ops.kda.affine import compose
from k3jax.ops.kda.api import kda, kda_step, summarize
from k3jax.ops.kda.gate import kda_gate

__all__ = ["compose", "kda", "kda_gate", "kda_step", "summarize"]
