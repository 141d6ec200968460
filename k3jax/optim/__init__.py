"""Optimizers as Optax transformations: Muon for matrices, AdamW for the rest."""

from k3jax.optim.groups import Group, parameter_groups
from k3jax.optim.optimizers import adamw, muon, orthogonalize_flops, scale_by_muon

__all__ = ["Group", "adamw", "muon", "orthogonalize_flops", "parameter_groups", "scale_by_muon"]
