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
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from k3jax.compat import vary_like
from k3jax.ops.kda.affine import AffineMap
from k3jax.ops.kda.exchange import Exchange


@runtime_checkable
class Stages(Protocol):
    """What evaluates the segments of this device; hashable. States are [R, B, H, K, V], R the segments of the device."""

    @property
    def segments(self) -> int: ...

    def prepare(self, q, k, v, g, beta, segment_ids, saved=None) -> Any:
        """Everything that needs no state, for the other stages. Backward gives what `recur` saved."""
        ...

    def maps(self, parts) -> tuple[AffineMap, Any]:
        """The segments as maps of the state, M [R, B, H, K, K] and S [R, B, H, K, V]; and `parts`, with what need not be
        made again."""
        ...

    def recur(self, parts, entering, *, keep: bool) -> tuple[jax.Array, jax.Array, Any]:
        """o [B, T, H, V], the states that leave the segments, and if `keep` what backward needs beside the inputs."""
        ...

    def entering_cotangents(self, parts, do, d_leaving) -> jax.Array:
        """Of the states that enter the segments."""
        ...

    def gradients(self, parts, do, d_leaving) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Of q, k, v, g and beta, and of the states that enter the segments."""
        ...


class Plan(NamedTuple):
    """How to evaluate; static."""

    stages: Stages
    exchange: Exchange | None
    """None: there is one segment."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def evaluate(plan: Plan, q, k, v, g, beta, initial_state, segment_ids):
    """(o [B, T, H, V] in v's dtype, final state). All arrays vary over the same mesh axes; segment_ids may be None."""
    return _forward(plan, q, k, v, g, beta, initial_state, segment_ids, keep=False)[0]


def _forward(plan: Plan, q, k, v, g, beta, initial_state, segment_ids, keep: bool):
    stages, exchange = plan
    parts = stages.prepare(q, k, v, g, beta, segment_ids)
    entering, kept = initial_state[None], None
    if exchange is not None:
        (M, S), parts = stages.maps(parts)
        entering, final, kept = exchange.forward(M, S, initial_state, segment_ids)
        kept = jax.tree.map(lambda x: checkpoint_name(x, "kda.states"), kept)
    o, leaving, saved = stages.recur(parts, entering, keep=keep)
    if exchange is None:
        final = leaving[0]
    return (o.astype(v.dtype), final), (saved, kept)


def _forward_rule(plan: Plan, *inputs):
    inputs = tuple(None if x is None else x.value for x in inputs)
    out, saved = _forward(plan, *inputs, keep=True)
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
