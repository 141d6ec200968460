"""KDA decode: one token of a sequence through the whole of a layer between its projections, in one kernel.

B batch, H heads, K key dim, V value dim, W conv width, D = 2K + V channels of q, k and v together.

One program takes one head of one sequence. In the order of K3 report, section 2.1, and with the layer's roundings:

    q, k, v = silu(conv)         conv: the last W - 1 projections and this one, weighted, rounded to bfloat16
    q, k = x rsqrt(Σ x² + 1e-6)   rounded to bfloat16, as v is
    decay = exp(bound sigmoid(exp(A) (z + b)))        beta = sigmoid(beta logit)
    S <- diag(decay) S;  S <- S + k (beta (v - Sᵀk))ᵀ;  o = scale Sᵀq, rounded to bfloat16
    y = w o rsqrt(mean o² + 1e-5) sigmoid(gate)

The state is read and written once, all the rest is small: a token costs 2·K·V·4 bytes of memory traffic a head.

Sᵀk and Sᵀq are one product on the tensor cores, with the decayed S: what is written then adds (q·k) beta (v - Sᵀk) to the
second. k and q are bfloat16; S is multiplied in three bfloat16 pieces, which together are S to its last bit.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.mosaic import Products, Transposed, launch, pieces, plain, tiled

BLOCKS = {"columns": 64}
COLUMNS = BLOCKS["columns"]
LANES = 128  # threads of a warpgroup: vectors are padded to one element each
PAIR = 8  # columns of the smallest product on the tensor cores; they hold k once and q in the others
KEY_EPSILON, NORM_EPSILON = 1e-6, 1e-5


class Token(NamedTuple):
    """Projections of one token: q, k, v side by side, bfloat16; the rest float32."""

    qkv: Float[Array, "B H D"]
    z: Float[Array, "B H K"]
    beta_logit: Float[Array, "B H"]
    gate: Float[Array, "B H V"]


class Weights(NamedTuple):
    """A layer's small weights, float32; filters[W - 1] weighs the token itself."""

    filters: Float[Array, "W H D"]
    a_log: Float[Array, " H"]
    bias: Float[Array, "H K"]
    norm: Float[Array, " V"]


class Decoded(NamedTuple):
    """The layer's output before its last projection, bfloat16; the next state and the next conv tail."""

    y: Float[Array, "B H V"]
    state: Float[Array, "B H K V"]
    tail: Float[Array, "B tail H D"]


