"""What all layers share: parameters with their placement, norms, and what a layer knows about its tokens.

B batch, T local tokens, D model.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int


class Axes(NamedTuple):
    """Mesh axes that the model communicates over; None: not sharded, and nothing is communicated."""

    pipe: str | None = None
    expert: str | None = None
    context: str | None = None
    exchange: str = "all_gather"
    """How rows travel between experts: a name of `parallel.experts.mixture.EXCHANGES`."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["segment_ids", "ids"],
    meta_fields=["axes"],
)
@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens of this rank, and the mesh axes over which they and the experts are spread."""

    segment_ids: Int[Array, "B T"]
    """Document of each token: non-decreasing along T and over context shards."""
    ids: Int[Array, "B T"]
    """Token ids, −1 for padding."""
    axes: Axes = Axes()

    @property
    def real(self) -> Bool[Array, "B T"]:
        """False for padding, which is neither routed nor counted."""
        return self.ids >= 0


class Placement(NamedTuple):
    """How one parameter is used and sharded."""

    fp32: bool = False
    """Used in float32 whatever the compute dtype."""
    expert_dim: int | None = None
    """Dim that is split over the expert axis."""


def param(value: jax.Array, *, fp32: bool = False, expert_dim: int | None = None) -> nnx.Param:
    """A parameter that remembers its `Placement`."""
    return nnx.Param(value, placement=Placement(fp32, expert_dim))


class Draw:
    """Source of initial values of one module.

    Small parameters take consecutive pieces of one stream of normal numbers: one generator in the program instead of one
    a parameter. Those that are sharded draw alone, so that no rank makes more than its share. Without a key it hands out
    zeros and counts what is taken.
    """

    def __init__(self, key: jax.Array | None = None, count: int = 0):
        self.key, self.taken, self.alone = key, 0, 0
        self.stream = None if key is None else jax.random.normal(jax.random.fold_in(key, 0), (count,), jnp.float32)

    def normal(self, std: float, *shape: int, alone: bool = False) -> jax.Array:
        """Normal values of standard deviation `std`, float32."""
        if alone:
            self.alone += 1
            if self.key is None:
                return jnp.zeros(shape)
            return std * jax.random.normal(jax.random.fold_in(self.key, self.alone), shape, jnp.float32)
        start, self.taken = self.taken, self.taken + math.prod(shape)
        if self.stream is None:
            return jnp.zeros(shape)
        return std * self.stream[start : self.taken].reshape(shape)

    def uniform(self, low: float, high: float, *shape: int) -> jax.Array:
        """Uniform values in (low, high), float32: normal ones through their distribution function."""
        return low + (high - low) * jax.scipy.special.ndtr(self.normal(1.0, *shape))


def placements(module: nnx.Module) -> dict[str, Any]:
    """The `Placement` of every parameter of a module, as a nested dict like `nnx.to_pure_dict` of its state."""

    def walk(tree):
        if isinstance(tree, nnx.Variable):
            return tree.get_metadata("placement")
        return {key: walk(value) for key, value in tree.items()}

    return walk(nnx.state(module))


class RMSNorm(nnx.Module):
    """x · rsqrt(mean x² + eps) · weight over the last dim, computed in float32, returned in x's dtype."""

    def __init__(self, size: int, eps: float):
        self.eps = eps
        self.weight = param(jnp.ones(size), fp32=True)

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        x32 = x.astype(at_least_fp32(x))
        scale = jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + self.eps)
        return (x32 * scale * self.weight[...]).astype(x.dtype)


def at_least_fp32(x: jax.Array) -> jnp.dtype:
    """float32, or float64 for the float64 reference."""
    return jnp.promote_types(x.dtype, jnp.float32)
