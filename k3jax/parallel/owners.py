"""Which replica owns which elements of a parameter; how gradients reach their owner, and new values leave it.

The elements of every matrix, or of every other array of a layer, are shared out evenly among the devices that hold the same
one: each gets the sum over replicas of the gradient of its own elements alone, keeps master weights and optimizer state of
these alone, and sends back their new values (ZeRO-1). K3 report, pre-training; `parallel.matrices` makes matrices whole again
where an optimizer needs them so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshes import AXES


def replica_axes(spec: P) -> tuple[str, ...]:
    """Mesh axes on which a parameter is replicated: those that its spec does not name."""
    named = {axis for dim in spec if dim is not None for axis in ((dim,) if isinstance(dim, str) else dim)}
    return tuple(axis for axis in AXES if axis not in named)


@dataclass(frozen=True)
class Owners:
    """Of one parameter. Its first `kept` dims (stage, chunk, layer, head, expert) stay dims; all others are shared out.

    So with spec P("pipe", None, None, "expert", None, None) and kept=4 the owners' array is [S, V, J, E, replicas x owned],
    sharded P("pipe", None, None, "expert", (replica axes)). A sharded dim that is shared out leaves a dim of its shards in
    front of the last one.

    Its methods work inside shard_map, on a device's own part.
    """

    spec: P
    shape: tuple[int, ...]
    """Of the whole parameter."""
    sizes: Mapping[str, int]
    """Of the mesh axes."""
    kept: int = 0

    # ---- numbers ----------------------------------------------------------------------------------------------------------

    @property
    def _dims(self) -> tuple[str | None, ...]:
        return (*self.spec, *[None] * (len(self.shape) - len(self.spec)))

    @property
    def axes(self) -> tuple[str, ...]:
        """Replica axes."""
        return replica_axes(self.spec)

    @property
    def replicas(self) -> int:
        return math.prod(self.sizes[axis] for axis in self.axes)

    @property
    def shards(self) -> dict[int, str]:
        """Sharded dims among those that are shared out, and over which axis."""
        return {i: axis for i, axis in enumerate(self._dims) if i >= self.kept and axis is not None}

    @property
    def local(self) -> tuple[int, ...]:
        """A device's own part of the parameter."""
        return tuple(size // self.sizes.get(a or "", 1) for size, a in zip(self.shape, self._dims, strict=True))

    @property
    def elements(self) -> int:
        """Elements of a device's part that are shared out together: of one matrix, or of one layer's array."""
        return math.prod(self.local[self.kept :])

    @property
    def owned(self) -> int:
        """Of these, one owner's; the last ones are padding."""
        return math.ceil(self.elements / self.replicas)

    @property
    def padded(self) -> int:
        """All owners' together."""
        return self.owned * self.replicas

    def of_chunk(self, each: int) -> int:
        """So many of every matrix, or of every layer's array, of one chunk on one device."""
        return math.prod(self.local[2 : self.kept]) * each

    @property
    def out_spec(self) -> P:
        """Of the owners' array."""
        return P(*self._dims[: self.kept], *self.shards.values(), self.axes)

    @property
    def owned_shape(self) -> tuple[int, ...]:
        """Of the owners' array."""
        return (*self.shape[: self.kept], *(self.sizes[axis] for axis in self.shards.values()), self.padded)

    # ---- on one device ----------------------------------------------------------------------------------------------------

    def flat(self, part: jax.Array) -> jax.Array:
        """What is shared out as one dim, [..., padded]; any dims in front."""
        kept = part.shape[: part.ndim - (len(self.shape) - self.kept)]
        elements = part.reshape(*kept, self.elements)
        return jnp.pad(elements, [(0, 0)] * len(kept) + [(0, self.padded - self.elements)])

    def unflat(self, elements: jax.Array) -> jax.Array:
        """Inverse of `flat`."""
        return elements[..., : self.elements].reshape(*elements.shape[:-1], *self.local[self.kept :])

    def placed(self, own: jax.Array) -> jax.Array:
        """[..., owned] as a device's part of the owners' array."""
        return own.reshape(*self.local[: self.kept], *[1] * len(self.shards), self.owned)

    # ---- between devices --------------------------------------------------------------------------------------------------

    def scatter_flat(self, elements: jax.Array) -> jax.Array:
        """Every replica's contributions, [..., padded], to the sum over replicas for this owner's elements, [..., owned].

        One reduce-scatter: a replica sends about the bytes of the whole, an all-reduce sends twice as many.
        """
        return lax.psum_scatter(elements, self.axes, scatter_dimension=elements.ndim - 1, tiled=True)

    def scatter(self, gradient: jax.Array) -> jax.Array:
        """A device's contributions to the gradient, to its part of the owners' array, float32."""
        return self.placed(self.scatter_flat(self.flat(gradient.astype(jnp.float32))))

    def own(self, part: jax.Array) -> jax.Array:
        """A device's part of a parameter, equal on all replicas, to its part of the owners' array. Nothing is sent."""
        return self.placed(self.own_flat(self.flat(part)))

    def own_flat(self, elements: jax.Array) -> jax.Array:
        """Of [..., padded], equal on all replicas, this owner's, [..., owned]."""
        start = lax.axis_index(self.axes) * self.owned
        return lax.dynamic_slice_in_dim(elements, start, self.owned, axis=elements.ndim - 1)

    def gather(self, owned: jax.Array) -> jax.Array:
        """A device's part of the owners' array, to its part of the parameter, equal on all replicas: one all-gather."""
        own = owned.reshape(*self.local[: self.kept], self.owned)
        return self.unflat(lax.all_gather(own, self.axes, axis=own.ndim - 1, tiled=True, to="invarying"))
