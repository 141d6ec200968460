"""How chunked KDA cuts a sequence: into segments side by side, each into groups one after the other, those into chunks.

B batch, T tokens, H heads, D any width, R segments, G groups of a segment, n chunks of a group, C tokens of a chunk,
Z = R·B·H recurrences side by side, P = n·Z chunks of all of them that are worked on at once.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.ops.kda.pairs import TILE

MIN_CHUNKS = 128
"""Chunks of a segment, at least: below, composing maps costs more than the shorter recurrence saves."""
MAX_SEGMENTS = 32
CACHE_PER_CORE = 2 << 20
"""Bytes that a group may need while it is worked on: enough work for a core, little enough to stay near it."""


def plan_segments(chunks: int, *, passes: int, maps: int, cores: int) -> int:
    """How many segments of a sequence to evaluate side by side, so that it ends soonest.

    `passes`: programs that carry all states through the chunks, one core each; `maps`: those that carry all maps. Cores
    take programs in rounds, a round lasts as many steps as a segment has chunks, and segments need rounds of both kinds.
    K3 report, section 2.1.
    """

    def steps(segments: int) -> int:
        rounds = lambda programs: -(-segments * programs // cores)
        return -(-chunks // segments) * (rounds(passes) + (rounds(maps) if segments > 1 else 0))

    most = min(chunks // MIN_CHUNKS, MAX_SEGMENTS)
    return min(range(1, max(1, most) + 1), key=steps)


def plan_groups(chunks: int, recurrences: int, chunk_bytes: int, cores: int) -> int:
    """How many groups to cut a segment's chunks into: what a group needs while it is worked on does not grow with T."""
    return -(-chunks // max(1, CACHE_PER_CORE * cores // (recurrences * chunk_bytes)))


class Layout(NamedTuple):
    """Sizes; static."""

    batch: int
    length: int
    heads: int
    chunk: int
    segments: int = 1
    groups: int = 1

    @property
    def chunks(self) -> int:
        """Chunks of a group."""
        return -(-self.length // (self.chunk * self.segments * self.groups))

    @property
    def padded(self) -> int:
        """Tokens of whole groups."""
        return self.segments * self.groups * self.chunks * self.chunk

    @classmethod
    def of(cls, shape: tuple[int, ...], V: int, chunk_size: int, segments: int | None, cores: int) -> Layout:
        """Of keys [B, T, H, K], for a device of so many cores; segments None: as planned.

        Chunks are no longer than the sequence needs: a power of two of at least a tile.
        """
        B, T, H, K = shape
        C = min(chunk_size, max(TILE, 1 << (T - 1).bit_length()))
        chunks = -(-T // C)
        if segments is None:
            passes = 2 * B * H  # a head of one sequence keeps about two cores busy
            segments = plan_segments(chunks, passes=passes, maps=-(-passes * (K + V) // V), cores=cores)
        chunk_bytes = 4 * 4 * C * (K + V)  # some four float32 arrays of each width
        return cls(B, T, H, C, segments, plan_groups(-(-chunks // segments), segments * B * H, chunk_bytes, cores))

    def pad(self, x: jax.Array, mode: str = "constant") -> jax.Array:
        """[B, T, ...] filled up at the end; zeros leave the state as it is (β = 0, g = 0)."""
        missing = self.padded - self.length
        return jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)), mode=mode) if missing else x

    def cut(self, x: jax.Array, group: jax.Array | int) -> jax.Array:
        """The chunks of one group, [B, padded, H, D] -> [P, C, D]."""
        B, H, D = x.shape[0], *x.shape[2:]
        x = x.reshape(B, self.segments, self.groups, self.chunks * self.chunk, H, D)
        x = lax.dynamic_index_in_dim(x, group, 2, keepdims=False)
        x = x.reshape(B, self.segments, self.chunks, self.chunk, H, D)
        return jnp.transpose(x, (2, 1, 0, 4, 3, 5)).reshape(-1, self.chunk, D)

    def tokens(self, x: jax.Array) -> jax.Array:
        """Chunks of one group as tokens, [P, C, D] -> [B, R, n·C, H, D]."""
        x = x.reshape(self.chunks, self.segments, self.batch, self.heads, self.chunk, -1)
        x = jnp.transpose(x, (2, 1, 0, 4, 3, 5))
        return x.reshape(self.batch, self.segments, -1, *x.shape[4:])

    def joined(self, x: jax.Array) -> jax.Array:
        """The tokens of all groups as a sequence, [G, B, R, n·C, H, D] -> [B, T, H, D]."""
        x = jnp.moveaxis(x, 0, 2)
        return x.reshape(self.batch, self.padded, *x.shape[4:])[:, : self.length]

    def steps(self, x: jax.Array) -> jax.Array:
        """[P, ...] -> [n, Z, ...], to scan over."""
        return x.reshape(self.chunks, -1, *x.shape[1:])
