"""The door to KDA's Hopper kernels: their stages, as `segments` drives them.

B batch, T tokens, H heads, K key dim, V value dim, R segments of a sequence, each a row of the kernels' batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from k3jax.ops.kda.layout import plan_segments
from pallas_kernels.kda import Rows, gradients, rows
from pallas_kernels.kda.prepare import Chunks
from pallas_kernels.kda.recurrence import BLOCKS, recurrence, segment_maps
from pallas_kernels.kda.reverse import entering_cotangents

CORES = 132
"""Multiprocessors of an H100 or H200; one of their programs fills one."""


def planned_segments(shape: tuple[int, ...], V: int) -> int:
    """Of queries [B, T, H, K], for a Hopper GPU, wherever the program is made."""
    B, T, H, K = shape
    blocks = lambda columns: B * H * columns // BLOCKS["columns"]
    return plan_segments(-(-T // BLOCKS["tokens"]), passes=blocks(V), maps=blocks(K + V), cores=CORES)


class Parts(NamedTuple):
    rows: Rows
    chunks: Chunks
    entering: jax.Array | None
    """In backward: the states that enter the segments."""


class Mosaic(NamedTuple):
    """`Stages` as kernels; static. Chunks and their states are made again in backward, not saved."""

    segments: int
    scale: float
    gate_lower_bound: float | None
    interpret: bool = False
    """In Mosaic's interpreter, on CPU."""

    def prepare(self, q, k, v, g, beta, segment_ids, saved=None) -> Parts:
        options: dict[str, Any] = self._asdict()
        given = rows(q, k, v, g, beta, segment_ids=segment_ids, **options)
        return Parts(given, given.chunks(keep_inverse=saved is not None), saved)

    def maps(self, parts: Parts):
        M, S = segment_maps(parts.chunks, interpret=self.interpret)
        return (self._by_segment(M), self._by_segment(S)), parts

    def recur(self, parts: Parts, entering, *, keep: bool):
        passed = recurrence(parts.chunks, _by_row(entering), interpret=self.interpret)
        saved = checkpoint_name(entering, "kda.states") if keep else None
        return parts.rows.joined(passed.o), self._by_segment(passed.final_state), saved

    def entering_cotangents(self, parts: Parts, do, d_leaving):
        do = parts.rows.cut(do.astype(jnp.bfloat16))
        return self._by_segment(entering_cotangents(parts.chunks, do, _by_row(d_leaving), interpret=self.interpret))

    def gradients(self, parts: Parts, do, d_leaving):
        do = parts.rows.cut(do.astype(jnp.bfloat16))
        *grads, d_entering = gradients(parts.rows, parts.chunks, _by_row(parts.entering), do, _by_row(d_leaving))
        return tuple(grads), self._by_segment(d_entering)

    def _by_segment(self, x):
        """[B R, H, K, V] -> [R, B, H, K, V]."""
        return x.reshape(-1, self.segments, *x.shape[1:]).swapaxes(0, 1)


def _by_row(states):
    """[R, B, H, K, V] -> [B R, H, K, V]."""
    return states.swapaxes(0, 1).reshape(-1, *states.shape[2:])
