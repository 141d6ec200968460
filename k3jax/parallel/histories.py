"""The rows that chunks append, on one rank: slots with all rows of a microbatch, and with the sums of their gradients.

`relay.py` says which slots and rows; here they are read and written. A row carries the name of its microbatch (1 + m), so
that an operation can tell whether it found its own. Slots for sums are zero when a microbatch takes them, and again when it
leaves: a row's sum goes away with a message, and before the chunk that appends it a row has no gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from k3jax.parallel.boxes import empty, replace, take
from k3jax.parallel.relay import Relay
from k3jax.parallel.schedules import STAY, Schedule

Tree = Any
Columns = dict[str, jax.Array]
"""The relay's columns in this tick, of all stages."""
History = Any
"""(names [rows], values or sums [rows, ...]) of one microbatch; () where chunks append none."""


class Histories:
    """Slots for what chunks append, rows like `row`; with appended=() there are none, and every tree is empty."""

    def __init__(self, schedule: Schedule, appended: tuple[int, ...], row: Tree):
        self.relay = Relay(schedule, appended) if appended else None
        self.columns = self.relay.columns if self.relay else {}
        self.none: History = empty((jnp.int32(0), row), self.relay.num_rows) if self.relay else ()
        self.no_rows = empty(row, self.relay.room) if self.relay else ()
        """What a message carries beside its stream."""

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
        return stream, (jnp.full_like(self.none[0], 1 + m), rows)

    # ---- operations ---------------------------------------------------------------------------------------------------------

    def on(self, box: Tree, columns: Columns, stage: jax.Array, m: jax.Array) -> Rows:
        """What an operation may do with the rows of its microbatch."""
        return Rows(self, box, columns, stage, m)

    def put(self, box: Tree, columns: Columns, stage: jax.Array, result: History) -> Tree:
        """The slots with an operation's result in its place."""
        return replace(box, result, columns["result"][stage]) if self.relay else box

    def deposit(self, box: Tree, columns: Columns, gradients: History) -> Tree:
        """The slots with a history of gradients, or zeros, added in the place for those of the model's head."""
        if not self.relay:
            return box
        old_names, old = take(box, columns["deposit"])
        names, new = gradients
        return replace(
            box, (jnp.where(names, names, old_names), jax.tree.map(jnp.add, old, new)), columns["deposit"]
        )

    # ---- messages -------------------------------------------------------------------------------------------------------------

    def receive(
        self, box: Tree, sent: Tree, way: int, pairs: list, m: jax.Array, columns: Columns, stage: jax.Array
    ) -> Tree:
        """The slots with the rows of microbatch m that came this way; as many travel as the stage with most sends."""
        if not self.relay or way == STAY or not (counts := np.unique(self.columns["travelling"][:, way])).any():
            return box
        travel = [lambda n=n: permute_first(sent, n, pairs) for n in counts.tolist()]
        arrived = lax.switch(jnp.searchsorted(jnp.asarray(counts), columns["travelling"][way]), travel)
        for i in range(self.relay.room):
            content = 1 + m, take(arrived, jnp.int32(i))
            box = self._file(box, content, columns["arriving"][stage, way, i])
        return box

    def _file(self, box: Tree, content: Tree, place: jax.Array) -> Tree:
        """A row in its place, added to what is there if it is a gradient; place −1 changes nothing."""
        rows, index = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), box), jnp.maximum(place, 0)
        old, (name, row) = take(rows, index), content
        is_sum = place >= self.relay.num_values * self.relay.num_rows
        new = name, jax.tree.map(lambda before, a: jnp.where(is_sum, before + a, a), old[1], row)
        filed = replace(rows, jax.tree.map(lambda before, a: jnp.where(place < 0, before, a), old, new), index)
        return jax.tree.map(lambda a, like: a.reshape(like.shape), filed, box)


class Rows(NamedTuple):
    """The rows of one operation's microbatch."""

    histories: Histories
    box: Tree
    columns: Columns
    stage: jax.Array
    m: jax.Array

    def values(self) -> tuple[History, jax.Array]:
        """All rows, and how many of those that must be there are not."""
        return self._take("values", "exist")

    def sums(self) -> tuple[History, jax.Array]:
        """Sums of their gradients, and how many of those that must have come have not."""
        return self._take("result", "summed")

    def unchanged(self) -> History:
        """What the slot of the result holds."""
        return take(self.box, self.columns["result"][self.stage]) if self.box else ()

    def leaving(self, history: History) -> Tree:
        """The rows that go with the operation's message."""
        histories = self.histories
        if not jax.tree.leaves(histories.no_rows) or not histories.relay.room:
            return histories.no_rows
        rows = [take(history[1], jnp.maximum(i, 0)) for i in self.columns["leaving"][self.stage]]
        return jax.tree.map(lambda *each: jnp.stack(each), *rows)

    def remaining(self, sums: History) -> History:
        """Sums without those that leave."""
        if not self.box:
            return ()
        names, rows = sums
        left = (jnp.arange(len(names))[:, None] == self.columns["leaving"][self.stage]).any(1)
        return names, jax.tree.map(lambda a: jnp.where(left.reshape(-1, *[1] * (a.ndim - 1)), 0, a), rows)

    def _take(self, slot: str, needed: str) -> tuple[History, jax.Array]:
        if not self.box:
            return (), jnp.int32(0)
        history = take(self.box, self.columns[slot][self.stage])
        (first, end), at = self.columns[needed][self.stage], jnp.arange(len(history[0]))
        return history, ((at >= first) & (at < end) & (history[0] != 1 + self.m)).sum().astype(jnp.int32)


def permute_first(rows: Tree, number: int, pairs: list[tuple[int, int]]) -> Tree:
    """The first rows from another stage, the others as they are."""

    def permute(a):
        return jnp.concatenate([lax.ppermute(a[:number], "pipe", pairs), a[number:]]) if number else a

    return jax.tree.map(permute, rows)
