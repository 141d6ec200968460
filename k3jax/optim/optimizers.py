"""Optimizers of a whole model, as chains of Optax transformations: Muon with AdamW, and AdamW alone.

Weight decay goes by group. State and updates are per leaf: nothing here looks at a mesh, or from one matrix to another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import optax

from k3jax.optim.groups import is_group, parameter_groups
from k3jax.optim.orthogonal import scale_by_muon


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
    """Muon on matrices and AdamW on all other leaves, as K3 uses them: `muon_with_adamw` of a `scale_by_muon`.

    Args:
      learning_rate: step size or schedule, shared by both; `consistent_rms` makes their updates alike in size.
      momentum: see `scale_by_muon`, also for nesterov, consistent_rms and ns_steps.
      nesterov: see there.
      weight_decay: decoupled, on the leaves whose group says so.
      consistent_rms: see there.
      ns_steps: see there.
      groups: a tree of `Group` like the parameters; None: `parameter_groups`.

    Returns:
      A `GradientTransformation`; the gradients it takes must be whole matrices, reduced over all replicas.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from k3jax.optim import muon
      >>> params = {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}
      >>> loss = lambda p: ((jnp.ones(4) @ p["w"] + p["b"]) ** 2).sum()
      >>> optimizer = muon(0.1, weight_decay=0.1)
      >>> @jax.jit
      ... def step(params, state):
      ...     updates, state = optimizer.update(jax.grad(loss)(params), state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> state, before = optimizer.init(params), loss(params)
      >>> for _ in range(20):
      ...     params, state = step(params, state)
      >>> bool(loss(params) < before / 2)
      True
    """
    matrices = scale_by_muon(
        momentum=momentum, nesterov=nesterov, consistent_rms=consistent_rms, ns_steps=ns_steps, groups=groups
    )
    return muon_with_adamw(learning_rate, matrices, weight_decay=weight_decay, groups=groups)


def muon_with_adamw(
    learning_rate: optax.ScalarOrSchedule,
    matrices: optax.GradientTransformation | None = None,
    *,
    adamw_learning_rate: optax.ScalarOrSchedule | None = None,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mu_dtype: jax.typing.DTypeLike | None = None,
    groups: Any = None,
) -> optax.GradientTransformation:
    """Muon on matrices and AdamW on all other leaves, each with its own settings.

    Args:
      learning_rate: step size or schedule.
      matrices: what makes updates of the leaves on Muon; None: `scale_by_muon(groups=groups)`.
      adamw_learning_rate: step size or schedule of the leaves on AdamW; None: the same.
      b1: decay of AdamW's average of gradients.
      b2: decay of AdamW's average of squares.
      eps: added to the root of AdamW's average of squares.
      weight_decay: decoupled, times the leaf's learning rate, on the leaves whose group says so.
      mu_dtype: dtype of AdamW's stored average of gradients; None: the parameter's.
      groups: a tree of `Group` like the parameters; None: `parameter_groups`. Leaves may have dims in front that the
        parameters had not, as long as their paths are the same.

    Returns:
      A `GradientTransformation`; the gradients it takes must be reduced over all replicas, and be what `matrices` takes.

    Examples:
      >>> import jax.numpy as jnp
      >>> from k3jax.optim import Group, muon_with_adamw, parameter_groups
      >>> params = {"w": jnp.ones((4, 3)), "codes": jnp.ones((16, 4)), "b": jnp.ones(3)}
      >>> groups = parameter_groups(params, {"codes": Group("adamw", decay=False)})
      >>> optimizer = muon_with_adamw(0.02, adamw_learning_rate=1e-3, b2=0.99, groups=groups)
      >>> updates, state = optimizer.update(params, optimizer.init(params), params)
      >>> {name: round(float(jnp.abs(u).max()), 4) for name, u in updates.items()}
      {'b': 0.001, 'codes': 0.001, 'w': 0.0016}
    """
    transforms = {
        "muon": scale_by_muon(groups=groups) if matrices is None else matrices,
        "adamw": optax.scale_by_adam(b1=b1, b2=b2, eps=eps, mu_dtype=mu_dtype),
    }
    rate = optax.scale_by_learning_rate(learning_rate)
    if adamw_learning_rate is not None:
        rate = by_optimizer({"muon": rate, "adamw": optax.scale_by_learning_rate(adamw_learning_rate)}, groups)
    return optax.chain(by_optimizer(transforms, groups), decayed_by_group(weight_decay, groups), rate)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mu_dtype: jax.typing.DTypeLike | None = None,
    groups: Any = None,
) -> optax.GradientTransformation:
    """AdamW on every leaf, with weight decay on the leaves whose group says so.

    Args:
      learning_rate: step size or schedule.
      b1: decay of the average of gradients.
      b2: decay of the average of squares.
      eps: added to the root of the average of squares.
      weight_decay: decoupled weight decay.
      mu_dtype: dtype of the stored average of gradients; None: the parameter's.
      groups: a tree of `Group` like the parameters; None: `parameter_groups`.

    Returns:
      A `GradientTransformation`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from k3jax.optim import adamw
      >>> params = {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}
      >>> optimizer = adamw(0.5, weight_decay=0.1)
      >>> zero = {"w": jnp.zeros((4, 3)), "b": jnp.zeros(3)}
      >>> updates, state = optimizer.update(zero, optimizer.init(params), params)
      >>> {name: round(float(jnp.abs(u).max()), 4) for name, u in updates.items()}
      {'b': 0.0, 'w': 0.05}
    """
    return optax.chain(
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps, mu_dtype=mu_dtype),
        decayed_by_group(weight_decay, groups),
        optax.scale_by_learning_rate(learning_rate),
    )


def by_optimizer(transforms: Mapping[Any, optax.GradientTransformation], groups: Any) -> optax.GradientTransformation:
    """Each leaf's updates by the transformation that its group names."""
    return optax.partition(transforms, lambda tree: of_groups("optimizer", tree, groups))


def decayed_by_group(weight_decay: float, groups: Any) -> optax.GradientTransformation:
    return optax.add_decayed_weights(weight_decay, mask=lambda tree: of_groups("decay", tree, groups))


def of_groups(field: str, tree: Any, groups: Any) -> Any:
    """One field of every leaf's group, as a tree."""
    groups = parameter_groups(tree) if groups is None else groups
    return jax.tree.map(lambda group: getattr(group, field), groups, is_leaf=is_group)
