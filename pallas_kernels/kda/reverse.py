"""KDA backward, first stage: the cotangent of the state, last chunk to first. Head-parallel.

B batch, T tokens, H heads, N chunks, C tokens of a chunk, K key dim, V value dim.

The mirror of the recurrence: one program carries dS, the cotangent of the state that leaves a chunk, of one head and
BLOCKS["columns"] value columns, in registers, float32. Per chunk, with dO the cotangent of its outputs:

    Y = X_end dS + A_Xᵀ dO        dS <- diag(decay) dS + Qᵀ dO - K_startᵀ Y        dbeta = Σ_V Y E

Y are the cotangents of what tokens write, dSᵀk with the dS of the token's own place: where keys are nearly parallel they
are small differences, which `prepare` has taken. dS as it is before that line and Y are written for the token-parallel
stage; the last dS is the gradient of the initial state. Documents need nothing here: what `prepare` made already stops at
their boundaries.

beta's gradient is taken here, with the recurrence's errors E and before Y is rounded, and Y with dS in two bfloat16 pieces:
a token's Σ_V Y E may be far smaller than its terms, and as a single number it has no others to average with.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.kda.decays import CHUNK
from pallas_kernels.kda.prepare import Chunks
from pallas_kernels.mosaic import Products, Transposed, launch, pieces, plain, tiled

BLOCKS = {"tokens": CHUNK, "columns": 64, "stages": 2}


class Reversed(NamedTuple):
    """Cotangents: of the state that leaves each chunk and what tokens write, bfloat16; of initial state and beta, float32."""

    states: Float[Array, "B H N K V"]
    writes: Float[Array, "B H N C V"]
    initial_state: Float[Array, "B H K V"]
    beta: Float[Array, "B H T"]


def reverse(
    chunks: Chunks,
    errors: Float[Array, "B H N C V"],
    do: Float[Array, "B T H V"],
    dfinal: Float[Array, "B H K V"],
    *,
    interpret=False,
) -> Reversed:
    """From the recurrence's errors and the cotangents of outputs, bfloat16, and of the final state, float32."""
    initial, states, writes, dbeta = run(chunks, do, dfinal, errors, interpret=interpret)
    return Reversed(states, writes, initial, dbeta.sum(2))


def entering_cotangents(
    chunks: Chunks, do: Float[Array, "B T H V"], dfinal: Float[Array, "B H K V"], *, interpret=False
) -> Float[Array, "B H K V"]:
    """That of the initial state alone, float32."""
    return run(chunks, do, dfinal, None, interpret=interpret)[0]


