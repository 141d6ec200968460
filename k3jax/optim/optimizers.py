"""Muon with AdamW for what is not a matrix, and AdamW alone; built from optax pieces.

Sources: K3 report section 3.4; Moonlight (arXiv:2502.16982) for the 0.2·√max(m, n) scale. Momentum and Newton–Schulz
iteration follow `optax.contrib.muon`, but are free of scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float

from k3jax.optim.groups import Group, parameter_groups

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration."""


def muon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.0,
    consistent_rms: float = 0.2,
    ns_steps: int = 5,
    groups: Any = None,
) -> optax.GradientTransformation:
    """Muon on matrices, AdamW on all other leaves.

    Args:
      learning_rate: step size or schedule, shared by both; `consistent_rms` makes their updates alike in size.
      momentum: decay of the gradient's moving average.
      nesterov: whether to look one step ahead along the momentum.
      weight_decay: decoupled, on the leaves whose group says so.
      consistent_rms: updates are scaled by this times √max(rows, columns).
      ns_steps: Newton–Schulz iterations.
      groups: a tree of `Group` like the parameters; None: `parameter_groups`.

    Returns:
      A `GradientTransformation`; the gradient it takes must be whole matrices, reduced over all replicas.
    """
    matrices = scale_by_muon(momentum=momentum, nesterov=nesterov, consistent_rms=consistent_rms, ns_steps=ns_steps)
    return by_group(matrices, learning_rate, weight_decay, groups)


class MuonState(NamedTuple):
    """Moving average of the gradients, and how many it has seen."""

    count: jax.typing.ArrayLike
    mu: Any


def scale_by_muon(
    *, momentum: float = 0.95, nesterov: bool = True, consistent_rms: float = 0.2, ns_steps: int = 5
) -> optax.GradientTransformation:
    """Orthogonalised momentum of matrices that lie in the last two axes of every leaf.

    Args:
      momentum: decay of the gradient's moving average, which is corrected for its start at zero.
      nesterov: whether to look one step ahead along the momentum.
      consistent_rms: updates are scaled by this times √max(rows, columns).
      ns_steps: Newton–Schulz iterations.

    Returns:
      A `GradientTransformation`. All axes before the last two are batch axes.
    """

    def init(params):
        return MuonState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))

    def update(updates, state, params=None):
        del params
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, momentum, 1)
        ahead: Any = optax.tree.bias_correction(mu, momentum, optax.safe_increment(count) if nesterov else count)
        if nesterov:
            now = optax.tree.bias_correction(updates, momentum, count)
            ahead = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, ahead, now)
        scale = lambda x: consistent_rms * max(x.shape[-2:]) ** 0.5
        return jax.tree.map(lambda x: scale(x) * orthogonalize(x, ns_steps), ahead), MuonState(count, mu)

    return optax.GradientTransformation(init, update)


def orthogonalize(x: Float[Array, "*batch m n"], steps: int = 5) -> Float[Array, "*batch m n"]:
    """Newton–Schulz iteration on each matrix: singular values go to about one (0.68 to 1.13 after five steps).

    Each matrix is divided by its largest element first, so that its norm neither underflows nor overflows: the result
    does not depend on its scale. A zero matrix stays zero.
    """
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    largest = jnp.abs(x).max((-2, -1), keepdims=True)
    x = x / jnp.where(largest > 0, largest, 1)
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-8)
    a, b, c = NEWTON_SCHULZ

    def iterate(_, x):
        square = x @ x.mT
        return a * x + (b * square + c * square @ square) @ x

    x = lax.fori_loop(0, steps, iterate, x)
    return x.mT if tall else x


def orthogonalize_flops(rows: int, columns: int, steps: int = 5) -> int:
    """Floating-point operations of `orthogonalize` for one matrix: what its products take."""
    short, long = sorted((rows, columns))
    return steps * (4 * short**2 * long + 2 * short**3)


def adamw(
    learning_rate: optax.ScalarOrSchedule, *, weight_decay: float = 0.0, groups: Any = None
) -> optax.GradientTransformation:
    """AdamW on every leaf, with weight decay on the leaves whose group says so.

    Args:
      learning_rate: step size or schedule.
      weight_decay: decoupled weight decay.
      groups: a tree of `Group` like the parameters; None: `parameter_groups`.

    Returns:
      A `GradientTransformation`.
    """
    return by_group(adam(), learning_rate, weight_decay, groups)


def adam() -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=0.9, b2=0.95)


def by_group(
    matrices: optax.GradientTransformation, learning_rate: optax.ScalarOrSchedule, weight_decay: float, groups: Any
) -> optax.GradientTransformation:
    """`matrices` on Muon's leaves and Adam on the others, then decay by group and the learning rate."""
    resolve = lambda params: parameter_groups(params) if groups is None else groups
    is_group = lambda x: isinstance(x, Group)
    labels = lambda params: jax.tree.map(lambda g: g.optimizer, resolve(params), is_leaf=is_group)
    decays = lambda params: jax.tree.map(lambda g: g.decay, resolve(params), is_leaf=is_group)
    return optax.chain(
        optax.partition({"muon": matrices, "adamw": adam()}, labels),
        optax.add_decayed_weights(weight_decay, mask=decays),
        optax.scale_by_learning_rate(learning_rate),
    )
