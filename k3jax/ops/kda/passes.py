"""Passes of chunked KDA over a whole sequence, group after group of chunks.

All chunks of a group are prepared at once, then the state goes through them; memory in between is that of one group.
B batch, T tokens, H heads, K key dim, V value dim, G groups, Z recurrences side by side, P chunks of a group, C their tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.compat import vary_like
from k3jax.ops.kda import chunked
from k3jax.ops.kda.affine import AffineMap
from k3jax.ops.kda.exchange import Exchange
from k3jax.ops.kda.layout import Layout


class Plan(NamedTuple):
    """How to evaluate; static."""

    layout: Layout
    scale: float
    gate_lower_bound: float | None
    save_states: bool = False
    """Whether forward keeps the state that enters each chunk for backward, or only those that enter groups."""
    exchange: Exchange | None = None
    """None: there is one segment."""


Solved = tuple[jax.Array, jax.Array]
"""Pairs of queries and keys, and inverses, of all chunks: [G, P, C, C]."""


class Sequence(NamedTuple):
    """What comes in, padded to whole groups."""

    arrays: tuple[jax.Array, ...]
    """q, k, v, g and β as they are given, [B, padded, H, D]."""
    documents: tuple[jax.Array, jax.Array] | None
    """Of each token, and of the last token of the chunk before its own; [B, padded, 1, 1]."""

    @classmethod
    def of(cls, layout: Layout, q, k, v, g, beta, segment_ids) -> Sequence:
        documents = None
        if segment_ids is not None:
            ids = layout.pad(segment_ids, "edge")
            # The state that enters the sequence is of its first token's document.
            last = ids[:, layout.chunk - 1 : -1 : layout.chunk]
            before = jnp.repeat(jnp.concatenate([ids[:, :1], last], 1), layout.chunk, 1)
            documents = ids[..., None, None], before[..., None, None]
        return cls(tuple(map(layout.pad, (q, k, v, g, beta[..., None]))), documents)

    def group(self, plan: Plan, at: jax.Array, dtype) -> tuple[chunked.Inputs, chunked.Masks | None]:
        """The inputs of one group of chunks."""
        layout = plan.layout
        q, k, v, g, beta = (layout.cut(x, at).astype(dtype) for x in self.arrays)
        masks = None
        if self.documents is not None:
            over_heads = lambda x: jnp.broadcast_to(x, (*x.shape[:2], layout.heads, 1))
            ids, before = (layout.cut(over_heads(x), at) for x in self.documents)
            masks = chunked.masks(ids, before)
        return chunked.inputs(q, k, v, g, beta, plan.scale, plan.gate_lower_bound), masks


def maps(plan: Plan, sequence: Sequence, dtype) -> tuple[AffineMap, Solved]:
    """Each segment as a map of the state, M [Z, K, K] and S [Z, K, V]; and what later passes need not solve again."""
    layout, (_, k, v, *_) = plan.layout, sequence.arrays
    K, V = k.shape[-1], v.shape[-1]

    def group(maps, at):
        chunks = chunked.prepare(*sequence.group(plan, at, dtype))
        return chunked.segment_maps(chunks, maps, layout), (chunks.reads, chunks.inverse)

    Z = layout.segments * layout.batch * layout.heads
    identity = jnp.broadcast_to(jnp.eye(K, K + V, dtype=dtype), (Z, K, K + V))
    maps, solved = lax.scan(group, vary_like(identity, k), jnp.arange(layout.groups))
    return (maps[..., :K], maps[..., K:]), solved


def outputs(plan: Plan, sequence: Sequence, entering: jax.Array, solved: Solved | None, keep: bool):
    """(o [B, T, H, V] in v's dtype, the states that leave segments, states and `solved` for backward if `keep`)."""
    layout, dtype, out = plan.layout, entering.dtype, sequence.arrays[2].dtype

    def group(state, at_solved):
        at, solved = at_solved
        chunks = chunked.prepare(*sequence.group(plan, at, dtype), solved)
        o, states, leaving = chunked.recur(chunks, state, layout)
        made = (chunks.reads, chunks.inverse) if keep and solved is None else None
        kept = (states if plan.save_states else state) if keep else None
        return leaving, (layout.tokens(o.astype(out)), kept, made)

    leaving, (o, states, made) = lax.scan(group, entering, (jnp.arange(layout.groups), solved))
    return layout.joined(o), leaving, states, made if solved is None else solved


def cotangents_apart(plan: Plan, sequence: Sequence, do: jax.Array, solved: Solved, like: jax.Array) -> jax.Array:
    """Cotangents of the states that enter segments, [Z, K, V], if no segment followed; `like`, a state, says the shape."""

    def group(d_state, at_solved):
        at, solved = at_solved
        chunks = chunked.prepare(*sequence.group(plan, at, like.dtype), solved)
        do_group = plan.layout.cut(do, at).astype(like.dtype)
        return chunked.recur_backward(chunks, do_group, d_state, plan.layout)[-1], None

    each = jnp.arange(plan.layout.groups), solved
    return lax.scan(group, vary_like(jnp.zeros_like(like), sequence.arrays[0]), each, reverse=True)[0]


def gradients(plan: Plan, sequence: Sequence, do: jax.Array, d_leaving: jax.Array, states: jax.Array, solved: Solved):
    """(cotangents of q, k, v, g and β [B, T, H, D] in their dtypes, those of the states that enter segments)."""
    layout, dtype = plan.layout, d_leaving.dtype

    def group(d_state, saved: Any):
        at, states, solved = saved
        inputs, masks = sequence.group(plan, at, dtype)
        chunks = chunked.prepare(inputs, masks, solved)
        if not plan.save_states:
            states = chunked.recur(chunks, states, layout)[1]
        do_group = layout.cut(do, at).astype(dtype)
        d_written, d_states, d_entering = chunked.recur_backward(chunks, do_group, d_state, layout)
        grads = chunked.prepare_backward(inputs, masks, chunks, states, do_group, d_written, d_states)
        grads = grads[0] * plan.scale, *grads[1:]
        return d_entering, [layout.tokens(d.astype(x.dtype)) for d, x in zip(grads, sequence.arrays, strict=True)]

    each = jnp.arange(layout.groups), states, solved
    d_entering, grads = lax.scan(group, d_leaving, each, reverse=True)
    return list(map(layout.joined, grads)), d_entering