def run(
    chunks: Chunks, do: jax.Array, dfinal: jax.Array, errors: jax.Array | None, *, interpret: bool
) -> tuple[jax.Array, ...]:
    """The cotangent of the initial state; with errors also those of states, writes and beta [B, H, blocks of columns, T]."""
    B, H, N, C, K = chunks.q.shape
    V = do.shape[-1]
    columns, stages = BLOCKS["columns"], BLOCKS["stages"]
    out = [jax.ShapeDtypeStruct((B, H, K, V), jnp.float32)]
    sources = [*kept(chunks), chunks.q, do]
    stage = [(C, K), (C, K), (C, C), (C, K), (C, columns)]
    if errors is not None:
        out += [jax.ShapeDtypeStruct((B, H, N, rows, V), jnp.bfloat16) for rows in (K, C)]
        out += [jax.ShapeDtypeStruct((B, H, V // columns, N * C), jnp.float32)]
        sources, stage = [*sources, errors], [*stage, (C, columns)]
    scratch = [
        [tiled(stages, *shape) for shape in stage],
        plain(stages, K),
        [tiled(K, columns) for _ in range(2)],
        tiled(C, columns),
        [] if errors is None else [plain(C)],
        tiled(K, columns, dtype=jnp.float32),
        plgpu.Barrier(num_arrivals=len(stage) + 1, num_barriers=stages),
        plgpu.Barrier(),
    ]
    return launch(
        lambda *refs: kernel(*refs, products=Products(interpret), arrays=len(sources) + 1),
        *(*sources, chunks.decay, dfinal),
        name="kda_entering_cotangents" if errors is None else "kda_reverse",
        out=out,
        grid={"columns": V // columns, "head": H, "batch": B},
        scratch=scratch,
        interpret=interpret,
    )


def kept(chunks: Chunks):
    """(-K_start, X_end, A_X), if `prepare` kept them; else raises ValueError."""
    if chunks.minus_k_start is None or chunks.x_end is None or chunks.a_x is None:
        raise ValueError("the reverse recurrence needs chunks from prepare(..., keep_inverse=True)")
    return chunks.minus_k_start, chunks.x_end, chunks.a_x


def kernel(*refs, products: Products, arrays: int):
    sources, (dfinal_g, initial_g, *kept_g) = refs[:arrays], refs[arrays:-8]
    buffers, decays, ds, y, dbeta, edge, loaded, entered = refs[-8:]
    b, h = lax.axis_index("batch"), lax.axis_index("head")
    N, C = sources[0].shape[2:4]
    K, width = edge.shape
    block = lax.axis_index("columns")
    columns = pl.ds(block * width, width)

    def load(step):
        n, slot = N - 1 - step, step % BLOCKS["stages"]
        parts = [x.at[b, h, n] for x in sources]
        parts[4] = sources[4].at[b, pl.ds(n * C, C), h, columns]
        if kept_g:
            parts[5] = sources[5].at[b, h, n, :, columns]
        for source, target in zip(parts, (*buffers, decays), strict=True):
            plgpu.copy_gmem_to_smem(source, target.at[slot], loaded.at[slot])

    def chunk(step, dS):
        n, slot = N - 1 - step, step % BLOCKS["stages"]
        minus_k_start, x_end, a_x, q, do, *errors = (x.at[slot] for x in buffers)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the results of the chunk before have left shared memory
        ds[0][...], ds[1][...] = pieces(dS, 2)
        plgpu.commit_smem()
        # Behind this barrier no thread reads the other slot any more.
        pl.when(step + 1 < N)(lambda: load(step + 1))
        if kept_g:
            plgpu.copy_smem_to_gmem(ds[0], kept_g[0].at[b, h, n, :, columns])
        plgpu.barrier_wait(loaded.at[slot])
        y_now = products((x_end, ds[0]), (x_end, ds[1]), (Transposed(a_x), do))
        y[...] = y_now.astype(jnp.bfloat16)
        if kept_g:
            dbeta[0][...] = jnp.sum(y_now * errors[0][...].astype(jnp.float32), axis=1)
        plgpu.commit_smem()
        if kept_g:
            plgpu.copy_smem_to_gmem(y, kept_g[1].at[b, h, n, :, columns])
            plgpu.copy_smem_to_gmem(dbeta[0], kept_g[2].at[b, h, block, pl.ds(n * C, C)])
        decay = lax.broadcast_in_dim(decays[slot], (K, width), (0,))
        return dS * decay + products((Transposed(q), do), (Transposed(minus_k_start), y))

    load(0)
    plgpu.copy_gmem_to_smem(dfinal_g.at[b, h, :, columns], edge, entered)
    plgpu.barrier_wait(entered)
    edge[...] = lax.fori_loop(0, N, chunk, edge[...])
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(edge, initial_g.at[b, h, :, columns])
    plgpu.wait_smem_to_gmem(0)


def reference(chunks: Chunks, errors, do, dfinal) -> Reversed:
    """The same from the definition, in the dtype of the chunks."""
    B, H, N, C, _ = chunks.q.shape
    do = do.reshape(B, N, C, H, -1).transpose(0, 3, 1, 2, 4)
    dS, states, writes = dfinal, [], []
    arrays = *kept(chunks), chunks.q, chunks.decay
    turned = lambda x: jnp.swapaxes(x, -1, -2)
    for n in reversed(range(N)):
        minus_k_start, x_end, a_x, q, decay = (x[:, :, n] for x in arrays)
        states.append(dS)
        writes.append(x_end @ dS + turned(a_x) @ do[:, :, n])
        dS = decay[..., None] * dS + turned(q) @ do[:, :, n] + turned(minus_k_start) @ writes[-1]
    states, writes = (jnp.stack(x[::-1], axis=2) for x in (states, writes))
    return Reversed(states, writes, dS, jnp.sum(writes * errors, -1).reshape(B, H, N * C))
