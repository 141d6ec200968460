"""Which parameter is on which optimizer, and how its matrices lie.

A leaf with two or more dims is a stack of matrices in its last two axes; all axes before them (layers, heads, experts)
are batch axes. Known names that are not matrices in this sense are left to AdamW. K3 report section 3.4.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

ADAMW_NAMES = re.compile(r"embed|table|(?<![a-z])head(?![a-z])|beta_proj|conv|norm|a_log|bias|query$")
NO_DECAY_NAMES = re.compile(r"conv|norm|a_log|bias|query$")
MATRIX_AXES = (-2, -1)

Path = tuple[Any, ...]


class Group(NamedTuple):
    """Treatment of one leaf. Axes count from the end: a group stays right when dims are put in front of a leaf."""

    optimizer: str
    """"muon" or "adamw"."""
    decay: bool = True
    """Whether weight decay applies."""
    matrix_axes: tuple[int, ...] = ()
    """(reduction axis, output axis) of its matrices on Muon, the last two if empty."""
    batch_axes: tuple[int, ...] = ()
    """All other axes: its matrices are independent along them. `parameter_groups` fills both in."""

    @property
    def label(self) -> str:
        return self.optimizer if self.decay else f"{self.optimizer}_no_decay"


def parameter_groups(params: Any, overrides: Mapping[str, Group] | None = None) -> Any:
    """Optimizer, matrix axes, batch axes and decay of every parameter.

    Args:
      params: a tree of arrays or of their shapes; only paths and `ndim` count.
      overrides: {pattern: `Group`}. A pattern is a dotted name or the end of one, "attn.out_gate", and may hold *, ? and
        […]; the first that matches decides.

    Returns:
      A tree like params with a `Group` for every leaf, which `muon(groups=…)` takes.

    Raises:
      ValueError: for a pattern that decides nothing, and for a group that its leaf cannot have.

    Examples:
      >>> import jax.numpy as jnp
      >>> from k3jax.optim import Group, parameter_groups
      >>> params = {"proj": jnp.zeros((4, 8)), "gate": jnp.zeros((4, 8)), "bias": jnp.zeros(8)}
      >>> groups = parameter_groups(params, {"gate": Group("adamw")})
      >>> {name: group.label for name, group in groups.items()}
      {'bias': 'adamw_no_decay', 'gate': 'adamw', 'proj': 'muon'}
    """
    overrides = overrides or {}
    unused = set(overrides)

    def group(path: Path, leaf: Any) -> Group:
        name = path_name(path)
        pattern = next((p for p in overrides if fnmatch.fnmatchcase(f".{name}", f"*.{p}")), None)
        if pattern is None:
            return checked(default_group(name, leaf.ndim), name, leaf.ndim)
        unused.discard(pattern)
        return checked(overrides[pattern], name, leaf.ndim)

    groups = jax.tree_util.tree_map_with_path(group, params)
    if unused:
        names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        raise ValueError(
            f"no parameter has its group by {', '.join(sorted(unused))}: a pattern is the end of a dotted name, and the "
            f"first that matches decides; there are {', '.join(names)}"
        )
    return groups


def default_group(name: str, ndim: int) -> Group:
    """By dotted name and number of dims."""
    name = name.lower()
    if ndim < 2 or ADAMW_NAMES.search(name):
        return Group("adamw", decay=ndim >= 2 and not NO_DECAY_NAMES.search(name))
    return Group("muon")


def checked(group: Group, name: str, ndim: int) -> Group:
    """The group with its axes filled in, counted from the end; ValueError if a leaf of ndim dims cannot have it."""
    if group.optimizer not in ("muon", "adamw"):
        raise ValueError(f"{name}: optimizer={group.optimizer!r} must be muon or adamw")
    if group.optimizer == "adamw":
        return group._replace(matrix_axes=(), batch_axes=())
    wanted = group.matrix_axes or MATRIX_AXES
    axes = tuple(axis - ndim if axis >= 0 else axis for axis in wanted)
    if len(set(axes)) != 2 or len(axes) != 2 or not all(-ndim <= axis < 0 for axis in axes):
        raise ValueError(f"{name}: matrix_axes={wanted} must be two axes of {ndim}: give others, or leave it to adamw")
    return group._replace(matrix_axes=axes, batch_axes=tuple(a for a in range(-ndim, 0) if a not in axes))


def is_group(x: Any) -> bool:
    return isinstance(x, Group)


def group_table(params: Any, groups: Any = None) -> str:
    """The groups as text: name, shape, optimizer, number and size of matrices, and decay, a line a parameter.

    Args:
      params: a tree of arrays or of their shapes.
      groups: a tree of `Group` like it; None: `parameter_groups(params)`.

    Returns:
      Aligned lines, the first with the names of the columns.

    Examples:
      >>> import jax.numpy as jnp
      >>> print(group_table({"proj": jnp.zeros((3, 4, 8)), "bias": jnp.zeros(8)}))
      parameter  shape  optimizer  matrices  decay
      bias       8      adamw                no
      proj       3x4x8  muon       3 of 4x8  yes
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    treated = jax.tree.leaves(parameter_groups(params) if groups is None else groups, is_leaf=is_group)
    rows = [("parameter", "shape", "optimizer", "matrices", "decay")]
    for (path, leaf), group in zip(leaves, treated, strict=True):
        matrices = ""
        if group.optimizer == "muon":
            size = [leaf.shape[axis] for axis in group.matrix_axes or MATRIX_AXES]
            matrices = f"{math.prod(leaf.shape) // math.prod(size)} of {times(size)}"
        rows.append((path_name(path), times(leaf.shape), group.optimizer, matrices, "yes" if group.decay else "no"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def times(shape: Any) -> str:
    return "x".join(map(str, shape)) or "scalar"


def path_name(path: Path) -> str:
    """Dotted name of a leaf, as in "chunks.0.attn.q_proj"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
