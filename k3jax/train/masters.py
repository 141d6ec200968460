"""Master weights and what is kept for each of their elements: whole on every replica, or with their owners (ZeRO).

Master weights, gradients that are summed over replicas and the optimizer's state lie alike: `specs`. Without owners these are
the parameters' own; with them (`k3jax.parallel.owners`) a replica has its own matrices and elements alone, and the weights
to compute with are a copy in the compute dtype.

S stages, V virtual chunks, J groups, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from k3jax import model as lm
from k3jax import optim
from k3jax.configs import MLA
from k3jax.layers.mla import qk_powers
from k3jax.sharding import owners_of, param_specs, reduce_gradients
from k3jax.train.config import StepConfig

Tree = Any


class Masters:
    """Where they lie and how they change. shapes: of all parameters, whole.

    Methods on whole trees are for use under jit, those with "local" in their name inside the step's shard_map.
    """

    def __init__(self, config: StepConfig, mesh: Mesh | AbstractMesh, shapes: Tree):
        self.config, self.mesh = config, mesh
        self.param_specs = param_specs(config.model)
        self.groups = groups_of(config, shapes)
        self.owners = owners_of(shapes, self.param_specs, self.groups, dict(mesh.shape)) if config.zero else None
        self.specs = jax.tree.map(lambda o: o.out_spec, self.owners) if self.owners else self.param_specs

    # ---- inside the step ------------------------------------------------------------------------------------------------

    @property
    def local_chunk_owners(self) -> Tree | None:
        """Owners of the chunks' parameters if gradients shall reach them during the pipeline (ZeRO-2), else None."""
        return self.owners["chunks"] if self.owners and self.config.zero == 2 else None

    def reduce_local(self, grads: Tree) -> Tree:
        """Each rank's contributions to gradients, summed over replicas; those of `local_chunk_owners` are already.

        One all-reduce a leaf, or one reduce-scatter to owners.
        """
        if not self.owners:
            return reduce_gradients(grads, self.param_specs)
        early = self.local_chunk_owners is not None
        reduce = lambda part: lambda o, g: o.placed(g) if early and part == "chunks" else o.scatter(g)
        return {part: jax.tree.map(reduce(part), self.owners[part], tree) for part, tree in grads.items()}

    # ---- the optimizer --------------------------------------------------------------------------------------------------

    def update(
        self, optimizer: optax.GradientTransformation, grads: Tree, state: Tree, state_specs: Tree, masters: Tree,
        max_logits: dict[str, jax.Array],
    ) -> tuple[Tree, Tree]:  # fmt: skip
        """The optimizer's updates and next state. Each owner works on what it owns; nothing is communicated.

        max_logits: of the heads of MLA slots, {p: [S, V, J, H]}, for QK-clip.
        """
        by_weight = {
            "chunks": {p: {"attn": dict.fromkeys(qk_powers(self.config.model), top)} for p, top in max_logits.items()}
        }
        update = optax.with_extra_args_support(optimizer).update
        if not self.owners:
            return update(grads, state, masters, max_logits=by_weight)
        owners = self.owners

        def local(grads, state, masters, max_logits):
            of_owner = lambda path, top: at(owners, path).of_units.own(top)
            tops = jax.tree_util.tree_map_with_path(of_owner, max_logits)
            return update(grads, state, masters, max_logits=tops)

        in_specs = self.specs, state_specs, self.specs, P("pipe")
        shard_mapped = jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=(self.specs, state_specs))
        return shard_mapped(grads, state, masters, by_weight)

    # ---- between whole parameters and their owners ----------------------------------------------------------------------

    def own(self, params: Tree) -> Tree:
        """Masters of whole parameters, float32."""
        return self._on_owners(lambda o, a: o.own(a), params, self.param_specs, self.specs)

    def gather(self, masters: Tree) -> Tree:
        """Whole parameters, or gradients, of what lies like masters. One all-gather a leaf, if there are owners."""
        return self._on_owners(lambda o, a: o.gather(a), masters, self.specs, self.param_specs)

    def params(self, masters: Tree) -> Tree:
        """The weights to compute with: in the compute dtype before they travel. Without owners the masters themselves."""
        return self.gather(self.cast(masters)) if self.owners else masters

    def cast(self, params: Tree) -> Tree:
        """In the compute dtype, but for what is used in float32."""
        return lm.cast_for_compute(self.config.model, params, jnp.dtype(self.config.dtype))

    def _on_owners(self, function: Callable, tree: Tree, in_specs: Tree, out_specs: Tree) -> Tree:
        if not self.owners:
            return tree
        local = lambda tree: jax.tree.map(function, self.owners, tree)
        return jax.shard_map(local, mesh=self.mesh, in_specs=(in_specs,), out_specs=out_specs)(tree)


def groups_of(config: StepConfig, params: Tree) -> Tree:
    """The `Group` of every parameter under the configured optimizer: AdamW alone has no matrices."""
    groups = optim.parameter_groups(params)
    if config.optimizer == "muon":
        return groups
    is_group = lambda x: isinstance(x, optim.Group)
    return jax.tree.map(lambda group: optim.Group("adamw", group.decay), groups, is_leaf=is_group)


def make_optimizer(config: StepConfig, learning_rate: optax.Schedule, groups: Tree) -> optax.GradientTransformation:
    """The configured optimizer, and QK-clip where the model has attention with logits to clip."""
    factory = {"muon": optim.muon, "adamw": optim.adamw}[config.optimizer]
    optimizer = factory(learning_rate, weight_decay=config.weight_decay, groups=groups)
    if MLA not in config.model.pattern:
        return optimizer
    return optax.chain(optimizer, optim.qk_clip(config.qk_clip, powers=qk_powers(config.model)))


def at(tree: Tree, path: tuple[Any, ...]) -> Any:
    """The subtree of nested dicts at a path of keys."""
    for key in path:
        tree = tree[key.key]
    return tree
