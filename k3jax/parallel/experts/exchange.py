"""Rows of tokens travel to the ranks that compute them and back, and expert weights to the ranks that hold a replica.

N local tokens, A tokens of the whole expert group (N·R), R expert ranks, k experts a token, C rows of a rank, H home
experts of a rank, D any width.

Written with collectives that every backend has: all ranks see all tokens of their group and keep the rows that the plan
gives them. Sums travel back by reduce-scatter. The plan makes row buffers small and equal, not these messages.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from k3jax.parallel.experts import planner


class Rows(NamedTuple):
    """What a rank has to know of its rows, and of where its own assignments went."""

    source_C: Int[Array, " C"]
    """Which token of the group a row is of; A for rows that are not used."""
    destination_Nk: Int[Array, "N k"]
    """rank · C + row of the own assignments, −1 for padding."""
    group_sizes: Int[Array, " slots"]
    """Rows of each expert slot, contiguous and in this order: home experts, then replicas."""
    replicas: Int[Array, " H"]
    """Experts of the replica slots, −1 if unused; empty on one rank alone."""

    @property
    def used_C(self) -> jax.Array:
        return jnp.arange(self.source_C.shape[0]) < self.group_sizes.sum()


class Group(NamedTuple):
    """The ranks that share experts; static. axis None: one rank alone, and nothing travels."""

    axis: str | None
    num_experts: int

    @property
    def size(self) -> int:
        return 1 if self.axis is None else lax.axis_size(self.axis)

    @property
    def rank(self) -> jax.Array | int:
        return 0 if self.axis is None else lax.axis_index(self.axis)

    def gather(self, x: jax.Array) -> jax.Array:
        """[n, ...] of each rank -> [n·R, ...]."""
        return x if self.axis is None else lax.all_gather(x, self.axis, axis=0, tiled=True)

    def scatter_sum(self, x: jax.Array) -> jax.Array:
        """The transpose of `gather`: this rank's part of the sum over ranks."""
        return x if self.axis is None else lax.psum_scatter(x, self.axis, scatter_dimension=0, tiled=True)

    def rows(self, experts_Nk: Int[Array, "N k"]) -> Rows:
        """Plan the group's rows. Collectives: all-gather of counts [E] and destinations [N, k]."""
        N, k = experts_Nk.shape
        C = planner.static_rows(N * k, self.num_experts, self.size, tile=1)
        counts = planner.counts(experts_Nk, self.num_experts)
        placement = planner.place(self.gather(counts[None]))
        own = lambda x: lax.dynamic_index_in_dim(x, self.rank, keepdims=False)
        destination_Nk = planner.destinations(placement, experts_Nk, self.rank, rows=C)
        # −1 and rows of other ranks lie outside [0, C) here, and are dropped.
        row_Ak = self.gather(destination_Nk) - self.rank * C
        row_Ak = jnp.where((row_Ak >= 0) & (row_Ak < C), row_Ak, C)
        A = row_Ak.shape[0]
        token_Ak = jnp.broadcast_to(jnp.arange(A)[:, None], row_Ak.shape)
        source_C = jnp.full(C, A).at[row_Ak].set(token_Ak, mode="drop")
        sizes, replicas = own(placement.group_sizes), own(placement.replicas)
        if self.size == 1:
            sizes, replicas = sizes[: self.num_experts], replicas[:0]
        return Rows(source_C, destination_Nk, sizes, replicas)

    def dispatch(self, x_ND: Float[Array, "N D"], rows: Rows) -> Float[Array, "C D"]:
        """Each row's token; 0 in rows that are not used. One all-gather of the tokens."""
        return self.gather(x_ND).at[rows.source_C].get(mode="fill", fill_value=0)

    def combine(self, y_CD: Float[Array, "C D"], rows: Rows) -> Float[Array, "N D"]:
        """The transpose of `dispatch`: the sum of each own token's rows, wherever they are. One reduce-scatter."""
        N = rows.destination_Nk.shape[0]
        sums = jnp.zeros((N * self.size, y_CD.shape[1]), y_CD.dtype)
        return self.scatter_sum(sums.at[rows.source_C].add(y_CD, mode="drop"))

    def to_rows(self, value_Nk: jax.Array, rows: Rows) -> jax.Array:
        """One number an assignment, as [C]; 0 in rows that are not used. One all-gather."""
        C = rows.source_C.shape[0]
        row_Ak = self.gather(rows.destination_Nk) - self.rank * C
        row_Ak = jnp.where((row_Ak >= 0) & (row_Ak < C), row_Ak, C)
        return jnp.zeros(C, value_Nk.dtype).at[row_Ak].set(self.gather(value_Nk), mode="drop")

    def from_rows(self, value_C: jax.Array, rows: Rows) -> jax.Array:
        """One number a row, back at its assignment [N, k]; 0 for padding. One all-gather."""
        destination = jnp.where(rows.destination_Nk < 0, self.size * value_C.shape[0], rows.destination_Nk)
        return self.gather(value_C).at[destination].get(mode="fill", fill_value=0)

    def with_replicas(self, weights: jax.Array, rows: Rows) -> jax.Array:
        """Weights of the home experts [H, ...], then those of the replica slots; unused slots have zeros. One all-gather."""
        if self.size == 1:
            return weights
        replicas = jnp.where(rows.replicas < 0, self.num_experts, rows.replicas)
        fetched = self.gather(weights).at[replicas].get(mode="fill", fill_value=0)
        return jnp.concatenate([weights, fetched])

    def to_owners(self, grads: jax.Array, rows: Rows) -> jax.Array:
        """The transpose of `with_replicas`: each owner's gradients and those of all its replicas. One reduce-scatter."""
        if self.size == 1:
            return grads
        H = rows.replicas.shape[0]
        replicas = jnp.where(rows.replicas < 0, self.num_experts, rows.replicas)
        sums = jnp.zeros((H * self.size, *grads.shape[1:]), grads.dtype).at[replicas].add(grads[H:], mode="drop")
        return grads[:H] + self.scatter_sum(sums)
