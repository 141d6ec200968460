"""KDA backward, first stage: the cotangent of the state, last chunk to first. Head-parallel.

B batch, T tokens, H heads, N chunks, C tokens of a chunk, K key dim, V value dim.

The mirror of the recurrence: one program carries dS, the cotangent of the state that leaves a chunk, of one head and
BLOCKS["columns"] value columns, in registers, float32. Per chunk, with dO the cotangent of its outputs:

    Y = X_end dS + A_Xᵀ dO        dS <- diag(decay) dS + Qᵀ dO - K_startᵀ Y

Y are the cotangents of what tokens write, dSᵀk with the dS of the token's own place: where keys are nearly parallel they
are small differences, which `prepare` has taken. dS as it is before that line and Y are written for the token-parallel
stage; the last dS is the gradient of the initial state. Documents need nothing here: what `prepare` made already stops at
their boundaries.
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
from pallas_kernels.mosaic import Products, Transposed, launch, plain, tiled

BLOCKS = {"tokens": CHUNK, "columns": 64, "stages": 2}


class Reversed(NamedTuple):
    """Cotangents of the state that leaves each chunk and of what tokens write, bfloat16, and of the initial state, float32."""

    states: Float[Array, "B H N K V"]
    writes: Float[Array, "B H N C V"]
    initial_state: Float[Array, "B H K V"]


def reverse(
    chunks: Chunks, do: Float[Array, "B T H V"], dfinal: Float[Array, "B H K V"], *, interpret=False
) -> Reversed:
    """Cotangents of states and writes from those of the outputs, bfloat16, and of the final state, float32."""
    initial, states, writes = run(chunks, do, dfinal, keep=True, interpret=interpret)
    return Reversed(states, writes, initial)


def entering_cotangents(
    chunks: Chunks, do: Float[Array, "B T H V"], dfinal: Float[Array, "B H K V"], *, interpret=False
) -> Float[Array, "B H K V"]:
    """That of the initial state alone, float32."""
    return run(chunks, do, dfinal, keep=False, interpret=interpret)[0]


def run(chunks: Chunks, do: jax.Array, dfinal: jax.Array, *, keep: bool, interpret: bool) -> tuple[jax.Array, ...]:
    """The cotangent of the initial state; `keep`: those of states and writes too."""
    B, H, N, C, K = chunks.w.shape
    V = do.shape[-1]
    columns, stages = BLOCKS["columns"], BLOCKS["stages"]
    out = [jax.ShapeDtypeStruct((B, H, K, V), jnp.float32)]
    out += [jax.ShapeDtypeStruct((B, H, N, rows, V), jnp.bfloat16) for rows in (K, C) if keep]
    stage = [(C, K), (C, K), (C, C), (C, K), (C, columns)]
    scratch = [
        [tiled(stages, *shape) for shape in stage],
        plain(stages, K),
        tiled(K, columns),
        tiled(C, columns),
        tiled(C, columns),
        tiled(K, columns, dtype=jnp.float32),
        plgpu.Barrier(num_arrivals=len(stage) + 1, num_barriers=stages),
        plgpu.Barrier(),
    ]
    return launch(
        lambda *refs: kernel(*refs, products=Products(interpret), keep=keep),
        *(*kept(chunks), chunks.q, do, chunks.decay, dfinal),
        name="kda_reverse" if keep else "kda_entering_cotangents",
        out=out,
        grid={"columns": V // columns, "head": H, "batch": B},
        scratch=scratch,
        interpret=interpret,
    )


def kept(chunks: Chunks):
    """(K_start, X_end, A_X), if `prepare` kept them; else raises ValueError."""
    if chunks.k_start is None or chunks.x_end is None or chunks.a_x is None:
        raise ValueError("the reverse recurrence needs chunks from prepare(..., keep_inverse=True)")
    return chunks.k_start, chunks.x_end, chunks.a_x


def kernel(*refs, products: Products, keep: bool):
    sources, (dfinal_g, initial_g, *kept_g) = refs[:6], refs[6 : 8 + 2 * keep]
    buffers, decays, ds, y, minus_y, edge, loaded, entered = refs[8 + 2 * keep :]
    b, h = lax.axis_index("batch"), lax.axis_index("head")
    N, C = sources[0].shape[2:4]
    K, width = edge.shape
    columns = pl.ds(lax.axis_index("columns") * width, width)

    def load(step):
        n, slot = N - 1 - step, step % BLOCKS["stages"]
        *chunked, do, decay = sources
        parts = [*(x.at[b, h, n] for x in chunked), do.at[b, pl.ds(n * C, C), h, columns], decay.at[b, h, n]]
        for source, target in zip(parts, (*buffers, decays), strict=True):
            plgpu.copy_gmem_to_smem(source, target.at[slot], loaded.at[slot])

    def chunk(step, dS):
        n, slot = N - 1 - step, step % BLOCKS["stages"]
        k_start, x_end, a_x, q, do = (x.at[slot] for x in buffers)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the results of the chunk before have left shared memory
        ds[...] = dS.astype(jnp.bfloat16)
        plgpu.commit_smem()
        # Behind this barrier no thread reads the other slot any more.
        pl.when(step + 1 < N)(lambda: load(step + 1))
        if keep:
            plgpu.copy_smem_to_gmem(ds, kept_g[0].at[b, h, n, :, columns])
        plgpu.barrier_wait(loaded.at[slot])
        y_now = products((x_end, ds), (Transposed(a_x), do))
        y[...], minus_y[...] = y_now.astype(jnp.bfloat16), (-y_now).astype(jnp.bfloat16)
        plgpu.commit_smem()
        if keep:
            plgpu.copy_smem_to_gmem(y, kept_g[1].at[b, h, n, :, columns])
        decay = lax.broadcast_in_dim(decays[slot], (K, width), (0,))
        return dS * decay + products((Transposed(q), do), (Transposed(k_start), minus_y))

    load(0)
    plgpu.copy_gmem_to_smem(dfinal_g.at[b, h, :, columns], edge, entered)
    plgpu.barrier_wait(entered)
    edge[...] = lax.fori_loop(0, N, chunk, edge[...])
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(edge, initial_g.at[b, h, :, columns])
    plgpu.wait_smem_to_gmem(0)


def reference(chunks: Chunks, do, dfinal) -> Reversed:
    """The same from the definition, in the dtype of the chunks."""
    B, H, N, C, _ = chunks.w.shape
    do = do.reshape(B, N, C, H, -1).transpose(0, 3, 1, 2, 4)
    dS, states, writes = dfinal, [], []
    arrays = *kept(chunks), chunks.q, chunks.decay
    turned = lambda x: jnp.swapaxes(x, -1, -2)
    for n in reversed(range(N)):
        k_start, x_end, a_x, q, decay = (x[:, :, n] for x in arrays)
        states.append(dS)
        writes.append(x_end @ dS + turned(a_x) @ do[:, :, n])
        dS = decay[..., None] * dS + turned(q) @ do[:, :, n] - turned(k_start) @ writes[-1]
    return Reversed(jnp.stack(states[::-1], axis=2), jnp.stack(writes[::-1], axis=2), dS)
