"""Every kernel with its block sizes, the work it does for a stated shape, and arguments to compile it with.

B batch, T tokens, H heads, N chunks, C tokens of a chunk, K key dim, V value dim; of experts: C rows, G experts, D latent,
F hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from pallas_kernels import grouped_gemm
from pallas_kernels.dispatch import send
from pallas_kernels.grouped_gemm import tiles, weight_gradients
from pallas_kernels.kda import chunk_gradients, decode, pair_gradients, prepare, recurrence, reverse
from pallas_kernels.kda.decays import CHUNK


class Shape(NamedTuple):
    """The default is 8,192 tokens of one K3 layer, and of its experts those of one rank of eight."""

    batch: int = 1
    tokens: int = 8192
    heads: int = 96
    key_dim: int = 128
    value_dim: int = 128
    experts: int = 112
    experts_per_token: int = 16
    latent: int = 3584
    expert_hidden: int = 3072


class Kernel(NamedTuple):
    name: str
    blocks: dict[str, int]
    function: Callable
    arguments: tuple
    operations: int  # floating-point operations on the tensor cores
    ranks: int = 1  # that share arguments and results

    @property
    def bytes(self) -> int:
        """Of a rank's arguments and results, read and written once each."""
        arrays = jax.tree.leaves((self.arguments, jax.eval_shape(self.function, *self.arguments)))
        return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays) // self.ranks


