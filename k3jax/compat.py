"""Differences between the supported JAX versions live here, and nowhere else."""

from __future__ import annotations

import jax
from jax import lax


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Mesh axes over which x differs between devices, inside shard_map; empty outside."""
    return jax.typeof(x).mat.varying


def vary_like(x: jax.Array, *refs: jax.Array) -> jax.Array:
    """x, marked as varying over every mesh axis that one of refs varies over.

    A scan carry and the branches of a cond must agree on this; a fresh array of zeros varies over nothing.
    """
    missing = frozenset().union(*map(varying_axes, refs)) - varying_axes(x)
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x
