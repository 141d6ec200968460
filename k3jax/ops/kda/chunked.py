"""KDA in chunks: a chunk of tokens is one affine map, from the entering state to its outputs and the next state.

B batch, T tokens, H heads, K key dim, V value dim, N chunks of a sequence, P = N·B·H all chunks, C tokens of a chunk,
I and J tiles of a chunk, i and j tokens of a tile, s stacked arrays (queries and keys).
K3 report, section 2.1 and its chunk form; in the comments G is the sum of g from the chunk's start.

The decay between two tokens is exp(G_i − G_j), and exp(−G_j) overflows. So a chunk is cut into tiles of 16 tokens, and
a pair of tokens in different tiles meets at the start of the later tile: both exponents are then sums of g, at most 0.
No exponent is a difference of long sums, and none refers to a token after the one whose output it serves.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.ops.kda.affine import AffineMap, matmul, product

TILE = 16
# exp of anything below is 0, also in float64; sums of a chunk of them stay finite.
FORGET = -1e4
# exp(80) · exp(-80), with sums over channels, is within float32.
MAX_EXPONENT = 80.0


def prepare(q, k, v, g, beta, *, segment_ids, gate_lower_bound, chunk_size) -> jax.Array:
    """Each chunk's map [N, B, H, C + K, K + V]: (outputs, next state) = map[:, :K] state + map[:, K:].

    With Y = (I + A)⁻¹ β [−K⁺ | V], A the pairs of keys, the rows of outputs are [Q⁺ | 0] + A_qk Y and those of the
    state [Diag(exp G_C) | 0] + K_cᵀ Y. q is scaled, all inputs have one dtype.
    """
    B, T, H, K, V = *q.shape, v.shape[-1]
    C = min(chunk_size, -(-T // TILE) * TILE)
    qkg = _cut(jnp.stack([q, k, jnp.maximum(g, FORGET)], -2), C)
    qk, g = qkg[..., :2, :, :], qkg[..., 2, :, :]
    beta, v = (_chunk(_cut(x, C)) for x in (beta[..., None, None], v[..., None, :]))
    decay = _decay(g)

    row, column = (lax.broadcasted_iota(jnp.int32, (C, C), axis) for axis in (0, 1))
    visible = row >= column
    from_start, to_end, through = decay.from_start, decay.to_end, decay.through
    if segment_ids is not None:
        ids = jnp.broadcast_to(segment_ids[..., None, None, None], (B, T, H, 1, 1))
        ids = _chunk(_cut(ids, C, mode="edge"))
        # The document that the entering state belongs to; a sequence enters with its first token's.
        last = ids[:, -1:]
        before = jnp.concatenate([ids[: B * H, :1], last[: -B * H]])
        visible = visible & (ids == ids.mT)
        from_start = jnp.where((ids == before).reshape(*g.shape[:-1], 1), from_start, 0)
        to_end = jnp.where(ids == last, to_end, 0)
        through = jnp.where((before == last)[:, 0], through, 0)

    if gate_lower_bound is not None and TILE * abs(gate_lower_bound) <= MAX_EXPONENT:
        pairs = _pairs_bounded(qk, decay, gate_lower_bound)
    else:
        pairs = _pairs_pointwise(qk, decay)
    qk_pairs, kk_pairs = _queries_keys(pairs)
    queries, keys = _queries_keys(qk * from_start[:, :, None])

    X = unit_lower_inverse(jnp.where(visible & (row > column), beta * kk_pairs, 0))
    Y = matmul(X, beta * jnp.concatenate([-keys, v], -1))
    reads = jnp.where(visible, qk_pairs, 0)
    writes = (_chunk(qk[..., 1:, :, :]) * to_end).mT
    kept = jnp.eye(K, dtype=q.dtype) * through[..., None]
    direct = jnp.concatenate([queries, kept], -2)
    maps = matmul(jnp.concatenate([reads, writes], -2), Y) + jnp.pad(direct, ((0, 0), (0, 0), (0, V)))
    return maps.reshape(-1, B, H, C + K, K + V)


def finish(maps: jax.Array, initial_state: jax.Array, T: int):
    """(o [B,T,H,V], final_state) of prepared chunks, T tokens of them, entered with `initial_state` [B,H,K,V]."""
    K = initial_state.shape[-2]

    def step(state, chunk):
        out = matmul(chunk[..., :K], state) + chunk[..., K:]
        return out[..., -K:, :], out[..., :-K, :]

    if maps.shape[0] == 1:
        final, o = step(initial_state, maps[0])
        o = o[None]
    else:
        final, o = lax.scan(step, initial_state, maps)
    N, B, H, C, V = o.shape
    return jnp.transpose(o, (1, 0, 3, 2, 4)).reshape(B, N * C, H, V)[:, :T], final


def summary(maps: jax.Array, K: int) -> AffineMap:
    """The whole sequence as one map of the state."""
    return product((maps[..., -K:, :K], maps[..., -K:, K:]))


def _cut(x, C, mode="constant"):
    """[B, T, H, s, D] -> [P, I, s, i, D], filled up at the end; zeros leave the state as it is (β = 0, g = 0)."""
    B, T, H, s, D = x.shape
    if T % C:
        x = jnp.pad(x, ((0, 0), (0, -T % C), (0, 0), (0, 0), (0, 0)), mode=mode)
    x = jnp.transpose(x.reshape(B, -1, C // TILE, TILE, H, s, D), (1, 0, 4, 2, 5, 3, 6))
    return x.reshape(-1, C // TILE, s, TILE, D)


def _chunk(x):
    """[P, I, 1, i, D] -> [P, C, D]."""
    P, tiles, _, _, D = x.shape
    return x.reshape(P, tiles * TILE, D)


def _queries_keys(x):
    """[P, I, 2, i, D] -> twice [P, C, D]."""
    return _chunk(x[:, :, :1]), _chunk(x[:, :, 1:])


class _Decay(NamedTuple):
    """Decay factors of a chunk; the names say between which places. Leading dim P."""

    g: jax.Array
    """[I, i, K]: the log decay of each token."""
    tile_sum: jax.Array
    """[I, i, K]: sum of g from the tile's start to the token, both included."""
    from_tile: jax.Array
    """[I, i, K]: its exp."""
    to_tile_end: jax.Array
    """[I, i, K]: after the token, to its tile's end."""
    between_tiles: jax.Array
    """[I, J, K]: from the end of tile J to the start of tile I (1 if there is nothing between)."""
    from_start: jax.Array
    """[I, i, K]: from the chunk's start to the token, its own included."""
    to_end: jax.Array
    """[C, K]: after the token, to the chunk's end."""
    through: jax.Array
    """[K]: of the whole chunk."""


