"""KDA backward, first stage: the cotangent of the state, last chunk to first. Head-parallel.

B batch, T tokens, H heads, N chunks, C tokens of a chunk, K key dim, V value dim.

The mirror of the recurrence: one program carries dS, the cotangent of the state that leaves a chunk, of one head and
BLOCKS["columns"] value columns, in registers, float32. Per chunk, with dO the cotangent of its outputs:

    dV' = K_end dS + A_qkᵀ dO        dS <- diag(decay) dS + Qᵀ dO - Wᵀ dV'

dS as it is before that line and dV' are written for the token-parallel stage; the last dS is the gradient of the
initial state. Documents need nothing here: what `prepare` made already stops at their boundaries.
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
    """Cotangents of the state that leaves each chunk and of V', bfloat16, and of the initial state, float32."""

    states: Float[Array, "B H N K V"]
    values: Float[Array, "B H N C V"]
    initial_state: Float[Array, "B H K V"]


def reverse(
    chunks: Chunks, do: Float[Array, "B T H V"], dfinal: Float[Array, "B H K V"], *, interpret=False
) -> Reversed:
    """Cotangents of states and values from those of the outputs, bfloat16, and of the final state, float32."""
    initial, states, values = run(chunks, do, dfinal, keep=True, interpret=interpret)
    return Reversed(states, values, initial)


def entering_cotangents(
    chunks: Chunks, do: Float[Array, "B T H V"], dfinal: Float[Array, "B H K V"], *, interpret=False
) -> Float[Array, "B H K V"]:
    """That of the initial state alone, float32."""
    return run(chunks, do, dfinal, keep=False, interpret=interpret)[0]


def run(chunks: Chunks, do: jax.Array, dfinal: jax.Array, *, keep: bool, interpret: bool) -> tuple[jax.Array, ...]:
    """The cotangent of the initial state; `keep`: those of states and values too."""
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
        *(chunks.w, chunks.q, chunks.a_qk, chunks.k_end, do, chunks.decay, dfinal),
        name="kda_reverse" if keep else "kda_entering_cotangents",
        out=out,
        grid={"columns": V // columns, "head": H, "batch": B},
        scratch=scratch,
        interpret=interpret,
    )


def kernel(*refs, products: Products, keep: bool):
    sources, (dfinal_g, initial_g, *kept_g) = refs[:6], refs[6 : 8 + 2 * keep]
    buffers, decays, ds, dv, minus_dv, edge, loaded, entered = refs[8 + 2 * keep :]
    b, h = lax.axis_index("batch"), lax.axis_index("head")
    N, C = sources[0].shape[2:4]
    K, width = edge.shape
    columns = pl.ds(lax.axis_index("columns") * width, width)

    def load(step):
        n, slot = N - 1 - step, step % BLOCKS["stages"]
        w, q, a, k_end, do, decay = sources
        parts = [*(x.at[b, h, n] for x in (w, q, a, k_end)), do.at[b, pl.ds(n * C, C), h, columns], decay.at[b, h, n]]
        for source, target in zip(parts, (*buffers, decays), strict=True):
            plgpu.copy_gmem_to_smem(source, target.at[slot], loaded.at[slot])

    def chunk(step, dS):
        n, slot = N - 1 - step, step % BLOCKS["stages"]
        w, q, a, k_end, do = (x.at[slot] for x in buffers)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the results of the chunk before have left shared memory
        ds[...] = dS.astype(jnp.bfloat16)
        plgpu.commit_smem()
        # Behind this barrier no thread reads the other slot any more.
        pl.when(step + 1 < N)(lambda: load(step + 1))
        if keep:
            plgpu.copy_smem_to_gmem(ds, kept_g[0].at[b, h, n, :, columns])
        plgpu.barrier_wait(loaded.at[slot])
        dv_now = products((k_end, ds), (Transposed(a), do))
        dv[...], minus_dv[...] = dv_now.astype(jnp.bfloat16), (-dv_now).astype(jnp.bfloat16)
        plgpu.commit_smem()
        if keep:
            plgpu.copy_smem_to_gmem(dv, kept_g[1].at[b, h, n, :, columns])
        decay = lax.broadcast_in_dim(decays[slot], (K, width), (0,))
        return dS * decay + products((Transposed(q), do), (Transposed(w), minus_dv))

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
    dS, states, values = dfinal, [], []
    turned = lambda x: jnp.swapaxes(x, -1, -2)
    for n in reversed(range(N)):
        w, _, q, a, k_end, decay = (x[:, :, n] for x in chunks[:6])
        states.append(dS)
        values.append(k_end @ dS + turned(a) @ do[:, :, n])
        dS = decay[..., None] * dS + turned(q) @ do[:, :, n] - turned(w) @ values[-1]
    return Reversed(jnp.stack(states[::-1], axis=2), jnp.stack(values[::-1], axis=2), dS)
