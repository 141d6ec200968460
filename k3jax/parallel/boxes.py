"""Slots of a rank: arrays with a leading dim of slots, read and overwritten in place.

Indices here are never negative; saying so spares the program the arithmetic that wraps them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from k3jax import compat
from meshes import AXES

Tree = Any


def vary(tree: Tree, axes: tuple[str, ...] = AXES) -> Tree:
    """The same values, marked as differing between devices along the axes, as branches and loop carries require."""

    return jax.tree.map(lambda x: compat.vary(x, axes), tree)


def empty(tree: Tree, slots: int) -> Tree:
    """A box of that many slots for such contents, zeros."""
    return vary(jax.tree.map(lambda a: jnp.zeros((slots, *a.shape), a.dtype), tree))


def take(box: Tree, index: jax.Array) -> Tree:
    """The contents of a slot: one index of every leaf's leading dim."""
    at = functools.partial(lax.dynamic_index_in_dim, index=index, keepdims=False, allow_negative_indices=False)
    return jax.tree.map(at, box)


def replace(box: Tree, content: Tree, index: jax.Array) -> Tree:
    """The box with a slot overwritten, in place."""
    at = functools.partial(lax.dynamic_update_index_in_dim, index=index, axis=0, allow_negative_indices=False)
    return jax.tree.map(at, box, content)


def post(box: Tree, content: Tree, slot: jax.Array) -> Tree:
    """The box with a slot overwritten; slot −1 is its last one, where what nobody waits for goes.

    Keeping the old content instead would read the box between two writes, and XLA would copy it whole in every tick.
    """
    if not jax.tree.leaves(box):
        return box
    size = jax.tree.leaves(box)[0].shape[0]
    return replace(box, content, jnp.where(slot >= 0, slot, size - 1))


def add_at(total: Tree, index: jax.Array, part: Tree, fresh: jax.Array | None = None) -> Tree:
    """The total with a part added at one index of the leading dim, in place; if `fresh`, the part replaces what is there."""
    before = lambda a: a if fresh is None else jnp.where(fresh, 0, a)
    return update_at(lambda a, d: before(a) + d.astype(a.dtype), total, index, part)


def max_at(total: Tree, index: jax.Array, part: Tree) -> Tree:
    """The total with the larger of itself and a part at one index of the leading dim, in place; a nan stays."""
    return update_at(jnp.maximum, total, index, part)


def update_at(update: Callable, total: Tree, index: jax.Array, part: Tree) -> Tree:
    """The total with update(total, part), elementwise, at one index of the leading dim, in place."""
    # XLA drops the update of a whole array, and then copies it
    if all(a.shape[0] == 1 for a in jax.tree.leaves(total)):
        return jax.tree.map(lambda a, d: update(a, d[None]), total, part)
    return replace(total, jax.tree.map(update, take(total, index), part), index)
