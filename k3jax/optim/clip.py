"""QK-clip: attention logits that grew too large are cut back in the weights that make them.

A head's logits are products of its query and key weights: what scales these by √γ each scales its logits by γ. So the
rule is a power of γ for every element of a weight: 1/2 in parts where query and key both give way, 1 in the part of the
query whose keys all heads share. Kimi K2, arXiv:2507.20534, section 2.1; kept in K3.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from k3jax.optim.groups import Path, path_name


def qk_clip(threshold: float = 100.0, *, powers: Mapping[str, ArrayLike]) -> optax.GradientTransformationExtraArgs:
    """Weights after the step times γ to a power, where γ = threshold / max(S, threshold) and S is a head's largest logit.

    Last in a chain: `update(updates, state, params, max_logits=…)` changes the updates so that params + updates are the
    clipped weights. It caps exactly the logits that S was measured on, as far as the step itself does not change them;
    updates of heads whose S is at most the threshold stay the same bit by bit.

    Args:
      threshold: largest logit that stays as it is.
      powers: {name: power of γ} of the weights to clip, by the last part of their path; a number, or an array that
        broadcasts against one head's matrix, such as [columns]. For the attention here: `k3jax.layers.mla.qk_powers`.

    Returns:
      A `GradientTransformationExtraArgs`. Its `max_logits` is a tree with an array at the path of a weight, or of a module
      that holds weights, which are clipped alike: S of every matrix, shaped like the weight without its last two dims.
      Weights without one are not clipped. ValueError for an array that no weight takes, or of another shape.

    Raises:
      ValueError: for a threshold that is not above 0; inf clips nothing.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from k3jax.optim import muon, qk_clip
      >>> params = {"attn": {"q": jnp.ones((2, 4, 3)), "k": jnp.ones((2, 4, 3)), "v": jnp.ones((2, 4, 3))}}
      >>> optimizer = optax.chain(muon(0.0), qk_clip(10.0, powers={"q": 0.5, "k": 0.5}))
      >>> max_logits = {"attn": jnp.array([7.0, 40.0])}  # of each of two heads
      >>> updates, _ = optimizer.update(params, optimizer.init(params), params, max_logits=max_logits)
      >>> params = optax.apply_updates(params, updates)
      >>> {name: w[:, 0, 0].tolist() for name, w in params["attn"].items()}
      {'k': [1.0, 0.5], 'q': [1.0, 0.5], 'v': [1.0, 1.0]}
    """

    if isinstance(threshold, Real) and not threshold > 0:
        raise ValueError(f"threshold={threshold}: must be above 0 (inf: never clip)")

    def update(updates, state, params=None, *, max_logits: Any = None, **extra_args):
        del extra_args
        if params is None or max_logits is None:
            raise ValueError("qk_clip needs weights and logits: call update(updates, state, params, max_logits=…)")
        measured = dict(jax.tree_util.tree_leaves_with_path(max_logits))
        taken = set()

        def clipped(path: Path, update: jax.Array, weight: jax.Array) -> jax.Array:
            source = next((path[:i] for i in range(len(path) + 1) if path[:i] in measured), None)
            power = powers.get(path_name(path[-1:]))
            if source is None or power is None:
                return update
            taken.add(source)
            if measured[source].shape != weight.shape[:-2]:
                raise ValueError(
                    f"{path_name(path)} is {weight.shape}: its max_logits must be {weight.shape[:-2]}, one for every "
                    f"matrix, and are {measured[source].shape}"
                )
            factor = clip_factor(measured[source], threshold, power)
            return jnp.where(factor == 1, update, ((weight + update) * factor - weight).astype(update.dtype))

        result = jax.tree_util.tree_map_with_path(clipped, updates, params)
        if taken != set(measured):
            unused = ", ".join(sorted(path_name(path) or "(root)" for path in set(measured) - taken))
            raise ValueError(f"max_logits at {unused} clip nothing: there is no weight named {' or '.join(powers)}")
        return result, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def clip_factor(max_logits: jax.Array, threshold: float, power: ArrayLike) -> jax.Array:
    """What the weights of each head are multiplied by, [*heads, 1 or rows, 1 or columns]; 1 at or below the threshold."""
    gamma = jnp.where(max_logits > threshold, threshold / max_logits, 1)  # also for a threshold of inf
    return gamma[..., None, None] ** jnp.asarray(power, gamma.dtype)
