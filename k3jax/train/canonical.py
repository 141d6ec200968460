"""The state as it lies on disk: by global layer and name, the same whatever the mesh, pipe and virtual count.

In memory a layer is slot (s, v, j, p) of stacked leaves [S, V, J, ...]. On disk it is a few records on its own stage:
each packs those arrays of the layer that lie alike into one, because a thousand small arrays are slow to write. Both
ways run on every device over its own values alone: nothing is communicated and no device ever holds another's part,
but during a save each holds its own part twice. Arrays that lie in pieces with their owners are records as they are
(`owned.py`): names and values are the same, and only where they are depends on the mesh.

Not stored: inactive slots, and the mixture of a layer that has a dense FFN instead. They come back as zeros.

S stages, V virtual chunks a stage, J groups a chunk, P slots a group (see `k3jax.parallel.layout`).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.parallel.layout import StackLayout
from k3jax.parallel.owners import Owners
from k3jax.train.owned import OwnedLeaf, OwnedPlace, Read

STACK_DIMS = {"chunks": 3, "dense": 1}
"""How many dims the leaves under such a key have in front of those of one layer: [S, V, J, ...], [layers, ...]."""


class Place(NamedTuple):
    """Where a named array is on disk: some columns of a record, or a record of its own."""

    record: str
    dtype: str
    shape: tuple[int, ...]
    start: int | None = None
    """First column; None: the record is the array."""
    axis: int | None = None
    """The array's dim that is the record's first; None: the record has one dim."""

    @property
    def columns(self) -> int:
        return math.prod(size for dim, size in enumerate(self.shape) if dim != self.axis)

    @property
    def end(self) -> int:
        return (self.start or 0) + self.columns

    def take(self, record: np.ndarray) -> np.ndarray:
        """The array out of its record, which may be stacked, [slots, ...], and have the rows of one device only.

        A view, if the record is one piece of memory.
        """
        if self.start is None:
            return record
        part = record[..., self.start : self.end]
        if self.axis is None:
            return part.reshape((*part.shape[:-1], *self.shape))
        stack = part.ndim - 2
        others = [size for dim, size in enumerate(self.shape) if dim != self.axis]
        order = list(range(stack + len(self.shape)))
        order.insert(stack + self.axis, order.pop(stack))
        return part.reshape(*part.shape[:-1], *others).transpose(order)

    def columns_of(self, array: jax.Array) -> jax.Array:
        """What the array, stacked dims in front, fills its columns with: the inverse of `take`."""
        stack = array.shape[: array.ndim - len(self.shape)]
        if self.axis is None:
            return array.reshape((*stack, self.columns))
        axis = len(stack) + self.axis
        return jnp.moveaxis(array, axis, len(stack)).reshape(*stack, array.shape[axis], self.columns)


class Pack(NamedTuple):
    """A kind of record: what leaves must have in common to be packed together, layer by layer."""

    tree: str
    kind: str
    """A key of STACK_DIMS."""
    p: int
    """Slot position of "chunks"."""
    moe: bool
    """Part of the mixture, which layers with a dense FFN do without."""
    rows: int
    """The record is [rows, columns], the rows over the expert axis; 0: it is [columns], whole on every device."""
    dtype: str

    @property
    def spec(self) -> P:
        """Of a record on its stage."""
        return P("expert") if self.rows else P()

    @property
    def spec_over_stages(self) -> P:
        """Of one slot's records of all stages, one after the other in the first dim."""
        if self.kind == "dense":
            return self.spec
        return P(("pipe", "expert")) if self.rows else P("pipe")

    def record(self, layer: int) -> str:
        part = "dense" if self.kind == "dense" else "moe" if self.moe else "layer"
        return f"{self.tree}/layers/{layer}/{part}{f'_{self.rows}_rows' if self.rows else ''}_{self.dtype}"


class LayerName(NamedTuple):
    """The name of a leaf of layers."""

    format: str
    """With {} for the layer, as in "params/layers/{}/attn/q_proj"."""
    p: int
    """Slot position, 0 for the dense FFN."""
    moe: bool
    """Part of the mixture, which layers with a dense FFN do without."""

    @classmethod
    def of(cls, name: str, kind: str) -> LayerName:
        """From a name like "params/chunks/0/attn/q_proj"."""
        prefix, _, rest = name.partition(f"/{kind}")
        if kind == "dense":
            return cls(f"{prefix}/layers/{{}}/dense{rest}", 0, False)
        p, _, rest = rest.removeprefix("/").partition("/")
        return cls(f"{prefix}/layers/{{}}/{rest or 'bias'}", int(p), prefix == "balance" or rest.startswith("moe/"))


