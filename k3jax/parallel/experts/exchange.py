"""Rows of tokens travel to the ranks that compute them and back, and expert weights to the ranks that hold a replica.

N local tokens, A tokens of the whole expert group (N·R), R expert ranks, k experts a token, C rows of a rank, H home
experts of a rank, D any width.

Written with collectives that every backend has: all ranks see all tokens of their group and keep the rows that the plan
gives them. Sums travel back by reduce-scatter. The plan makes row buffers small and equal, not these messages. They are
few, for what is needed together travels together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from k3jax.compat import vary_like
from k3jax.parallel.experts.planner import LocalPlan, counts, plan_local


class Part(NamedTuple):
    """Consecutive rows of a rank: all of them here, a part where messages and products take turns."""

    origin: Any
    """For `combine`."""
    weights_C: Float[Array, " C"]
    tokens: tuple[Float[Array, "C D"], ...]
    """0 in rows that are not used, like the weights."""
    group_sizes: Int[Array, " slots"]


class AllGather(NamedTuple):
    """The ranks that share experts; static. axis None: one rank alone, and nothing travels."""

    axis: str | None
    num_experts: int

    @property
    def size(self) -> int:
        return 1 if self.axis is None else lax.axis_size(self.axis)

    def plan(self, experts_Nk: Int[Array, "N k"]) -> LocalPlan:
        """This rank's part of the group's plan. One all-gather of counts, R·E integers."""
        (table,) = self.gather(counts(experts_Nk, self.num_experts)[None])
        return plan_local(table, experts_Nk, 0 if self.axis is None else lax.axis_index(self.axis))

    def own_replicas(self, plan: LocalPlan) -> Int[Array, " H"]:
        """Experts of this rank's replica slots, −1 for unused ones."""
        return plan.replicas

    def dispatch(
        self, plan: LocalPlan, weights_Nk: Float[Array, "N k"], *tokens: Float[Array, "N D"], beside: Any = None
    ) -> list[Part]:
        """Every row's weight and tokens. One all-gather of what is given, and of the rows' places."""
        C = plan.destination.size
        destination_Ak, weights_Ak, *tokens_AD = self.gather(plan.destination, weights_Nk, *tokens)
        first = 0 if self.axis is None else lax.axis_index(self.axis) * C
        row = destination_Ak.reshape(-1) - first
        # Padding and rows of other ranks lie outside [0, C) here, and are dropped.
        row = jnp.where((row >= 0) & (row < C), row, C)
        assignment_C = jnp.full(C, row.size).at[row].set(jnp.arange(row.size), mode="drop")
        token_C = assignment_C // weights_Nk.shape[1]
        take = lambda x, at: x.at[at].get(mode="fill", fill_value=0)
        weights_C, x_CD = take(weights_Ak.reshape(-1), assignment_C), tuple(take(x, token_C) for x in tokens_AD)
        return [Part(assignment_C, weights_C, x_CD, plan.group_sizes)]

    def combine(
        self,
        plan: LocalPlan,
        parts: Sequence[Part],
        y_CD: Sequence[Float[Array, "_ D"]],
        *numbers: Sequence[Float[Array, " _"]],
    ) -> tuple[Float[Array, "N ..."], ...]:
        """Sums over each own token's rows, wherever they are, [N, D], and numbers at their assignments, [N, k]; float32.

        One reduce-scatter.
        """
        (N, k), (at,), (y,) = plan.destination.shape, (part.origin for part in parts), y_CD
        A = N * self.size
        fp32 = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))
        sums = vary_like(jnp.zeros((A, y.shape[1]), fp32(y).dtype), y).at[at // k].add(fp32(y), mode="drop")
        at_assignment = lambda x: jnp.zeros(A * k, x.dtype).at[at].set(x, mode="drop").reshape(A, k)
        return self.scatter_sum(sums, *(at_assignment(fp32(x)) for (x,) in numbers))

    def with_replicas(self, plan: LocalPlan, *weights: Float[Array, "H ..."]) -> tuple[Float[Array, "slots ..."], ...]:
        """Of each: the home experts', then those of the replica slots; zeros in unused slots. One all-gather."""
        if self.size == 1:
            return weights
        replicas = jnp.where(plan.replicas < 0, self.num_experts, plan.replicas)
        fetched = (x.at[replicas].get(mode="fill", fill_value=0) for x in self.gather(*weights))
        return tuple(jnp.concatenate(pair) for pair in zip(weights, fetched, strict=True))

    def to_owners(self, plan: LocalPlan, *grads: Float[Array, "slots ..."]) -> tuple[Float[Array, "H ..."], ...]:
        """Each owner's gradients and those of all its replicas: the transpose of `with_replicas`. One reduce-scatter."""
        if self.size == 1:
            return grads
        H = len(plan.replicas)
        replicas = jnp.where(plan.replicas < 0, self.num_experts, plan.replicas)
        empty = lambda g: jnp.zeros((H * self.size, *g.shape[1:]), g.dtype)
        sums = self.scatter_sum(*(empty(g).at[replicas].set(g[H:], mode="drop") for g in grads))
        return tuple(g[:H] + others for g, others in zip(grads, sums, strict=True))

    def gather(self, *arrays: Shaped[Array, "n ..."]) -> tuple[Shaped[Array, "m ..."], ...]:
        """[n, ...] of each rank -> [n·R, ...], in one message."""
        if self.axis is None:
            return arrays
        word = jnp.dtype(f"uint{8 * min(x.dtype.itemsize for x in arrays)}")
        flat = jnp.concatenate([x.reshape(len(x), -1).view(word) for x in arrays], 1)
        every = lax.all_gather(flat, self.axis, axis=0, tiled=True)
        return split(every, arrays)

    def scatter_sum(self, *arrays: Float[Array, "m ..."]) -> tuple[Float[Array, "n ..."], ...]:
        """This rank's parts [n, ...] of the sums over ranks of [n·R, ...], in one message of their widest dtype."""
        if self.axis is None:
            return arrays
        widest = jnp.result_type(*arrays)
        flat = jnp.concatenate([x.reshape(len(x), -1).astype(widest) for x in arrays], 1)
        own = lax.psum_scatter(flat, self.axis, scatter_dimension=0, tiled=True)
        like = [jax.ShapeDtypeStruct(x.shape, widest) for x in arrays]
        return tuple(part.astype(x.dtype) for part, x in zip(split(own, like), arrays, strict=True))


def split(flat: Shaped[Array, "n D"], like: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> tuple[jax.Array, ...]:
    """Columns back as arrays of these dtypes and shapes, but for the number of rows."""
    widths = [math.prod(x.shape[1:]) * x.dtype.itemsize // flat.dtype.itemsize for x in like]
    parts = jnp.split(flat, list(itertools.accumulate(widths))[:-1], 1)
    return tuple(part.view(x.dtype).reshape(-1, *x.shape[1:]) for part, x in zip(parts, like, strict=True))
