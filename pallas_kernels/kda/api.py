"""KDA on Hopper: arrays in the layout of models in, arrays out; checks, padding and documents.

B batch, T tokens, H heads, N chunks, C tokens of a chunk, K key dim, V value dim, R segments of a sequence.

The kernels work on rows: whole chunks of tokens that follow each other. A sequence is one row, or R of them, and then it is
the caller who finds the state that enters each (`segment_maps`) and the cotangent of the one that leaves it.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.kda.chunk_gradients import chunk_gradients
from pallas_kernels.kda.decays import CHUNK, TILE
from pallas_kernels.kda.pair_gradients import pair_gradients
from pallas_kernels.kda.prepare import Chunks, prepare
from pallas_kernels.kda.recurrence import recurrence
from pallas_kernels.kda.reverse import reverse

HEAD_DIMS = (64, 128)
LONGEST_EXPONENT = 80  # nats that one tile may decay by: e^80 is within float32 and bfloat16

static: Any = partial(dataclasses.field, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The inputs as the kernels take them: q, k, v, g, beta and where documents start, tokens filled up to whole chunks."""

    arrays: tuple
    tokens: int = static()
    segments: int = static()
    scale: float = static()
    gate_lower_bound: float = static()
    interpret: bool = static()

    def chunks(self, *, keep_inverse: bool = False) -> Chunks:
        """Everything of the chunks that needs no state; for `gradients`, with the inverse."""
        how = {"scale": self.scale, "gate_lower_bound": self.gate_lower_bound, "interpret": self.interpret}
        return prepare(*self.arrays, keep_inverse=keep_inverse, **how)

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return CHUNK * -(-self.tokens // (CHUNK * self.segments))

    def cut(self, x: jax.Array) -> jax.Array:
        """[B, T, ...] -> [B R, tokens of a row, ...]. Zeros change nothing: beta 0 writes nothing, g 0 forgets nothing."""
        return self.filled_up(x).reshape(-1, self.length, *x.shape[2:])

    def filled_up(self, x: jax.Array, **how) -> jax.Array:
        fill = self.segments * self.length - self.tokens
        return jnp.pad(x, [(0, fill if axis == 1 else 0) for axis in range(x.ndim)], **how)

    def joined(self, x: jax.Array) -> jax.Array:
        """The inverse of `cut`."""
        return x.reshape(-1, self.segments * x.shape[1], *x.shape[2:])[:, : self.tokens]


def rows(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    *,
    segment_ids: Int[Array, "B T"] | None,
    scale: float,
    gate_lower_bound: float | None,
    segments: int = 1,
    interpret: bool = False,
) -> Rows:
    """Inputs of `forward` as rows, each sequence in `segments` of equal length (the last ones may be short or empty).

    Raises ValueError as `forward` does.
    """
    check(q, k, v, g, beta, None, segment_ids, gate_lower_bound)
    assert gate_lower_bound is not None
    empty = Rows((), q.shape[1], segments, scale, gate_lower_bound, interpret)
    first = None
    if segment_ids is not None:
        first = document_starts(empty.filled_up(segment_ids, mode="edge")).reshape(-1, empty.length)
    arrays = *map(empty.cut, (q, k, v, g)), empty.cut(beta).swapaxes(1, 2), first
    return dataclasses.replace(empty, arrays=arrays)


class Residuals(NamedTuple):
    """What `backward` needs. Chunks and states are cheaper to make again than to keep."""

    rows: Rows
    initial_state: jax.Array


def forward(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    *,
    initial_state: Float[Array, "B H K V"] | None,
    segment_ids: Int[Array, "B T"] | None,
    scale: float,
    gate_lower_bound: float | None,
    interpret: bool = False,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"], Residuals]:
    """Kimi Delta Attention: (o bfloat16, final state float32, residuals for `backward`).

    q, k, v bfloat16; g (log decay, gate_lower_bound <= g <= 0), beta and initial_state float32; K and V 64 or 128, any
    T >= 1. segment_ids: constant in a document, non-decreasing; the state starts at zero in each new document and
    `initial_state` belongs to the first. interpret: run in Mosaic's interpreter on CPU.

    Raises ValueError for other shapes and dtypes, and for a gate without a bound or with one below -5.
    K3 report, sections 2.1 and 2.3; Kimi Linear, arXiv:2510.26692.
    """
    check(q, k, v, g, beta, initial_state, segment_ids, gate_lower_bound)
    if initial_state is None:
        initial_state = jnp.zeros((len(q), *q.shape[2:], v.shape[-1]), jnp.float32)
    how = {"scale": scale, "gate_lower_bound": gate_lower_bound, "interpret": interpret}
    given = rows(q, k, v, g, beta, segment_ids=segment_ids, **how)
    passed = recurrence(given.chunks(), initial_state, interpret=interpret)
    return given.joined(passed.o), passed.final_state, Residuals(given, initial_state)


class Gradients(NamedTuple):
    """Of the inputs of `forward`, in their shapes and dtypes; of the initial state even where none was given."""

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T H V"]
    g: Float[Array, "B T H K"]
    beta: Float[Array, "B T H"]
    initial_state: Float[Array, "B H K V"]


def backward(residuals: Residuals, do: Float[Array, "B T H V"], dfinal_state: Float[Array, "B H K V"]) -> Gradients:
    """Gradients from the cotangents of `forward`'s output (rounded to bfloat16) and final state (float32).

    The chunks and the states are made again: kept, they would be several times the inputs (a chunk's state alone has
    twice the size of its q, k and v), and making them again costs about one forward. K3 report, section 2.4.
    """
    given, initial_state = residuals
    chunks = given.chunks(keep_inverse=True)
    do = given.cut(do.astype(jnp.bfloat16))
    return gradients(given, chunks, initial_state, do, dfinal_state.astype(jnp.float32))


def gradients(given: Rows, chunks: Chunks, entering: jax.Array, do: jax.Array, d_leaving: jax.Array) -> Gradients:
    """From chunks with their inverse, the states that enter rows, and the cotangents of outputs, as rows, and of the
    states that leave. `Gradients.initial_state` is that of the states that enter."""
    q, k, _, g, beta, first = given.arrays
    interpret = given.interpret
    passed = recurrence(chunks, entering, keep=True, interpret=interpret)
    back = reverse(chunks, passed.kept()[1], do, d_leaving, interpret=interpret)
    known = chunk_gradients(beta, first, chunks.decay, passed, do, back, interpret=interpret)
    how = {"scale": given.scale, "gate_lower_bound": given.gate_lower_bound, "interpret": interpret}
    dq, dk, dg = pair_gradients(q, k, g, beta, first, known, **how)
    dq, dk, dv, dg, dbeta = map(given.joined, (dq, dk, known.v, dg, back.beta.swapaxes(1, 2)))
    return Gradients(dq, dk, dv, dg, dbeta, back.initial_state)


def check(q, k, v, g, beta, initial_state, segment_ids, gate_lower_bound):
    """Raises ValueError, naming what was got and what is needed."""
    if gate_lower_bound is None or not 0 < -TILE * gate_lower_bound <= LONGEST_EXPONENT:
        raise ValueError(
            f"gate_lower_bound={gate_lower_bound}; these kernels need one of at least {-LONGEST_EXPONENT / TILE} and below "
            "0. Use another implementation for an unbounded gate"
        )
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q and v have shapes {q.shape} and {v.shape}; they must be [B,T,H,K] and [B,T,H,V]")
    (B, T, H, K), V = q.shape, v.shape[-1]
    for name, size in (("K", K), ("V", V)):
        if size not in HEAD_DIMS:
            raise ValueError(f"{name} = {size}; these kernels have {name} in {HEAD_DIMS}. Use another implementation")
    if T == 0:
        raise ValueError("q has T = 0 tokens; at least one is needed")
    half, full = jnp.bfloat16, jnp.float32
    needed = {
        "q": (q, q.shape, half),
        "k": (k, q.shape, half),
        "v": (v, (B, T, H, V), half),
        "g": (g, q.shape, full),
        "beta": (beta, (B, T, H), full),
        "initial_state": (initial_state, (B, H, K, V), full),
        "segment_ids": (segment_ids, (B, T), jnp.int32),
    }
    for name, (array, shape, dtype) in needed.items():
        if array is not None and (array.shape != shape or array.dtype != dtype):
            raise ValueError(
                f"{name} is {array.dtype}{list(array.shape)}; with q {list(q.shape)} and v {list(v.shape)} it must be "
                f"{jnp.dtype(dtype)}{list(shape)}"
            )


def document_starts(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Where in its chunk each token's document began, -1 if before the chunk; T in whole chunks."""
    starts = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
    place = jnp.arange(segment_ids.shape[1]) % CHUNK
    chunks = jnp.where(starts, place, -1).reshape(len(segment_ids), -1, CHUNK)
    return jax.lax.cummax(chunks, axis=2).reshape(segment_ids.shape)
