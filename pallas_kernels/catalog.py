"""Every kernel with its block sizes, the work it does for a stated shape, and arguments to compile it with.

B batch, T tokens, H heads, N chunks, C tokens of a chunk, K key dim, V value dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda import chunk_gradients, decode, pair_gradients, prepare, recurrence, reverse
from pallas_kernels.kda.decays import CHUNK


class Shape(NamedTuple):
    """A KDA problem; the default is 8,192 tokens of one K3 layer."""

    batch: int = 1
    tokens: int = 8192
    heads: int = 96
    key_dim: int = 128
    value_dim: int = 128


class Kernel(NamedTuple):
    name: str
    blocks: dict[str, int]
    function: Callable
    arguments: tuple
    operations: int  # floating-point operations on the tensor cores

    @property
    def bytes(self) -> int:
        """Of all arguments and results, read and written once each."""
        arrays = jax.tree.leaves((self.arguments, jax.eval_shape(self.function, *self.arguments)))
        return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays)


def kernels(shape: Shape) -> list[Kernel]:
    """All kernels at this shape; tokens are rounded up to whole chunks."""
    B, T, H, K, V = shape
    C = CHUNK
    N = -(-T // C)
    half: Any = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
    full: Any = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    key, value = half(B, N * C, H, K), half(B, N * C, H, V)
    first = jax.ShapeDtypeStruct((B, N * C), jnp.int32)
    beta, state = full(B, H, N * C), full(B, H, K, V)
    inputs = key, key, value, full(B, N * C, H, K), beta, first
    gate = {"scale": K**-0.5, "gate_lower_bound": -5.0}
    make = partial(prepare.prepare, **gate)
    make_again = partial(prepare.prepare, keep_inverse=True, **gate)
    pass_again = partial(recurrence.recurrence, keep=True)
    # Without what a kernel does not read.
    only: Any = lambda made, *read: made._replace(**{name: None for name in made._fields if name not in read})
    chunks = jax.eval_shape(make, *inputs)
    passed = jax.eval_shape(pass_again, chunks, state)
    kept = jax.eval_shape(make_again, *inputs)
    kept = only(kept, "q", "decay", "minus_k_start", "x_end", "a_x")
    to_reverse = kept, passed.errors, value, state
    back = jax.eval_shape(reverse.reverse, *to_reverse)
    passed, back = only(passed, "states", "errors"), only(back, "states", "writes")
    to_chunks = beta, first, chunks.decay, passed, value, back
    given = jax.eval_shape(chunk_gradients.chunk_gradients, *to_chunks)
    given = only(given, "a_qk", "a_kk", "q", "k_end", "k_start", "decay")
    pull_pairs = partial(pair_gradients.pair_gradients, **gate)

    D, W = 2 * K + V, 4
    token = decode.Token(half(B, H, D), full(B, H, K), full(B, H), full(B, H, V))
    weights = decode.Weights(full(W, H, D), full(H), full(H, K), full(V))
    one_token = token, weights, state, half(B, W - 1, H, D)

    each = 2 * B * H * N * C  # operations of one multiply and add for each token and head
    sums = 3 * C * K  # of log decays over tokens, g in three pieces
    inverse = 5 * 2 * 3 * C * C
    preparing = each * (5 * sums + 3 * 2 * C * K + inverse + C * (K + V))
    transposing = each * (3 * C * C + 2 * C * C + 3 * C * K)
    passing = each * (4 * K * V + C * V)
    reversing = each * (4 * K * V + C * V)
    mapping = each * 3 * K * (K + V)
    return [
        Kernel("kda_prepare", prepare.BLOCKS, make, inputs, preparing),
        Kernel("kda_prepare, for backward", prepare.BLOCKS, make_again, inputs, preparing + transposing),
        Kernel(
            "kda_segment_maps",
            recurrence.BLOCKS,
            recurrence.segment_maps,
            (only(chunks, "w", "u", "k_end", "decay"),),
            mapping,
        ),
        Kernel("kda_recurrence", recurrence.BLOCKS, recurrence.recurrence, (chunks, state), passing),
        Kernel("kda_recurrence, for backward", recurrence.BLOCKS, pass_again, (chunks, state), passing),
        Kernel(
            "kda_entering_cotangents",
            reverse.BLOCKS,
            reverse.entering_cotangents,
            (kept, value, state),
            reversing,
        ),
        Kernel("kda_reverse", reverse.BLOCKS, reverse.reverse, to_reverse, reversing),
        Kernel(
            "kda_chunk_gradients",
            chunk_gradients.BLOCKS,
            chunk_gradients.chunk_gradients,
            to_chunks,
            each * (3 * K * V + C * 2 * V),
        ),
        Kernel(
            "kda_pair_gradients",
            pair_gradients.BLOCKS,
            pull_pairs,
            (key, key, full(B, N * C, H, K), beta, first, given),
            each * (7 * sums + 3 * 4 * C * K),
        ),
        Kernel("kda_decode, one token", decode.BLOCKS, partial(decode.decode_token, **gate), one_token, 0),
    ]
