"""Which mesh axis each parameter is sharded over, and the one rule for its gradient.

Layer stacks are sharded over pipe (their first dim), experts and the dense FFN over expert, the vocabulary of embedding
and head over pipe; everything else is replicated.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from k3jax import model
from k3jax.configs import ModelConfig
from k3jax.layers.common import Placement
from k3jax.optim import orthogonalize_flops
from k3jax.parallel.owners import Owners, balanced, replica_axes


def param_specs(config: ModelConfig) -> dict[str, Any]:
    """PartitionSpec of every parameter, a tree like the parameters."""
    shapes = {part: model.shapes(config, part) for part in ("embed", "dense", "head")}
    shapes["chunks"] = {str(p): model.shapes(config, kind) for p, kind in enumerate(config.pattern)}
    if not config.dense_layers:
        shapes["dense"] = {}
    stacked = {"embed": [], "chunks": ["pipe", None, None], "dense": [None], "head": []}

    def spec(part, place: Placement, shape):
        dims: list[str | None] = [None] * len(shape.shape)
        if place.expert_dim is not None:
            dims[place.expert_dim] = "expert"
        return P(*stacked[part], *dims)

    is_place = lambda x: isinstance(x, Placement)
    specs = {
        part: jax.tree.map(lambda a, b, part=part: spec(part, a, b), tree, shapes[part], is_leaf=is_place)
        for part, tree in model.placement_tree(config).items()
    }
    specs["embed"]["table"] = P("pipe", None)
    specs["head"]["weight"] = P(None, "pipe")
    return specs


def reduce_gradients(grads: Any, specs: Any) -> Any:
    """Whole gradients from each rank's contributions: a sum over exactly the axes that the parameter is not sharded over.

    Before: every rank holds the gradient of its own tokens' losses. After: equal on all replicas. One all-reduce a leaf.
    """
    return jax.tree.map(lambda g, spec: lax.psum(g, replica_axes(spec)), grads, specs)


def owners_of(shapes: dict[str, Any], specs: dict[str, Any], groups: Any, sizes: dict[str, int]) -> dict[str, Any]:
    """Who owns which part of every parameter, a tree like them; stacks keep dims of stage and chunk.

    groups: a tree of `Group`. Matrices of Muon stay whole; few and large ones are spread over the devices by what their
    orthogonalisation costs.
    """
    own = lambda part: (
        lambda a, spec, group: Owners(
            spec, a.shape, sizes, kept=2 if part == "chunks" else 0, unit_dims=len(group.matrix_axes)
        )
    )
    tree = {part: jax.tree.map(own(part), leaves, specs[part], groups[part]) for part, leaves in shapes.items()}
    leaves, structure = jax.tree.flatten(tree)
    matrices = [i for i, owners in enumerate(leaves) if owners.unit_dims]
    spread = balanced([leaves[i] for i in matrices], [orthogonalize_flops(*leaves[i].unit) for i in matrices])
    for i, owners in zip(matrices, spread, strict=True):
        leaves[i] = owners
    return jax.tree.unflatten(structure, leaves)


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
