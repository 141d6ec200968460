"""The executor: one loop that runs any schedule table, forward and backward, inside one `shard_map`.

Each tick receives messages by `ppermute` over the pipe axis, runs the rank's own operation of the table in a branch,
and files what it made. Forward runs `jax.vjp` of the chunk and stores the leaves of its pullback; backward takes them
out again: no automatic differentiation goes through the schedule.

Rules that keep it right and fast (docs/step.md):
- a rank-dependent branch may hold grouped collectives over data, expert and context, never a `ppermute`;
- what communicates over pipe (embedding, head) stands in branches on tick-wide columns, the same on all ranks;
- a branch returns the values of one operation; store and gradient sums are updated outside of it, or XLA would copy
  them whole in every tick.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.activations.leaves import leaf_origins
from k3jax.compat import varying_axes
from k3jax.parallel.schedules import BACKWARD, FORWARD, Schedule
from meshes import AXES

Tree = Any
REPLICAS = ("data", "expert", "context")


class Program(NamedTuple):
    """What the executor runs; it knows no model. Microbatch m, virtual chunk v and `is_last` are traced."""

    embed: Callable[[Tree, jax.Array], Tree]
    """(params["embed"], m) -> stream. May communicate over pipe."""
    chunk: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
    """(weights, stream, extras) -> (stream, counts); counts are integers summed over microbatches."""
    extras: Callable[[jax.Array, jax.Array], Tree]
    """(v, m) -> inputs of the chunk that have no gradient."""
    head: Callable[[Tree, Tree, jax.Array, jax.Array], jax.Array]
    """(params["head"], stream, m, is_last) -> this rank's sum of losses. May communicate over pipe."""


class Outcome(NamedTuple):
    """Sums over microbatches, of this rank's tokens."""

    loss: jax.Array
    counts: Tree
    """Counts of the rank's own chunks, [V, ...]."""
    grads: Tree
    """float32 gradients like params; None from a forward-only table."""


class Made(NamedTuple):
    """What one operation made; zeros where its kind makes no such thing."""

    leaves: list[jax.Array]
    counts: Tree
    stream: Tree
    d_stream: Tree
    d_weights: Tree


