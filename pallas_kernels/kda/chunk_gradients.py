"""KDA backward, second stage: from states, errors and writes to the chunk's matrices. Token-parallel.

B batch, T tokens, H heads, N chunks, C tokens of a chunk, K key dim, V value dim.

One program takes one chunk of one head, with the state S that entered it, the cotangent dS of the one that left, dO, the
tokens' errors E (token i writes beta_i k_i E_iᵀ) and the cotangents Y of beta E. It makes all that needs no decay:

    dv = beta Y        dA_qk = Tril(dO (beta E)ᵀ)        dA_kk = -StrictTril(Y (beta E)ᵀ)
    dQ = dO Sᵀ         dK_end = beta E dSᵀ               dK_start = -Y Sᵀ        ddecay = decay · rowsum(dS S)

with A_qk, K_end and K_start of report's chunk form, without beta, but A_kk with it. It is that form's gradient,
differentiated through the solution instead of the inverse: -Xᵀ dT Tᵀ there is -Y (beta E)ᵀ here. Nothing is a difference
of sums over the chunk: Y and E are those already. beta is never divided by. Pairs of different documents get no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kda.decays import CHUNK, columns, indices, rows
from pallas_kernels.kda.recurrence import Passed
from pallas_kernels.kda.reverse import Reversed
from pallas_kernels.mosaic import Products, Transposed, launch, plain, tiled

BLOCKS = {"tokens": CHUNK, "columns": 64}
COLUMNS = BLOCKS["columns"]


class ChunkGradients(NamedTuple):
    """Gradients of v and of the chunk's matrices: bfloat16; of the decay, float32."""

    v: Float[Array, "B T H V"]
    a_qk: Float[Array, "B H N C C"]
    a_kk: Float[Array, "B H N C C"]
    q: Float[Array, "B H N C K"]
    k_end: Float[Array, "B H N C K"]
    k_start: Float[Array, "B H N C K"]
    decay: Float[Array, "B H N K"]


def chunk_gradients(
    beta: Float[Array, "B H T"],
    first: Int[Array, "B T"] | None,
    decay: Float[Array, "B H N K"],
    passed: Passed,
    do: Float[Array, "B T H V"],
    back: Reversed,
    *,
    interpret: bool = False,
) -> ChunkGradients:
    """Gradients from a recurrence that kept its states and errors, and from its reverse."""
    states, errors = passed.kept()
    (B, H, N, K), C = decay.shape, CHUNK
    half, full = jnp.bfloat16, jnp.float32
    shapes = [(do.shape, half), *(((B, H, N, C, x), half) for x in (C, C, K, K, K)), ((B, H, N, K), full)]
    squares, v_blocks = (C, COLUMNS), do.shape[-1] // COLUMNS
    scratch = [
        [tiled(v_blocks, *squares) for _ in range(3)],
        [tiled(v_blocks, *squares) for _ in range(2)],
        tiled(*squares),
        plain(COLUMNS),
        [plain(C), plain(C, dtype=jnp.int32), plain(K)],
        [plgpu.Barrier(num_arrivals=x) for x in (3 * v_blocks + 2 + (first is not None), 2 * v_blocks)],
    ]
    arrays = (do, errors, back.writes, states, back.states, beta, decay)
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


