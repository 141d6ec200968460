"""KDA, second stage: the state through the chunks of a sequence. Head-parallel.

B batch, T tokens, H heads, N chunks, C tokens of a chunk, K key dim, V value dim.

One program carries the state of one head and BLOCKS["columns"] value columns (columns of S evolve independently)
through all chunks, in registers, float32. Per chunk, from what `prepare` made:

    E = U - W S        O = Q S + A_qk E        S <- diag(decay) S + K_endᵀ E

E are the tokens' errors v - Sᵀk: beta is in A_qk and K_end.

The loads of a chunk are in flight while the one before is worked on. W S is formed with S in two bfloat16 pieces:
where the state predicts the value almost exactly, U - W S is what rounding of S to 8 bits would destroy. Backward
needs the state that enters each chunk and E; they are written, in bfloat16, only if asked for.

All chunks together map the state affinely, S -> M S + S_0. [M | S_0] is what [I | 0] becomes under [0 | U]: the same
kernel over K + V columns, without outputs.
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


class Passed(NamedTuple):
    """The recurrence's results; the last two only for backward, else None."""

    o: Float[Array, "B T H V"]
    final_state: Float[Array, "B H K V"]
    states: Float[Array, "B H N K V"] | None
    errors: Float[Array, "B H N C V"] | None

    def kept(self) -> tuple[jax.Array, jax.Array]:
        """The states and errors; ValueError if the recurrence did not keep them."""
        if self.states is None or self.errors is None:
            raise ValueError("backward needs the states and errors of recurrence(..., keep=True)")
        return self.states, self.errors


def recurrence(chunks: Chunks, initial_state: Float[Array, "B H K V"], *, keep=False, interpret=False) -> Passed:
    """Outputs bfloat16 and final state float32 of all chunks; `keep`: entering states and errors too, bfloat16."""
    B, H, N, C, K = chunks.w.shape
    V = chunks.u.shape[-1]
    out = [jax.ShapeDtypeStruct((B, N * C, H, V), jnp.bfloat16)]
    out += [jax.ShapeDtypeStruct((B, H, N, rows, V), jnp.bfloat16) for rows in (K, C) if keep]
    final, o, *kept = run(chunks, initial_state, out, interpret=interpret)
    return Passed(o, final, *(kept if keep else (None, None)))


def segment_maps(chunks: Chunks, *, interpret=False) -> tuple[Float[Array, "B H K K"], Float[Array, "B H K V"]]:
    """(M, S_0), float32: the state that leaves all chunks is M times the one that enters, and S_0."""
    B, H, _, _, K = chunks.w.shape
    columns = K + chunks.u.shape[-1]
    (maps,) = run(chunks, jnp.broadcast_to(jnp.eye(K, columns), (B, H, K, columns)), [], interpret=interpret)
    return maps[..., :K], maps[..., K:]