def run(schedule: Schedule, program: Program, params: Tree, cotangent: jax.Array) -> Outcome:
    """Runs the table over params = {"embed", "chunks": [V, ...], "dense", "head"} of this rank.

    cotangent: of each token's loss (1 / number of targets). Gradients are this rank's own contributions: reduce them
    over the axes on which a parameter is replicated.
    """
    stages, stage = schedule.stages, lax.axis_index("pipe")
    differentiate = BACKWARD in schedule.kinds
    params = vary(params)
    zeros = lambda tree: vary(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree))
    slots = lambda tree, n: vary(jax.tree.map(lambda a: jnp.zeros((n, *a.shape), a.dtype), tree))
    mailbox = lambda tree: slots(tree, schedule.num_slots + 1)
    weights = lambda v: {"chunk": take(params["chunks"], v), "dense": params["dense"]}
    extras = lambda v, m: vary(program.extras(v, m))

    first = jnp.int32(0)
    no_stream = zeros(jax.eval_shape(program.embed, params["embed"], first))
    example = (weights(first), no_stream, extras(first, first))
    no_counts = zeros(jax.eval_shape(lambda *args: program.chunk(*args)[1], *example))
    pullback = Pullback(program.chunk, example) if differentiate else None
    no_leaves = zeros(pullback.stored) if pullback else []
    no_grads = zeros(example[0]) if pullback else None
    fp32_zeros = lambda tree: vary(jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), tree))

    carry = dict(
        inputs=mailbox(no_stream),
        counts=zeros(jax.tree.map(lambda a: jnp.broadcast_to(a, (schedule.virtual, *a.shape)), no_counts)),
        sent=no_stream,
        loss=vary(jnp.zeros(()), REPLICAS),
    )
    if pullback:
        carry |= dict(
            store=slots(no_leaves, schedule.num_slots),
            d_outputs=mailbox(no_stream),
            sent_back=no_stream,
            grads=fp32_zeros(params),
        )

    def idle(slot, v, m, carry):
        return Made(no_leaves, no_counts, no_stream, no_stream, no_grads)

    def forward(slot, v, m, carry):
        args = (weights(v), take(carry["inputs"], slot), extras(v, m))
        leaves, (stream, counts) = pullback.forward(*args) if pullback else ([], program.chunk(*args))
        return Made(leaves, counts, stream, no_stream, no_grads)

    def backward(slot, v, m, carry):
        assert pullback is not None
        args = (weights(v), take(carry["inputs"], slot), extras(v, m))
        d_weights, d_stream = pullback.backward(args, take(carry["store"], slot), take(carry["d_outputs"], slot))
        return Made(no_leaves, no_counts, no_stream, d_stream, d_weights)

    branches = [idle, forward] + ([backward] if pullback else [])

    def tick(carry, row):
        mine = row["table"][stage]
        kind, chunk, m, slot = mine[0], *(jnp.maximum(mine[i], 0) for i in (1, 2, 3))
        v = chunk // stages

        onward = [(i, (i + 1) % stages) for i in range(stages)]
        arrived = lax.ppermute(carry["sent"], "pipe", onward)
        inputs = post(carry["inputs"], arrived, row["arrivals"][stage, 0])
        embedded = lax.cond(
            row["embed_forward"] >= 0,
            lambda: vary(program.embed(params["embed"], row["embed_forward"])),
            lambda: no_stream,
        )
        enters = (row["embed_forward"] >= 0) & (stage == 0)
        carry |= dict(inputs=post(inputs, embedded, jnp.where(enters, slot, -1)))
        if pullback:
            returned = lax.ppermute(carry["sent_back"], "pipe", [(j, i) for i, j in onward])
            carry |= dict(d_outputs=post(carry["d_outputs"], returned, row["arrivals"][stage, 1]))

        made: Made = lax.switch(kind, [lambda b=b: vary(b(slot, v, m, carry)) for b in branches])
        carry |= dict(sent=made.stream, counts=add_at(carry["counts"], v, made.counts))
        is_last, leaves_model = stage == stages - 1, row["head"] >= 0
        if pullback is None:
            loss = lax.cond(
                leaves_model,
                lambda: program.head(params["head"], made.stream, row["head"], is_last),
                lambda: vary(jnp.zeros(()), REPLICAS),
            )
            return carry | dict(loss=carry["loss"] + loss), None

        def head():
            function = lambda p, stream: program.head(p, stream, row["head"], is_last)
            loss, vjp = jax.vjp(function, params["head"], made.stream)
            d_head, d_stream = vjp(vary(cotangent, REPLICAS))
            return loss, vary(d_head), vary(d_stream)

        no_head = (vary(jnp.zeros(()), REPLICAS), zeros(params["head"]), no_stream)
        loss, d_head, d_stream = lax.cond(leaves_model, head, lambda: no_head)

        def embed_backward():
            d_stream = lax.psum(jax.tree.map(lambda a: jnp.where(stage == 0, a, 0), made.d_stream), "pipe")
            embed = lambda p: vary(program.embed(p, row["embed_backward"]), REPLICAS)
            vjp = jax.vjp(embed, params["embed"])[1]
            return vary(vjp(d_stream)[0])

        d_embed = lax.cond(row["embed_backward"] >= 0, embed_backward, lambda: zeros(params["embed"]))
        grads, d_weights = carry["grads"], made.d_weights
        return carry | dict(
            store=file(carry["store"], made.leaves, jnp.where(kind == FORWARD, slot, -1)),
            d_outputs=post(carry["d_outputs"], d_stream, jnp.where(leaves_model & is_last, slot, -1)),
            sent_back=made.d_stream,
            loss=carry["loss"] + loss,
            grads={
                "embed": jax.tree.map(jnp.add, grads["embed"], d_embed),
                "chunks": add_at(grads["chunks"], v, d_weights["chunk"]),
                "dense": jax.tree.map(jnp.add, grads["dense"], d_weights["dense"]),
                "head": jax.tree.map(jnp.add, grads["head"], d_head),
            },
        ), None

    columns = {
        name: jnp.asarray(getattr(schedule, name))
        for name in ("table", "arrivals", "embed_forward", "head", "embed_backward")
    }
    carry, _ = lax.scan(tick, carry, columns)
    return Outcome(carry["loss"], carry["counts"], carry.get("grads"))


