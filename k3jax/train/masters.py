"""Master weights and what is kept for each of their elements: whole on every replica, or with their owners (ZeRO).

Master weights, gradients that are summed over replicas and the optimizer's state lie alike: `specs`. Without owners these are
the parameters' own; with them (`k3jax.parallel.owners`) a replica has the elements that it owns, and the weights to compute
with are a copy in the compute dtype.

S stages, V virtual chunks, J groups, H heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from k3jax import model as lm
from k3jax import optim
from k3jax.layers.mla import qk_powers
from k3jax.optim.groups import is_group, path_name
from k3jax.optim.orthogonal import directed
from k3jax.parallel.matrices import Deal, deals
from k3jax.parallel.owners import Owners
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
        self.owners = owners_of(shapes, self.param_specs, dict(mesh.shape)) if config.zero else None
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
        """The optimizer's updates and next state, and QK-clip. Each rank works on what it owns, and on the matrices dealt to it.

        max_logits: of the heads of MLA slots, {p: [S, V, J, H]}.
        """

        def local(grads, state, masters, max_logits):
            updates, state = optimizer.update(grads, state, masters)
            return self._clip_local(updates, masters, max_logits), state

        specs = self.specs, state_specs, self.specs, P("pipe")
        on_ranks = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=specs[:2])
        return on_ranks(grads, state, masters, max_logits)

    def _clip_local(self, updates: Tree, masters: Tree, max_logits: dict[str, jax.Array]) -> Tree:
        """Updates after which the logits that were measured are at most `qk_clip`."""
        for p, top in max_logits.items():
            powers: dict[str, Any] = qk_powers(self.config.model)
            weights = masters["chunks"][p]["attn"]
            changed = updates["chunks"][p]["attn"]
            if self.owners:  # a slice of a matrix is clipped like one of a single row
                owners = self.owners["chunks"][p]["attn"]
                powers = {name: self._own_power(owners[name], power) for name, power in powers.items()}
                weights, changed = ({name: tree[name][..., None, :] for name in powers} for tree in (weights, changed))
            clip = optim.qk_clip(self.config.qk_clip, powers=powers)
            tops = dict.fromkeys(powers, top)
            clipped: Any = clip.update(changed, clip.init(weights), weights, max_logits=tops)[0]
            of_slot = updates["chunks"][p]["attn"]
            of_slot |= {name: clipped[name].reshape(of_slot[name].shape) for name in powers}
        return updates

    def _own_power(self, owners: Owners, power: ArrayLike) -> jax.Array:
        """`qk_powers` of the elements of a weight that this rank owns."""
        return owners.own_flat(owners.flat(jnp.broadcast_to(jnp.asarray(power), owners.shape[-2:])))

    def orthogonalize_local(self, momenta: Tree, steps: int) -> Tree:
        """Every matrix `directed`: by the rank that it is dealt to, or without owners by all that have it, or a piece of it."""
        paths, tree = jax.tree_util.tree_flatten_with_path(momenta)
        slices = {path_name(path): x for path, x in paths}
        if not self.owners:
            return tree.unflatten(self._directed_whole(name, x, steps) for name, x in slices.items())
        for names, deal in self.deals.items():
            rows = [slices[name].reshape(-1, slices[name].shape[-1]) for name in names]
            for name, made in zip(names, deal.run(functools.partial(directed, steps=steps), rows), strict=True):
                slices[name] = made.reshape(slices[name].shape)
        return tree.unflatten(slices.values())

    def _directed_whole(self, name: str, x: jax.Array, steps: int) -> jax.Array:
        """`directed`, but that a matrix of which ranks hold pieces is made whole on each of them."""
        for dim, axis in self._pieces[name].items():
            whole = directed(lax.all_gather(x, axis, axis=dim, tiled=True), steps)
            return lax.dynamic_slice_in_dim(whole, lax.axis_index(axis) * x.shape[dim], x.shape[dim], dim)
        return directed(x, steps)

    @functools.cached_property
    def _pieces(self) -> dict[str, dict[int, str]]:
        """Of every parameter: the dim of its matrices that is sharded, at most one, and its mesh axis."""
        specs = jax.tree_util.tree_leaves_with_path(self.param_specs, is_leaf=lambda x: isinstance(x, P))
        return {path_name(path): {i: a for i, a in enumerate(spec) if a and i >= len(spec) - 2} for path, spec in specs}

    @functools.cached_property
    def deals(self) -> dict[tuple[str, ...], Deal]:
        """Which rank orthogonalises which matrices, by the names of parameters; none without owners."""
        if not self.owners:
            return {}
        groups = jax.tree.leaves(self.groups, is_leaf=is_group)
        owners = jax.tree_util.tree_leaves_with_path(self.owners)
        return deals({path_name(path): o for (path, o), g in zip(owners, groups, strict=True) if g.matrix_axes})

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
    return jax.tree.map(lambda group: optim.Group("adamw", group.decay), groups, is_leaf=is_group)


def make_optimizer(config: StepConfig, learning_rate: optax.Schedule, masters: Masters) -> optax.GradientTransformation:
    """The configured optimizer of master weights that lie like `masters` says."""
    how: Any = dict(weight_decay=config.weight_decay, mu_dtype=config.momentum_dtype, groups=masters.groups)
    if config.optimizer == "adamw":
        return optim.adamw(learning_rate, **how)
    matrices = optim.scale_by_muon(
        mu_dtype=config.momentum_dtype, groups=masters.groups, orthogonalizer=masters.orthogonalize_local
    )
    return optim.muon_with_adamw(learning_rate, matrices, **how)
