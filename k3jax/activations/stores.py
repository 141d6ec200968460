"""Where a rank puts what its operations keep for later ones: on its device, in its host's memory, with another rank.

A store holds the leaves of one span (made by one kind of operation, read last by another) under one storage. Its columns say
for every tick and stage which slots an operation writes and reads, and what moves beside it; they are made from the schedule
alone. Within a tick `send` reads what leaves, the operation `take`s, and `put` writes what was made and what arrived: no
operation waits for a message that only a later one needs. `row` is a store's columns in this tick, `stage` this rank's.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from k3jax.activations import quantize
from k3jax.activations.hosting import Hosting, host
from k3jax.activations.parking import Pair, Parking, park
from k3jax.activations.policy import Policy
from k3jax.parallel.boxes import empty, post, replace, take
from k3jax.parallel.schedules import Schedule

Tree = Any
Span = tuple[int, int]
"""The kind of operation that stores something, and the last kind that reads it."""


class Traffic(NamedTuple):
    """What a rank puts where: contents of a store in a tick, or bytes in a step."""

    device: jax.Array | int = 0
    host: jax.Array | int = 0
    remote: jax.Array | int = 0
    """Sent to another rank, there or back."""


class DeviceStore:
    """Slots on the device."""

    def __init__(self, slots: np.ndarray, writes: np.ndarray):
        self.num_slots = int(slots.max()) + 1
        self.columns = {"slot": slots, "write": np.where(writes, slots, -1)}

    @property
    def reserved(self) -> tuple[int, int]:
        """Contents for which there is room on the device and in host memory."""
        return self.num_slots, 0

    def empty(self, content: Tree) -> Tree:
        return empty(content, self.num_slots)

    def send(self, box: Tree, row: Tree, stage: jax.Array) -> Tree:
        return None

    def take(self, box: Tree, row: Tree, stage: jax.Array) -> Tree:
        return take(box, jnp.maximum(row["slot"][stage], 0))

    def unchanged(self, box: Tree) -> Tree:
        return take(box, jnp.int32(0))

    def put(self, box: Tree, row: Tree, stage: jax.Array, made: Tree, arrived: Tree) -> Tree:
        return replace(box, made, jnp.maximum(row["write"][stage], 0))

    def traffic(self, row: Tree, stage: jax.Array) -> Traffic:
        return Traffic(device=row["write"][stage] >= 0)


def exchange(permutation: tuple[Pair, ...], stage: jax.Array, content: Tree) -> Tree:
    """The content of who sent, on who received; on others it stays as it is."""
    if not permutation:
        return content
    arrived, receives = lax.ppermute(content, "pipe", permutation), jnp.bool_(False)
    for _, receiver in permutation:
        receives |= stage == receiver
    return jax.tree.map(lambda new, old: jnp.where(receives, new, old), arrived, content)


class ParkedStore:
    """Slots on the device; contents may spend the middle of their life in a slot of another rank."""

    def __init__(self, parking: Parking, writes: np.ndarray):
        self.num_slots, self.pairs = parking.num_slots, parking.pairs
        self.columns = {
            "slot": parking.slots,
            "write": np.where(writes, parking.slots, -1),
            "there": {(r, s): parking.column((r, s)) for r, s in self.pairs},
            "back": {(r, s): parking.column((s, r)) for r, s in self.pairs},
        }
        self.columns["next"] = {
            way: {pair: np.roll(column[:, 0], -1) for pair, column in self.columns[way].items()}
            for way in ("there", "back")
        }

    @property
    def reserved(self) -> tuple[int, int]:
        """Contents for which there is room on the device and in host memory; one is a buffer for what moves."""
        return self.num_slots + bool(self.pairs), 0

    def empty(self, content: Tree) -> Tree:
        return {"slots": empty(content, self.num_slots), "moving": content if self.pairs else None}

    def send(self, box: Tree, row: Tree, stage: jax.Array) -> Tree:
        """What this rank's partner sent. A pair that exchanges nothing in this tick runs no permute."""
        content = box["moving"]
        for early, late in self.pairs:
            there, back = (row[way][early, late][0] >= 0 for way in ("there", "back"))
            onward, home = (early, late), (late, early)
            ways = [
                functools.partial(exchange, permutation, stage)
                for permutation in ((), (onward,), (home,), (onward, home))
            ]
            content = lax.switch(there + 2 * back, ways, content)
        return content

    def take(self, box: Tree, row: Tree, stage: jax.Array) -> Tree:
        return take(box["slots"], jnp.maximum(row["slot"][stage], 0))

    def unchanged(self, box: Tree) -> Tree:
        return take(box["slots"], jnp.int32(0))

    def put(self, box: Tree, row: Tree, stage: jax.Array, made: Tree, arrived: Tree) -> Tree:
        """What leaves in the next tick is read after all writes: between them XLA would copy the slots whole."""
        makes = jnp.maximum(row["write"][stage], 0)
        slots = replace(box["slots"], made, makes)
        if not self.pairs:
            return {"slots": slots, "moving": None}
        arrives = self._mine(stage, lambda way, pair: row[way][pair][1], receives=True)
        second = jax.tree.map(lambda new, old: jnp.where(arrives >= 0, new, old), arrived, made)
        slots = replace(slots, second, jnp.where(arrives >= 0, arrives, makes))
        leaves = self._mine(stage, lambda way, pair: row["next"][way][pair], receives=False)
        return {"slots": slots, "moving": take(slots, jnp.maximum(leaves, 0))}

    def _mine(self, stage: jax.Array, slot, *, receives: bool) -> jax.Array:
        """The slot that this rank sends from or receives in; -1 for none."""
        mine = jnp.int32(-1)
        for pair in self.pairs:
            for way, ends in (("there", pair), ("back", pair[::-1])):
                mine = jnp.where(stage == ends[receives], slot(way, pair), mine)
        return mine

    def traffic(self, row: Tree, stage: jax.Array) -> Traffic:
        sent = self._mine(stage, lambda way, pair: row[way][pair][0], receives=False) >= 0
        return Traffic(device=row["write"][stage] >= 0, remote=sent)