def _decay(g) -> _Decay:
    P, tiles, _, K = g.shape
    # Sums are products with matrices of 0 and 1: no term of a sum that is not part of it can cost it digits.
    row, term = (lax.broadcasted_iota(jnp.int32, (2 * TILE, TILE), axis) for axis in (0, 1))
    included = (term <= row) ^ (row >= TILE) | (row - TILE < term) & (row >= TILE)
    sums = matmul(included.astype(g.dtype), g)
    tile_sum = sums[..., :TILE, :]
    # Boundary a lies before tile a; from boundary b to boundary a there are the tiles b <= t < a.
    a, b, t = (lax.broadcasted_iota(jnp.int32, (tiles + 1, tiles + 1, tiles), axis) for axis in (0, 1, 2))
    spans = ((b <= t) & (t < a)).astype(g.dtype).reshape(-1, tiles)
    span = jnp.exp(matmul(spans, tile_sum[..., -1, :])).reshape(P, tiles + 1, tiles + 1, K)
    from_tile, to_tile_end = jnp.split(jnp.exp(sums), 2, -2)
    return _Decay(
        g,
        tile_sum,
        from_tile,
        to_tile_end,
        span[:, :tiles, 1:],
        from_tile * span[:, :tiles, 0, None],
        (to_tile_end * span[:, tiles, 1:, None]).reshape(P, tiles * TILE, K),
        span[:, tiles, 0],
    )


