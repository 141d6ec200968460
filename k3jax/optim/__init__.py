"""Optimizers as Optax transformations: Muon for matrices, AdamW for the rest."""

from k3jax.optim.clip import qk_clip
from k3jax.optim.groups import Group, group_table, parameter_groups
from k3jax.optim.optimizers import adamw, muon, muon_with_adamw
from k3jax.optim.orthogonal import newton_schulz_flops, orthogonalize, scale_by_muon

__all__ = [
    "Group",
    "adamw",
    "group_table",
    "muon",
    "muon_with_adamw",
    "newton_schulz_flops",
    "orthogonalize",
    "parameter_groups",
    "qk_clip",
    "scale_by_muon",
]
