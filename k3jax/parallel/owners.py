"""Which replica owns which part of a parameter; how gradients reach their owner, and new values leave it.

A parameter is a stack of units: whole matrices where the optimizer needs them whole (Muon), else single elements. Units are
dealt evenly to the devices that hold the same parameter, in order, the last places with padding. An owner gets the sum over
replicas of the gradient of its own units alone, keeps their optimizer state alone, and sends back their new values: ZeRO
without a buffer of all parameters, and without a matrix in pieces. K3 report, pre-training: Muon.

S pipeline stages, V virtual chunks of a stage, U units of one device's part of a parameter, D owners.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from meshes import AXES


def replica_axes(spec: P) -> tuple[str, ...]:
    """Mesh axes on which a parameter is replicated: those that its spec does not name."""
    named = {axis for dim in spec if dim is not None for axis in ((dim,) if isinstance(dim, str) else dim)}
    return tuple(axis for axis in AXES if axis not in named)


@dataclass(frozen=True)
class Owners:
    """Of one parameter. Its first `kept` dims (stage and chunk of a stack) stay as they are, its last `unit_dims` make a unit,
    those between are batch dims.

    So with spec P("pipe", None, None, "expert", None, None), kept=2 and unit_dims=2 the owners' array is
    [S, V, expert, owners x slots, rows, columns], sharded P("pipe", None, "expert", (replica axes), None, None). If a unit
    itself is sharded, the ranks that hold pieces of it are owners too, and get whole units for their pieces.

    All methods but `owned_shape` work inside shard_map, on a device's own part, with any number of the kept dims in front.
    Raises ValueError if more than one dim of a unit is sharded.
    """

    spec: P
    shape: tuple[int, ...]
    """Of the whole parameter."""
    sizes: Mapping[str, int]
    """Of the mesh axes."""
    kept: int = 0
    unit_dims: int = 0
    first: int = 0
    """The first owner that has a unit, where there are fewer units than owners."""

    def __post_init__(self):
        pieces = [axis for axis in self._dims[self.unit_start :] if axis is not None]
        if len(pieces) > 1:
            raise ValueError(f"a unit of {self.shape} is sharded as {self.spec}: at most one of its dims may be")
        if self.first and self.first + self.units > self.owners:
            raise ValueError(f"{self.units} units from owner {self.first} on: there are {self.owners} owners")

    # ---- numbers ----------------------------------------------------------------------------------------------------------

    @property
    def _dims(self) -> tuple[str | None, ...]:
        return (*self.spec, *[None] * (len(self.shape) - len(self.spec)))

    @property
    def unit_start(self) -> int:
        return len(self.shape) - self.unit_dims

    @property
    def axes(self) -> tuple[str, ...]:
        """Replica axes."""
        return replica_axes(self.spec)

    @property
    def replicas(self) -> int:
        return math.prod(self.sizes[axis] for axis in self.axes)

    @property
    def pieces(self) -> tuple[int, str] | None:
        """The sharded dim of a unit, counted from the end (-1 is the last), and its axis."""
        found = [(i - len(self.shape), a) for i, a in enumerate(self._dims) if i >= self.unit_start and a is not None]
        return found[0] if found else None

    @property
    def owner_axes(self) -> tuple[str, ...]:
        """Axes over which units are dealt."""
        return (*self.axes, self.pieces[1]) if self.pieces else self.axes

    @property
    def owners(self) -> int:
        return math.prod(self.sizes[axis] for axis in self.owner_axes)

    @property
    def batch_parts(self) -> dict[int, str]:
        """Batch dims that are sharded, and over which axis."""
        return {i: a for i, a in enumerate(self._dims[: self.unit_start]) if i >= self.kept and a is not None}

    @property
    def local(self) -> tuple[int, ...]:
        """A device's own part, kept dims left out."""
        sizes = [size // self.sizes.get(axis or "", 1) for size, axis in zip(self.shape, self._dims, strict=True)]
        return tuple(sizes[self.kept :])

    @property
    def unit(self) -> tuple[int, ...]:
        """Shape of a whole unit; () for single elements."""
        return self.shape[self.unit_start :]

    @property
    def local_unit(self) -> tuple[int, ...]:
        """Of a unit, what one device has before it gets its own whole."""
        return self.local[len(self.local) - self.unit_dims :]

    @property
    def units(self) -> int:
        """Units of a device's part, or pieces of them, of one chunk."""
        return math.prod(self.local[: len(self.local) - self.unit_dims])

    @property
    def slots(self) -> int:
        """Units of one owner, padding included."""
        return math.ceil(self.units / self.owners)

    @property
    def elements(self) -> int:
        """Elements of a device's part, of one chunk."""
        return math.prod(self.local)

    @property
    def padded(self) -> int:
        """Elements of a device's part with the padding that makes it divide, of one chunk."""
        return self.owners * self.slots * math.prod(self.local_unit)

    @property
    def owned(self) -> int:
        """Elements of one owner, padding included, of one chunk."""
        return self.slots * math.prod(self.unit)

    @property
    def of_units(self) -> Owners:
        """The same owners of one number for each unit."""
        dims = dict(spec=P(*self._dims[: self.unit_start]), shape=self.shape[: self.unit_start], unit_dims=0)
        return dataclasses.replace(self, **dims)

    @property
    def out_spec(self) -> P:
        """Of the owners' array."""
        return P(*self._dims[: self.kept], *self.batch_parts.values(), self.owner_axes, *[None] * self.unit_dims)

    @property
    def owned_shape(self) -> tuple[int, ...]:
        """Of the owners' array."""
        parts = [self.sizes[axis] for axis in self.batch_parts.values()]
        return (*self.shape[: self.kept], *parts, self.owners * self.slots, *self.unit)

    # ---- a device's part as units -----------------------------------------------------------------------------------------

    def units_of(self, part: jax.Array) -> jax.Array:
        """[..., local dims] as [..., owners x slots, unit]: padded with zeros."""
        kept = part.shape[: part.ndim - len(self.local)]
        units = part.reshape(*kept, self.units, *self.local_unit)
        before = self.first * self.slots
        pads = [(before, self.owners * self.slots - before - self.units)]
        return jnp.pad(units, [(0, 0)] * len(kept) + pads + [(0, 0)] * self.unit_dims)

    def part_of(self, units: jax.Array) -> jax.Array:
        """Inverse of `units_of`."""
        dim, before = self._dim(units), self.first * self.slots
        kept = units.shape[:dim]
        return lax.slice_in_dim(units, before, before + self.units, axis=dim).reshape(*kept, *self.local)

    def _dim(self, units: jax.Array) -> int:
        """Which dim counts units."""
        return units.ndim - self.unit_dims - 1

    # ---- between devices --------------------------------------------------------------------------------------------------

    def scatter_units(self, units: jax.Array) -> jax.Array:
        """Every replica's contributions to all units, to the sum over replicas for this owner's units alone, [..., slots, unit].

        One reduce-scatter: a replica sends about the bytes of its part once, where an all-reduce sends them twice. Pieces of
        units are then put together by an all-to-all among those that hold them.
        """
        own = lax.psum_scatter(units, self.axes, scatter_dimension=self._dim(units), tiled=True)
        if self.pieces:
            dim, axis = self.pieces
            own = lax.all_to_all(own, axis, split_axis=self._dim(own), concat_axis=own.ndim + dim, tiled=True)
        return own

    def gather_units(self, own: jax.Array) -> jax.Array:
        """What each owner has of its units, to all units on every replica: one all-gather; inverse of the above."""
        if self.pieces:
            dim, axis = self.pieces
            own = lax.all_to_all(own, axis, split_axis=own.ndim + dim, concat_axis=self._dim(own), tiled=True)
        return lax.all_gather(own, self.axes, axis=self._dim(own), tiled=True, to="invarying")

    def scatter(self, gradient: jax.Array) -> jax.Array:
        """A device's contributions to the gradient, [kept dims, local dims], to its part of the owners' array, float32."""
        return self.placed(self.scatter_units(self.units_of(gradient.astype(jnp.float32))))

    def own(self, part: jax.Array) -> jax.Array:
        """A device's part of a parameter, equal on all replicas, to its part of the owners' array. Replicas send nothing."""
        units = self.units_of(part)
        dim, slots = self._dim(units), units.shape[self._dim(units)] // self.replicas
        own = lax.dynamic_slice_in_dim(units, lax.axis_index(self.axes) * slots, slots, axis=dim)
        if self.pieces:
            dim, axis = self.pieces
            own = lax.all_to_all(own, axis, split_axis=self._dim(own), concat_axis=own.ndim + dim, tiled=True)
        return self.placed(own)

    def gather(self, owned: jax.Array) -> jax.Array:
        """A device's part of the owners' array, to its part of the parameter, equal on all replicas."""
        kept = owned.shape[: self.kept]
        return self.part_of(self.gather_units(owned.reshape(*kept, *owned.shape[self.kept + len(self.batch_parts) :])))

    def placed(self, own: jax.Array) -> jax.Array:
        """[..., slots, unit] as a device's part of the owners' array: with the dims that batch dims are sharded over."""
        kept = [self.shape[i] // self.sizes.get(self._dims[i] or "", 1) for i in range(self.kept)]
        return own.reshape(*kept, *[1] * len(self.batch_parts), self.slots, *self.unit)


# ---- who gets what there are few of --------------------------------------------------------------------------------------


def balanced(owners: Sequence[Owners], costs: Sequence[int | float]) -> list[Owners]:
    """The same, with the owners of parameters of fewer units than owners chosen so that work is spread.

    costs: of one unit of each. Greedy, the largest first: each goes to the neighbouring devices whose most loaded one has the
    least so far. Where there are as many units as owners, all have equally many slots, and there is nothing to choose.
    """
    result = list(owners)
    load = np.zeros([owners[0].sizes[axis] for axis in AXES]) if owners else np.zeros(())
    for i in sorted(range(len(owners)), key=lambda i: (-costs[i] * owners[i].slots, i)):
        each = owners[i]
        starts = range(each.owners - each.units + 1) if each.units < each.owners else (0,)
        loads = [load + costs[i] * each.slots * _mask(each, first) for first in starts]
        first = min(starts, key=lambda first: (loads[first].max(), first))
        result[i], load = dataclasses.replace(each, first=first), loads[first]
    return result


def loads(owners: Sequence[Owners], costs: Sequence[int | float]) -> np.ndarray:
    """Sum of the costs of the units of each device, padding left out: [data, pipe, expert, context]."""
    of = lambda each, cost: cost * _units(each)
    zero = np.zeros([owners[0].sizes[axis] for axis in AXES]) if owners else np.zeros(())
    return functools.reduce(lambda total, pair: total + of(*pair), zip(owners, costs, strict=True), zero)


def _mask(each: Owners, first: int) -> np.ndarray:
    """1 where a device has a unit; [data, pipe, expert, context], 1 for axes that do not matter."""
    return (_units(dataclasses.replace(each, first=first)) > 0).astype(np.float64)


def _units(each: Owners) -> np.ndarray:
    """Units of each device, in the same dims."""
    slots = np.arange(each.owners * each.slots).reshape(each.owners, each.slots) - each.first * each.slots
    held = ((slots >= 0) & (slots < each.units)).sum(axis=1)
    held = held.reshape([each.sizes[axis] for axis in each.owner_axes])
    order = sorted(range(held.ndim), key=lambda dim: AXES.index(each.owner_axes[dim]))
    sizes = [each.sizes[axis] if axis in each.owner_axes else 1 for axis in AXES]
    return held.transpose(order).reshape(sizes)
