"""KDA, first stage: what a chunk needs before its entering state is known. Token-parallel.

B batch, T tokens, H heads, N chunks, C tokens of a chunk, K key dim, V value dim.

One program takes one chunk of one head. With G the sums of log decays from the chunk's start to a token, inclusive:

    P[i,j] = k_i · k_j e^{G_i - G_j}, j < i                          W = (I + P diag(beta))^-1 (k e^G)
    A_qk[i,j] = scale (q_i · k_j e^{G_i - G_j}) beta_j, j <= i       U = (I + P diag(beta))^-1 v
    Q = scale q e^G        K_end = beta k e^{G_C - G}                decay = e^{G_C}

beta is with what is written (A_qk, K_end), not with what is solved for: U - W S are the errors v - Sᵀk of the tokens, and
beta's gradient needs them where beta is 0, too. Backward solves the transposed system, whose solutions are the cotangents
of what tokens write. With X = (I + diag(beta) P)^-1:

    K_start = beta k e^G        X_end = Xᵀ (k e^{G_C - G})        A_X = (A_qk without beta) X

K_start is handed on as it is used, with a minus. Nearly parallel keys nearly cancel in X_end: the keys keep two bfloat16
pieces until they have.

Exponents. No e^{-G} over a chunk: a pair of tokens in different tiles of 16 meets at a boundary between them, rows of
the later half of a block of 2b decay from the middle, columns of the earlier half decay to it (b = 16, 32), so no
exponent is positive. Inside a tile, e^{G} and e^{-G} from the tile's start, with the exact constant factors 2^s and
2^-s that keep both in range if 16 |gate_lower_bound| <= 80 (K3 report, section 2.1). Every sum of log
decays is a product of a 0/1 matrix with g in three bfloat16 pieces: exact terms, added in float32.

The inverse Z of I + M is substitution in blocks: with the diagonal blocks of b rows inverted, those of 2b rows follow
from Z_21 = -Z_22 M_21 Z_11. Z, M and their products in two bfloat16 pieces (16 bits): below the rounding of the result.

Documents. first[t] is the place in t's chunk where t's document began, -1 if that was before the chunk. Token i sees
j >= first[i]; the entering state reaches only tokens whose first is -1; only tokens from the last one's first on reach
the leaving state, and the entering state passes through only if that is -1.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kda.decays import (
    CHUNK,
    CHUNK_BITS,
    TILE,
    TILE_BITS,
    DecaySums,
    below,
    columns,
    constant_split,
    indices,
    rows,
    same,
)
from pallas_kernels.mosaic import Products, Transposed, launch, pieces, plain, tiled

BLOCKS = {"tokens": CHUNK, "tile": TILE, "columns": 64}  # columns: as many as keep their arrays in registers
COLUMNS = BLOCKS["columns"]


class Chunks(NamedTuple):
    """What the recurrences need of every chunk: all bfloat16, decay float32; the last three only for backward, else None."""

    w: Float[Array, "B H N C K"]
    u: Float[Array, "B H N C V"]
    q: Float[Array, "B H N C K"]
    a_qk: Float[Array, "B H N C C"]
    k_end: Float[Array, "B H N C K"]
    decay: Float[Array, "B H N K"]
    minus_k_start: Float[Array, "B H N C K"] | None
    x_end: Float[Array, "B H N C K"] | None
    a_x: Float[Array, "B H N C C"] | None


def prepare(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B H T"],
    first: Int[Array, "B T"] | None,
    *,
    scale: float,
    gate_lower_bound: float,
    keep_inverse: bool = False,
    interpret: bool = False,
) -> Chunks:
    """Chunks of q, k, v bfloat16 and g, beta float32 (g >= gate_lower_bound); T a multiple of 64, K and V of 64.

    keep_inverse: with what backward needs of the inverse.
    """
    B, T, H, K = q.shape
    V = v.shape[-1]
    N = T // CHUNK
    square, k_blocks, v_blocks = (CHUNK, COLUMNS), K // COLUMNS, V // COLUMNS
    shapes = [(CHUNK, K), (CHUNK, V), (CHUNK, K), (CHUNK, CHUNK), (CHUNK, K), (K,)]
    shapes += [(CHUNK, K), (CHUNK, K), (CHUNK, CHUNK)] * keep_inverse
    dtype = lambda shape: jnp.float32 if shape == (K,) else jnp.bfloat16
    out = [jax.ShapeDtypeStruct((B, H, N, *shape), dtype(shape)) for shape in shapes]
    scratch = [
        tiled(k_blocks, *square),
        tiled(k_blocks, *square),
        tiled(max(v_blocks, k_blocks * keep_inverse), *square),
        tiled(*square, dtype=jnp.float32),
        tiled(*square),
        [tiled(*square) for _ in range(4)],
        plain(CHUNK),
        plain(CHUNK, dtype=jnp.int32),
        plain(k_blocks, COLUMNS),
        plgpu.Barrier(num_arrivals=2 * k_blocks + 1 + (first is not None)),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=v_blocks),
    ]
    how = {
        "products": Products(interpret),
        "scale": scale,
        "shift": constant_split(gate_lower_bound),
        "documents": first is not None,
        "keep_inverse": keep_inverse,
    }
    arguments = (q, k, v, g, beta) if first is None else (q, k, v, g, beta, first)
    grid = {"chunk": N, "head": H, "batch": B}
    body = lambda *refs: kernel(*refs, **how)
    results = launch(body, *arguments, name="kda_prepare", out=out, grid=grid, scratch=scratch, interpret=interpret)
    return Chunks(*results, *(() if keep_inverse else [None] * 3))


def kernel(*refs, products: Products, scale: float, shift: int, documents: bool, keep_inverse: bool):
    inputs = 5 + documents
    q_g, k_g, v_g, g_g, beta_g, *first_g = refs[:inputs]
    outputs = inputs + 6 + 3 * keep_inverse
    w_g, u_g, q_out, a_g, end_g, decay_g, *kept_g = refs[inputs:outputs]
    q, k, v, g, upto, squares, beta, first, decay, loaded, g_loaded, v_loaded = refs[outputs:]
    b, h, n = (lax.axis_index(name) for name in ("batch", "head", "chunk"))
    tokens = pl.ds(n * CHUNK, CHUNK)
    bf16, f32 = jnp.bfloat16, jnp.float32
    k_blocks, v_blocks = q.shape[0], v_g.shape[-1] // COLUMNS
    part = lambda block: pl.ds(block * COLUMNS, COLUMNS)

    def load_g(block):
        plgpu.copy_gmem_to_smem(g_g.at[b, tokens, h, part(block)], g, g_loaded)

    def load_v():
        for block in range(v_blocks):
            plgpu.copy_gmem_to_smem(v_g.at[b, tokens, h, part(block)], v.at[block], v_loaded)

    load_g(0)
    if not keep_inverse:
        load_v()
    for source, target in ((q_g, q), (k_g, k)):
        for block in range(k_blocks):
            plgpu.copy_gmem_to_smem(source.at[b, tokens, h, part(block)], target.at[block], loaded)
    plgpu.copy_gmem_to_smem(beta_g.at[b, h, tokens], beta, loaded)
    if documents:
        plgpu.copy_gmem_to_smem(first_g[0].at[b, tokens], first, loaded)
    plgpu.barrier_wait(loaded)

    i, j = indices()

    # Documents: who sees whom, whom the entering state reaches, who reaches the leaving state.
    visible = entering = leaving = lambda x: x
    if documents:
        visible = lambda x: jnp.where(j >= rows(first[...]), x, 0.0)
        entering = lambda x: jnp.where(rows(first[...]) < 0, x, 0.0)
        leaving = lambda x: jnp.where(i >= first[CHUNK - 1], x, 0.0)

    decays = DecaySums(products, upto, squares[:3])
    decays.start()

    def block_of_columns(block, sums):
        # Operands are read anew for each use: registers are scarcer than the bandwidth of shared memory.
        times = lambda x, factor: (x[block].astype(f32) * factor).astype(bf16)

        def add_pairs(sums, row_factor, column_factor, mask):
            """Adds q·k and k·k of the pairs in the mask, the operands times these factors."""
            squares[3][...] = times(k, column_factor)
            left = times(q, row_factor), times(k, row_factor)
            plgpu.commit_smem()
            masked = lambda x: jnp.where(mask, products((x, Transposed(squares[3]))), 0.0)
            return tuple(total + masked(x) for total, x in zip(sums, left, strict=True))

        def level(bits, sums):
            factor = jnp.exp(decays.to_middle(bits))
            return add_pairs(sums, factor, factor, below(bits))

        plgpu.barrier_wait(g_loaded)
        decays.put(g[...])
        pl.when(block + 1 < k_blocks)(lambda: load_g(block + 1))
        inside = decays.from_tile()
        sums = add_pairs(sums, jnp.exp(inside) * 2.0**shift, jnp.exp(-inside) * 2.0**-shift, same(TILE_BITS))
        sums = lax.fori_loop(TILE_BITS, CHUNK_BITS, level, sums)
        to_end = leaving(jnp.exp(decays.to_end()))
        squares[3][...] = times(k, to_end * rows(beta[...]))
        if keep_inverse:
            end, v[block] = pieces(k[block].astype(f32) * to_end, 2)  # v is still to come
        from_start = entering(jnp.exp(decays.from_start()))
        # Of the last token: 0 if its document is not the one that entered.
        decay[block] = jnp.sum(jnp.where(i == CHUNK - 1, from_start, 0.0), axis=0)
        squares[2][...] = times(q, from_start * scale)
        if keep_inverse:
            squares[1][...] = times(k, from_start * -rows(beta[...]))
            q[block] = end  # q has been read
        k[block] = times(k, from_start)
        plgpu.commit_smem()
        for source, target in zip(squares[3:0:-1], (end_g, q_out, *kept_g[:1]), strict=False):
            plgpu.copy_smem_to_gmem(source, target.at[b, h, n, :, part(block)])
        plgpu.wait_smem_to_gmem(0)
        return sums

    zeros = jnp.zeros((CHUNK, CHUNK), f32)
    a_qk, a_kk = lax.fori_loop(0, k_blocks, block_of_columns, (zeros, zeros))
    a_qk = visible(jnp.where(j <= i, a_qk * scale, 0.0))
    upto[...] = (a_qk if keep_inverse else a_qk * columns(beta[...])).astype(bf16)
    a_kk = visible(jnp.where(j < i, a_kk, 0.0))
    if keep_inverse:
        g[...] = a_kk
    a_kk = a_kk * columns(beta[...])

    a_hi, a_lo, x_hi, x_lo = squares
    a_hi[...], a_lo[...] = pieces(a_kk, 2)

    def double(bits, x):
        hi, lo = pieces(x, 2)
        x_hi[...], x_lo[...] = hi, lo
        plgpu.commit_smem()
        hi, lo = pieces(products((hi, a_hi), (hi, a_lo), (lo, a_hi)), 2)
        return x - jnp.where(below(bits), products((hi, x_hi), (hi, x_lo), (lo, x_hi)), 0.0)

    x = lax.fori_loop(1, CHUNK_BITS, double, jnp.where(i == j, 1.0, jnp.where(below(0), -a_kk, 0.0)))
    left = x.astype(bf16)
    for block in range(k_blocks):
        k[block] = products((left, k.at[block])).astype(bf16)
    if keep_inverse:
        # (I + diag(beta) P)^-1 from the other inverse: I - diag(beta) (I + P diag(beta))^-1 P.
        a_hi[...], a_lo[...] = pieces(g[...], 2)
        plgpu.commit_smem()
        hi, lo = pieces(x, 2)
        x = jnp.where(i == j, 1.0, 0.0) - rows(beta[...]) * products((hi, a_hi), (hi, a_lo), (lo, a_hi))
        x_hi[...], x_lo[...] = pieces(x, 2)
        plgpu.commit_smem()
        for block in range(k_blocks):
            hi, lo = q.at[block], v.at[block]
            q[block] = products((Transposed(x_hi), hi), (Transposed(x_hi), lo), (Transposed(x_lo), hi)).astype(bf16)
        a_hi[...] = products((upto, x_hi), (upto, x_lo)).astype(bf16)
        upto[...] = (upto[...].astype(f32) * columns(beta[...])).astype(bf16)
        plgpu.commit_smem()
        load_v()
    plgpu.barrier_wait(v_loaded)
    for block in range(v_blocks):
        v[block] = products((left, v.at[block])).astype(bf16)
    plgpu.commit_smem()
    for source, target in zip((k, v, q), (w_g, u_g, *kept_g[1:2]), strict=False):
        for block in range(v_blocks if target is u_g else k_blocks):
            plgpu.copy_smem_to_gmem(source.at[block], target.at[b, h, n, :, part(block)])
    for source, target in zip((upto, a_hi), (a_g, *kept_g[2:]), strict=False):
        plgpu.copy_smem_to_gmem(source, target.at[b, h, n])
    for block in range(k_blocks):
        plgpu.copy_smem_to_gmem(decay.at[block], decay_g.at[b, h, n, part(block)])
    plgpu.wait_smem_to_gmem(0)


def reference(q, k, v, g, beta, first=None, *, scale) -> Chunks:
    """The same from the definition, in the dtype of the inputs; pairwise decays, masked before exp."""
    B, T, H, _ = q.shape
    N = T // CHUNK
    q, k, v, g = (x.reshape(B, N, CHUNK, H, -1).transpose(0, 3, 1, 2, 4) for x in (q, k, v, g))
    beta = beta.reshape(B, H, N, CHUNK)
    place = jnp.arange(CHUNK)
    first = jnp.full((B, 1, N, CHUNK), -1) if first is None else first.reshape(B, 1, N, CHUNK)
    G = jnp.cumsum(g, axis=3)
    visible = jnp.tril(place >= first[..., None])
    between = jnp.exp(jnp.where(visible[..., None], G[..., :, None, :] - G[..., None, :, :], -jnp.inf))
    pairs = lambda x: jnp.einsum("...id,...jd,...ijd->...ij", x, k, between)
    a_qk, a_kk, row, column = scale * pairs(q), jnp.tril(pairs(k), -1), beta[..., None], beta[..., None, :]
    inverse = lambda x: jnp.linalg.inv(jnp.eye(CHUNK, dtype=g.dtype) + x)
    left, right = inverse(a_kk * column), inverse(row * a_kk)
    last = first[..., -1:]
    entering = (first < 0)[..., None] * jnp.exp(G)
    leaving = (place >= last)[..., None] * jnp.exp(G[..., -1:, :] - G)
    decay = jnp.where(last < 0, jnp.exp(G[..., -1, :]), 0.0)
    k_start, k_end = k * entering, k * leaving
    forward = left @ k_start, left @ v, scale * q * entering, a_qk * column, row * k_end, decay
    return Chunks(*forward, -row * k_start, jnp.swapaxes(right, -1, -2) @ k_end, a_qk @ right)
