"""Differences between the supported JAX versions live here, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax import lax
from jax.extend import core


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Mesh axes over which x differs between devices, inside shard_map; empty outside."""
    return axes_of_type(jax.typeof(x))


def axes_of_type(aval: Any) -> frozenset[str]:
    """Mesh axes over which a value of this abstract type differs between devices."""
    return aval.mat.varying


def vary_like(x: jax.Array, *refs: jax.Array) -> jax.Array:
    """x, marked as varying over every mesh axis that one of refs varies over.

    A scan carry and the branches of a cond must agree on this; a fresh array of zeros varies over nothing.
    """
    return vary(x, frozenset().union(*map(varying_axes, refs)))


def vary(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """x, marked as varying over these mesh axes too."""
    missing = frozenset(axes) - varying_axes(x)
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def scan_arity(eqn: core.JaxprEqn) -> tuple[int, int]:
    """Numbers of constants and of carries of a scan; what follows among its operands is scanned."""
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carries, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carries)
