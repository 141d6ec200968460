"""A chunk's pullback as data: what of it is stored between forward and backward, and how it is put together again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from k3jax.activations.leaves import Origin, leaf_origins

Tree = Any
Args = tuple[Tree, Tree, Tree]
"""weights, stream, extras: what a chunk is called with."""
STREAM = "chunk.in"
"""Name of stored leaves that are the chunk's stream."""


class Pullback:
    """Of `chunk(weights, stream, extras) -> (stream, counts)`, with respect to weights and stream.

    Leaves that are weights or extras are handed in again; the others go to a store. Raises ValueError for a leaf that is
    neither an input of the chunk nor a named value.
    """

    def __init__(self, chunk: Callable, example: Args):
        self.chunk = chunk
        vjp = lambda *args: self._vjp(*args)[1]
        leaves, self.treedef = jax.tree.flatten(jax.eval_shape(vjp, *example))
        num_weights, self.num_stream, _ = (len(jax.tree.leaves(arg)) for arg in example)

        def stored(origin: Origin) -> Origin:  # the stream's mailbox slot is free once forward has run
            is_stream = origin.input is not None and 0 <= origin.input - num_weights < self.num_stream
            return Origin(names=frozenset({STREAM})) if is_stream else origin

        self.origins = [stored(o) for o in leaf_origins(lambda *args: jax.tree.leaves(vjp(*args)), *example)]
        self.stored = self._pick(leaves)

    def _vjp(self, weights: Tree, stream: Tree, extras: Tree):
        made, vjp, counts = jax.vjp(lambda w, x: self.chunk(w, x, extras), weights, stream, has_aux=True)
        return made, vjp, counts

    def _pick(self, leaves: list) -> list:
        return [leaf for leaf, origin in zip(leaves, self.origins, strict=True) if origin.stored]

    def forward(self, args: Args) -> tuple[list[jax.Array], tuple[Tree, Tree]]:
        """Leaves to store, and the chunk's output and counts."""
        made, vjp, counts = self._vjp(*args)
        return self._pick(jax.tree.leaves(vjp)), (made, counts)

    def backward(self, weights: Tree, extras: Tree, stored: list[jax.Array], d_stream: Tree) -> tuple[Tree, Tree]:
        """Gradients of weights and stream."""
        handed_in = [*jax.tree.leaves(weights), *[None] * self.num_stream, *jax.tree.leaves(extras)]
        rest = iter(stored)

        def leaf(origin: Origin):
            if origin.stored:
                return next(rest)
            return origin.constant if origin.input is None else handed_in[origin.input]

        return jax.tree.unflatten(self.treedef, [leaf(origin) for origin in self.origins])(d_stream)
