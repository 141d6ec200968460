"""Chunked KDA of a whole sequence as one operation with its own gradient.

A long sequence may be cut into segments that are evaluated side by side: several on this device, or one on each rank of a
mesh axis. Each segment is an affine map of the state; composing the maps gives the state that enters each, and from
there the recurrence is exact. Backward mirrors it: the cotangent of the state that leaves a segment comes from the segments
after it, through transposed maps. K3 report, sections 2.1 and 5.1.2.

B batch, T tokens, H heads, K key dim, V value dim, R segments, of all ranks in order.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from k3jax.compat import vary_like
from k3jax.ops.kda import chunked
from k3jax.ops.kda.affine import compose

MIN_CHUNKS = 128
"""Chunks of a segment, at least: below, composing maps costs more than the shorter recurrence saves."""
MAX_SEGMENTS = 32


def plan_segments(chunks: int, recurrences: int, cores: int) -> int:
    """How many segments of a sequence to evaluate side by side.

    A recurrence (one head of one sequence) keeps about two cores busy; segments multiply the recurrences until all
    cores have work. K3 report, section 2.1.
    """
    return max(1, min(cores // (2 * recurrences), chunks // MIN_CHUNKS, MAX_SEGMENTS))


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

    layout: chunked.Layout
    scale: float
    gate_lower_bound: float | None
    save_states: bool
    """Whether forward keeps the state that enters each chunk for backward, or only those that enter segments."""
    exchange: Exchange | None
    """None: there is one segment."""


class Saved(NamedTuple):
    """What backward needs beside the inputs."""

    reads: jax.Array
    inverse: jax.Array
    states: jax.Array
    """Entering each chunk, or each segment."""
    exchange: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def evaluate(plan: Plan, q, k, v, g, beta, initial_state, segment_ids):
    """(o [B, T, H, V] in v's dtype, final state). All arrays vary over the same mesh axes; segment_ids may be None."""
    return _forward(plan, q, k, v, g, beta, initial_state, segment_ids)[0]


def _forward(plan: Plan, q, k, v, g, beta, initial_state, segment_ids):
    layout, dtype = plan.layout, initial_state.dtype
    inputs = chunked.cut(q, k, v, g, beta, layout, plan.scale, plan.gate_lower_bound, dtype)
    chunks = chunked.prepare(inputs, chunked.masks(segment_ids, layout))
    entering, kept = initial_state, None
    if plan.exchange is not None:
        M, S = (_by_segment(x, initial_state) for x in chunked.segment_maps(chunks, layout))
        entering, final, kept = plan.exchange.forward(M, S, initial_state, segment_ids)
    o, states, leaving = chunked.recur(chunks, _by_row(entering), layout)
    if plan.exchange is None:
        final = leaving.reshape(initial_state.shape)
    saved = Saved(
        checkpoint_name(chunks.reads, "kda.pairs"),
        checkpoint_name(chunks.inverse, "kda.pairs"),
        checkpoint_name(states if plan.save_states else _by_row(entering), "kda.states"),
        jax.tree.map(lambda x: checkpoint_name(x, "kda.states"), kept),
    )
    return (layout.joined(o).astype(v.dtype), final), saved


def _forward_rule(plan: Plan, *inputs):
    inputs = tuple(None if x is None else x.value for x in inputs)
    out, saved = _forward(plan, *inputs)
    return out, (inputs, saved)


def _backward_rule(plan: Plan, residuals, cotangents):
    (q, k, v, g, beta, initial_state, segment_ids), saved = residuals
    do, d_final = (None if isinstance(x, SymbolicZero) else x for x in cotangents)
    layout, dtype = plan.layout, initial_state.dtype
    inputs = chunked.cut(q, k, v, g, beta, layout, plan.scale, plan.gate_lower_bound, dtype)
    mask = chunked.masks(segment_ids, layout)
    chunks = chunked.prepare(inputs, mask, (saved.reads, saved.inverse))
    states = saved.states if plan.save_states else chunked.recur(chunks, saved.states, layout)[1]
    do = layout.cut(_zeros_like(v, q) if do is None else do).astype(dtype)
    d_leaving = _zeros_like(initial_state, q) if d_final is None else d_final
    if plan.exchange is not None:
        nothing = jnp.broadcast_to(_zeros_like(initial_state, q), (layout.segments, *initial_state.shape))
        *_, apart = chunked.recur_backward(chunks, do, _by_row(nothing), layout)
        d_leaving, d_initial = plan.exchange.backward(saved.exchange, _by_segment(apart, initial_state), d_final)
    d_written, d_states, d_entering = chunked.recur_backward(chunks, do, _by_row(d_leaving), layout)
    if plan.exchange is None:
        d_initial = d_entering.reshape(initial_state.shape)
    grads = chunked.prepare_backward(inputs, mask, chunks, states, do, d_written, d_states)
    d_q, d_k, d_v, d_g, d_beta = map(layout.joined, grads)
    grads = d_q * plan.scale, d_k, d_v, d_g, d_beta[..., 0]
    return *(d.astype(x.dtype) for d, x in zip(grads, (q, k, v, g, beta), strict=True)), d_initial, None


evaluate.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _zeros_like(x, ref):
    return vary_like(jnp.zeros_like(x), ref)


def _by_row(states):
    """[R, B, H, K, V], or without R, -> [Z, K, V]."""
    return states.reshape(-1, *states.shape[-2:])


def _by_segment(x, initial_state):
    return x.reshape(-1, *initial_state.shape[:2], *x.shape[1:])