def decode_token(
    token: Token,
    weights: Weights,
    state: Float[Array, "B H K V"],
    tail: Float[Array, "B tail H D"],
    *,
    scale: float,
    gate_lower_bound: float,
    interpret: bool = False,
) -> Decoded:
    """One token: state float32, tail the last W - 1 rows of qkv, bfloat16.

    Raises ValueError if K or V is not 64 or 128, or a shape or dtype does not fit them. K3 report, sections 2.1, 2.5.
    """
    check(token, weights, state, tail)
    B, H, K, V = state.shape
    W = weights.filters.shape[0]
    half, full = jnp.bfloat16, jnp.float32
    apart = lambda x: jnp.stack([lanes(part) for part in jnp.split(x, [K, 2 * K], -1)], -2)
    # One value a head: as vectors, since kernels load vectors.
    rate = jnp.broadcast_to(jnp.exp(weights.a_log)[:, None], (H, LANES))
    beta = jnp.broadcast_to(jax.nn.sigmoid(token.beta_logit)[..., None], (B, H, LANES))
    vectors = (apart(token.qkv), lanes(token.z), beta, lanes(token.gate), apart(weights.filters), rate)
    vectors = (*vectors, lanes(weights.bias), lanes(weights.norm))
    out = [
        jax.ShapeDtypeStruct((B, H, LANES), half),
        jax.ShapeDtypeStruct((B, H, K, V), full),
        jax.ShapeDtypeStruct((B, W - 1, H, 3, LANES), half),
    ]
    scratch = [
        tiled(V // COLUMNS, K, COLUMNS, dtype=full),
        tiled(K, COLUMNS),
        tiled(PAIR, K),
        [plain(LANES) for _ in range(7)],
        plgpu.Barrier(num_arrivals=V // COLUMNS),
    ]
    y, state, tail = launch(
        lambda *refs: kernel(*refs, products=Products(interpret), scale=scale, lower_bound=gate_lower_bound),
        *vectors,
        state,
        apart(tail),
        name="kda_decode",
        out=out,
        grid={"head": H, "batch": B},
        scratch=scratch,
        interpret=interpret,
    )
    together = [tail[..., part, :size] for part, size in enumerate((K, K, V))]
    return Decoded(y[..., :V], state, jnp.concatenate(together, -1))


def lanes(x: jax.Array) -> jax.Array:
    """x with its last dim padded to one element a thread."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, LANES - x.shape[-1])])


def check(token: Token, weights: Weights, state, tail):
    """Raises ValueError, naming what was got and what is needed."""
    B, H, K, V = state.shape
    for name, size in (("K", K), ("V", V)):
        if size not in (64, 128):
            raise ValueError(f"{name} = {size}; this kernel has {name} in (64, 128). Use another implementation")
    D, W, full = 2 * K + V, weights.filters.shape[0], jnp.float32
    needed = {
        "state": (state, (B, H, K, V), full),
        "tail": (tail, (B, W - 1, H, D), jnp.bfloat16),
        "qkv": (token.qkv, (B, H, D), jnp.bfloat16),
        "z": (token.z, (B, H, K), full),
        "beta_logit": (token.beta_logit, (B, H), full),
        "gate": (token.gate, (B, H, V), full),
        "filters": (weights.filters, (W, H, D), full),
        "a_log": (weights.a_log, (H,), full),
        "bias": (weights.bias, (H, K), full),
        "norm": (weights.norm, (V,), full),
    }
    for name, (array, shape, dtype) in needed.items():
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"{name} is {array.dtype}{list(array.shape)}; with a state {list(state.shape)} it must be "
                f"{jnp.dtype(dtype)}{list(shape)}"
            )


def kernel(*refs, products: Products, scale: float, lower_bound: float):
    qkv_g, z_g, beta_g, gate_g, filters_g, rate_g, bias_g, norm_g, s_g, tail_g, y_g, s_out, tail_out = refs[:13]
    s, piece, pair, (q, k, decay, v, beta, error, o), loaded = refs[13:]
    b, h = lax.axis_index("batch"), lax.axis_index("head")
    v_blocks, K, _ = s.shape
    f32, bf16 = jnp.float32, jnp.bfloat16
    rounded = lambda x: x.astype(bf16).astype(f32)
    W = filters_g.shape[0]
    for block in range(v_blocks):
        source = s_g.at[b, h, :, pl.ds(block * COLUMNS, COLUMNS)]
        plgpu.copy_gmem_to_smem(source, s.at[block], loaded)

    def convolved(part):
        """silu of the convolution of q, k or v; moves their tail on by one token."""
        taps = [tail_g[b, w, h, part] for w in range(W - 1)] + [qkv_g[b, h, part]]
        for w in range(W - 1):
            tail_out[b, w, h, part] = taps[w + 1]
        terms = [x.astype(f32) * filters_g[w, h, part] for w, x in enumerate(taps)]
        x = rounded(sum(terms[1:], start=terms[0]))
        return x / (1.0 + jnp.exp(-x))

    for part, target in enumerate((q, k)):
        x = convolved(part)
        target[...] = rounded(x * lax.rsqrt(jnp.sum(x * x) + KEY_EPSILON))
    v[...] = rounded(convolved(2))
    beta[...] = beta_g[b, h]
    log_decay = lower_bound / (1.0 + jnp.exp(-rate_g[h] * (z_g[b, h] + bias_g[h])))
    decay[...] = jnp.exp(log_decay)
    if v_blocks * COLUMNS < LANES:
        o[...] = jnp.zeros((LANES,), f32)
    plgpu.barrier_wait(loaded)

    rows = lambda x, width=COLUMNS: lax.broadcast_in_dim(x[pl.ds(0, K)], (K, width), (0,))
    column = lambda size: lax.broadcasted_iota(jnp.int32, (size, PAIR), 1)
    products.store(Transposed(pair), jnp.where(column(K) == 0, rows(k, PAIR), rows(q, PAIR)).astype(bf16))
    qk = jnp.sum(q[...] * k[...])

    @pl.loop(0, v_blocks)
    def _(block):
        part = pl.ds(block * COLUMNS, COLUMNS)
        s[block] = S = s[block] * rows(decay)
        read = jnp.zeros((COLUMNS, PAIR), f32)
        for x in pieces(S, 3):
            piece[...] = x
            plgpu.commit_smem()
            read += products((Transposed(piece), Transposed(pair)))
        of_k, of_q = (jnp.sum(jnp.where(column(COLUMNS) == place, read, 0.0), axis=1) for place in (0, 1))
        error[part] = beta[part] * (v[part] - of_k)
        o[part] = of_q + qk * error[part]
        s[block] = s[block] + rows(k) * lax.broadcast_in_dim(error[part], (K, COLUMNS), (1,))

    plgpu.commit_smem()
    for block in range(v_blocks):
        plgpu.copy_smem_to_gmem(s.at[block], s_out.at[b, h, :, pl.ds(block * COLUMNS, COLUMNS)])
    x = rounded(o[...] * scale)
    normed = x * lax.rsqrt(jnp.sum(x * x) / (v_blocks * COLUMNS) + NORM_EPSILON) * norm_g[...]
    y_g[b, h] = (normed / (1.0 + jnp.exp(-gate_g[b, h]))).astype(bf16)
    plgpu.wait_smem_to_gmem(0)


def reference(token: Token, weights: Weights, state, tail, *, scale, gate_lower_bound) -> Decoded:
    """The same from the definition, in the dtype of the inputs, without roundings."""
    K = state.shape[2]
    rows = jnp.concatenate([tail, token.qkv[:, None]], 1)
    x = jax.nn.silu(jnp.einsum("bwhd,whd->bhd", rows, weights.filters))
    q, k, v = jnp.split(x, [K, 2 * K], -1)
    q, k = (x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + KEY_EPSILON) for x in (q, k))
    log_decay = gate_lower_bound * jax.nn.sigmoid(jnp.exp(weights.a_log)[:, None] * (token.z + weights.bias))
    S = jnp.exp(log_decay)[..., None] * state
    error = jax.nn.sigmoid(token.beta_logit)[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", S, k))
    S = S + k[..., None] * error[..., None, :]
    o = scale * jnp.einsum("bhkv,bhk->bhv", S, q)
    normed = o * lax.rsqrt(jnp.mean(o * o, -1, keepdims=True) + NORM_EPSILON) * weights.norm
    return Decoded(normed * jax.nn.sigmoid(token.gate), S, rows[:, 1:])
