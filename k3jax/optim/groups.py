"""Which parameter is on which optimizer, and how its matrices lie.

A leaf with two or more dims is a stack of matrices in its last two axes; all axes before them (layers, heads, experts)
are batch axes. Known names that are not matrices in this sense are left to AdamW. K3 report section 3.4.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax

ADAMW_NAMES = re.compile(r"embed|head|table|conv|norm|a_log|bias|beta_proj|query")
NO_DECAY_NAMES = re.compile(r"conv|norm|a_log|bias|query")


class Group(NamedTuple):
    """Treatment of one leaf."""

    optimizer: str
    """"muon" or "adamw"."""
    decay: bool
    """Whether weight decay applies."""
    matrix_axes: tuple[int, ...] = ()
    """(reduction axis, output axis) of its matrices; empty on AdamW."""
    batch_axes: tuple[int, ...] = ()
    """Axes over which its matrices are independent."""

    @property
    def label(self) -> str:
        return self.optimizer if self.decay else f"{self.optimizer}_no_decay"


def group_of(path: tuple[Any, ...], leaf: Any) -> Group:
    """The group of one leaf, from its path and number of dims."""
    name = path_name(path).lower()
    if leaf.ndim < 2 or ADAMW_NAMES.search(name):
        return Group("adamw", decay=leaf.ndim >= 2 and not NO_DECAY_NAMES.search(name))
    return Group("muon", True, (leaf.ndim - 2, leaf.ndim - 1), tuple(range(leaf.ndim - 2)))


def parameter_groups(params: Any) -> Any:
    """A tree like params with the `Group` of every leaf; leaves need only `ndim`.

    Overriding it: change the returned tree and hand it to `muon(groups=…)`.
    """
    return jax.tree_util.tree_map_with_path(group_of, params)


def path_name(path: tuple[Any, ...]) -> str:
    """Dotted name of a leaf, as in "chunks.0.attn.q_proj"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
