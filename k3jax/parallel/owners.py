"""How a gradient lies among the replicas of its parameter when every element has exactly one owner."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.parallel.gradient_sums import flat, padded, scatter
from meshes import AXES


def replica_axes(spec: P) -> tuple[str, ...]:
    """Mesh axes on which a parameter is replicated: those that its spec does not name."""
    named = {axis for dim in spec if dim is not None for axis in ((dim,) if isinstance(dim, str) else dim)}
    return tuple(axis for axis in AXES if axis not in named)


@dataclass(frozen=True)
class Owners:
    """Of one parameter: dims of its gradient are flattened on each device, padded, and split over the replicas in order.

    The first `kept` dims (stage and chunk of a stack) stay dims. So with spec P("pipe", None, None, "expert") and kept=2
    the owners' array is [S, V, expert, replicas x elements of one owner], sharded P("pipe", None, "expert", (replica axes)).
    """

    spec: P
    shape: tuple[int, ...]
    """Of the whole parameter."""
    sizes: Mapping[str, int]
    """Of the mesh axes."""
    kept: int = 0

    @property
    def axes(self) -> tuple[str, ...]:
        """Replica axes."""
        return replica_axes(self.spec)

    @property
    def replicas(self) -> int:
        return math.prod(self.sizes[axis] for axis in self.axes)

    @property
    def sharded_dims(self) -> dict[int, str]:
        """Flattened dims that are sharded, and over which axis."""
        return {i: axis for i, axis in enumerate(self.spec) if i >= self.kept and axis is not None}

    @property
    def elements(self) -> int:
        """Elements that one device flattens, of one chunk."""
        split = math.prod(self.sizes[axis] for axis in self.sharded_dims.values())
        return math.prod(self.shape[self.kept :]) // split

    @property
    def owned(self) -> int:
        """Elements of one owner, padding included."""
        return padded(self.elements, self.replicas) // self.replicas

    @property
    def out_spec(self) -> P:
        """Of the owners' array."""
        return P(*self.spec[: self.kept], *self.sharded_dims.values(), self.axes)

    def scatter(self, gradient: jax.Array) -> jax.Array:
        """A device's own contributions to the gradient, to this owner's part of the sum over replicas."""
        return self.placed(scatter(flat(gradient, self.owned * self.replicas, self.kept), self.axes))

    def placed(self, shard: jax.Array) -> jax.Array:
        """A device's part of the owners' array from its own elements, in whatever dims."""
        local = [self.shape[i] // self.sizes.get(self.spec[i] or "", 1) for i in range(self.kept)]
        return shard.reshape(*local, *[1] * len(self.sharded_dims), self.owned)

    def whole(self, owners: jax.Array, mesh: Mesh | AbstractMesh) -> jax.Array:
        """The logical gradient from the owners' array, outside of shard_map; an all-gather over the replicas."""
        constrain = lambda x, spec: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
        gathered = constrain(owners, P(*self.out_spec[:-1], None))[..., : self.elements]
        kept, parts = self.kept, {dim: self.sizes[axis] for dim, axis in self.sharded_dims.items()}
        local = [size // parts.get(dim, 1) for dim, size in enumerate(self.shape)][kept:]
        apart = gathered.reshape(*self.shape[:kept], *parts.values(), *local)
        place = {dim: kept + i for i, dim in enumerate(parts)}
        order = list(range(kept))
        for dim in range(kept, len(self.shape)):  # what a dim was split into goes in front of its local rest
            order += [place[dim]] if dim in place else []
            order.append(dim + len(parts))
        return constrain(apart.transpose(order).reshape(self.shape), self.spec)
