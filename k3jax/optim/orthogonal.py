"""Muon's update of matrices: momentum, made orthogonal by a Newton–Schulz iteration.

Sources: K3 report section 3.4; Moonlight (arXiv:2502.16982) for the 0.2·√max(m, n) scale. The momentum rule is that of
`optax.contrib.muon`. Updates are free of the scale of gradients: only ratios of them are ever formed.

m rows, n columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float

from k3jax.optim.groups import MATRIX_AXES, is_group, path_name

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration."""


class MuonState(NamedTuple):
    """Moving average of the gradients, and how many it has seen."""

    count: jax.typing.ArrayLike
    mu: Any


def scale_by_muon(
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    consistent_rms: float = 0.2,
    ns_steps: int = 5,
    mu_dtype: jax.typing.DTypeLike | None = None,
    groups: Any = None,
    orthogonalizer: Callable[[Any, int], Any] | None = None,
) -> optax.GradientTransformation:
    """Orthogonalised momentum of leaves that are stacks of matrices.

    Matrices do not see each other, so any number of batch dims may stand in front. Gradients may have any scale that
    float32 holds, and it may change on the way.

    Args:
      momentum: decay of the gradient's moving average, which is corrected for its start at zero.
      nesterov: whether to look one step ahead along the momentum.
      consistent_rms: updates are scaled by this times √max(rows, columns).
      ns_steps: Newton–Schulz iterations.
      mu_dtype: dtype of the stored momentum; None: the parameter's. bfloat16 halves it. Each step then rounds it by up
        to 2⁻⁸: the momentum is off by 0.5 % where gradients vary, at most by 2⁻⁸ / (1 − momentum), 8 %, where they stay
        the same; updates of varying gradients by 1 %, a cosine of 0.9999.
      groups: a tree of `Group` with the paths of the leaves, whose `matrix_axes` say where the matrices lie; None: the
        last two axes.
      orthogonalizer: (momenta, ns_steps) -> every matrix of the tree `directed`, where they are not whole on this device;
        None: they are.

    Returns:
      A `GradientTransformation`. Updates have the gradient's dtype; the arithmetic is at least float32, products of
      bfloat16 matrices are summed in float32.

    Raises:
      ValueError: for settings that mean nothing; from its `init`, for a leaf of fewer than two dims.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from k3jax.optim import scale_by_muon
      >>> params = {"heads": jnp.zeros((3, 16, 8))}
      >>> optimizer = optax.chain(scale_by_muon(), optax.scale_by_learning_rate(0.02))
      >>> state = optimizer.init(params)
      >>> grads = {"heads": 1e-12 * jax.random.normal(jax.random.key(0), (3, 16, 8))}
      >>> updates, state = optimizer.update(grads, state)
      >>> singular = jnp.linalg.svd(updates["heads"], compute_uv=False) / (0.02 * 0.2 * 16**0.5)
      >>> bool((singular > 0.6).all() and (singular < 1.2).all())
      True
    """
    check_settings(momentum, consistent_rms, ns_steps)
    axes = {} if groups is None else axes_by_path(groups)

    def init(params):
        if orthogonalizer is None:  # which may take matrices in any form
            for path, leaf in jax.tree_util.tree_leaves_with_path(params):
                if leaf.ndim < 2:
                    name = path_name(path) or "the parameter"
                    raise ValueError(
                        f"{name} is {leaf.shape}, no matrix: take `muon`, which leaves it to AdamW, or a mask"
                    )
        return MuonState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params, dtype=mu_dtype))

    def update(updates, state, params=None):
        del params
        count = optax.safe_increment(state.count)
        average = lambda m, g: momentum * at_least_fp32(m) + (1 - momentum) * at_least_fp32(g)
        mu = jax.tree.map(average, state.mu, updates)
        # The iteration forgets scale, so the momentum needs no correction for its start at zero; ahead of it, only what
        # it lacks beside the newest gradient. Divided by (1 − momentum^t), this is the rule of optax.
        lacks = (1 - momentum**count) / (1 - momentum ** optax.safe_increment(count))

        def ahead(m, g):
            return (average(jnp.asarray(lacks, m.dtype) * m, g) if nesterov else m).astype(g.dtype)

        def whole(path, m):
            at = axes.get(path, MATRIX_AXES)
            return jnp.moveaxis(directed(jnp.moveaxis(m, at, MATRIX_AXES), ns_steps), MATRIX_AXES, at)

        momenta = jax.tree.map(ahead, mu, updates)
        directions = (
            orthogonalizer(momenta, ns_steps) if orthogonalizer else jax.tree_util.tree_map_with_path(whole, momenta)
        )
        directions = jax.tree.map(lambda x: consistent_rms * x, directions)
        return directions, MuonState(count, jax.tree.map(lambda new, old: new.astype(old.dtype), mu, state.mu))

    return optax.GradientTransformation(init, update)


