"""The rows that chunks append, on one rank: slots with all rows of a microbatch, and with the sums of their gradients.

`relay.py` says which slots and rows; here they are read and written. A slot carries the name of its microbatch (1 + m), so
that an operation can tell whether it found its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.parallel.boxes import empty, replace, take, vary
from k3jax.parallel.relay import Relay
from k3jax.parallel.schedules import STAY, Schedule

Tree = Any
Columns = dict[str, jax.Array]
"""The relay's columns in this tick, of all stages."""
OF_STAGE = ("values", "result", "fresh", "entering", "leaving")
History = Any
"""(name, values or sums [rows, ...]) of one microbatch; () where chunks append none."""


class Histories:
    """Slots for what chunks append, rows like `row`; with appended=() there are none, and every tree is empty."""

    def __init__(self, schedule: Schedule, appended: tuple[int, ...], row: Tree):
        self.relay = Relay(schedule, appended) if appended else None
        self.columns = self.relay.columns if self.relay else {}
        self.no_rows = empty(row, self.relay.room) if self.relay else ()
        """What a message carries beside its stream."""
        self.none: History = (vary(jnp.int32(0)), empty(row, self.relay.num_rows)) if self.relay else ()

    def empty(self) -> Tree:
        """All slots."""
        return empty(self.none, self.relay.num_slots) if self.relay else ()

    def join(self, stream: Tree, history: History) -> Tree:
        """A chunk's input: the stream alone where none is appended, else also all rows."""
        return (stream, history[1]) if self.relay else stream

    def part(self, joined: Tree, m: jax.Array) -> tuple[Tree, History]:
        """A chunk's stream, and its rows under the name of their microbatch."""
        if not self.relay:
            return joined, ()
        stream, rows = joined
        return stream, (1 + m, rows)

    def on(self, box: Tree, columns: Columns, stage: jax.Array, m: jax.Array) -> Rows:
        """What a stage's operation does with the rows of its microbatch."""
        return Rows(box, {name: columns[name][stage] for name in OF_STAGE if self.relay}, m)

    def put(self, box: Tree, columns: Columns, stage: jax.Array, result: History) -> Tree:
        """The slots with an operation's result in its place."""
        return replace(box, result, columns["result"][stage]) if self.relay else box

    def deposit(self, box: Tree, columns: Columns, stage: jax.Array, gradients: History, result: History) -> Tree:
        """The slots with the gradients that the model's head made; where it made none (name 0) the result, once more."""
        if not self.relay:
            return box
        made = gradients[0] > 0
        index = jnp.where(made, columns["deposit"], columns["result"][stage])
        # Written without a look at what was there: XLA would copy all slots.
        return replace(box, jax.tree.map(lambda d, same: jnp.where(made, d, same), gradients, result), index)

    def travel(self, rows: Tree, way: int, pairs: list[tuple[int, int]], columns: Columns) -> Tree:
        """Rows of a message from the stage that sent it this way; only those travel that are sent."""
        if not self.relay or way == STAY or not self.relay.loads[way].any():
            return rows
        branches = [lambda load=load: permute(rows, load, pairs) for load in self.relay.loads[way].tolist()]
        return lax.switch(columns["travelling"][way], branches)


def permute(rows: Tree, load: list[int], pairs: list[tuple[int, int]]) -> Tree:
    """The first rows from another stage, of each as many as its load; the others are anything."""
    steps = sorted({0, *load})

    def parts(a):
        for low, high in itertools.pairwise(steps):
            yield lax.ppermute(a[low:high], "pipe", [(sender, to) for sender, to in pairs if load[sender] >= high])
        yield a[steps[-1] :]

    return jax.tree.map(lambda a: jnp.concatenate([*parts(a)]), rows) if any(load) else rows


class Rows(NamedTuple):
    """The rows of one operation's microbatch."""

    box: Tree
    columns: Columns
    """Of the operation's stage."""
    m: jax.Array

    def values(self) -> tuple[History, jax.Array]:
        """The rows as the forward left them; 1 if the slot is another microbatch's, else 0."""
        if not self.box:
            return (), jnp.int32(0)
        history = take(self.box, self.columns["values"])
        return history, (history[0] != 1 + self.m).astype(jnp.int32)

    def extended(self, arrived: Tree) -> tuple[History, jax.Array]:
        """The rows for a forward, with those that have arrived."""
        return self._result(lambda before, new: new, arrived)

    def summed(self, arrived: Tree) -> tuple[History, jax.Array]:
        """Sums of the rows' gradients for a backward, with those that have arrived."""
        return self._result(jnp.add, arrived)

    def _result(self, how: Callable, arrived: Tree) -> tuple[History, jax.Array]:
        """What is in the slot of the result, zeros if it is fresh, and what has arrived; 1 if it is another's, else 0."""
        if not self.box:
            return (), jnp.int32(0)
        (name, rows), fresh = take(self.box, self.columns["result"]), self.columns["fresh"] > 0
        rows = jax.tree.map(lambda a: jnp.where(fresh, 0, a), rows)
        return (name, self._arrange(how, rows, arrived)), ((name != 1 + self.m) & ~fresh).astype(jnp.int32)

    def _arrange(self, how: Callable, rows: Tree, arrived: Tree) -> Tree:
        """Rows that have arrived, brought together with those that were there."""
        source = self.columns["entering"]

        def arrange(before, new):
            if not len(new):
                return before
            return jnp.where(across(source >= 0, before), how(before, jnp.take(new, source, 0, mode="clip")), before)

        return jax.tree.map(arrange, rows, arrived)

    def leaving(self, history: History) -> Tree:
        """The rows that go with the operation's message."""
        pick = lambda a: jnp.take(a, self.columns["leaving"], 0, mode="clip")
        return jax.tree.map(pick, history[1]) if self.box else ()

    def unchanged(self) -> History:
        """What the slot of the result holds."""
        return take(self.box, self.columns["result"]) if self.box else ()


def across(flags: jax.Array, like: jax.Array) -> jax.Array:
    """One flag for each row of an array."""
    return flags.reshape(-1, *[1] * (like.ndim - 1))
