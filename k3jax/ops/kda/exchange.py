"""How consecutive segments of a sequence follow each other: from their affine maps to the state that enters each.

Backward mirrors it: the cotangent of the state that leaves a segment comes from the segments after it, through transposed
maps, so no gradient with respect to a map is ever formed. K3 report, section 5.1.2.

B batch, H heads, K key dim, V value dim, R segments, of all ranks in order.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.ops.kda.affine import compose


@runtime_checkable
class Exchange(Protocol):
    """How the segments of a sequence follow each other; hashable."""

    def forward(self, M, S, initial_state, segment_ids) -> tuple[jax.Array, jax.Array, Any]:
        """From the maps M [R, B, H, K, K] and S [R, B, H, K, V] of this device's segments and the first state: the
        state that enters each of them, the last state, and what `backward` needs."""
        ...

    def backward(self, kept, d_entering, d_final) -> tuple[jax.Array, jax.Array]:
        """From the cotangents of the entering states, as if no segment followed, and that of the last state (None:
        zero): the cotangents of the states that leave each segment, and of the first state."""
        ...


class SideBySide(NamedTuple):
    """The segments of one device."""

    def forward(self, M, S, initial_state, segment_ids):
        entering, final = states_between(M, S, initial_state)
        return entering, final, M

    def backward(self, kept, d_entering, d_final):
        d_final = jnp.zeros_like(d_entering[0]) if d_final is None else d_final
        return cotangents_between(kept, d_entering, d_final)


def states_between(M, S, first) -> tuple[jax.Array, jax.Array]:
    """The state that enters each of R consecutive maps, [R, ...], and the one that leaves the last."""
    # The first state is a map too: it forgets all and writes that state.
    M, S = jnp.concatenate([jnp.zeros_like(M[:1]), M]), jnp.concatenate([first[None], S])
    _, states = lax.associative_scan(lambda earlier, later: compose(later, earlier), (M, S))
    return states[:-1], states[-1]


def cotangents_between(M, d_entering, d_final) -> tuple[jax.Array, jax.Array]:
    """The cotangents of the states that leave each map, and of the first state: `states_between` backward in time."""
    d_leaving, d_first = states_between(M[::-1].mT, d_entering[::-1], d_final)
    return d_leaving[::-1], d_first
