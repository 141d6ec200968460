"""KDA on Hopper: arrays in the layout of models in, arrays out; checks, padding and documents.

B batch, T tokens, H heads, N chunks, C tokens of a chunk, K key dim, V value dim.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.kda.chunk_gradients import chunk_gradients
from pallas_kernels.kda.decays import CHUNK, TILE
from pallas_kernels.kda.pair_gradients import pair_gradients
from pallas_kernels.kda.prepare import prepare
from pallas_kernels.kda.recurrence import recurrence
from pallas_kernels.kda.reverse import reverse

HEAD_DIMS = (64, 128)
LONGEST_EXPONENT = 80  # nats that one tile may decay by: e^80 is within float32 and bfloat16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residuals:
    """What backward needs: the padded inputs. Chunks and states are cheaper to make again than to keep."""

    arrays: tuple
    tokens: int = dataclasses.field(metadata={"static": True})
    scale: float = dataclasses.field(metadata={"static": True})
    gate_lower_bound: float = dataclasses.field(metadata={"static": True})
    interpret: bool = dataclasses.field(metadata={"static": True})


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
    assert gate_lower_bound is not None
    B, T, H, K = q.shape
    if initial_state is None:
        initial_state = jnp.zeros((B, H, K, v.shape[-1]), jnp.float32)
    q, k, v, g, beta = (padded(x) for x in (q, k, v, g, beta))
    first = None if segment_ids is None else document_starts(segment_ids)
    arrays = q, k, v, g, beta.swapaxes(1, 2), first, initial_state
    chunks = prepare(*arrays[:6], scale=scale, gate_lower_bound=gate_lower_bound, interpret=interpret)
    passed = recurrence(chunks, initial_state, interpret=interpret)
    return passed.o[:, :T], passed.final_state, Residuals(arrays, T, scale, gate_lower_bound, interpret)


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
    q, k, v, g, beta, first, initial_state = residuals.arrays
    how = {"scale": residuals.scale, "gate_lower_bound": residuals.gate_lower_bound, "interpret": residuals.interpret}
    interpret = residuals.interpret
    do = padded(do.astype(jnp.bfloat16))
    chunks = prepare(q, k, v, g, beta, first, keep_inverse=True, **how)
    passed = recurrence(chunks, initial_state, keep=True, interpret=interpret)
    back = reverse(chunks, do, dfinal_state.astype(jnp.float32), interpret=interpret)
    given = chunk_gradients(v, beta, first, chunks, passed, do, back, interpret=interpret)
    dq, dk, dg, dbeta = pair_gradients(q, k, g, beta, first, given, **how)
    dq, dk, dv, dg, dbeta = (x[:, : residuals.tokens] for x in (dq, dk, given.v, dg, dbeta.swapaxes(1, 2)))
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


def padded(x: jax.Array, **how) -> jax.Array:
    """x with whole chunks of tokens on axis 1. Zeros change nothing: beta 0 writes nothing, g 0 forgets nothing."""
    return jnp.pad(x, [(0, -x.shape[1] % CHUNK if axis == 1 else 0) for axis in range(x.ndim)], **how)


def document_starts(segment_ids: Int[Array, "B T"]) -> Int[Array, "B padded"]:
    """Where in its chunk each token's document began, -1 if before the chunk; T padded to whole chunks."""
    ids = padded(segment_ids, mode="edge")
    starts = jnp.diff(ids, axis=1, prepend=ids[:, :1]) != 0
    place = jnp.arange(ids.shape[1]) % CHUNK
    chunks = jnp.where(starts, place, -1).reshape(len(ids), -1, CHUNK)
    return jax.lax.cummax(chunks, axis=2).reshape(ids.shape)
