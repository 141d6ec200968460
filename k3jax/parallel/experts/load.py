"""How evenly experts and ranks are loaded, counted where rows are planned."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

AXIS, OTHERS = "expert", ("data", "context")


class Load(NamedTuple):
    """Of one rank and layer; sums over microbatches."""

    computed: Int[Array, "*layers"]
    """Rows that this rank computed."""
    replicas: Int[Array, "*layers"]
    """Experts of other ranks that it fetched."""
    routed_E: Int[Array, "*layers E"]
    """Assignments of its own tokens to each expert."""


class LoadMetrics(NamedTuple):
    """Of a step; the same on every rank."""

    rows_max_over_mean: Float[Array, ""]
    """Busiest over mean rank of an expert group, in the worst layer and group; 1 without MoE layers."""
    max_vio: Float[Array, ""]
    """(busiest - mean) / mean expert, before planning, in the worst layer."""
    replicas: Int[Array, ""]
    """Experts fetched by all ranks."""
    dropped: Int[Array, ""]
    """Assignments that no rank computed."""


def load_metrics(load: Load) -> LoadMetrics:
    """From the loads of this rank's layers; inside the step's shard_map. Collectives: sums and maxima of a few integers."""
    ranks, E = lax.axis_size(AXIS), load.routed_E.shape[-1]
    over_mean = lambda most, total, n: jnp.where(total > 0, most * n / jnp.maximum(total, 1), 1.0)
    rows = over_mean(lax.pmax(load.computed, AXIS), lax.psum(load.computed, AXIS), ranks)
    routed_E = lax.psum(load.routed_E, (AXIS, *OTHERS))
    experts = over_mean(routed_E.max(-1), routed_E.sum(-1), E)
    everywhere = (AXIS, *OTHERS, "pipe")
    return LoadMetrics(
        lax.pmax(rows.max(), (*OTHERS, "pipe")),
        lax.pmax(experts.max(), "pipe") - 1.0,
        lax.psum(load.replicas.sum(), everywhere),
        lax.psum(load.routed_E.sum() - load.computed.sum(), everywhere),
    )
