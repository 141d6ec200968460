"""Decays inside a chunk, and the products of all pairs of its tokens under them.

P chunks, C tokens of a chunk, K key dim, I tiles of a chunk, i and j tokens of a tile, s stacked rows (queries, keys),
m tiles of half a block. K3 report, section 2.1.

A pair of tokens needs the decay between them, exp(G_i − G_j) with G the sum of g; but exp(−G_j) overflows. So two tokens
meet between them: the pair's factor is the product of a decay to the meeting place and one from there, both with exponents
<= 0. Tokens of different halves of a block of 2, 4, … tokens meet at the border of the halves. The promise g >= bound makes
the smallest blocks tiles of 16: there, the columns may grow. No exponent is a difference of long sums (all are sums of
g, taken as products with matrices of 0 and 1), and none refers to a token after the row that it serves.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.ops.kda.affine import contract, matmul

TILE = 16
MAX_EXPONENT = 80.0
"""exp(80) · exp(-80), with sums over channels, is within float32."""
FORGET = -1e4
"""exp of anything below is 0, also in float64; sums of a chunk of them stay finite."""


class Decays(NamedTuple):
    """Factors in (0, 1]. A tile's anchor lies after the decay of its first token."""

    from_anchor: jax.Array
    """[P, I, i, K]: from the tile's anchor to the token."""
    to_tile_end: jax.Array
    """[P, I, i, K]: after the token, to its tile's end."""
    growth: jax.Array | None
    """[P, I, i, K]: 1 / from_anchor, at most exp(80); only under a promise."""
    near: jax.Array | None
    """[P, I, level, i, K], without a promise: between the token and the border of the halves of its block of 2, 4, 8, 16."""
    start: jax.Array
    """[P, I, K]: from the chunk's start to each tile's anchor."""
    end: jax.Array
    """[P, I, K]: from each tile's end to the chunk's."""
    through: jax.Array
    """[P, K]: of the whole chunk."""
    far: tuple[jax.Array, ...]
    """[P, I, K] for blocks of 2, 4, … tiles: between the anchor of the later half and each tile, to its anchor in the
    later half, from its end in the earlier."""
    lift: float
    """Rows are multiplied with it and columns divided by it."""


