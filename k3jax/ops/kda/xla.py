"""The stages of `chunked`, fast and portable, as `segments` drives them.

B batch, T tokens, H heads, K key dim, V value dim, R segments, Z = R·B·H rows of states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from k3jax.ops.kda import chunked


class Parts(NamedTuple):
    inputs: chunked.Inputs
    masks: chunked.Masks | None
    chunks: chunked.Chunks
    states: jax.Array | None
    """In backward: entering each chunk."""


class Saved(NamedTuple):
    reads: jax.Array
    inverse: jax.Array
    states: jax.Array
    """Entering each chunk, or each segment."""


class Xla(NamedTuple):
    """`Stages` in XLA; static."""

    layout: chunked.Layout
    dtype: Any
    """Of states, and of everything between inputs and results."""
    scale: float
    gate_lower_bound: float | None
    save_states: bool
    """Whether forward keeps the state that enters each chunk for backward, or only those that enter segments."""

    @property
    def segments(self) -> int:
        return self.layout.segments

    def prepare(self, q, k, v, g, beta, segment_ids, saved: Saved | None = None) -> Parts:
        inputs = chunked.cut(q, k, v, g, beta, self.layout, self.scale, self.gate_lower_bound, self.dtype)
        masks = chunked.masks(segment_ids, self.layout)
        if saved is None:
            return Parts(inputs, masks, chunked.prepare(inputs, masks), None)
        chunks = chunked.prepare(inputs, masks, (saved.reads, saved.inverse))
        states = saved.states if self.save_states else chunked.recur(chunks, saved.states, self.layout)[1]
        return Parts(inputs, masks, chunks, states)

    def maps(self, parts: Parts):
        M, S = chunked.segment_maps(parts.chunks, self.layout)
        return self._by_segment(M), self._by_segment(S)

    def recur(self, parts: Parts, entering):
        entering = _by_row(entering)
        o, states, leaving = chunked.recur(parts.chunks, entering, self.layout)
        saved = Saved(
            checkpoint_name(parts.chunks.reads, "kda.pairs"),
            checkpoint_name(parts.chunks.inverse, "kda.pairs"),
            checkpoint_name(states if self.save_states else entering, "kda.states"),
        )
        return self.layout.joined(o), self._by_segment(leaving), saved

    def entering_cotangents(self, parts: Parts, do, d_leaving):
        *_, d_entering = self._recur_backward(parts, do, d_leaving)
        return d_entering

    def gradients(self, parts: Parts, do, d_leaving):
        do, d_written, d_states, d_entering = self._recur_backward(parts, do, d_leaving)
        grads = chunked.prepare_backward(*parts, do, d_written, d_states)
        d_q, d_k, d_v, d_g, d_beta = map(self.layout.joined, grads)
        return (d_q * self.scale, d_k, d_v, d_g, d_beta[..., 0]), d_entering

    def _recur_backward(self, parts: Parts, do, d_leaving):
        do = self.layout.cut(do).astype(self.dtype)
        d_written, d_states, entering = chunked.recur_backward(parts.chunks, do, _by_row(d_leaving), self.layout)
        return do, d_written, d_states, self._by_segment(entering)

    def _by_segment(self, x):
        """[Z, K, V] -> [R, B, H, K, V]."""
        return x.reshape(-1, self.layout.batch, self.layout.heads, *x.shape[1:])


def _by_row(states):
    """[R, B, H, K, V] -> [Z, K, V]."""
    return states.reshape(-1, *states.shape[-2:])
