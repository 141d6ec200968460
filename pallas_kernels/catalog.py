"""Every kernel with its block sizes, the work it does for a stated shape, and arguments to compile it with.

B batch, T tokens, H heads, N chunks, C tokens of a chunk, K key dim, V value dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda import prepare, recurrence
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
        """Bytes read and written once each."""
        arrays = jax.tree.leaves((self.arguments, jax.eval_shape(self.function, *self.arguments)))
        return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays)


def kernels(shape: Shape) -> list[Kernel]:
    """All kernels at this shape; tokens are rounded up to whole chunks."""
    B, T, H, K, V = shape
    C = CHUNK
    N = -(-T // C)
    half = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
    full = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    key, value = half(B, N * C, H, K), half(B, N * C, H, V)
    first = jax.ShapeDtypeStruct((B, N * C), jnp.int32)
    state = full(B, H, K, V)
    inputs = key, key, value, full(B, N * C, H, K), full(B, H, N * C), first
    how = {"scale": K**-0.5, "gate_lower_bound": -5.0}
    chunks = jax.eval_shape(lambda *x: prepare.prepare(*x, **how), *inputs)
    each = 2 * B * H * N * C  # operations of one multiply and add per token and head
    inverse = 5 * 2 * 3 * C * C
    sums, pairs, left = 3 * 5 * C * K, 2 * 3 * C * K, C * (K + V)
    return [
        Kernel(
            "kda_prepare",
            prepare.BLOCKS,
            lambda *x: prepare.prepare(*x, **how),
            inputs,
            each * (sums + pairs + left + inverse),
        ),
        Kernel("kda_recurrence", recurrence.BLOCKS, recurrence.recurrence, (chunks, state), each * (4 * K * V + C * V)),
    ]
