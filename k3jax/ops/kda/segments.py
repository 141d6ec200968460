"""KDA of a whole sequence as one operation with its own gradient, whatever evaluates it.

A long sequence may be cut into segments that are evaluated side by side: several on this device, or one on each rank of a
mesh axis. Each segment is an affine map of the state; composing the maps gives the state that enters each, and from
there the recurrence is exact. Backward mirrors it: the cotangent of the state that leaves a segment comes from the segments
after it, through transposed maps. K3 report, sections 2.1 and 5.1.2.

Two things vary: the stages, which evaluate the segments of a device, and the exchange, which knows how segments follow
each other.

B batch, T tokens, H heads, K key dim, V value dim, R segments, of all ranks in order.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from k3jax.compat import vary_like
from k3jax.ops.kda.affine import compose

MIN_CHUNKS = 128
"""Chunks of a segment, at least: below, composing maps costs more than the shorter recurrence saves."""
MAX_SEGMENTS = 32


def plan_segments(chunks: int, *, passes: int, maps: int, cores: int) -> int:
    """How many segments of a sequence to evaluate side by side, so that it ends soonest.

    `passes`: programs that carry all states through the chunks, one core each; `maps`: those that carry all maps. Cores
    take programs in rounds, a round lasts as many steps as a segment has chunks, and segments need rounds of both kinds.
    K3 report, section 2.1.
    """

    def steps(segments: int) -> int:
        rounds = lambda programs: -(-segments * programs // cores)
        return -(-chunks // segments) * (rounds(passes) + (rounds(maps) if segments > 1 else 0))

    most = min(chunks // MIN_CHUNKS, MAX_SEGMENTS)
    return min(range(1, max(1, most) + 1), key=steps)


@runtime_checkable
class Stages(Protocol):
    """What evaluates the segments of this device; hashable. States are [R, B, H, K, V], R the segments of the device."""

    @property
    def segments(self) -> int: ...

    def prepare(self, q, k, v, g, beta, segment_ids, saved=None) -> Any:
        """Everything that needs no state, for the other stages. Backward gives what `recur` saved."""
        ...

    def maps(self, parts) -> tuple[jax.Array, jax.Array]:
        """The segments as maps of the state: M [R, B, H, K, K] and S [R, B, H, K, V]."""
        ...

    def recur(self, parts, entering) -> tuple[jax.Array, jax.Array, Any]:
        """o [B, T, H, V], the states that leave the segments, and what to save for backward beside the inputs."""
        ...

    def entering_cotangents(self, parts, do, d_leaving) -> jax.Array:
        """Of the states that enter the segments."""
        ...

    def gradients(self, parts, do, d_leaving) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Of q, k, v, g and beta, and of the states that enter the segments."""
        ...


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


class Plan(NamedTuple):
    """How to evaluate; static."""

    stages: Stages
    exchange: Exchange | None
    """None: there is one segment."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def evaluate(plan: Plan, q, k, v, g, beta, initial_state, segment_ids):
    """(o [B, T, H, V] in v's dtype, final state). All arrays vary over the same mesh axes; segment_ids may be None."""
    return _forward(plan, q, k, v, g, beta, initial_state, segment_ids)[0]


def _forward(plan: Plan, q, k, v, g, beta, initial_state, segment_ids):
    stages, exchange = plan
    parts = stages.prepare(q, k, v, g, beta, segment_ids)
    entering, kept = initial_state[None], None
    if exchange is not None:
        entering, final, kept = exchange.forward(*stages.maps(parts), initial_state, segment_ids)
        kept = jax.tree.map(lambda x: checkpoint_name(x, "kda.states"), kept)
    o, leaving, saved = stages.recur(parts, entering)
    if exchange is None:
        final = leaving[0]
    return (o.astype(v.dtype), final), (saved, kept)


def _forward_rule(plan: Plan, *inputs):
    inputs = tuple(None if x is None else x.value for x in inputs)
    out, saved = _forward(plan, *inputs)
    return out, (inputs, saved)


def _backward_rule(plan: Plan, residuals, cotangents):
    (q, k, v, g, beta, initial_state, segment_ids), (saved, kept) = residuals
    do, d_final = (None if isinstance(x, SymbolicZero) else x for x in cotangents)
    stages, exchange = plan
    parts = stages.prepare(q, k, v, g, beta, segment_ids, saved)
    zeros_like = lambda x: vary_like(jnp.zeros_like(x), q)
    do = zeros_like(v) if do is None else do
    if exchange is None:
        d_leaving = (zeros_like(initial_state) if d_final is None else d_final)[None]
    else:
        nothing = jnp.broadcast_to(zeros_like(initial_state), (stages.segments, *initial_state.shape))
        apart = stages.entering_cotangents(parts, do, nothing)
        d_leaving, d_initial = exchange.backward(kept, apart, d_final)
    grads, d_entering = stages.gradients(parts, do, d_leaving)
    if exchange is None:
        d_initial = d_entering[0]
    return *(d.astype(x.dtype) for d, x in zip(grads, (q, k, v, g, beta), strict=True)), d_initial, None


evaluate.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
