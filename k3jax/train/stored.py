"""What a step stores for backward on one rank, found by tracing: no device, nothing compiled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax

from k3jax.activations.policy import Policy
from k3jax.activations.records import Leaf
from k3jax.activations.stores import Span
from k3jax.train.step import TrainStep


class StoredLeaf(NamedTuple):
    """One leaf that each (chunk, microbatch) of a rank puts away."""

    names: frozenset[str]
    """One, or one for each branch that makes it."""
    span: Span
    """Kind of operation that makes it, and the last kind that reads it."""
    shape: jax.ShapeDtypeStruct
    """Of this rank, before it is encoded."""
    policy: Policy
    bytes: int
    """As stored."""

    @property
    def label(self) -> str:
        return "|".join(sorted(self.names))


def stored_leaves(step: TrainStep) -> list[StoredLeaf]:
    """All that the pullback of one rank's chunk stores under the step's policy; names it recomputes are not among them."""
    pullback = step.pullback()
    leaves = pullback.leaves(step.resolved.policy)
    return [
        StoredLeaf(names, span, jax.ShapeDtypeStruct(leaf.shape.shape, leaf.shape.dtype), leaf.policy, leaf.bytes)
        for span, of_span in leaves.items()
        for names, leaf in zip(pullback.names[span], of_span, strict=True)
    ]


def summed(leaves: Iterable[StoredLeaf]) -> list[Leaf]:
    """For the ledger: a leaf for each name and span, with the bytes of all that carry that name."""
    total: dict[tuple[str, Span, Policy], int] = {}
    for leaf in leaves:
        key = leaf.label, leaf.span, leaf.policy
        total[key] = total.get(key, 0) + leaf.bytes
    return [Leaf(label, size, policy, *span) for (label, span, policy), size in total.items()]