class Pullback:
    """A chunk's pullback as data: which of its leaves are stored, and how it is put together again.

    Raises ValueError for a leaf that is neither an input of the chunk nor a named value.
    """

    def __init__(self, chunk: Callable, example: tuple[Tree, Tree, Tree]):
        self.chunk = chunk
        vjp = lambda *args: self._vjp(*args)[1]
        leaves, self.treedef = jax.tree.flatten(jax.eval_shape(vjp, *example))
        self.origins = leaf_origins(lambda *args: jax.tree.leaves(vjp(*args)), *example)
        self.stored = [leaf for leaf, origin in zip(leaves, self.origins, strict=True) if origin.stored]

    def _vjp(self, weights: Tree, stream: Tree, extras: Tree):
        made, vjp, counts = jax.vjp(lambda w, x: self.chunk(w, x, extras), weights, stream, has_aux=True)
        return made, vjp, counts

    def forward(self, weights: Tree, stream: Tree, extras: Tree) -> tuple[list[jax.Array], tuple[Tree, Tree]]:
        """Leaves to store, and the chunk's output and counts."""
        made, vjp, counts = self._vjp(weights, stream, extras)
        leaves = jax.tree.leaves(vjp)
        return [leaf for leaf, o in zip(leaves, self.origins, strict=True) if o.stored], (made, counts)

    def backward(self, args: tuple[Tree, Tree, Tree], stored: list[jax.Array], d_stream: Tree) -> tuple[Tree, Tree]:
        """Gradients of weights and stream; inputs are handed in again, the rest comes from the store."""
        flat, rest = jax.tree.leaves(args), iter(stored)

        def leaf(origin):
            if origin.stored:
                return next(rest)
            return origin.constant if origin.input is None else flat[origin.input]

        leaves = [leaf(origin) for origin in self.origins]
        return jax.tree.unflatten(self.treedef, leaves)(d_stream)


def vary(tree: Tree, axes: tuple[str, ...] = AXES) -> Tree:
    """The same values, marked as differing between devices along the axes, as branches and loop carries require."""

    def mark(x):
        missing = tuple(axis for axis in axes if axis not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree)


# Indices here are never negative; saying so spares the program the arithmetic that wraps them.


def take(box: Tree, index: jax.Array) -> Tree:
    """The contents of a slot: one index of every leaf's leading dim."""
    at = functools.partial(lax.dynamic_index_in_dim, index=index, keepdims=False, allow_negative_indices=False)
    return jax.tree.map(at, box)


def replace(box: Tree, content: Tree, index: jax.Array) -> Tree:
    """The box with a slot overwritten, in place."""
    at = functools.partial(lax.dynamic_update_index_in_dim, index=index, axis=0, allow_negative_indices=False)
    return jax.tree.map(at, box, content)


def post(box: Tree, content: Tree, slot: jax.Array) -> Tree:
    """The mailbox with a slot overwritten; slot −1 is its last one, where what nobody waits for goes.

    Keeping the old content instead would read the box between two writes, and XLA would copy it whole in every tick.
    """
    size = jax.tree.leaves(box)[0].shape[0]
    return replace(box, content, jnp.where(slot >= 0, slot, size - 1))


def file(box: Tree, content: Tree, slot: jax.Array) -> Tree:
    """The store with a slot overwritten; slot −1 changes nothing."""
    index = jnp.maximum(slot, 0)
    new = jax.tree.map(lambda old, new: jnp.where(slot >= 0, new, old), take(box, index), content)
    return replace(box, new, index)


def add_at(total: Tree, index: jax.Array, part: Tree) -> Tree:
    """The total with a part added at one index of the leading dim, in place."""
    if all(
        a.shape[0] == 1 for a in jax.tree.leaves(total)
    ):  # XLA drops the update of a whole array, and then copies it
        return jax.tree.map(lambda a, d: a + d.astype(a.dtype)[None], total, part)
    return replace(total, jax.tree.map(lambda a, d: a + d.astype(a.dtype), take(total, index), part), index)