def half(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def full(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def kernels(shape: Shape) -> list[Kernel]:
    """All kernels at this shape."""
    return kda_kernels(shape) + expert_kernels(shape) + exchange_kernels(shape)


def exchange_kernels(shape: Shape, ranks: int = 8) -> list[Kernel]:
    """Those between ranks, on a mesh of GPUs that need not exist; for tokens that a row of whole copies holds."""
    N, k, D = shape.batch * shape.tokens, shape.experts_per_token, shape.latent
    if 2 * D % (4 * send.LANES):
        return []
    mesh, tokens = AbstractMesh((ranks,), ("expert",), axis_types=(AxisType.Auto,)), PartitionSpec("expert")
    function = jax.shard_map(
        partial(send.send_rows, rows=N * k, axis_name="expert"), mesh=mesh, in_specs=(tokens, tokens), out_specs=tokens
    )
    arguments = half(ranks * N, D), jax.ShapeDtypeStruct((ranks * N, k), jnp.int32)
    return [Kernel(f"send_rows, to {ranks} ranks", send.BLOCKS, function, arguments, 0, ranks)]


def expert_kernels(shape: Shape) -> list[Kernel]:
    """Those of grouped products; every rank has as many rows as its tokens have experts."""
    C, G, D, F = shape.batch * shape.tokens * shape.experts_per_token, shape.experts, shape.latent, shape.expert_hidden
    x, hidden, sizes = half(C, D), half(C, F), jax.ShapeDtypeStruct((G,), jnp.int32)
    into, out_of = half(G, D, F), half(G, F, D)
    # Costs what K3's activation does.
    situ = lambda gate, up: jnp.tanh(gate) * jax.nn.sigmoid(gate) * jnp.tanh(up)
    with_slopes = lambda gate, up: (situ(gate, up), situ(gate, up) * (1 - gate), situ(gate, up) * (1 - up))
    down = lambda x, w, sizes, p: grouped_gemm.grouped_product(x, w, sizes, row_weights=p, dtype=jnp.float32)
    back = partial(grouped_gemm.grouped_product, transposed=True)
    pull = partial(grouped_gemm.gated_gradients, with_slopes=with_slopes)
    gated, blocks, one = partial(grouped_gemm.gated_product, activation=situ), tiles.BLOCKS, 2 * C * D * F
    return [
        Kernel("grouped_product", blocks, grouped_gemm.grouped_product, (x, into, sizes), one),
        Kernel("grouped_product, weighted", blocks, down, (hidden, out_of, sizes, full(C)), one),
        Kernel("grouped_product, transposed", blocks, back, (x, out_of, sizes), one),
        Kernel("grouped_product, of two", blocks, back, ((hidden,) * 2, (into,) * 2, sizes), 2 * one),
        Kernel("grouped_gated_product", blocks, gated, (x, into, into, sizes), 2 * one),
        Kernel("grouped_gated_gradients", blocks, pull, (x, into, into, hidden, full(C), sizes), 2 * one),
        Kernel(
            "grouped_weight_gradient", weight_gradients.BLOCKS, grouped_gemm.weight_gradient, (x, hidden, sizes), one
        ),
    ]


def kda_kernels(shape: Shape) -> list[Kernel]:
    """Those of KDA; tokens are rounded up to whole chunks."""
    B, T, H, K, V = shape[:5]
    C = CHUNK
    N = -(-T // C)
    key, value = half(B, N * C, H, K), half(B, N * C, H, V)
    first = jax.ShapeDtypeStruct((B, N * C), jnp.int32)
    beta, state = full(B, H, N * C), full(B, H, K, V)
    inputs = key, key, value, full(B, N * C, H, K), beta, first
    gate = {"scale": K**-0.5, "gate_lower_bound": -5.0}
    make = partial(prepare.prepare, **gate)
    make_again = partial(prepare.prepare, keep_inverse=True, **gate)
    pass_again = partial(recurrence.recurrence, keep=True)
    # Without what a kernel does not read.
    only: Any = lambda made, *read: made._replace(**{name: None for name in made._fields if name not in read})
    chunks = jax.eval_shape(make, *inputs)
    passed = jax.eval_shape(pass_again, chunks, state)
    kept = jax.eval_shape(make_again, *inputs)
    kept = only(kept, "q", "decay", "minus_k_start", "x_end", "a_x")
    to_reverse = kept, passed.errors, value, state
    back = jax.eval_shape(reverse.reverse, *to_reverse)
    passed, back = only(passed, "states", "errors"), only(back, "states", "writes")
    to_chunks = beta, first, chunks.decay, passed, value, back
    given = jax.eval_shape(chunk_gradients.chunk_gradients, *to_chunks)
    given = only(given, "a_qk", "a_kk", "q", "k_end", "k_start", "decay")
    pull_pairs = partial(pair_gradients.pair_gradients, **gate)

    D, W = 2 * K + V, 4
    token = decode.Token(half(B, H, D), full(B, H, K), full(B, H), full(B, H, V))
    weights = decode.Weights(full(W, H, D), full(H), full(H, K), full(V))
    one_token = token, weights, state, half(B, W - 1, H, D)
    reading = 2 * B * H * 3 * K * V * decode.PAIR  # the state, in three pieces

    each = 2 * B * H * N * C  # operations of one multiply and add for each token and head
    sums = 3 * C * K  # of log decays over tokens, g in three pieces
    inverse = 5 * 2 * 3 * C * C
    preparing = each * (5 * sums + 3 * 2 * C * K + inverse + C * (K + V))
    transposing = each * (3 * C * C + 2 * C * C + 3 * C * K)
    passing = each * (4 * K * V + C * V)
    reversing = each * (4 * K * V + C * V)
    mapping = each * 3 * K * (K + V)
    return [
        Kernel("kda_prepare", prepare.BLOCKS, make, inputs, preparing),
        Kernel("kda_prepare, for backward", prepare.BLOCKS, make_again, inputs, preparing + transposing),
        Kernel(
            "kda_segment_maps",
            recurrence.BLOCKS,
            recurrence.segment_maps,
            (only(chunks, "w", "u", "k_end", "decay"),),
            mapping,
        ),
        Kernel("kda_recurrence", recurrence.BLOCKS, recurrence.recurrence, (chunks, state), passing),
        Kernel("kda_recurrence, for backward", recurrence.BLOCKS, pass_again, (chunks, state), passing),
        Kernel(
            "kda_entering_cotangents",
            reverse.BLOCKS,
            reverse.entering_cotangents,
            (kept, value, state),
            reversing,
        ),
        Kernel("kda_reverse", reverse.BLOCKS, reverse.reverse, to_reverse, reversing),
        Kernel(
            "kda_chunk_gradients",
            chunk_gradients.BLOCKS,
            chunk_gradients.chunk_gradients,
            to_chunks,
            each * (3 * K * V + C * 2 * V),
        ),
        Kernel(
            "kda_pair_gradients",
            pair_gradients.BLOCKS,
            pull_pairs,
            (key, key, full(B, N * C, H, K), beta, first, given),
            each * (7 * sums + 3 * 4 * C * K),
        ),
        Kernel("kda_decode, one token", decode.BLOCKS, partial(decode.decode_token, **gate), one_token, reading),
    ]