def kernel(*refs, products: Products, documents: bool):
    do_g, errors_g, y_g, s_g, ds_g, beta_g, decay_g, *first_g = refs[: 7 + documents]
    dv_g, dqk_g, dkk_g, dq_g, dend_g, dstart_g, ddecay_g = refs[7 + documents : 14 + documents]
    (do, errors, y), (s, ds), out, sums, (beta, first, decay), (loaded, key_loaded) = refs[14 + documents :]
    b, h, n = (lax.axis_index(name) for name in ("batch", "head", "chunk"))
    C = CHUNK
    tokens = pl.ds(n * C, C)
    bf16, f32 = jnp.bfloat16, jnp.float32
    part = lambda block: pl.ds(block * COLUMNS, COLUMNS)
    v_blocks, k_blocks = do.shape[0], s_g.shape[-2] // COLUMNS
    i, j = indices()

    for block in range(v_blocks):
        plgpu.copy_gmem_to_smem(do_g.at[b, tokens, h, part(block)], do.at[block], loaded)
        for source, target in ((errors_g, errors), (y_g, y)):
            plgpu.copy_gmem_to_smem(source.at[b, h, n, :, part(block)], target.at[block], loaded)
    plgpu.copy_gmem_to_smem(beta_g.at[b, h, tokens], beta, loaded)
    plgpu.copy_gmem_to_smem(decay_g.at[b, h, n], decay, loaded)
    if documents:
        plgpu.copy_gmem_to_smem(first_g[0].at[b, tokens], first, loaded)
    plgpu.barrier_wait(loaded)
    visible = (lambda x: jnp.where(j >= rows(first[...]), x, 0.0)) if documents else (lambda x: x)

    def send(result, target):
        """Writes a result from registers by way of `out`, whose earlier contents must have left."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out[...] = result.astype(bf16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, target)

    over = lambda left, right: products(*((left.at[c], Transposed(right.at[c])) for c in range(v_blocks)))
    zeros = jnp.zeros((C, C), f32)

    def value_block(block, carry):
        send(y[block].astype(f32) * rows(beta[...]), dv_g.at[b, tokens, h, part(block)])
        return carry

    lax.fori_loop(0, v_blocks, value_block, None)

    def key_block(block, carry):
        plgpu.commit_smem()  # Behind this barrier no thread reads the block before any more.
        for source, target in ((s_g, s), (ds_g, ds)):
            for c in range(v_blocks):
                plgpu.copy_gmem_to_smem(source.at[b, h, n, part(block), part(c)], target.at[c], key_loaded)
        plgpu.barrier_wait(key_loaded)
        send(over(do, s), dq_g.at[b, h, n, :, part(block)])
        send(over(errors, ds) * rows(beta[...]), dend_g.at[b, h, n, :, part(block)])
        send(-over(y, s), dstart_g.at[b, h, n, :, part(block)])
        both = lax.fori_loop(0, v_blocks, lambda c, total: total + s[c].astype(f32) * ds[c].astype(f32), zeros)
        sums[...] = jnp.sum(both * rows(decay[part(block)]), axis=1)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sums, ddecay_g.at[b, h, n, part(block)])
        return carry

    lax.fori_loop(0, k_blocks, key_block, None)
    written = lambda x: visible(x * columns(beta[...]))
    send(written(jnp.where(j < i, -over(y, errors), 0.0)), dkk_g.at[b, h, n])
    send(written(jnp.where(j <= i, over(do, errors), 0.0)), dqk_g.at[b, h, n])
    plgpu.wait_smem_to_gmem(0)


def reference(beta, first, decay, passed: Passed, do, back: Reversed) -> ChunkGradients:
    """The same from the definition, in the dtype of the inputs."""
    B, H, N, C, _ = back.writes.shape
    by_chunk = lambda x: x.reshape(B, N, C, H, -1).transpose(0, 3, 1, 2, 4)
    turned = lambda x: jnp.swapaxes(x, -1, -2)
    first = jnp.full((B, 1, N, C, 1), -1) if first is None else first.reshape(B, 1, N, C, 1)
    visible = jnp.arange(C) >= first
    S, errors = passed.kept()
    do, beta = by_chunk(do), beta.reshape(B, H, N, C, 1)
    dS, Y = back.states, back.writes
    written = beta * errors
    return ChunkGradients(
        (beta * Y).transpose(0, 2, 3, 1, 4).reshape(B, N * C, H, -1),
        jnp.tril(do @ turned(written)) * visible,
        -jnp.tril(Y @ turned(written), -1) * visible,
        do @ turned(S),
        written @ turned(dS),
        -Y @ turned(S),
        decay * jnp.sum(S * dS, -1),
    )
