"""Sums of a rank's chunk gradients over microbatches: whole on the device, or in owner shards in host memory (ZeRO-2).

V virtual chunks.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.parallel.boxes import add_at, empty, replace, take, vary
from k3jax.parallel.schedules import Schedule
from k3jax.parallel.zero import buffering

Tree = Any


def padded(size: int, replicas: int) -> int:
    """Elements of a flat gradient that divides by its replicas: every owner has equally many, the last some of padding."""
    return math.ceil(size / replicas) * replicas


def flat(gradient: jax.Array, size: int, kept: int = 0) -> jax.Array:
    """All dims but the first few `kept` ones as one float32 dim of that many elements, the last of them zeros."""
    elements = gradient.reshape(*gradient.shape[:kept], -1).astype(jnp.float32)
    return jnp.pad(elements, [(0, 0)] * kept + [(0, size - elements.shape[-1])])


def scatter(flat_gradient: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """This replica's own part of the sum over replicas.

    Before: every replica holds contributions to all elements. After: the sum for its own elements alone, in the order of
    replicas. One reduce-scatter; a replica sends about the bytes of the whole, an all-reduce sends twice as many.
    """
    return lax.psum_scatter(flat_gradient, axes, scatter_dimension=flat_gradient.ndim - 1, tiled=True)


class WholeSums:
    """Every replica holds the whole sum for each of its chunks, [V, ...]; summing over replicas is left to do."""

    columns: Tree = {}

    def empty(self, chunks: Tree) -> Tree:
        return vary(jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), chunks))

    def add(self, sums: Tree, row: Tree, stage: jax.Array, v: jax.Array, part: Tree) -> Tree:
        return add_at(sums, v, part)

    def finish(self, sums: Tree, stage: jax.Array) -> Tree:
        return sums


class ShardedSums:
    """Two buffers on the device, and for each chunk this replica's shard of the sum over replicas in host memory.

    `replicas`: for each leaf of the chunks, the mesh axes on which it is replicated. All members of such a group are on one
    stage, so a flush may stand in a rank-dependent branch; there it costs nothing in ticks without one. `finish` gives
    [V, elements of one owner]. K3 report, pre-training: Pipeline ZeRO-2; the plan is `k3jax.parallel.zero`.
    """

    def __init__(self, schedule: Schedule, replicas: Tree):
        self.plan, self.replicas = buffering(schedule), replicas
        self.columns = {"buffer": self.plan.buffer, "starts": self.plan.starts, "flush": self.plan.flush}

    def empty(self, chunks: Tree) -> Tree:
        def sizes(a, axes):
            count = lax.axis_size(axes)
            size = padded(math.prod(a.shape[1:]), count)
            return jax.ShapeDtypeStruct((size,), jnp.float32), jax.ShapeDtypeStruct((size // count,), jnp.float32)

        both = jax.tree.map(sizes, chunks, self.replicas)
        whole, shard = (jax.tree.map(lambda _, pair, i=i: pair[i], chunks, both) for i in (0, 1))
        virtual = jax.tree.leaves(chunks)[0].shape[0]
        return {
            "buffers": empty(whole, self.plan.num_buffers),
            "shards": jax.device_put(empty(shard, virtual), jax.memory.Space.Host),
        }

    def add(self, sums: Tree, row: Tree, stage: jax.Array, v: jax.Array, part: Tree) -> Tree:
        buffers, shards, index = sums["buffers"], sums["shards"], jnp.maximum(row["buffer"][stage], 0)
        if (self.plan.flush >= 0).any():
            # A flush says where to add meanwhile: XLA then knows that it reads before the sum is written, and copies nothing.
            flush = lambda shards, index: (
                self._flush(buffers, shards, *row["flush"][stage]),
                1 - row["flush"][stage, 0],
            )
            keep = lambda *unchanged: unchanged
            shards, index = lax.cond(row["flush"][stage, 0] >= 0, flush, keep, shards, index)
        elements = jax.tree.map(lambda d, b: flat(d, b.shape[1]), part, buffers)
        return {"buffers": add_at(buffers, index, elements, fresh=row["starts"][stage]), "shards": shards}

    def finish(self, sums: Tree, stage: jax.Array) -> Tree:
        shards = sums["shards"]
        for buffer, rest in enumerate(jnp.asarray(self.plan.rest)):
            shards = self._flush(sums["buffers"], shards, buffer, *rest[stage])
        return jax.device_put(shards, jax.memory.Space.Device)

    def _flush(self, buffers: Tree, shards: Tree, buffer: jax.Array | int, chunk: jax.Array, first: jax.Array) -> Tree:
        """The shards with a buffer reduce-scattered into that of a chunk.

        Memory that nobody has written holds anything on a GPU: the first flush of a chunk stores, later ones add.
        """
        parts = jax.tree.map(scatter, take(buffers, jnp.int32(buffer)), self.replicas)
        before = jax.device_put(take(shards, chunk), jax.memory.Space.Device)
        after = jax.tree.map(lambda a, d: jnp.where(first > 0, d, a + d), before, parts)
        return vary(replace(shards, jax.device_put(after, jax.memory.Space.Host), chunk))
