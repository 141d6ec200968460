"""The stages of chunked KDA in XLA: fast and portable.

Group after group of chunks: all chunks of a group are prepared at once, then the state goes through them, and memory in
between is that of one group.

B batch, T tokens, H heads, K key dim, V value dim, R segments, G groups, Z = R·B·H recurrences side by side, P chunks of
a group, C their tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from k3jax.compat import vary_like
from k3jax.ops.kda import chunked
from k3jax.ops.kda.layout import Layout


class Parts(NamedTuple):
    """The inputs, padded to whole groups, and what is known of them."""

    arrays: tuple[jax.Array, ...]
    """q, k, v, g and β as they are given, [B, padded, H, D]."""
    documents: tuple[jax.Array, jax.Array] | None
    """Of each token, and of the last token of the chunk before its own; [B, padded, 1, 1]."""
    solved: tuple[jax.Array, jax.Array] | None = None
    """Pairs of queries and keys, and inverses, of all chunks, [G, P, C, C]: not made a second time."""
    states: jax.Array | None = None
    """In backward: entering each chunk [G, P, K, V], or each group [G, Z, K, V]."""


class Xla(NamedTuple):
    """`Stages` in XLA; static."""

    layout: Layout
    dtype: Any
    """Of states, and of everything between inputs and results."""
    scale: float
    gate_lower_bound: float | None
    save_states: bool
    """Whether forward keeps the state that enters each chunk for backward, or only those that enter groups."""

    @property
    def segments(self) -> int:
        return self.layout.segments

    def prepare(self, q, k, v, g, beta, segment_ids, saved=None) -> Parts:
        layout, documents = self.layout, None
        if segment_ids is not None:
            ids = layout.pad(segment_ids, "edge")
            # The state that enters the sequence is of its first token's document.
            last = ids[:, layout.chunk - 1 : -1 : layout.chunk]
            before = jnp.repeat(jnp.concatenate([ids[:, :1], last], 1), layout.chunk, 1)
            documents = ids[..., None, None], before[..., None, None]
        arrays = tuple(map(layout.pad, (q, k, v, g, beta[..., None])))
        return Parts(arrays, documents) if saved is None else Parts(arrays, documents, *saved)

    def maps(self, parts: Parts):
        _, k, v, *_ = parts.arrays
        K, V = k.shape[-1], v.shape[-1]

        def group(maps, at):
            chunks = chunked.prepare(*self._group(parts, at))
            return chunked.segment_maps(chunks, maps, self.layout), (chunks.reads, chunks.inverse)

        Z = self.layout.segments * self.layout.batch * self.layout.heads
        identity = jnp.broadcast_to(jnp.eye(K, K + V, dtype=self.dtype), (Z, K, K + V))
        maps, solved = lax.scan(group, vary_like(identity, k), self._groups)
        maps = self._by_segment(maps)
        return (maps[..., :K], maps[..., K:]), parts._replace(solved=solved)

    def recur(self, parts: Parts, entering, *, keep: bool):
        def group(state, at_solved):
            at, solved = at_solved
            chunks = chunked.prepare(*self._group(parts, at), solved)
            o, states, leaving = chunked.recur(chunks, state, self.layout)
            made = (chunks.reads, chunks.inverse) if keep and solved is None else None
            kept = (states if self.save_states else state) if keep else None
            return leaving, (self.layout.tokens(o.astype(parts.arrays[2].dtype)), kept, made)

        leaving, (o, states, made) = lax.scan(group, _by_row(entering), (self._groups, parts.solved))
        saved = None
        if keep:
            solved = made if parts.solved is None else parts.solved
            named = lambda tree, name: jax.tree.map(lambda x: checkpoint_name(x, name), tree)
            saved = named(solved, "kda.pairs"), named(states, "kda.states")
        return self.layout.joined(o), self._by_segment(leaving), saved

    def entering_cotangents(self, parts: Parts, do, d_leaving):
        do = self.layout.pad(do)

        def group(d_state, at_solved):
            at, solved = at_solved
            chunks = chunked.prepare(*self._group(parts, at), solved)
            return chunked.recur_backward(chunks, self._cut(do, at), d_state, self.layout)[-1], None

        d_entering, _ = lax.scan(group, _by_row(d_leaving), (self._groups, parts.solved), reverse=True)
        return self._by_segment(d_entering)

    def gradients(self, parts: Parts, do, d_leaving):
        do = self.layout.pad(do)

        def group(d_state, saved):
            at, solved, states = saved
            inputs, masks = self._group(parts, at)
            chunks, do_group = chunked.prepare(inputs, masks, solved), self._cut(do, at)
            if not self.save_states:
                states = chunked.recur(chunks, states, self.layout)[1]
            d_written, d_states, d_entering = chunked.recur_backward(chunks, do_group, d_state, self.layout)
            grads = chunked.prepare_backward(inputs, masks, chunks, states, do_group, d_written, d_states)
            grads = grads[0] * self.scale, *grads[1:]
            return d_entering, [self.layout.tokens(d.astype(x.dtype)) for d, x in zip(grads, parts.arrays, strict=True)]

        each = self._groups, parts.solved, parts.states
        d_entering, grads = lax.scan(group, _by_row(d_leaving), each, reverse=True)
        *grads, d_beta = map(self.layout.joined, grads)
        return (*grads, d_beta[..., 0]), self._by_segment(d_entering)

    @property
    def _groups(self) -> jax.Array:
        return jnp.arange(self.layout.groups)

    def _cut(self, x: jax.Array, at: jax.Array) -> jax.Array:
        return self.layout.cut(x, at).astype(self.dtype)

    def _group(self, parts: Parts, at: jax.Array) -> tuple[chunked.Inputs, chunked.Masks | None]:
        """The inputs of one group of chunks."""
        q, k, v, g, beta = (self._cut(x, at) for x in parts.arrays)
        masks = None
        if parts.documents is not None:
            over_heads = lambda x: jnp.broadcast_to(x, (*x.shape[:2], self.layout.heads, 1))
            ids, before = (self.layout.cut(over_heads(x), at) for x in parts.documents)
            masks = chunked.masks(ids, before)
        return chunked.inputs(q, k, v, g, beta, self.scale, self.gate_lower_bound), masks

    def _by_segment(self, x):
        """[Z, K, V] -> [R, B, H, K, V]."""
        return x.reshape(-1, self.layout.batch, self.layout.heads, *x.shape[1:])


def _by_row(states):
    """[R, B, H, K, V] -> [Z, K, V]."""
    return states.reshape(-1, *states.shape[-2:])