def _tile_pairs(rows, columns):
    """Σ_K rows [I, s, i, K] columns [I, J, j, K] -> [I, s, i, C]; columns are seen from the start of tile I."""
    P, tiles, s, _, K = rows.shape
    rows, columns = rows.reshape(P, tiles, s * TILE, K), columns.reshape(P, tiles, tiles * TILE, K)
    return matmul(rows, columns.mT).reshape(P, tiles, s, TILE, tiles * TILE)


def _keys_of(qk):
    """[P, I, 2, i, K] -> [P, 1, J, j, K]."""
    return qk[:, None, :, 1]


def _pairs_bounded(qk, decay: _Decay, bound):
    """Σ_K x_i k_j exp(G_i − G_j) for i >= j, x = q and k, as [I, s, i, C]; anything finite for i < j.

    A tile's pairs meet at its own start: the exponent of its columns is positive, at most 16 |bound|. Both sides carry
    half of that as a constant power of two, so that neither leaves the range of float32.
    """
    tile = jnp.arange(qk.shape[1])
    half = 2.0 ** round(TILE / 2 * abs(bound) / math.log(2))
    own_tile = (tile[:, None] == tile)[..., None, None]
    earlier = decay.to_tile_end[:, None] * decay.between_tiles[..., None, :]
    own = _scaled_exp(-decay.tile_sum, 1 / half)[:, None]
    columns = _keys_of(qk) * jnp.where(own_tile, own, earlier / half)
    return _tile_pairs(qk * _scaled_exp(decay.tile_sum, half)[:, :, None], columns)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _scaled_exp(x, factor):
    """exp(x) · factor; the derivative is the value itself, so it does not leave the range of the value either."""
    return jnp.exp(x) * factor


@_scaled_exp.defjvp
def _scaled_exp_jvp(factor, primals, tangents):
    y = _scaled_exp(*primals, factor)
    return y, y * tangents[0]


def _pairs_pointwise(qk, decay: _Decay):
    """As `_pairs_bounded`, for any gate: each pair of a tile has its own exponent, a sum that is empty for i <= j."""
    P, tiles, _, _, K = qk.shape
    i, j, t = (lax.broadcasted_iota(jnp.int32, (TILE, TILE, TILE), axis) for axis in (0, 1, 2))
    after_j_to_i = ((j < t) & (t <= i)).astype(qk.dtype).reshape(-1, TILE)
    weights = jnp.exp(matmul(after_j_to_i, decay.g)).reshape(P, tiles, TILE, TILE, K)
    weighted_keys = weights * qk[:, :, 1, None]
    inside = jnp.sum(qk[..., None, :] * weighted_keys[:, :, None], -1)
    between = decay.to_tile_end[:, None] * decay.between_tiles[..., None, :]
    across = _tile_pairs(qk * decay.from_tile[:, :, None], _keys_of(qk) * between)
    tile = jnp.arange(tiles)
    own_tile = (tile[:, None] == tile)[:, None, None, :, None]
    by_tile = across.reshape(P, tiles, 2, TILE, tiles, TILE)
    return jnp.where(own_tile, inside[..., None, :], by_tile).reshape(across.shape)


@jax.custom_jvp
def unit_lower_inverse(A):
    """(I + A)⁻¹ of strictly lower triangular A [..., C, C], by substitution of blocks of 1, 2, 4, … rows.

    Block b of size n is already inverted; the pair (b, b + 1) is [[P, 0], [R, Q]], whose inverse has −Q⁻¹ R P⁻¹ below.
    Its errors are those of substitution row by row (repeated squaring loses all digits on similar keys).
    """
    C = A.shape[-1]
    i, j = (lax.broadcasted_iota(jnp.int32, (C, C), axis) for axis in (0, 1))

    def join(level, X):
        # Below the diagonal, the highest bit in which i and j differ says which level joins them.
        R = jnp.where((i ^ j) >> level == 1, A, 0)
        return X - matmul(matmul(X, R), X)

    X = jnp.where(i == j, 1, 0) - jnp.where(i ^ j == 1, A, 0)
    return lax.fori_loop(1, (C - 1).bit_length(), join, X)


@unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(primals, tangents):
    X = unit_lower_inverse(*primals)
    return X, -matmul(matmul(X, tangents[0]), X)