def check_settings(momentum: Any, consistent_rms: Any, ns_steps: Any) -> None:
    """ValueError for numbers that mean nothing; arrays, which `optax.inject_hyperparams` makes of them, may hold anything."""
    for name, value, holds, needed in (
        ("momentum", momentum, lambda x: 0 <= x < 1, "at least 0 and below 1"),
        ("consistent_rms", consistent_rms, lambda x: 0 < x < math.inf, "positive and finite"),
        ("ns_steps", ns_steps, lambda x: x >= 1, "at least 1"),
    ):
        if value is None or (isinstance(value, Real) and not holds(value)):
            raise ValueError(f"{name}={value}: must be {needed}")


def axes_by_path(groups: Any) -> dict[tuple[Any, ...], tuple[int, ...]]:
    """Where each leaf's matrices lie. By path, because inside `optax.partition` trees lack the leaves of others."""
    leaves = jax.tree_util.tree_leaves_with_path(groups, is_leaf=is_group)
    return {path: group.matrix_axes or MATRIX_AXES for path, group in leaves}


def directed(x: Float[Array, "*batch m n"], steps: int = 5) -> Float[Array, "*batch m n"]:
    """Each matrix orthogonalised, times √max(m, n): all elements have a root mean square of about one."""
    return max(x.shape[-2:]) ** 0.5 * orthogonalize(x, steps)


def orthogonalize(x: Float[Array, "*batch m n"], steps: int = 5) -> Float[Array, "*batch m n"]:
    """Newton–Schulz iteration on each matrix: singular values go to about one.

    After five steps, those that were above 1/500 of the matrix's norm are within 0.68 and 1.20.

    Each matrix is divided by its largest element before its norm is taken, so that neither underflows nor overflows:
    the result does not depend on its scale. Zero stays zero, and where all matrices of this device are zero nothing is
    computed. Products have the dtype of x and are summed in float32 at least.

    Args:
      x: matrices in the last two axes.
      steps: iterations.

    Returns:
      An array like x.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> x = orthogonalize(jax.random.normal(jax.random.key(0), (3, 8, 20)))
      >>> singular = jnp.linalg.svd(x, compute_uv=False)
      >>> bool((singular > 0.6).all() and (singular < 1.2).all())
      True
    """
    fp32 = jnp.promote_types(x.dtype, jnp.float32)
    product = lambda a, b: jnp.matmul(a.astype(x.dtype), b.astype(x.dtype), preferred_element_type=fp32)
    a, b, c = NEWTON_SCHULZ

    def step(_, y):
        square = product(y, y.mT)
        return a * y + product(b * square + c * product(square, square), y)

    def iterate(x):
        y = x.astype(fp32)
        tall = y.shape[-2] > y.shape[-1]
        y = y.mT if tall else y
        largest = jnp.abs(y).max((-2, -1), keepdims=True)
        y = y / jnp.where(largest > 0, largest, 1)
        y = y / jnp.maximum(jnp.linalg.norm(y, axis=(-2, -1), keepdims=True), 1)  # at least 1, unless all is zero
        y = lax.fori_loop(0, steps, step, y)
        return (y.mT if tall else y).astype(x.dtype)

    return lax.cond((x != 0).any(), iterate, lambda x: x, x)


def newton_schulz_flops(rows: int, columns: int, steps: int = 5) -> int:
    """Floating-point operations of the iteration on one matrix, those of its products.

    Args:
      rows: of the matrix.
      columns: of the matrix.
      steps: iterations.

    Returns:
      An integer; a multiplication and its addition count as two.

    Examples:
      >>> newton_schulz_flops(128, 7168) == newton_schulz_flops(7168, 128) == 5 * (4 * 128**2 * 7168 + 2 * 128**3)
      True
    """
    small, large = sorted((rows, columns))
    return steps * (4 * small * small * large + 2 * small**3)


def at_least_fp32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
