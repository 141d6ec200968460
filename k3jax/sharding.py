"""Which mesh axis each parameter is sharded over, and the one rule for its gradient.

Layer stacks are sharded over pipe (their first dim), experts and the dense FFN over expert, the vocabulary of embedding
and head over pipe; everything else is replicated.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from k3jax import model
from k3jax.configs import ModelConfig
from k3jax.layers.common import Placement, placements
from k3jax.optim import Group, parameter_groups
from k3jax.parallel.owners import Owners, replica_axes


def param_specs(config: ModelConfig) -> dict[str, Any]:
    """PartitionSpec of every parameter, a tree like the parameters."""
    specs: dict[str, Any] = {part: module_specs(config, part) for part in ("embed", "head")}
    kinds = enumerate(config.pattern)
    specs["chunks"] = {str(p): module_specs(config, kind, stacked=("pipe", None, None)) for p, kind in kinds}
    specs["dense"] = module_specs(config, "dense", stacked=(None,)) if config.dense_layers else {}
    specs["embed"]["table"] = P("pipe", None)
    specs["head"]["weight"] = P(None, "pipe")
    return specs


def module_specs(config: ModelConfig, part: str, *, stacked: tuple[str | None, ...] = ()) -> dict[str, Any]:
    """PartitionSpec of every parameter of one module of `model.MODULES`; stacked: axes of the dims in front of its own."""

    def spec(place: Placement, shape):
        return P(*stacked, *("expert" if dim == place.expert_dim else None for dim in range(len(shape.shape))))

    places = placements(model.abstract(config, part))
    return jax.tree.map(spec, places, model.shapes(config, part), is_leaf=lambda x: isinstance(x, Placement))


def reduce_gradients(grads: Any, specs: Any) -> Any:
    """Whole gradients from each rank's contributions: a sum over exactly the axes that the parameter is not sharded over.

    Before: every rank holds the gradient of its own tokens' losses. After: equal on all replicas. One all-reduce a leaf.
    """
    return jax.tree.map(lambda g, spec: lax.psum(g, replica_axes(spec)), grads, specs)


def owners_of(shapes: dict[str, Any], specs: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    """Who owns which elements of every parameter, a tree like them.

    Each matrix that Muon takes is shared out by itself, under AdamW too: QK-clip tells heads apart. So is each layer's array
    of other parameters.
    """

    def own(part: str, a: Any, spec: P, group: Group) -> Owners:
        stacked = {"chunks": 3, "dense": 1}.get(part, 0)
        return Owners(spec, a.shape, sizes, len(a.shape) - 2 if group.matrix_axes else stacked)

    of, groups = lambda part: functools.partial(own, part), parameter_groups(shapes)
    return {part: jax.tree.map(of(part), tree, specs[part], groups[part]) for part, tree in shapes.items()}


def check_divisible(config: ModelConfig, sizes: dict[str, int]) -> None:
    """ValueError if the model's sharded dims do not divide by the mesh, naming both."""
    for dim, value, axis in (
        ("vocab_size", config.vocab_size, "pipe"),
        ("num_experts", config.num_experts, "expert"),
        ("dense_width", config.dense_width, "expert"),
    ):
        if value % sizes[axis]:
            raise ValueError(
                f"model.{dim}={value} does not divide by {axis}={sizes[axis]}: choose a mesh or a size that does"
            )
