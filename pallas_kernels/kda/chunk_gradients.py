"""KDA backward, second stage: from states and values to the chunk's matrices. Token-parallel.

B batch, T tokens, H heads, N chunks, C tokens of a chunk, K key dim, V value dim.

One program takes one chunk of one head, with the state S that entered it, the cotangent dS of the one that left, V',
dV', dO, W, U and X = (I + A_kk)^-1. It makes all that needs no decay (K3 report's chunk form, differentiated):

    dv = beta Xᵀ dV'          dA_qk = Tril(dO V'ᵀ)                dQ = dO Sᵀ             dK_end = V' dSᵀ
    Y = Xᵀ dW, dW = -dV' Sᵀ   dA_kk = -StrictTril(Xᵀ (dW Wᵀ + dV' Uᵀ))      ddecay = decay · rowsum(dS S)

(X diag(beta) times keys is W and times values U: dT Tᵀ of the textbook form is dW Wᵀ + dV' Uᵀ, no keys needed.)
beta's gradient through v is Σ_V v Xᵀ dV'; beta is never divided by. Pairs of different documents get no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kda.decays import CHUNK, indices, rows
from pallas_kernels.kda.prepare import Chunks
from pallas_kernels.kda.recurrence import Passed
from pallas_kernels.kda.reverse import Reversed
from pallas_kernels.mosaic import Products, Transposed, launch, plain, tiled

BLOCKS = {"tokens": CHUNK, "columns": 64}
COLUMNS = BLOCKS["columns"]


class ChunkGradients(NamedTuple):
    """Gradients of v and of what `prepare` made: bfloat16; beta's share and the decay's, float32."""

    v: Float[Array, "B T H V"]
    a_qk: Float[Array, "B H N C C"]
    a_kk: Float[Array, "B H N C C"]
    q: Float[Array, "B H N C K"]
    k_end: Float[Array, "B H N C K"]
    y: Float[Array, "B H N C K"]
    decay: Float[Array, "B H N K"]
    beta: Float[Array, "B H T"]


def chunk_gradients(
    v: Float[Array, "B T H V"],
    beta: Float[Array, "B H T"],
    first: Int[Array, "B T"] | None,
    chunks: Chunks,
    passed: Passed,
    do: Float[Array, "B T H V"],
    back: Reversed,
    *,
    interpret: bool = False,
) -> ChunkGradients:
    """Gradients of chunks with their inverse, of a recurrence that kept its states, and of its reverse."""
    B, H, N, C, K = chunks.w.shape
    V = v.shape[-1]
    half, full = jnp.bfloat16, jnp.float32
    shapes = [((B, N * C, H, V), half), *(((B, H, N, C, x), half) for x in (C, C, K, K, K))]
    shapes += [((B, H, N, K), full), ((B, H, N * C), full)]
    squares, v_blocks = (C, COLUMNS), V // COLUMNS
    scratch = [
        [tiled(v_blocks, *squares) for _ in range(3)],
        [tiled(v_blocks, *squares) for _ in range(2)],
        tiled(C, C),
        [tiled(*squares) for _ in range(4)],
        plain(COLUMNS),
        [plain(C), plain(C, dtype=jnp.int32), plain(K), plain(C)],
        [plgpu.Barrier(num_arrivals=x) for x in (3 * v_blocks + 3 + (first is not None), 2, 2 * v_blocks + 1)],
    ]
    inverse, states, values = kept(chunks, passed)
    arrays = (do, values, back.values, v, chunks.u, chunks.w, states, back.states, inverse, beta, chunks.decay)
    arrays = arrays if first is None else (*arrays, first)
    how = {"products": Products(interpret), "documents": first is not None}
    return ChunkGradients(
        *launch(
            lambda *refs: kernel(*refs, **how),
            *arrays,
            name="kda_chunk_gradients",
            out=[jax.ShapeDtypeStruct(*x) for x in shapes],
            grid={"chunk": N, "head": H, "batch": B},
            scratch=scratch,
            interpret=interpret,
        )
    )


def kept(chunks: Chunks, passed: Passed):
    """The inverse, the states and V', if the stages before kept them; else raises ValueError."""
    if chunks.inverse is None or passed.states is None or passed.values is None:
        raise ValueError("chunk gradients need prepare(..., keep_inverse=True) and recurrence(..., keep=True)")
    return chunks.inverse, passed.states, passed.values


