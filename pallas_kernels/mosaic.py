"""The few words in which the Hopper kernels are written: shared memory, products on the tensor cores, launch.

Kernels are written for Warpgroup lowering (layouts of register arrays are inferred) and run unchanged in Mosaic's
interpreter on CPU. One word differs there: the interpreter of jax 0.10 knows neither a transposed reference nor a
register array as an operand of wgmma, so `Products` spells the product out on the values it reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import InterpretParams


def tiled(*shape: int, dtype=jnp.bfloat16):
    """Shared memory as wgmma and TMA want it: 128-byte swizzle. The last dim is a multiple of 128 bytes."""
    columns = 128 // jnp.dtype(dtype).itemsize
    tiling = plgpu.TilingTransform((8, columns))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(128)))


def plain(*shape: int, dtype=jnp.float32):
    """Shared memory in row order, for vectors."""
    return plgpu.SMEM(shape, dtype)


@dataclasses.dataclass(frozen=True)
class Transposed:
    """A shared-memory operand, read as its transpose."""

    ref: Any


@dataclasses.dataclass(frozen=True)
class Products:
    """Sums of matrix products, float32, in a fresh accumulator."""

    interpret: bool

    def __call__(self, *pairs) -> jax.Array:
        """Sum of x @ y over pairs (x, y), bfloat16: x in registers or shared memory, y in shared memory."""
        if self.interpret:
            terms = [jnp.dot(value(x), value(y), preferred_element_type=jnp.float32) for x, y in pairs]
            return sum(terms[1:], start=terms[0])
        pairs = [(operand(x), operand(y)) for x, y in pairs]
        (rows, _), (_, columns) = pairs[0][0].shape, pairs[0][1].shape

        def run(accumulator):
            for x, y in pairs:
                plgpu.wgmma(accumulator, x, y)
            return accumulator[...]

        return pl.run_scoped(run, plgpu.ACC((rows, columns), jnp.float32))

    def store(self, operand: Transposed, x: jax.Array):
        """Writes x into shared memory, such that `operand` is x."""
        if self.interpret:
            operand.ref[...] = x.T
        else:
            operand.ref.T[...] = x


def value(x):
    if isinstance(x, Transposed):
        return x.ref[...].T
    return x if isinstance(x, jax.Array) else x[...]


def operand(x):
    return x.ref.T if isinstance(x, Transposed) else x


def pieces(x: jax.Array, count: int) -> list[jax.Array]:
    """bfloat16 arrays whose sum is x to 8·count bits: products with them are exact in float32."""
    parts = []
    for _ in range(count):
        parts.append(x.astype(jnp.bfloat16))
        x = x - parts[-1].astype(jnp.float32)
    return parts


def launch(
    body,
    *arguments: Any,
    name: str,
    out: Sequence[jax.ShapeDtypeStruct],
    grid: dict[str, int],
    scratch: Sequence,
    interpret: bool,
    warpgroups: int | None = None,
) -> tuple[jax.Array, ...]:
    """Runs `body(*inputs, *outputs, *scratch)`, references all, once for each point of the named grid.

    An argument may be a tree of arrays; its input is the same tree of references.
    With `warpgroups`, by as many at once, which share the scratch; their axis is named "warpgroup".

    Inside shard_map the results vary over the mesh axes that any argument varies over.
    """
    semantics = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
    arrays, tree = jax.tree.flatten(arguments)
    results = plgpu.kernel(
        lambda *refs: body(*jax.tree.unflatten(tree, refs[: len(arrays)]), *refs[len(arrays) :]),
        out_type=tuple(out),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        scratch_types=list(scratch),
        num_threads=warpgroups,
        thread_name="warpgroup" if warpgroups else None,
        kernel_name=name,
        compiler_params=None if interpret else semantics,
        interpret=InterpretParams() if interpret else None,
    )(*arrays)
    # Mosaic types them as varying over nothing.
    varying = frozenset().union(*(jax.typeof(x).mat.varying for x in arrays))
    missing = [tuple(sorted(varying - jax.typeof(x).mat.varying)) for x in results]
    return tuple(lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(results, missing, strict=True))
