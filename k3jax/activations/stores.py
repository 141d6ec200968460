"""Where a rank puts what its operations keep for later ones: on its device, in its host's memory, with another rank.

A store holds the leaves of one span (made by one kind of operation, read last by another) under one storage. Its columns say
for every tick and stage which slots an operation writes and reads, and what moves beside it; they are made from the schedule
alone. Within a tick `send` reads what leaves, the operation `take`s, and `put` writes what was made and what arrived: no
operation waits for a message that only a later one needs. `row` is a store's columns in this tick, `stage` this rank's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from k3jax.activations import quantize
from k3jax.activations.hosting import Hosting, host
from k3jax.activations.parking import Parking, park
from k3jax.activations.policy import Policy
from k3jax.parallel.boxes import empty, file, post, take
from k3jax.parallel.schedules import Schedule

Tree = Any
Span = tuple[int, int]
"""The kind of operation that stores something, and the last kind that reads it."""


class DeviceStore:
    """Slots on the device; with a `Parking`, some contents spend the middle of their span in a slot of another rank."""

    def __init__(self, slots: np.ndarray, writes: np.ndarray, parking: Parking | None = None):
        self.num_slots = parking.num_slots if parking else int(slots.max()) + 1
        self.pairs = parking.pairs if parking else ()
        self.columns = {
            "slot": slots,
            "write": np.where(writes, slots, -1),
            "moves": [parking.column(pair) for pair in self.pairs] if parking else [],
        }

    def empty(self, content: Tree) -> Tree:
        return empty(content, self.num_slots + bool(self.pairs))

    def send(self, box: Tree, row: Tree, stage: jax.Array) -> Tree:
        """What each pair sends in this tick; where it sends nothing, no permute runs."""
        arrived = []
        for pair, (source, _) in zip(self.pairs, row["moves"], strict=True):
            content = take(box, jnp.maximum(source, 0))
            travel = lambda content=content, pair=pair: lax.ppermute(content, "pipe", [pair])
            arrived.append(lax.cond(source >= 0, travel, lambda content=content: content))
        return arrived

    def take(self, box: Tree, row: Tree, stage: jax.Array) -> Tree:
        return take(box, jnp.maximum(row["slot"][stage], 0))

    def put(self, box: Tree, row: Tree, stage: jax.Array, made: Tree, arrived: Tree) -> Tree:
        if not self.pairs:
            return file(box, made, row["write"][stage])
        box = post(box, made, row["write"][stage])
        for (_, receiver), (_, slot), content in zip(self.pairs, row["moves"], arrived, strict=True):
            box = post(box, content, jnp.where(stage == receiver, slot, -1))
        return box


class HostStore:
    """Slots in host memory, and a few on the device where contents land a tick before they are read."""

    def __init__(self, hosting: Hosting):
        self.hosting = hosting
        self.columns = {"write": hosting.write, "land": hosting.land, "fetch": hosting.fetch, "slot": hosting.slots}

    def empty(self, content: Tree) -> Tree:
        return {
            "host": jax.device_put(empty(content, self.hosting.num_host_slots + 1), jax.memory.Space.Host),
            "device": empty(content, self.hosting.num_slots + 1),
        }

    def send(self, box: Tree, row: Tree, stage: jax.Array) -> Tree:
        source, _ = row["fetch"][stage]
        return jax.device_put(take(box["host"], jnp.maximum(source, 0)), jax.memory.Space.Device)

    def take(self, box: Tree, row: Tree, stage: jax.Array) -> Tree:
        return take(box["device"], jnp.maximum(row["slot"][stage], 0))

    def put(self, box: Tree, row: Tree, stage: jax.Array, made: Tree, arrived: Tree) -> Tree:
        _, landing = row["fetch"][stage]
        device = post(post(box["device"], made, row["land"][stage]), arrived, landing)
        on_host = jax.device_put(made, jax.memory.Space.Host)
        return {"host": post(box["host"], on_host, row["write"][stage]), "device": device}


Store = DeviceStore | HostStore


class Leaf(NamedTuple):
    """One leaf of what operations store."""

    shape: jax.ShapeDtypeStruct
    policy: Policy

    @property
    def quantized(self) -> bool:
        return self.policy.quantized and quantize.quantizable(self.shape)

    def encode(self, x: jax.Array) -> Tree:
        return quantize.encode(x) if self.quantized else x

    def decode(self, stored: Tree) -> jax.Array:
        return quantize.decode(*stored, self.shape.dtype) if self.quantized else stored


class Stores:
    """All stores of a rank, for leaves of several spans, each under its policy."""

    def __init__(self, schedule: Schedule, leaves: dict[Span, list[Leaf]]):
        self.leaves = leaves
        self.groups: dict[tuple[Span, str], list[int]] = {}
        for span, of_span in leaves.items():
            for i, leaf in enumerate(of_span):
                self.groups.setdefault((span, leaf.policy.storage), []).append(i)
        self.stores = {key: make_store(schedule, *key) for key in self.groups}
        self.columns = {key: store.columns for key, store in self.stores.items()}

    def encode(self, made: dict[Span, list[jax.Array]], name: jax.Array) -> Tree:
        """What the stores hold of what an operation made, and the name of the operation; for a branch."""
        return {
            (span, storage): (name, [self.leaves[span][i].encode(made[span][i]) for i in group])
            for (span, storage), group in self.groups.items()
            if span in made
        }

    def empty(self, encoded: Tree) -> Tree:
        return {key: store.empty(encoded[key]) for key, store in self.stores.items()}

    def send(self, boxes: Tree, rows: Tree, stage: jax.Array) -> Tree:
        return {key: store.send(boxes[key], rows[key], stage) for key, store in self.stores.items()}

    def take(self, kind: int, boxes: Tree, rows: Tree, stage: jax.Array, name: jax.Array) -> tuple[Tree, jax.Array]:
        """What an operation of this kind may read, {span: leaves}, and how many names are not its own."""
        found: dict[Span, dict[int, jax.Array]] = {}
        wrong = jnp.int32(0)
        for (span, storage), group in self.groups.items():
            if not span[0] < kind <= span[1]:
                continue
            key = (span, storage)
            stored_name, stored = self.stores[key].take(boxes[key], rows[key], stage)
            wrong += stored_name != name
            for i, value in zip(group, stored, strict=True):
                found.setdefault(span, {})[i] = self.leaves[span][i].decode(value)
        return {span: [found[span][i] for i in sorted(found[span])] for span in found}, wrong

    def put(self, boxes: Tree, rows: Tree, stage: jax.Array, made: Tree, arrived: Tree) -> Tree:
        return {
            key: store.put(boxes[key], rows[key], stage, made[key], arrived[key]) for key, store in self.stores.items()
        }


def make_store(schedule: Schedule, span: Span, storage: str) -> Store:
    """The store of that storage; what is recomputed is never stored."""
    makes: Callable[[], np.ndarray] = lambda: schedule.table[:, :, 0] == span[0]
    if storage == "keep":
        return DeviceStore(schedule.slots(*span), makes())
    if storage == "remote-offload":
        parking = park(schedule, *span)
        return DeviceStore(parking.slots, makes(), parking)
    if storage == "local-offload":
        return HostStore(host(schedule, *span))
    raise ValueError(f"{storage!r} is no storage: choose keep, local-offload or remote-offload")