def kernel(*refs, products: Products, documents: bool):
    do_g, values_g, dv_g, v_g, u_g, w_g, s_g, ds_g, x_g, beta_g, decay_g, *first_g = refs[: 11 + documents]
    dv_out, dqk_g, dkk_g, dq_g, dend_g, y_g, ddecay_g, dbeta_g = refs[11 + documents : 19 + documents]
    (do, values, dv), (s, ds), x, (operand, dw, out, other), sums, vectors, barriers = refs[19 + documents :]
    beta, first, decay, dbeta = vectors
    loaded, value_loaded, key_loaded = barriers
    b, h, n = (lax.axis_index(name) for name in ("batch", "head", "chunk"))
    C = CHUNK
    tokens = pl.ds(n * C, C)
    bf16, f32 = jnp.bfloat16, jnp.float32
    part = lambda block: pl.ds(block * COLUMNS, COLUMNS)
    v_blocks, k_blocks = do.shape[0], w_g.shape[-1] // COLUMNS
    i, j = indices()

    for block in range(v_blocks):
        plgpu.copy_gmem_to_smem(do_g.at[b, tokens, h, part(block)], do.at[block], loaded)
        for source, target in ((values_g, values), (dv_g, dv)):
            plgpu.copy_gmem_to_smem(source.at[b, h, n, :, part(block)], target.at[block], loaded)
    plgpu.copy_gmem_to_smem(x_g.at[b, h, n], x, loaded)
    plgpu.copy_gmem_to_smem(beta_g.at[b, h, tokens], beta, loaded)
    plgpu.copy_gmem_to_smem(decay_g.at[b, h, n], decay, loaded)
    if documents:
        plgpu.copy_gmem_to_smem(first_g[0].at[b, tokens], first, loaded)
    plgpu.barrier_wait(loaded)
    visible = (lambda x: jnp.where(j >= rows(first[...]), x, 0.0)) if documents else (lambda x: x)

    def fetch(barrier, *copies):
        """Loads into buffers that no thread reads any more behind the barrier that commit_smem holds."""
        plgpu.commit_smem()
        for source, target in copies:
            plgpu.copy_gmem_to_smem(source, target, barrier)
        plgpu.barrier_wait(barrier)

    def send(result, buffer, target):
        """Writes a result from registers by way of a buffer, whose earlier contents must have left."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        buffer[...] = result.astype(bf16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, target)

    over = lambda left, right: products(*((left.at[c], Transposed(right.at[c])) for c in range(v_blocks)))

    # Through U: dV' Uᵀ, and through v: dv = beta Xᵀ dV', with beta's share.
    def value_block(block, carry):
        inner, share = carry
        u, own = (u_g.at[b, h, n, :, part(block)], operand), (v_g.at[b, tokens, h, part(block)], other)
        fetch(value_loaded, u, own)
        inner = inner + products((dv.at[block], Transposed(operand)))
        y = products((Transposed(x), dv.at[block]))
        share = share + y * other[...].astype(f32)
        send(y * rows(beta[...]), out, dv_out.at[b, tokens, h, part(block)])
        return inner, share

    zeros = jnp.zeros((C, C), f32)
    inner, share = lax.fori_loop(0, v_blocks, value_block, (zeros, zeros))
    dbeta[...] = jnp.sum(share, axis=1)

    def key_block(block, inner):
        tiles = [
            (source.at[b, h, n, part(block), part(c)], target.at[c])
            for source, target in ((s_g, s), (ds_g, ds))
            for c in range(v_blocks)
        ]
        fetch(key_loaded, *tiles, (w_g.at[b, h, n, :, part(block)], operand))
        send(over(do, s), out, dq_g.at[b, h, n, :, part(block)])
        send(over(values, ds), out, dend_g.at[b, h, n, :, part(block)])
        dw[...] = (-over(dv, s)).astype(bf16)
        plgpu.commit_smem()
        send(products((Transposed(x), dw)), out, y_g.at[b, h, n, :, part(block)])
        both = lax.fori_loop(0, v_blocks, lambda c, total: total + s[c].astype(f32) * ds[c].astype(f32), zeros)
        sums[...] = jnp.sum(both * rows(decay[part(block)]), axis=1)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sums, ddecay_g.at[b, h, n, part(block)])
        return inner + products((dw, Transposed(operand)))

    inner = lax.fori_loop(0, k_blocks, key_block, inner)
    operand[...] = inner.astype(bf16)
    plgpu.commit_smem()
    send(visible(jnp.where(j < i, -products((Transposed(x), operand)), 0.0)), out, dkk_g.at[b, h, n])
    send(visible(jnp.where(j <= i, over(do, values), 0.0)), out, dqk_g.at[b, h, n])
    plgpu.copy_smem_to_gmem(dbeta, dbeta_g.at[b, h, tokens])
    plgpu.wait_smem_to_gmem(0)


def reference(v, beta, first, chunks: Chunks, passed: Passed, do, back: Reversed) -> ChunkGradients:
    """The same from the definition, in the dtype of the inputs."""
    B, H, N, C, _ = chunks.w.shape
    by_chunk = lambda x: x.reshape(B, N, C, H, -1).transpose(0, 3, 1, 2, 4)
    turned = lambda x: jnp.swapaxes(x, -1, -2)
    first = jnp.full((B, 1, N, C, 1), -1) if first is None else first.reshape(B, 1, N, C, 1)
    visible = jnp.arange(C) >= first
    inverse, S, values = kept(chunks, passed)
    dS, dV, X = back.states, back.values, turned(inverse)
    dW = -dV @ turned(S)
    y_v = X @ dV
    dv = (beta.reshape(B, H, N, C, 1) * y_v).transpose(0, 2, 3, 1, 4).reshape(v.shape)
    return ChunkGradients(
        dv,
        jnp.tril(by_chunk(do) @ turned(values)) * visible,
        -jnp.tril(X @ (dW @ turned(chunks.w) + dV @ turned(chunks.u)), -1) * visible,
        by_chunk(do) @ turned(S),
        values @ turned(dS),
        X @ dW,
        chunks.decay * jnp.sum(S * dS, -1),
        jnp.sum(by_chunk(v) * y_v, -1).reshape(beta.shape),
    )