class Member(NamedTuple):
    """A leaf in a pack."""

    number: int
    """Its place among the leaves of the state."""
    name: str
    """With {} for the layer."""
    place: Place
    """Without the record, which depends on the layer."""


class CanonicalForm:
    """The mapping between a state on a mesh and its records; it holds no values.

    abstract: a TrainState of shapes, with None for trees that are left out; shardings: a tree like it, on one mesh.
    owners: a tree like the parameters, of those whose master weights and optimizer state lie with their owners, or None.
    Raises ValueError for a leaf of layers that is sharded otherwise than stages over pipe and one dim over expert.
    """

    def __init__(self, abstract: Any, shardings: Any, layout: StackLayout, owners: Any = None):
        paths, self._tree = jax.tree_util.tree_flatten_with_path(abstract)
        self._leaves = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for (_, leaf), sharding in zip(paths, jax.tree.leaves(shardings), strict=True)
        ]
        self._stored = [tree is not None for tree in abstract]
        self._layout, self._mesh = layout, self._leaves[0].sharding.mesh
        self._whole: dict[str, int] = {}
        """Numbers of the leaves that are not of layers, by name."""
        self._packs: dict[Pack, list[Member]] = {}
        self._owned: list[OwnedLeaf] = []
        owned = {tuple(path): each for path, each in jax.tree_util.tree_leaves_with_path(owners)}
        for number, (path, name) in enumerate(zip(paths, readable_names([p for p, _ in paths]), strict=True)):
            keys = [word(key) for key in path[0]]
            kind = next((key for key in keys if key in STACK_DIMS), None)
            tails = (owned.get(tuple(path[0][i:])) for i in range(len(path[0])))
            each = next((each for each in tails if each is not None), None)
            if each is not None:
                self._own(number, name, kind, each)
            elif kind is None:
                self._whole[name] = number
            else:
                self._pack(number, name, kind, self._leaves[number])

    def _own(self, number: int, name: str, kind: str | None, owners: Owners) -> None:
        dtype, named, layers = np.dtype(self._leaves[number].dtype).name, name, None
        if kind is not None:
            layer = LayerName.of(name, kind)
            named, layers = layer.format, self._layout.stored_layers(kind, layer.p, layer.moe)
        self._owned.append(OwnedLeaf(number, name, named, layers, owners, dtype))

    def _pack(self, number: int, name: str, kind: str, leaf: jax.ShapeDtypeStruct) -> None:
        layer = LayerName.of(name, kind)
        spec = (*leaf.sharding.spec, *[None] * leaf.ndim)[STACK_DIMS[kind] : leaf.ndim]
        split = [dim for dim, axes in enumerate(spec) if axes is not None]
        if [spec[dim] for dim in split] not in ([], ["expert"]):
            raise ValueError(f"{name} is sharded as {spec} within a layer: a checkpoint takes one dim, over expert")
        dtype, shape = np.dtype(leaf.dtype).name, leaf.shape[STACK_DIMS[kind] :]
        pack = Pack(
            tree=name.partition("/")[0],
            kind=kind,
            p=layer.p,
            moe=layer.moe,
            rows=shape[split[0]] if split else 0,
            dtype=dtype,
        )
        members = self._packs.setdefault(pack, [])
        start = members[-1].place.end if members else 0
        place = Place("", dtype, shape, start, split[0] if split else None)
        members.append(Member(number, layer.format, place))

    # ---- what is on disk ---------------------------------------------------------------------------------------------

    @functools.cached_property
    def index(self) -> dict[str, Place | OwnedPlace]:
        """Where every named array is; but for arrays with owners it does not depend on the mesh."""
        index: dict[str, Place | OwnedPlace] = {}
        for leaf in self._owned:
            index |= leaf.places()
        for name, number in self._whole.items():
            leaf = self._leaves[number]
            index[name] = Place(name, np.dtype(leaf.dtype).name, leaf.shape)
        for pack, members in self._packs.items():
            for layer in self._layers(pack):
                for _, name, place in members:
                    index[name.format(layer)] = place._replace(record=pack.record(layer))
        return index

    @functools.cached_property
    def records(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of every record. Those of a layer are on the devices of its stage."""
        records = {name: self._leaves[number] for name, number in self._as_they_are}
        for pack in self._packs:
            for layer in self._layers(pack):
                stage = None if pack.kind == "dense" else self._layout.position(layer)[0]
                records[pack.record(layer)] = self._record(pack, stage)
        return records

    @property
    def _as_they_are(self) -> list[tuple[str, int]]:
        """Names and numbers of the leaves that are records themselves."""
        return [*self._whole.items(), *((leaf.record, leaf.number) for leaf in self._owned)]

    def _layers(self, pack: Pack) -> list[int]:
        """The layers that have such a record."""
        return [int(layer) for layer in self._layout.stored_layers(pack.kind, pack.p, pack.moe).flat if layer >= 0]

    def _record(self, pack: Pack, stage: int | None) -> jax.ShapeDtypeStruct:
        columns = self._packs[pack][-1].place.end
        shape = (pack.rows, columns) if pack.rows else (columns,)
        mesh = self._mesh if stage is None else self._stage_meshes[stage]
        return jax.ShapeDtypeStruct(shape, np.dtype(pack.dtype), sharding=NamedSharding(mesh, pack.spec))

    @functools.cached_property
    def _stage_meshes(self) -> list[Mesh]:
        mesh = self._mesh
        stages = np.split(np.asarray(mesh.devices), self._layout.stages, axis=mesh.axis_names.index("pipe"))
        return [Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types) for devices in stages]

    # ---- to records and back -----------------------------------------------------------------------------------------

    def to_records(self, state: Any) -> dict[str, jax.Array]:
        """The records of a state, as `records` describes them; trees that are left out may be there or not."""
        leaves = jax.tree.leaves([tree for tree, stored in zip(state, self._stored, strict=True) if stored])
        result = {name: leaves[number] for name, number in self._as_they_are}
        packs = self._pack_leaves(leaves) if self._slots else []
        for (pack, slot), packed in zip(self._slots, packs, strict=True):
            if pack.kind == "dense":
                result[pack.record(*slot)] = packed
                continue
            of_device = {shard.device: shard.data for shard in packed.addressable_shards}
            for stage in range(self._layout.stages):
                name, like = self._record_at(pack, stage, slot)
                if name is not None:
                    result[name] = assemble(like, [of_device[d] for d in local_devices(like.sharding)])
        return result

    def from_records(self, records: dict[str, jax.Array]) -> Any:
        """The state with these records, which must lie as `records` describes; inverse of `to_records`.

        Each device's part is put together in host memory: that needs no compilation, for something done once.
        """
        leaves: list[Any] = [None] * len(self._leaves)
        for name, number in self._as_they_are:
            leaves[number] = records[name]
        for pack, members in self._packs.items():
            slots = [slot for of, slot in self._slots if of == pack]
            stack_of = self._stacks(pack, slots, records)
            for number, _, place in members:
                leaf = self._leaves[number]
                shape = leaf.sharding.shard_shape(leaf.shape)
                devices = local_devices(leaf.sharding)
                parts = [place.take(stack_of[device]).reshape(shape) for device in devices]
                leaves[number] = assemble(leaf, jax.device_put(parts, devices, may_alias=False))
        return jax.tree.unflatten(self._tree, leaves)

    def records_of(self, read: Read) -> dict[str, jax.Array]:
        """The records, as `records` describes them, of arrays that `read(name, index)` gives part by part.

        One device's part of one record at a time is in host memory; what replicas share is read once.
        """
        result = {name: placed(self.records[name], functools.partial(read, name)) for name in self._whole}
        result |= {leaf.record: placed(self.records[leaf.record], leaf.part(read)) for leaf in self._owned}
        for pack, members in self._packs.items():
            for layer in self._layers(pack):

                def part(index, pack=pack, members=members, layer=layer):
                    values = np.empty([at.stop - at.start for at in index], pack.dtype)
                    for _, name, place in members:
                        rows = [index[0] if dim == place.axis else slice(0, n) for dim, n in enumerate(place.shape)]
                        place.take(values)[...] = read(name.format(layer), tuple(rows))
                    return values

                result[pack.record(layer)] = placed(self.records[pack.record(layer)], part)
        return result

    def _stacks(self, pack: Pack, slots: list[tuple[int, ...]], records: dict[str, jax.Array]) -> dict[Any, np.ndarray]:
        """Each local device's records of this pack, slot after slot."""
        if pack.kind == "dense":
            held = [records[pack.record(*slot)] for slot in slots]
            return stack_by_device(held)
        stacks = {}
        for stage in range(self._layout.stages):
            held = []
            for slot in slots:
                name, like = self._record_at(pack, stage, slot)
                held.append(zeros(like) if name is None else records[name])
            stacks |= stack_by_device(held)
        return stacks

    @functools.cached_property
    def _slots(self) -> list[tuple[Pack, tuple[int, ...]]]:
        """What one rank's program makes: packs at slots, (v, j) of "chunks" and (layer,) of "dense"."""
        sizes = {"chunks": self._layout.layer_table.shape[1:3], "dense": (self._layout.config.dense_layers,)}
        return [(pack, slot) for pack in self._packs for slot in np.ndindex(sizes[pack.kind])]

    def _record_at(self, pack: Pack, stage: int, slot: tuple[int, ...]) -> tuple[str | None, jax.ShapeDtypeStruct]:
        """The record of "chunks" in that slot, None if it is not stored; and how it lies, or would."""
        name = pack.record(int(self._layout.layer_table[(stage, *slot, pack.p)]))
        return name if name in self.records else None, self._record(pack, stage)

    @functools.cached_property
    def _pack_leaves(self):
        """All leaves -> for every one of `_slots` the records of all stages, on the stages' own devices."""

        def local(leaves):
            stacks = {}
            for pack, members in self._packs.items():
                columns = [place.columns_of(leaves[number]) for number, _, place in members]
                # The barrier keeps XLA from compiling every slot of every leaf by itself (2.6 instead of 0.9 s).
                stacks[pack] = lax.optimization_barrier(jnp.concatenate(columns, axis=-1))
            return [stacks[pack][(0, *slot) if pack.kind == "chunks" else slot] for pack, slot in self._slots]

        specs = [leaf.sharding.spec for leaf in self._leaves]
        out_specs = [pack.spec_over_stages for pack, _ in self._slots]
        return jax.jit(jax.shard_map(local, mesh=self._mesh, in_specs=(specs,), out_specs=out_specs))


def local_devices(sharding: NamedSharding) -> list[Any]:
    return [device for device in np.asarray(sharding.mesh.devices).flat if device.process_index == jax.process_index()]


def assemble(like: jax.ShapeDtypeStruct, parts: list[jax.Array]) -> jax.Array:
    """The array whose parts already lie on the devices of this process."""
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, parts, dtype=like.dtype)


