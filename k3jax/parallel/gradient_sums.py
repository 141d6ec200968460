"""Sums of a rank's chunk gradients over microbatches: whole on the device, or in owner shards in host memory (ZeRO-2).

V virtual chunks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from k3jax.parallel.boxes import add_at, empty, replace, take, vary
from k3jax.parallel.schedules import Schedule
from k3jax.parallel.zero import buffering

Tree = Any


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

    `owners`: `k3jax.parallel.owners.Owners` of each leaf of the chunks. All members of a group of replicas are on one stage,
    so a flush may stand in a rank-dependent branch; there it costs nothing in ticks without one. `finish` gives
    [V, …, owned]. K3 report, pre-training: Pipeline ZeRO-2; the plan is `k3jax.parallel.zero`.
    """

    def __init__(self, schedule: Schedule, owners: Tree):
        self.plan, self.owners = buffering(schedule), owners
        self.columns = {"buffer": self.plan.buffer, "starts": self.plan.starts, "flush": self.plan.flush}

    def empty(self, chunks: Tree) -> Tree:
        of_shape = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
        inner = lambda o: o.local[2 : o.kept]  # of stage and chunk, one at a time
        whole = jax.tree.map(lambda o: of_shape(*inner(o), o.padded), self.owners)
        shard = jax.tree.map(lambda o: of_shape(*inner(o), o.owned), self.owners)
        virtual = jax.tree.leaves(chunks)[0].shape[0]
        return {
            "buffers": empty(whole, self.plan.num_buffers),
            "shards": jax.device_put(empty(shard, virtual), jax.memory.Space.Host),
        }

    def add(self, sums: Tree, row: Tree, stage: jax.Array, v: jax.Array, part: Tree) -> Tree:
        buffers, shards, index = sums["buffers"], sums["shards"], jnp.maximum(row["buffer"][stage], 0)
        if (self.plan.flush >= 0).any():
            source, *target = row["flush"][stage]
            # A flush says where to add meanwhile: XLA then knows that it reads before the sum is written, and copies nothing.
            flush = lambda shards, _: (self._flush(buffers, shards, source, *target), 1 - source)
            keep = lambda *unchanged: unchanged
            shards, index = jax.lax.cond(source >= 0, flush, keep, shards, index)
        elements = jax.tree.map(lambda o, d: o.flat(d.astype(jnp.float32)), self.owners, part)
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
        parts = jax.tree.map(
            lambda o, elements: o.scatter_flat(elements), self.owners, take(buffers, jnp.int32(buffer))
        )
        before = jax.device_put(take(shards, chunk), jax.memory.Space.Device)
        after = jax.tree.map(lambda a, d: jnp.where(first > 0, d, a + d), before, parts)
        return vary(replace(shards, jax.device_put(after, jax.memory.Space.Host), chunk))
