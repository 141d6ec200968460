"""The executor over chunks that only scale their input: quick to compile, with leaves that divide by nothing."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from k3jax.parallel import pipeline
from k3jax.parallel.owners import Owners
from k3jax.parallel.reports import Report
from k3jax.parallel.schedules import build
from meshes import MeshSpec

LEAVES = {"five": (5,), "seven": (7,), "one": (1, 1)}  # fewer elements than replicas, and none a multiple of them


@dataclasses.dataclass(frozen=True, eq=False)
class Toy:
    """Gradients of the chunks, whole (zero=0) or through buffers and owners' shards (zero=2)."""

    mesh: str
    schedule: str
    virtual: int
    microbatches: int
    zero: int
    leaves: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=lambda: LEAVES)
    devices: list | None = None
    kept: int = 2
    """Dims of a leaf that are not shared out."""

    @property
    def spec(self) -> MeshSpec:
        return MeshSpec.parse(self.mesh)

    @property
    def width(self) -> int:
        """Of the stream: each of its elements is scaled by the sum of one row of a leaf."""
        return sum(shape[0] for shape in self.leaves.values())

    @property
    def elements(self) -> int:
        """Of a chunk's leaves."""
        return sum(map(math.prod, self.leaves.values()))

    @property
    def owners(self) -> dict[str, Owners]:
        spec = lambda shape: P("pipe", None, *[None] * len(shape))
        stacked = lambda shape: (self.spec.pipe, self.virtual, *shape)
        return {n: Owners(spec(s), stacked(s), self.spec.sizes, self.kept) for n, s in self.leaves.items()}

    def problem(self, seed: int = 0):
        """params, inputs [M, ranks, width], and each microbatch's factor [M]."""
        spec, random = self.spec, np.random.default_rng(seed)
        draw = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)
        params = {
            "embed": {"scale": draw(self.width)},
            "chunks": {n: 0.1 * draw(spec.pipe, self.virtual, *shape) for n, shape in self.leaves.items()},
            "dense": {},
            "head": {"w": draw(self.width)},
        }
        ranks = spec.data * spec.expert * spec.context
        return params, draw(self.microbatches, ranks, self.width), draw(self.microbatches)

    @functools.cached_property
    def gradients(self):
        """Of `problem()`: sums over microbatches and replicas."""
        gather = lambda grads: {name: o.gather(grads[name]) for name, o in self.owners.items()}
        owned = {name: o.out_spec for name, o in self.owners.items()}
        whole = jax.shard_map(gather, mesh=self.built, in_specs=(owned,), out_specs=P("pipe"))
        return jax.jit(lambda *problem: whole(self.sharded(*problem)) if self.zero else self.sharded(*problem))

    @functools.cached_property
    def built(self):
        return self.spec.build(self.devices)

    @property
    def sharded(self):
        """The same as they leave shard_map: with zero=2, in owners' arrays."""
        specs = {"embed": P(), "chunks": P("pipe"), "dense": {}, "head": P()}
        out_specs = {name: o.out_spec for name, o in self.owners.items()} if self.zero else P("pipe")
        in_specs = (specs, P(None, pipeline.REPLICAS), P())
        return jax.shard_map(self._local, mesh=self.built, in_specs=in_specs, out_specs=out_specs)

    def _local(self, params, inputs, factors):
        def chunk(weights, x, factor):  # linear in its weights: a microbatch's gradient is its factor times x
            rows = [weights["chunk"][name].reshape(shape[0], -1) for name, shape in self.leaves.items()]
            w = jnp.concatenate([row.sum(1) for row in rows])
            return x * checkpoint_name(jnp.broadcast_to(1 + w * factor, x.shape), "toy.scale"), Report()

        program = pipeline.Program(
            embed=lambda p, m: lax.psum(jnp.where(lax.axis_index("pipe") == 0, inputs[m] * p["scale"], 0), "pipe"),
            chunk=pipeline.KEEP_ALL.checkpoint(chunk, {"toy.scale"}),
            extras=lambda v, m: factors[m],
            head=lambda p, x, m, last: lax.psum(jnp.where(last, (x * p["w"]).sum(), 0), "pipe"),
        )
        mine = params | {"chunks": jax.tree.map(lambda a: a[0], params["chunks"])}
        sizes = dict(stages=self.spec.pipe, virtual=self.virtual, microbatches=self.microbatches)
        owners = self.owners if self.zero else None
        out = pipeline.run(build(self.schedule, **sizes), program, mine, jnp.ones(()), owners=owners)
        chunks = out.grads["chunks"]
        if self.zero:
            return {name: o.placed(chunks[name]) for name, o in self.owners.items()}
        return jax.tree.map(lambda a: lax.psum(a, pipeline.REPLICAS)[None], chunks)
