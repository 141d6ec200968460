"""Chunked KDA of a whole sequence as one operation with its own gradient.

A long sequence may be cut into segments that are evaluated side by side: several on this device, or one on each rank of a
mesh axis. Each segment is an affine map of the state; composing the maps gives the state that enters each, and from
there the recurrence is exact. K3 report, sections 2.1 and 5.1.2.

B batch, T tokens, H heads, K key dim, V value dim, R segments.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from k3jax.compat import vary_like
from k3jax.ops.kda import passes
from k3jax.ops.kda.passes import Plan, Sequence


class Saved(NamedTuple):
    """What backward needs beside the inputs."""

    reads: jax.Array
    inverse: jax.Array
    states: jax.Array
    """Entering each chunk, or each group."""
    exchange: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def evaluate(plan: Plan, q, k, v, g, beta, initial_state, segment_ids):
    """(o [B, T, H, V] in v's dtype, final state). All arrays vary over the same mesh axes; segment_ids may be None."""
    return _forward(plan, q, k, v, g, beta, initial_state, segment_ids, keep=False)[0]


def _forward(plan: Plan, q, k, v, g, beta, initial_state, segment_ids, keep: bool):
    sequence = Sequence.of(plan.layout, q, k, v, g, beta, segment_ids)
    entering, solved, exchanged = initial_state, None, None
    if plan.exchange is not None:
        (M, S), solved = passes.maps(plan, sequence, initial_state.dtype)
        M, S = _by_segment(M, initial_state), _by_segment(S, initial_state)
        entering, final, exchanged = plan.exchange.forward(M, S, initial_state, segment_ids)
    o, leaving, states, solved = passes.outputs(plan, sequence, _by_row(entering), solved, keep)
    if plan.exchange is None:
        final = leaving.reshape(initial_state.shape)
    if not keep:
        return (o, final), None
    named = lambda name, tree: jax.tree.map(lambda x: checkpoint_name(x, name), tree)
    return (o, final), Saved(*named("kda.pairs", solved), *named("kda.states", (states, exchanged)))


def _forward_rule(plan: Plan, *inputs):
    inputs = tuple(None if x is None else x.value for x in inputs)
    out, saved = _forward(plan, *inputs, keep=True)
    return out, (inputs, saved)


def _backward_rule(plan: Plan, residuals, cotangents):
    (q, k, v, g, beta, initial_state, segment_ids), saved = residuals
    do, d_final = (None if isinstance(x, SymbolicZero) else x for x in cotangents)
    sequence, solved = Sequence.of(plan.layout, q, k, v, g, beta, segment_ids), (saved.reads, saved.inverse)
    do = plan.layout.pad(_zeros_like(v, q) if do is None else do)
    d_leaving = _zeros_like(initial_state, q) if d_final is None else d_final
    if plan.exchange is not None:
        nothing = jnp.broadcast_to(_zeros_like(initial_state, q), (plan.layout.segments, *initial_state.shape))
        apart = passes.cotangents_apart(plan, sequence, do, solved, _by_row(nothing))
        d_leaving, d_initial = plan.exchange.backward(saved.exchange, _by_segment(apart, initial_state), d_final)
    grads, d_entering = passes.gradients(plan, sequence, do, _by_row(d_leaving), saved.states, solved)
    if plan.exchange is None:
        d_initial = d_entering.reshape(initial_state.shape)
    return *grads[:4], grads[4][..., 0], d_initial, None


evaluate.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _zeros_like(x, ref):
    return vary_like(jnp.zeros_like(x), ref)


def _by_row(states):
    """[R, B, H, K, V], or without R, -> [Z, K, V]."""
    return states.reshape(-1, *states.shape[-2:])


def _by_segment(x, initial_state):
    return x.reshape(-1, *initial_state.shape[:2], *x.shape[1:])
