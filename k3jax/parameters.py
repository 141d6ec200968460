"""How many parameters a model has, from shapes alone: nothing is allocated, however large the model."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax

from k3jax import model as lm
from k3jax.configs import ModelConfig
from k3jax.layers.common import Placement, placements
from k3jax.optim.groups import Group, is_group, parameter_groups, path_name

STACKED_DIMS = {"K": 3, "M": 3, "dense": 1, "embed": 0, "head": 0}
"""Dims that the training state has in front of those of one layer; parameter groups are told by all dims."""


class Parameter(NamedTuple):
    """One array of one kind of layer, or of the embedding or head."""

    name: str
    """Part (layer kind, dense, embed or head) and path, as in "K.attn.q_proj"."""
    shape: tuple[int, ...]
    layers: int
    """Layers that have it; 1 for embedding and head."""
    active_share: float
    """Part of it that one token uses."""
    group: Group

    @property
    def total(self) -> int:
        return self.layers * math.prod(self.shape)

    @property
    def active(self) -> float:
        return self.total * self.active_share


def parameters(config: ModelConfig) -> list[Parameter]:
    """Every parameter of the model, each kind of layer once. A layer with a dense FFN has no mixture."""
    parts = [*dict.fromkeys(config.layer_kinds), *(["dense"] if config.dense_layers else []), "embed", "head"]
    shapes = {part: lm.shapes(config, part) for part in parts}
    stacked = {
        part: jax.tree.map(lambda a, n=STACKED_DIMS[part]: jax.ShapeDtypeStruct((1,) * n + a.shape, a.dtype), tree)
        for part, tree in shapes.items()
    }
    groups = jax.tree.leaves(parameter_groups(stacked), is_leaf=is_group)
    places = {part: placements(lm.abstract(config, part)) for part in parts}
    placed = jax.tree.leaves(places, is_leaf=lambda x: isinstance(x, Placement))
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    return [
        _parameter(config, path, leaf.shape, place, group)
        for (path, leaf), place, group in zip(leaves, placed, groups, strict=True)
    ]


def _parameter(
    config: ModelConfig, path: tuple[Any, ...], shape: tuple[int, ...], place: Placement, group: Group
) -> Parameter:
    name = path_name(path)
    part, *below = name.split(".")
    layers, active_share = {"dense": config.dense_layers}.get(part, 1), 1.0
    if part in config.layer_kinds:
        in_mixture = below[0] == "moe"
        layers = config.layer_kinds[config.dense_layers if in_mixture else 0 :].count(part)
        if in_mixture and place.expert_dim is not None:  # what is sharded over experts belongs to one expert each
            active_share = config.experts_per_token / config.num_experts
    elif part == "embed":
        active_share = 0.0
    return Parameter(name, shape, layers, active_share, group)


def count(config: ModelConfig) -> tuple[int, int]:
    """(total, active) parameters. Active: all but the experts a token does not choose and the embedding table."""
    every = parameters(config)
    return sum(p.total for p in every), round(sum(p.active for p in every))


def count_by_group(config: ModelConfig, optimizer: str = "muon") -> dict[str, int]:
    """Parameters by treatment, such as "muon" or "adamw_no_decay"; under `optimizer` adamw all are on adamw."""
    counts: dict[str, int] = {}
    for p in parameters(config):
        group = p.group if optimizer == "muon" else p.group._replace(optimizer=optimizer)
        counts[group.label] = counts.get(group.label, 0) + p.total
    return {label: counts[label] for label in ("muon", "adamw", "adamw_no_decay") if label in counts}