@functools.cache
def _tile_sums(promise: bool) -> np.ndarray:
    """[sums · i, t]: which tokens t of a tile belong to a sum: to the token from the anchor, after it, and `near`."""
    i, t = np.mgrid[:TILE, :TILE]
    sums = [(0 < t) & (t <= i), i < t]
    if not promise:
        for n in _halves(TILE):
            border = (i // (2 * n)) * 2 * n + n
            sums.append(np.where(i & n, (border <= t) & (t <= i), (i < t) & (t < border)))
    return np.concatenate(sums).astype(np.float32)


@functools.cache
def _chunk_sums(tiles: int) -> np.ndarray:
    """[spans, parts]: which parts of a chunk belong to `start`, `end`, `far` of each tile, and `through`, the last.

    Parts are the first token of each tile, then the rest of each tile.
    """
    tile = np.arange(tiles)
    # Places of tile t: 2 t its start, 2 t + 1 its anchor, 2 t + 2 its end; a part lies between two of them.
    part = np.concatenate([2 * tile, 2 * tile + 1])
    anchor, end = 2 * tile + 1, 2 * tile + 2
    spans = [(0 * tile, anchor), (end, 0 * tile + 2 * tiles)]
    for m in _halves(tiles):
        border = anchor - 2 * (tile % (2 * m)) + 2 * m
        spans.append((np.minimum(border, end), np.maximum(border, anchor)))
    begin, end = (np.concatenate(places)[:, None] for places in zip(*spans, strict=True))
    return np.concatenate([(begin <= part) & (part < end), np.ones((1, 2 * tiles))]).astype(np.float32)


def _halves(n: int) -> list[int]:
    """1, 2, 4, … below n."""
    return [1 << level for level in range((n - 1).bit_length())]


def lift(gate_lower_bound: float | None) -> float | None:
    """If g >= gate_lower_bound lets the columns of a tile grow: the constant power of two that rows are multiplied with
    and columns divided by, half of the largest exponent for each, so that neither leaves the range of float32."""
    if gate_lower_bound is None or TILE * abs(gate_lower_bound) > MAX_EXPONENT:
        return None
    return 2.0 ** round(TILE / 2 * abs(gate_lower_bound) / math.log(2))


def decays(g_PCK: jax.Array, gate_lower_bound: float | None) -> Decays:
    """Decay factors of chunks of log decays; C a power of two of at least 16."""
    P, C, K = g_PCK.shape
    lifted = lift(gate_lower_bound)
    promise = lifted is not None
    g = jnp.maximum(g_PCK, FORGET).reshape(P * C // TILE, TILE, K)
    member = jnp.asarray(_tile_sums(promise), g.dtype)
    sums = matmul(jnp.broadcast_to(member, (len(g), *member.shape)), g).reshape(P, C // TILE, -1, TILE, K)
    anchored = sums[:, :, 0]
    tiles = C // TILE
    member = jnp.asarray(_chunk_sums(tiles), g.dtype)
    parts = jnp.concatenate([g.reshape(P, tiles, TILE, K)[:, :, 0], anchored[:, :, -1]], 1)
    spans = jnp.exp(matmul(jnp.broadcast_to(member, (P, *member.shape)), parts))
    start, end, *far = jnp.split(spans[:, :-1], 2 + len(_halves(tiles)), 1)
    return Decays(
        from_anchor=jnp.exp(anchored),
        to_tile_end=jnp.exp(sums[:, :, 1]),
        growth=jnp.exp(-anchored) if promise else None,
        near=None if promise else jnp.exp(sums[:, :, 2:]),
        start=start,
        end=end,
        through=spans[:, -1],
        far=tuple(far),
        lift=lifted or 1.0,
    )


def pairs(x: jax.Array, k: jax.Array, decay: Decays) -> jax.Array:
    """Σ_K x_i k_j exp(G_i − G_j) for i >= j, as [P, I, s, i, C] (0 or finite for i < j); x [P, I, s, i, K], k [P, I, j, K].

    Linear in x and in k: its transpose is autodiff's, and gradients of the decays follow from those of x and k.
    """
    P, tiles, s, _, K = x.shape
    i, j = np.mgrid[:TILE, :TILE]
    merged = lambda rows: rows.reshape(*rows.shape[:-3], s * TILE, K)
    products = functools.partial(contract, "ik,jk->ij")
    rows = x * decay.lift * decay.from_anchor[:, :, None]
    if decay.growth is not None:
        out = products(merged(rows), k * (decay.growth / decay.lift))
    else:
        assert decay.near is not None
        diagonal = jnp.sum(x * k[:, :, None], -1).reshape(P, tiles, s * TILE, 1)
        stacked = lambda mask: jnp.asarray(np.tile(mask, (s, 1)))
        out = jnp.where(stacked(i == j), diagonal, 0)
        for level, n in enumerate(_halves(TILE)):
            later = jnp.asarray(i[:, :1] & n != 0)
            factor = decay.near[:, :, level]
            block = products(merged(x * jnp.where(later, factor, 0)[:, :, None]), k * jnp.where(later, 0, factor))
            out = jnp.where(stacked((i ^ j) // n == 1), block, out)
    # From tiles to blocks of 2, 4, … tiles, [P, blocks, tiles · s · i, tiles · j] each.
    ended = k * decay.to_tile_end
    for m, span in zip(_halves(tiles), decay.far, strict=True):
        halves = lambda a, m=m: a.reshape(P, tiles // (2 * m), 2, m, *a.shape[2:])
        span = halves(span)
        later = merged(halves(rows)[:, :, 1] * span[:, :, 1, :, None, None])
        earlier = halves(ended)[:, :, 0] * (span[:, :, 0] / decay.lift)[:, :, :, None]
        block = products(
            later.reshape(P, tiles // (2 * m), m * s * TILE, K), earlier.reshape(P, tiles // (2 * m), m * TILE, K)
        )
        out = out.reshape(P, tiles // (2 * m), 2, *block.shape[2:])
        above = jnp.concatenate([out[:, :, 0], jnp.zeros_like(block)], -1)
        below = jnp.concatenate([block, out[:, :, 1]], -1)
        out = jnp.concatenate([above, below], 2)
    return out.reshape(P, tiles, s, TILE, tiles * TILE)


def unit_lower_inverse(A: jax.Array) -> jax.Array:
    """(I + A)⁻¹ of strictly lower triangular A [..., C, C], C a power of two, by substitution of blocks.

    [[P, 0], [R, Q]] has the inverse [[P⁻¹, 0], [−Q⁻¹ R P⁻¹, Q⁻¹]]. Its errors are those of substitution row by row
    (repeated squaring loses all digits on similar keys).
    """
    C = A.shape[-1]
    if C > TILE:
        h = C // 2
        early, late = unit_lower_inverse(jnp.stack([A[..., :h, :h], A[..., h:, h:]]))
        joint = -matmul(late, matmul(A[..., h:, :h], early))
        above = jnp.concatenate([early, jnp.zeros_like(joint)], -1)
        return jnp.concatenate([above, jnp.concatenate([joint, late], -1)], -2)
    i, j = np.mgrid[:C, :C]
    X = jnp.where(i == j, 1, 0) - jnp.where(i ^ j == 1, A, 0)
    for n in _halves(C)[1:]:
        # Below the diagonal, the highest bit in which i and j differ says at which size their blocks join.
        R = jnp.where((i ^ j) // n == 1, A, 0)
        X = X - matmul(matmul(X, R), X)
    return X