class HostStore:
    """Slots in host memory, and a few on the device where contents land a tick before they are read.

    What an operation made goes to the host beside the next one.
    """

    def __init__(self, hosting: Hosting):
        self.hosting = hosting
        before = np.concatenate([np.full_like(hosting.write[:1], -1), hosting.write[:-1]])
        columns = {"write": hosting.write, "land": hosting.land, "fetch": hosting.fetch, "slot": hosting.slots}
        self.columns = columns | {"write_before": before}

    @property
    def reserved(self) -> tuple[int, int]:
        """Contents for which there is room: a slot more in each memory, and a buffer for what goes to the host."""
        return self.hosting.num_slots + 2, self.hosting.num_host_slots + 1

    def empty(self, content: Tree) -> Tree:
        on_host = jax.device_put(empty(content, self.hosting.num_host_slots + 1), jax.memory.Space.Host)
        return {"host": on_host, "device": empty(content, self.hosting.num_slots + 1), "made": content}

    def send(self, box: Tree, row: Tree, stage: jax.Array) -> Tree:
        made = jax.device_put(box["made"], jax.memory.Space.Host)
        host = post(box["host"], made, row["write_before"][stage])
        fetched = take(host, jnp.maximum(row["fetch"][stage, 0], 0))
        return {"host": host, "fetched": jax.device_put(fetched, jax.memory.Space.Device)}

    def take(self, box: Tree, row: Tree, stage: jax.Array) -> Tree:
        return take(box["device"], jnp.maximum(row["slot"][stage], 0))

    def unchanged(self, box: Tree) -> Tree:
        return box["made"]

    def put(self, box: Tree, row: Tree, stage: jax.Array, made: Tree, arrived: Tree) -> Tree:
        device = post(box["device"], made, row["land"][stage])
        device = post(device, arrived["fetched"], row["fetch"][stage, 1])
        return {"host": arrived["host"], "device": device, "made": made}

    def traffic(self, row: Tree, stage: jax.Array) -> Traffic:
        return Traffic(device=row["land"][stage] >= 0, host=row["write"][stage] >= 0)


Store = DeviceStore | ParkedStore | HostStore


class Leaf(NamedTuple):
    """One leaf of what operations store."""

    shape: jax.ShapeDtypeStruct
    policy: Policy

    @property
    def quantized(self) -> bool:
        return self.policy.quantized and quantize.quantizable(self.shape)

    @property
    def bytes(self) -> int:
        """As stored."""
        shape, dtype = self.shape.shape, self.shape.dtype
        return quantize.nbytes(shape) if self.quantized else math.prod(shape) * dtype.itemsize

    def encode(self, x: jax.Array) -> Tree:
        return quantize.encode(x) if self.quantized else x

    def decode(self, stored: Tree) -> jax.Array:
        if not self.quantized:
            return stored
        bits, scales = stored
        return quantize.decode(bits, scales, self.shape.dtype)


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

    def unchanged(self, boxes: Tree) -> Tree:
        """What an operation that makes nothing for a store hands to `put`; for a branch.

        Every tick writes: this content goes where it is. A write that depends on the tick would read the slots between
        writes, or need a spare one.
        """
        return {key: store.unchanged(boxes[key]) for key, store in self.stores.items()}

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

    def traffic(self, encoded: Tree, rows: Tree, stage: jax.Array) -> Traffic:
        """Bytes that this rank puts into its stores in a tick, float32."""
        total = Traffic(*[jnp.float32(0)] * 3)
        for key, store in self.stores.items():
            size = sum(a.nbytes for a in jax.tree.leaves(encoded[key][1]))
            total = jax.tree.map(
                lambda sum_, n, size=size: sum_ + float(size) * n, total, store.traffic(rows[key], stage)
            )
        return total


def make_store(schedule: Schedule, span: Span, storage: str) -> Store:
    """The store of that storage; what is recomputed is never stored."""
    writes = schedule.table[:, :, 0] == span[0]
    if storage == "keep":
        return DeviceStore(schedule.slots(*span), writes)
    if storage == "remote-offload":
        return ParkedStore(park(schedule, *span), writes)
    if storage == "local-offload":
        return HostStore(host(schedule, *span))
    raise ValueError(f"{storage!r} is no storage: choose keep, local-offload or remote-offload")
