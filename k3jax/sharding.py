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
from k3jax.layers.common import Placement, placements
from k3jax.optim import newton_schulz_flops
from k3jax.parallel.owners import Owners, balanced, replica_axes


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
    spread = balanced([leaves[i] for i in matrices], [newton_schulz_flops(*leaves[i].unit) for i in matrices])
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
