"""A chunk's pullback as data: what of it is stored between its operations, and how it is put together again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from k3jax.activations.history import history_name
from k3jax.activations.leaves import Origin, known, output_origins
from k3jax.activations.policy import ActivationPolicy
from k3jax.activations.split import split
from k3jax.activations.stores import Leaf, Span
from k3jax.parallel.schedules import BACKWARD, FORWARD, WEIGHT

Tree = Any
Args = tuple[Tree, Tree, Tree]
"""weights, stream, extras: what a chunk is called with."""
Given = tuple[Tree, Tree, Tree]
"""weights, history, extras: what backward is given again."""
Stored = dict[Span, list]
STREAM, HELD = "chunk.in", "backward.held"
"""Names of stored leaves that are the chunk's stream, and of what backward makes for the weight gradients."""


class Pullback:
    """Of `chunk(weights, stream, extras) -> (stream, report)`, with respect to weights and stream.

    The last `num_history` leaves of the stream are a history (see `activations/history.py`). Leaves that are weights, history
    or extras are handed in again, the history as it is after the chunk; the others are stored. If weight gradients are an
    operation of their own, what backward holds for them is stored too, and a leaf is stored no longer than it is read.
    Raises ValueError for a leaf that is neither an input of the chunk nor a named value.
    """

    def __init__(self, chunk: Callable, example: Args, *, num_history: int = 0, separate_weights: bool = False):
        def vjp(weights, stream, extras):
            made, vjp, report = jax.vjp(lambda w, x: chunk(w, x, extras), weights, stream, has_aux=True)
            return made, report, vjp

        # Traced once: what forward runs, whose leaves backward is put together of.
        self._traced, (made, self.report, pulled) = jax.make_jaxpr(vjp, return_shape=True)(*example)
        """`report`: shapes of what a chunk reports."""
        leaves, self.treedef = jax.tree.flatten(pulled)
        self._made = jax.tree.structure((made, self.report))
        weights, stream, extras = map(jax.tree.leaves, example)
        self.num_history = num_history
        first_row = len(weights) + len(stream) - num_history
        history = {history_name(i): first_row + i for i in range(num_history)}

        def stored(origin: Origin) -> Origin:  # the stream's place in the mailbox is free once forward has run
            if origin.input is not None and len(weights) <= origin.input < first_row:
                return Origin(names=frozenset({STREAM}))
            row = [history[name] for name in origin.names if name in history]
            return Origin(input=row[0]) if row else origin

        found = output_origins(self._traced)[self._made.num_leaves :]
        self.origins = [stored(origin) for origin in known(found)]
        self.num_stream = len(stream) - num_history
        self._all_kept = kept = self._kept(leaves)
        self.spans: list[Span] = [(FORWARD, BACKWARD)] * len(kept)
        """Of each stored leaf."""
        self.shapes: Stored = {(FORWARD, BACKWARD): kept}
        names = [origin.names for origin in self.origins if origin.stored]
        if separate_weights:
            self._separate(example)
        self.names: dict[Span, list[frozenset[str]]] = self._by_span(names)
        """Of what is stored, in the order of `shapes`."""
        if separate_weights:
            held = self.shapes[BACKWARD, WEIGHT]
            self.names[BACKWARD, WEIGHT] = [frozenset({HELD})] * len(held)

    def leaves(self, policy: ActivationPolicy) -> dict[Span, list[Leaf]]:
        """What is stored, with its policy."""
        return {
            span: [Leaf(shape, policy.of_leaf(names)) for shape, names in zip(shapes, self.names[span], strict=True)]
            for span, shapes in self.shapes.items()
        }

    def forward(self, args: Args) -> tuple[Stored, tuple[Tree, Tree]]:
        """What to store, and the chunk's output and report."""
        values = core.jaxpr_as_fun(self._traced)(*jax.tree.leaves(args))
        made, leaves = values[: self._made.num_leaves], values[self._made.num_leaves :]
        return self._by_span(self._kept(leaves)), self._made.unflatten(made)

    def backward(self, given: Given, stored: Stored, d_stream: Tree) -> tuple[Tree, Tree]:
        """Gradients of weights and stream."""
        return self._apply(given, stored[FORWARD, BACKWARD], d_stream)

    def backward_input(self, given: Given, stored: Stored, d_stream: Tree) -> tuple[Stored, Tree]:
        """What to store for `backward_weights`, and the gradient of the stream."""
        values = self._inputs(given, stored) + jax.tree.leaves(d_stream)
        d_inputs, crossing = self.split.before(*(values[i] for i in self.split.before_reads))
        held = [values[i] for i in self.held_cotangents]
        return {(BACKWARD, WEIGHT): crossing + held}, jax.tree.unflatten(jax.tree.structure(d_stream), d_inputs)

    def backward_weights(self, given: Given, stored: Stored) -> Tree:
        """Gradients of weights."""
        values = dict(enumerate(self._inputs(given, stored)))
        crossing = len(self.split.crossing)
        of_backward = stored[BACKWARD, WEIGHT]
        values |= dict(zip(self.held_cotangents, of_backward[crossing:], strict=True))
        grads = self.split.after(*(values[i] for i in self.split.after_reads), *of_backward[:crossing])
        return jax.tree.unflatten(jax.tree.structure(given[0]), grads)

    @property
    def whole_forward(self) -> tuple[core.ClosedJaxpr, int]:
        """The traced program, and how many of its outputs are the chunk's own; leaves follow them."""
        return self._traced, self._made.num_leaves

    def whole_backward(self, example: Args) -> core.ClosedJaxpr:
        """Traced; from what is given again, all stored leaves and the stream's cotangent to gradients of weights and stream."""
        weights, stream, extras = example
        given = weights, jax.tree.leaves(stream)[self.num_stream :], extras
        return jax.make_jaxpr(lambda *args: self._apply(*args))(given, self._all_kept, stream)

    # ---- how ----------------------------------------------------------------------------------------------------------

    def _kept(self, leaves: list) -> list:
        return [leaf for leaf, origin in zip(leaves, self.origins, strict=True) if origin.stored]

    def _by_span(self, kept: list) -> Stored:
        groups: Stored = {}
        for leaf, span in zip(kept, self.spans, strict=True):
            groups.setdefault(span, []).append(leaf)
        return groups

    def _apply(self, given: Given, kept: list[jax.Array], d_stream: Tree) -> tuple[Tree, Tree]:
        weights, *others = given
        handed_in = [*jax.tree.leaves(weights), *[None] * self.num_stream, *jax.tree.leaves(others)]
        rest = iter(kept)

        def leaf(origin: Origin):
            if origin.stored:
                return next(rest)
            return origin.constant if origin.input is None else handed_in[origin.input]

        return jax.tree.unflatten(self.treedef, [leaf(origin) for origin in self.origins])(d_stream)

    def _separate(self, example: Args) -> None:
        """Cuts backward in two. Inputs of the whole are what is given again, stored leaves, and the stream's cotangent."""
        weights, stream, extras = example
        all_stream, kept = jax.tree.leaves(stream), self._all_kept
        given = weights, all_stream[self.num_stream :], extras
        closed = self.whole_backward(example)
        num_weights, handed_in = len(jax.tree.leaves(weights)), len(jax.tree.leaves(given))
        first = [False] * num_weights + [True] * len(all_stream)
        free = [i < handed_in for i in range(len(closed.jaxpr.invars))]
        self.split = split(closed, first, free=free)
        late = set(self.split.after_reads)
        self.spans = [(FORWARD, WEIGHT if handed_in + i in late else BACKWARD) for i in range(len(kept))]
        behind = handed_in + len(kept)
        self.held_cotangents = [i for i in self.split.after_reads if i >= behind]
        held = [all_stream[i - behind] for i in self.held_cotangents]
        self.shapes = self._by_span(kept) | {(BACKWARD, WEIGHT): [*self.split.crossing, *held]}

    def _inputs(self, given: Given, stored: Stored) -> list[jax.Array | None]:
        """Values of the whole backward's inputs but for the cotangent; None where a leaf is no longer there."""
        rest = {span: iter(leaves) for span, leaves in stored.items()}
        kept = [next(rest[span]) if span in rest else None for span in self.spans]
        return [*jax.tree.leaves(given), *kept]