def run(chunks: Chunks, initial_state: jax.Array, out: list, *, interpret: bool) -> tuple[jax.Array, ...]:
    """The final state, then `out`: nothing, or outputs, or these with what backward needs. If the state has more columns
    than U, U is that of the last ones, and 0 for those before."""
    B, H, _, C, K = chunks.w.shape
    columns, stages = BLOCKS["columns"], BLOCKS["stages"]
    reads = [chunks.q, chunks.a_qk] if out else []
    stage = [(C, K), (C, columns), (C, K), *(x.shape[3:] for x in reads)]
    scratch = [
        [tiled(stages, *shape) for shape in stage],
        plain(stages, K),
        [tiled(K, columns) for _ in range(2)],
        [tiled(C, columns) for _ in range(2 if out else 1)],
        tiled(K, columns, dtype=jnp.float32),
        plgpu.Barrier(num_arrivals=len(stage) + 1, num_barriers=stages),
        plgpu.Barrier(),
    ]
    return launch(
        lambda *refs: kernel(*refs, products=Products(interpret), arrays=len(stage) + 1, outputs=len(out)),
        *(chunks.w, chunks.u, chunks.k_end, *reads, chunks.decay),
        initial_state,
        name="kda_recurrence" if out else "kda_segment_maps",
        out=[jax.ShapeDtypeStruct(initial_state.shape, jnp.float32), *out],
        grid={"columns": initial_state.shape[-1] // columns, "head": H, "batch": B},
        scratch=scratch,
        interpret=interpret,
    )


def kernel(*refs, products: Products, arrays: int, outputs: int):
    sources, (s_g, final_g, *out_g) = refs[:arrays], refs[arrays : arrays + 2 + outputs]
    buffers, decays, s_pieces, (errors, *o), s, loaded, entered = refs[arrays + 2 + outputs :]
    b, h = lax.axis_index("batch"), lax.axis_index("head")
    N, C = sources[0].shape[2:4]
    K, width = s.shape
    block = lax.axis_index("columns")
    columns = pl.ds(block * width, width)
    before = (s_g.shape[-1] - sources[1].shape[-1]) // width  # blocks of columns where U is 0
    u_columns = pl.ds(jnp.maximum(block - before, 0) * width, width) if before else columns

    def load(n):
        slot = n % BLOCKS["stages"]
        for index, (source, target) in enumerate(zip(sources, (*buffers, decays), strict=True)):
            part = source.at[b, h, n, :, u_columns] if index == 1 else source.at[b, h, n]
            plgpu.copy_gmem_to_smem(part, target.at[slot], loaded.at[slot])

    def chunk(n, S):
        slot = n % BLOCKS["stages"]
        w, u, k_end, *reads = (x.at[slot] for x in buffers)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the results of the chunk before have left shared memory
        s_pieces[0][...], s_pieces[1][...] = pieces(S, 2)
        plgpu.commit_smem()
        # Behind this barrier no thread reads the other slot any more.
        pl.when(n + 1 < N)(lambda: load(n + 1))
        plgpu.barrier_wait(loaded.at[slot])
        hi, lo = s_pieces
        written = u[...].astype(jnp.float32)
        if before:
            written = written * jnp.where(block < before, 0.0, 1.0)
        errors[...] = (written - products((w, hi), (w, lo))).astype(jnp.bfloat16)
        plgpu.commit_smem()
        if outputs:
            (q, a), (o_now,), (o_g, *kept_g) = reads, o, out_g
            o_now[...] = products((q, hi), (a, errors)).astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_now, o_g.at[b, pl.ds(n * C, C), h, columns])
            for source, target in zip((hi, errors), kept_g, strict=False):
                plgpu.copy_smem_to_gmem(source, target.at[b, h, n, :, columns])
        return S * lax.broadcast_in_dim(decays[slot], (K, width), (0,)) + products((Transposed(k_end), errors))

    load(0)
    plgpu.copy_gmem_to_smem(s_g.at[b, h, :, columns], s, entered)
    plgpu.barrier_wait(entered)
    s[...] = lax.fori_loop(0, N, chunk, s[...])
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(s, final_g.at[b, h, :, columns])
    plgpu.wait_smem_to_gmem(0)


def reference(chunks: Chunks, initial_state) -> Passed:
    """The same from the definition, in the dtype of the chunks."""
    S, o, states, errors = initial_state, [], [], []
    for n in range(chunks.w.shape[2]):
        w, u, q, a, k_end, decay = (x[:, :, n] for x in chunks[:6])
        states.append(S)
        errors.append(u - w @ S)
        o.append(q @ S + a @ errors[-1])
        S = decay[..., None] * S + jnp.swapaxes(k_end, -1, -2) @ errors[-1]
    stacked = lambda x: jnp.stack(x, axis=2)
    B, H, N, C, V = stacked(o).shape
    return Passed(stacked(o).reshape(B, H, N * C, V).swapaxes(1, 2), S, stacked(states), stacked(errors))
