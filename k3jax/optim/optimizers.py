"""Muon with AdamW for what is not a matrix, and AdamW alone; built from optax pieces.

Sources: K3 report section 3.4; Moonlight (arXiv:2502.16982) for the 0.2·√max(m, n) scale; `optax.contrib.muon` for the
momentum rule and the Newton–Schulz iteration.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

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

    def shape_of_matrices(tree):
        return jax.tree.map(lambda a: MuonDimensionNumbers(a.ndim - 2, a.ndim - 1), tree)

    matrices = optax.chain(
        scale_by_muon(
            ns_coeffs=(NEWTON_SCHULZ,) * ns_steps,  # one row a step: a loop instead of an unrolled program
            beta=momentum,
            nesterov=nesterov,
            weight_dimension_numbers=shape_of_matrices,
        ),
        optax.stateless_with_tree_map(lambda u, _: consistent_rms * max(jnp.shape(u)[-2:]) ** 0.5 * u),
    )
    return by_group(matrices, learning_rate, weight_decay, groups)


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