def placed(like: jax.ShapeDtypeStruct, part: Callable[[tuple[slice, ...]], np.ndarray]) -> jax.Array:
    """The array of which `part(index)` gives what a device holds; slices have a start and a stop."""
    devices_of: dict[tuple[tuple[int, int, int], ...], list[Any]] = {}
    indices: Any = like.sharding.addressable_devices_indices_map(like.shape)
    for device, index in indices.items():
        key = tuple(at.indices(size) for at, size in zip(index, like.shape, strict=True))
        devices_of.setdefault(key, []).append(device)
    shards = []
    for key, devices in devices_of.items():
        values = np.asarray(part(tuple(slice(start, stop) for start, stop, _ in key)), like.dtype)
        shards += [jax.device_put(values, device, may_alias=False) for device in devices]
    return assemble(like, shards)


def zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    local = like.sharding.shard_shape(like.shape)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda _: np.zeros(local, like.dtype))


def stack_by_device(arrays: list[jax.Array]) -> dict[Any, np.ndarray]:
    """The parts that each local device has of arrays which lie alike, stacked in host memory."""
    parts: dict[Any, list[np.ndarray]] = {}
    for array in arrays:
        for shard in array.addressable_shards:
            parts.setdefault(shard.device, []).append(np.asarray(shard.data))
    return {device: np.stack(held) for device, held in parts.items()}


def word(key: Any) -> str:
    """One key of a path as text."""
    return jax.tree_util.keystr((key,), simple=True)


def readable_names(paths: list[tuple[Any, ...]]) -> list[str]:
    """Names like "optimizer/muon/mu/chunks/0/attn/q_proj"; optax's wrappers show only where they tell apart."""

    def name(path, brief):
        words = [{"opt_state": "optimizer", "master": "params"}.get(word(path[0]), word(path[0]))]
        for key in path[1:]:
            noise = isinstance(key, jax.tree_util.SequenceKey) or re.fullmatch("inner_states?", word(key))
            if not (brief and noise):
                words.append(word(key))
        return "/".join(words)

    brief = [name(path, True) for path in paths]
    return brief if len(set(brief)) == len(brief) else [name(path, False) for path in paths]
