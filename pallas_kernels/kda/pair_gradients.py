"""KDA backward, last stage: from the chunk's matrices to q, k and the log decays. Token-parallel.

B batch, T tokens, H heads, N chunks, C tokens of a chunk, K key dim, V value dim.

One program takes one chunk of one head and BLOCKS["columns"] key columns. Pairs meet where they met in `prepare`: at a
boundary between them (no exponent is positive) or, inside a tile of 16, at its start with the exact constant split.
With f = e^G, e = e^{G_C - G}, D_ij = e^{G_i - G_j}, sums over pairs j < i:

    dq = scale (dQ f + Σ_j dA_qk D k_j)        R = dK_start f + Σ_j dA_kk D k_j        end = dK_end e
    columns_j = Σ_i (dA_qk scale q_i + dA_kk beta_i k_i) D        dk = beta R + columns + end
    dg_t = Σ_{i >= t} (q dq + k (beta R - columns))_i + Σ_{i < t} (k end)_i + ddecay

Pairs behind t have to cancel in dg_t, to float32 and not only to bfloat16: under a strong gate dg is what few pairs leave.
So dg's terms are made of the rounded operands, q and k times the products with them: then a pair is the same number in
its row and in its column. And a pair of a token with itself has no decay: it joins dq and dk only after dg is taken.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kda.chunk_gradients import ChunkGradients
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

BLOCKS = {"tokens": CHUNK, "tile": TILE, "columns": 64}
COLUMNS = BLOCKS["columns"]


def pair_gradients(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B H T"],
    first: Int[Array, "B T"] | None,
    given: ChunkGradients,
    *,
    scale: float,
    gate_lower_bound: float,
    interpret: bool = False,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H K"], Float[Array, "B T H K"]]:
    """Gradients of q and k, bfloat16, and of g, float32."""
    B, T, H, K = q.shape
    half, full = jnp.bfloat16, jnp.float32
    k_blocks, square = K // COLUMNS, (CHUNK, COLUMNS)
    documents = first is not None
    out = [jax.ShapeDtypeStruct((B, T, H, K), x) for x in (half, half, full)]
    scratch = [
        [tiled(*square) for _ in range(5)],
        [tiled(*square, dtype=full) for _ in range(4)],
        [tiled(CHUNK, CHUNK) for _ in range(3)],
        [tiled(*square) for _ in range(5)],
        [plain(CHUNK), plain(CHUNK, dtype=jnp.int32), plain(COLUMNS), plain(CHUNK)],
        plgpu.Barrier(num_arrivals=10 + documents),
    ]
    how = {
        "products": Products(interpret),
        "scale": scale,
        "shift": constant_split(gate_lower_bound),
        "documents": documents,
    }
    dq, dk, dg = launch(
        lambda *refs: kernel(*refs, **how),
        *(q, k, g, given.q, given.k_end, given.k_start, given.a_qk, given.a_kk, beta, given.decay),
        *((first,) if documents else ()),
        name="kda_pair_gradients",
        out=out,
        grid={"columns": k_blocks, "chunk": T // CHUNK, "head": H, "batch": B},
        scratch=scratch,
        interpret=interpret,
    )
    return dq, dk, dg


def kernel(*refs, products: Products, scale: float, shift: int, documents: bool):
    q_g, k_g, g_g, dq_g, dend_g, dstart_g, dqk_g, dkk_g, beta_g, ddecay_g, *first_g = refs[: 10 + documents]
    dq_out, dk_out, dg_out = refs[10 + documents : 13 + documents]
    (q, k, dq_in, dend, dstart), (g, dq, dk, terms), (dqk, dkk, upto), squares, vectors, loaded = refs[13 + documents :]
    beta, first, ddecay, itself = vectors
    b, h, n, block = (lax.axis_index(name) for name in ("batch", "head", "chunk", "columns"))
    tokens, part = pl.ds(n * CHUNK, CHUNK), pl.ds(block * COLUMNS, COLUMNS)
    bf16, f32 = jnp.bfloat16, jnp.float32
    copies = [(x.at[b, tokens, h, part], y) for x, y in ((q_g, q), (k_g, k), (g_g, g))]
    copies += [(x.at[b, h, n, :, part], y) for x, y in ((dq_g, dq_in), (dend_g, dend), (dstart_g, dstart))]
    copies += [(x.at[b, h, n], y) for x, y in ((dqk_g, dqk), (dkk_g, dkk))]
    copies += [(beta_g.at[b, h, tokens], beta), (ddecay_g.at[b, h, n, part], ddecay)]
    copies += [(x.at[b, tokens], first) for x in first_g]
    for source, target in copies:
        plgpu.copy_gmem_to_smem(source, target, loaded)
    decays = DecaySums(products, upto, squares[:3])
    decays.start()
    plgpu.barrier_wait(loaded)

    i, j = indices()
    entering = leaving = lambda x: x
    if documents:
        entering = lambda x: jnp.where(rows(first[...]) < 0, x, 0.0)
        leaving = lambda x: jnp.where(i >= first[CHUNK - 1], x, 0.0)
    wide = lambda ref: ref[...].astype(f32)

    def add_pairs(row_factor, column_factor, mask):
        """Adds what the pairs in the mask give to dq, dk and the terms of dg."""
        m_qk, m_kk, k_column, q_row, k_row = squares
        k_column[...] = (wide(k) * column_factor).astype(bf16)
        q_row[...] = (wide(q) * (row_factor * scale)).astype(bf16)
        k_row[...] = (wide(k) * (row_factor * rows(beta[...]))).astype(bf16)
        for target, source in ((m_qk, dqk), (m_kk, dkk)):
            target[...] = jnp.where(mask, wide(source), 0.0).astype(bf16)
        plgpu.commit_smem()

        def add(gradient, factor, sign, operand, *pairs):
            product = products(*pairs)
            gradient[...] = gradient[...] + factor * product
            terms[...] = terms[...] + sign * wide(operand) * product

        add(dk, column_factor, -1.0, k_column, (Transposed(m_qk), q_row), (Transposed(m_kk), k_row))
        add(dq, row_factor * scale, 1.0, q_row, (m_qk, k_column))
        add(dk, row_factor * rows(beta[...]), 1.0, k_row, (m_kk, k_column))

    def level(bits, carry):
        decays.put(g[...])
        factor = jnp.exp(decays.to_middle(bits))
        add_pairs(factor, factor, below(bits))
        return carry

    decays.put(g[...])
    inside = decays.from_tile()
    dq[...] = dk[...] = terms[...] = jnp.zeros((CHUNK, COLUMNS), f32)
    mask = same(TILE_BITS) & (j < i)
    add_pairs(jnp.exp(inside) * 2.0**shift, jnp.exp(-inside) * 2.0**-shift, mask)
    lax.fori_loop(TILE_BITS, CHUNK_BITS, level, None)

    decays.put(g[...])
    from_start = entering(jnp.exp(decays.from_start()))
    for gradient, operand, given in ((dq, q, scale * wide(dq_in)), (dk, k, rows(beta[...]) * wide(dstart))):
        more = from_start * given
        gradient[...] = gradient[...] + more
        terms[...] = terms[...] + wide(operand) * more
    plgpu.commit_smem()  # Others may read them.
    end = leaving(jnp.exp(decays.to_end())) * wide(dend)
    itself[...] = scale * jnp.sum(jnp.where(i == j, wide(dqk), 0.0), axis=1)

    def running(chosen, x):
        """Sums of x over the chosen tokens j, for every token i."""
        for target, piece in zip(squares[:3], pieces(x, 3), strict=True):
            target[...] = piece
        plgpu.commit_smem()
        return products(*((chosen, piece) for piece in squares[:3]))

    dg = running(Transposed(upto), terms[...])
    dq_in[...] = (dq[...] + rows(itself[...]) * wide(k)).astype(bf16)
    dend[...] = (dk[...] + end + rows(itself[...]) * wide(q)).astype(bf16)
    kept = wide(k) * end
    g[...] = dg + (running(upto, kept) - kept) + columns(ddecay[...])
    plgpu.commit_smem()
    for source, target in ((dq_in, dq_out), (dend, dk_out), (g, dg_out)):
        plgpu.copy_smem_to_gmem(source, target.at[b, tokens, h, part])
    plgpu.wait_smem_to_gmem(0)


def reference(q, k, g, beta, first, given: ChunkGradients, *, scale):
    """The same from the definition, in the dtype of the inputs; pairwise decays, masked before exp."""
    B, T, H, K = q.shape
    N = T // CHUNK
    to_chunks = lambda x: x.reshape(B, N, CHUNK, H, K).transpose(0, 3, 1, 2, 4)
    to_tokens = lambda x: x.transpose(0, 2, 3, 1, 4).reshape(B, T, H, K)
    q, k, g = map(to_chunks, (q, k, g))
    beta = beta.reshape(B, H, N, CHUNK, 1)
    place = jnp.arange(CHUNK)
    first = jnp.full((B, 1, N, CHUNK), -1) if first is None else first.reshape(B, 1, N, CHUNK)
    G = jnp.cumsum(g, axis=3)
    earlier = (place[:, None] > place)[..., None]
    between = jnp.exp(jnp.where(earlier, G[..., :, None, :] - G[..., None, :, :], -jnp.inf))
    by_row = lambda d: jnp.einsum("...ij,...ijd,...jd->...id", d, between, k)
    by_column = lambda d, x: jnp.einsum("...ij,...ijd,...id->...jd", d, between, x)
    f = (first < 0)[..., None] * jnp.exp(G)
    e = (place >= first[..., -1:])[..., None] * jnp.exp(G[..., -1:, :] - G)
    dq = scale * (given.q * f + by_row(given.a_qk))
    r = given.k_start * f + by_row(given.a_kk)
    end = given.k_end * e
    column = by_column(given.a_qk, scale * q) + by_column(given.a_kk, beta * k)
    terms = q * dq + k * (beta * r - column)
    kept = k * end
    dg = jnp.flip(jnp.cumsum(jnp.flip(terms, 3), 3), 3) + jnp.cumsum(kept, 3) - kept + given.decay[..., None, :]
    itself = scale * jnp.diagonal(given.a_qk, axis1=-2, axis2=-1)[..., None]
    dk = beta * r + column + end + itself * q
    return tuple(map(to_tokens, (dq + itself * k, dk, dg)))
