"""Relations between the tokens of a chunk, and the sums of log decays that pairs of them need.

C tokens of a chunk, D key columns at hand.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import Products, pieces

CHUNK_BITS, TILE_BITS = 6, 4
CHUNK, TILE = 2**CHUNK_BITS, 2**TILE_BITS


def constant_split(gate_lower_bound: float) -> int:
    """The s of the exact factors 2^s and 2^-s that keep e^G and e^-G of a tile, times a key, normal numbers."""
    return round(TILE // 2 * abs(gate_lower_bound) / math.log(2))


def indices():
    """Row and column number of each element of a chunk's square."""
    return (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))


def rows(x):
    """A vector of tokens as a square that varies down its rows."""
    return lax.broadcast_in_dim(x, (CHUNK, CHUNK), (0,))


def columns(x):
    """A vector as a square that varies along its columns."""
    return lax.broadcast_in_dim(x, (CHUNK, CHUNK), (1,))


def blocks(bits):
    """Number of the block of 2^bits tokens of each row and column; bits may be known only in a loop."""
    return (lax.shift_right_logical(x, jnp.full(x.shape, bits)) for x in indices())


def same(bits):
    """Pairs of tokens in one block of 2^bits."""
    i, j = blocks(bits)
    return i == j


def below(bits):
    """Pairs (i, j): i in the later and j in the earlier half of one block of 2·2^bits tokens."""
    i, j = blocks(bits)
    return same(bits + 1) & (i > j)


@dataclasses.dataclass(frozen=True)
class DecaySums:
    """Sums of log decays over runs of tokens, [C, D] float32, as products of 0/1 matrices with g.

    `upto` [C, C] holds 1 where j <= i: in shared memory, or the compiler keeps every mask made of it in registers
    throughout. `g_pieces`, three of [C, D], hold g in bfloat16 pieces: the terms are exact.
    """

    products: Products
    upto: Any
    g_pieces: Any

    def start(self) -> None:
        i, j = indices()
        self.upto[...] = jnp.where(j <= i, 1.0, 0.0).astype(jnp.bfloat16)
        plgpu.commit_smem()

    def put(self, g: jax.Array) -> None:
        for target, piece in zip(self.g_pieces, pieces(g, 3), strict=True):
            target[...] = piece
        plgpu.commit_smem()

    def over(self, chosen: jax.Array) -> jax.Array:
        """Over the tokens j that are 1 in row i, for every token i."""
        chosen = chosen.astype(jnp.bfloat16)
        return self.products(*((chosen, piece) for piece in self.g_pieces))

    def from_start(self) -> jax.Array:
        """From the chunk's start to token i, inclusive."""
        return self.over(self.upto[...])

    def to_end(self) -> jax.Array:
        """After token i, to the chunk's end."""
        return self.over(1.0 - self.upto[...].astype(jnp.float32))

    def from_tile(self) -> jax.Array:
        """From the start of its tile to token i, inclusive."""
        return self.over(jnp.where(same(TILE_BITS), self.upto[...].astype(jnp.float32), 0.0))

    def to_middle(self, bits) -> jax.Array:
        """Between token i and the middle of its block of 2·2^bits tokens: from it for the later half, to it for the earlier."""
        upto = self.upto[...].astype(jnp.float32)
        later = (next(blocks(bits)) & 1) == 1
        return self.over(jnp.where(same(bits), jnp.where(later, upto, 1.0 - upto), 0.0))
