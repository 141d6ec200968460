"""Context parallelism: a sequence lies on the ranks of one mesh axis, in equal parts and in order.

B batch, T local tokens, H heads, K key dim, V value dim, C channel dims, W conv width, R ranks on the axis.

KDA needs the state that enters a rank's part, the short convolution the few rows before it. Both come by one
all-gather, which is grouped: it may stand in a branch that only some groups of ranks take. K3 report, section 5.1.2.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from k3jax.ops.kda import api, chunked, compose
from k3jax.ops.kda.affine import AffineMap
from k3jax.ops.short_conv import short_conv


def shard_length(T: int, context: int) -> int:
    """Tokens of each rank when T tokens are spread over `context` ranks.

    Raises ValueError, naming both, if some rank would get fewer tokens than another.
    """
    if T <= 0 or T % context:
        raise ValueError(
            f"sequence length T={T} does not divide into context={context} equal parts of at least one token; "
            f"make T a multiple of {context}, or choose a context that divides it"
        )
    return T // context


def kda_context_parallel(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    *,
    axis_name: str = "context",
    scale: float | None = None,
    initial_state: Float[Array, "B H K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    gate_lower_bound: float | None = None,
    chunk_size: int = api.CHUNK_SIZE,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """`kda` of the whole sequence, inside a shard_map that binds `axis_name`: (o of this rank, the last state).

    Before: each rank holds its T tokens; `initial_state`, the same on all, enters the first rank.
    After: each rank has its outputs; the final state is the whole sequence's, on every rank.
    Collective: one all-gather over `axis_name` of R·B·(H·K·(K+V)+8)·4 bytes, whatever T; none if the axis has one rank.

    Raises ValueError as `kda` does. K3 report, section 5.1.2.
    """
    options: dict[str, Any] = dict(segment_ids=segment_ids, gate_lower_bound=gate_lower_bound, chunk_size=chunk_size)
    if lax.axis_size(axis_name) == 1:
        return api.kda(q, k, v, g, beta, scale=scale, initial_state=initial_state, **options)
    api.check(q, k, v, g, beta, initial_state, segment_ids, gate_lower_bound, chunk_size)
    inputs, initial = api.in_state_dtype(q, k, v, g, beta, initial_state, scale=scale)
    maps = chunked.prepare(*inputs, **options)
    entering, final = _states(chunked.summary(maps, q.shape[-1]), initial, segment_ids, axis_name)
    o, _ = chunked.finish(maps, entering, q.shape[1])
    return o.astype(v.dtype), final


def _states(
    own: AffineMap, initial: jax.Array, segment_ids: jax.Array | None, axis_name: str
) -> tuple[jax.Array, jax.Array]:
    """The state that enters this rank's part, and the one that leaves the last rank's."""
    M, S = own
    *_, K, V = S.shape
    message = jnp.concatenate([M, S], -1).reshape(S.shape[0], -1)
    if segment_ids is not None:
        message = jnp.concatenate([message, _as_bytes(segment_ids[:, [0, -1]], S.dtype).reshape(S.shape[0], -1)], -1)
    message = lax.all_gather(message, axis_name)
    R, B = message.shape[:2]
    maps = message[..., : M[0].size + S[0].size].reshape(R, *S.shape[:-1], K + V)
    M, S = maps[..., :K], maps[..., K:]
    if segment_ids is not None:
        first, last = jnp.moveaxis(_from_bytes(message[..., -8:].reshape(R, B, 2, 4)), -1, 0)
        # What enters a part whose first token starts a document is forgotten; what ends inside, its map forgets.
        continues = jnp.concatenate([jnp.ones_like(first[:1], bool), first[1:] == last[:-1]])[..., None, None, None]
        M = jnp.where(continues, M, 0)
    # The initial state is the first map's: it forgets all and writes that state.
    M, S = jnp.concatenate([jnp.zeros_like(M[:1]), M]), jnp.concatenate([initial[None], S])
    _, states = lax.associative_scan(lambda earlier, later: compose(later, earlier), (M, S))
    rank = lax.axis_index(axis_name)
    entering = lax.dynamic_index_in_dim(states, rank, keepdims=False)
    if segment_ids is not None:
        entering = jnp.where(lax.dynamic_index_in_dim(continues, rank, keepdims=False), entering, 0)
    return entering, states[-1]


def short_conv_context_parallel(
    x: Float[Array, "B T *C"],
    w: Float[Array, " W *C"],
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    axis_name: str = "context",
) -> Float[Array, "B T *C"]:
    """`short_conv` of the whole sequence, inside a shard_map that binds `axis_name`; this rank's T tokens.

    Collective: one all-gather over `axis_name` of the last min(W−1, T) rows of each rank; none if W or the axis is 1.
    """
    R, (B, T), W = lax.axis_size(axis_name), x.shape[:2], w.shape[0]
    if R == 1 or W == 1:
        return short_conv(x, w, segment_ids)
    tail = min(W - 1, T)
    message = x[:, -tail:].reshape(B, tail, -1)
    if segment_ids is not None:
        message = jnp.concatenate([message, _as_bytes(segment_ids[:, -tail:], x.dtype)], -1)
    # The tails of all ranks in order, after zeros: those W−1 rows that end where this rank begins are its halo. If the
    # parts are as long as their tails, it reaches back over several ranks.
    tails = jnp.moveaxis(lax.all_gather(message, axis_name), 0, 1).reshape(B, R * tail, -1)
    tails = jnp.pad(tails, ((0, 0), (W - 1, 0), (0, 0)))
    halo = lax.dynamic_slice_in_dim(tails, lax.axis_index(axis_name) * tail, W - 1, axis=1)
    ids = None
    if segment_ids is not None:
        halo, ids = halo[..., :-4], _from_bytes(halo[..., -4:])
    return short_conv(x, w, segment_ids, halo=halo.reshape(B, W - 1, *x.shape[2:]), halo_segment_ids=ids)


def _as_bytes(ids: jax.Array, dtype) -> jax.Array:
    """int32 -> [..., 4] whole numbers of 0 to 255, which a 16-bit float holds: they ride in a message of floats."""
    return ((ids[..., None] >> jnp.arange(0, 32, 8, dtype=ids.dtype)) & 255).astype(dtype)


def _from_bytes(parts: jax.Array) -> jax.Array:
    parts = parts.astype(jnp.int32)
    return parts[..., 0] | parts[..., 1] << 8 | parts[..., 2] << 16 | parts[..., 3] << 24
