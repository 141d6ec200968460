"""Context parallelism: a sequence lies on the ranks of one mesh axis, in equal parts and in order.

B batch, T local tokens, H heads, K key dim, V value dim, C channel dims, W conv width, R ranks on the axis.

KDA needs the state that enters a rank's part, the short convolution the few rows before it. Both come by one
all-gather, which is grouped: it may stand in a branch that only some groups of ranks take. K3 report, section 5.1.2.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from k3jax.compat import vary_like
from k3jax.ops.kda import api
from k3jax.ops.kda.exchange import cotangents_between, states_between
from k3jax.ops.kda.segments import evaluate
from k3jax.ops.short_conv import short_conv


def shard_length(T: int, context: int) -> int:
    """Tokens of each rank when T tokens are spread over `context` ranks.

    Raises ValueError, naming both, if there is no rank or some rank would get fewer tokens than another.
    """
    if context < 1:
        raise ValueError(f"context={context} ranks for T={T} tokens; at least one is needed")
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
    implementation: str | None = None,
    segments: int | None = None,
    save_states: bool = True,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """`kda` of the whole sequence, inside a shard_map that binds `axis_name`: (o of this rank, the last state).

    Before: each rank holds its T tokens; `initial_state`, the same on all, enters the first rank.
    After: each rank has its outputs; the final state is the whole sequence's, on every rank.
    Collective: one all-gather over `axis_name` of R·B·(segments·H·K·(K+V)+8)·4 bytes, whatever T (8: the documents at
    the ends, only with segment_ids), and one in backward of R·B·segments·H·K·(K+V)·4, or R·B·H·K·V·4 more if the final
    state has a cotangent; twice that in float64. An axis of one rank gathers nothing.

    implementation: as of `kda`, but "recurrent" only on one rank; segments: those of each rank.
    Raises ValueError as `kda` does. K3 report, section 5.1.2.
    """
    if lax.axis_size(axis_name) == 1:
        return api.kda(
            q,
            k,
            v,
            g,
            beta,
            scale=scale,
            initial_state=initial_state,
            segment_ids=segment_ids,
            gate_lower_bound=gate_lower_bound,
            chunk_size=chunk_size,
            implementation=implementation,
            segments=segments,
            save_states=save_states,
        )
    api.check(q, k, v, g, beta, initial_state, segment_ids, gate_lower_bound, chunk_size, segments)
    arrays = api.alike(q, k, v, g, beta, initial_state, segment_ids, gate_lower_bound)
    plan = api.plan(
        arrays,
        implementation,
        api.static_scale(q, scale),
        gate_lower_bound,
        chunk_size=chunk_size,
        segments=segments,
        save_states=save_states,
        exchange=RankToRank(axis_name),
    )
    return evaluate(plan, *arrays)


class RankToRank(NamedTuple):
    """The segments of all ranks of a mesh axis, in order: an `Exchange`."""

    axis_name: str

    def forward(self, M, S, initial_state, segment_ids):
        if segment_ids is None:
            continues = None
            all_M, all_S = self.gather(M, S)
        else:
            all_M, all_S, ends = self.gather(M, S, _as_bytes(segment_ids[:, [0, -1]], S.dtype))
            all_continues = _continues(*jnp.moveaxis(_from_bytes(ends), -1, 0), segments=len(M))
            # What enters a rank whose first token starts a document is forgotten; what ends inside, its maps forget.
            all_M, continues = jnp.where(all_continues, all_M, 0), self.own(all_continues)
        entering, final = states_between(_joined(all_M), _joined(all_S), initial_state)
        entering = self.own(entering.reshape(all_S.shape))
        if continues is not None:
            entering = jnp.where(continues, entering, 0)
        return entering, final, (self.own(all_M), continues)

    def backward(self, kept, d_entering, d_final):
        M, continues = kept
        if continues is not None:
            d_entering = jnp.where(continues, d_entering, 0)
        all_M, all_d, *d_finals = self.gather(M, d_entering, *(() if d_final is None else (d_final,)))
        # Every rank has the last state, and its own cotangent of it.
        d_final = d_finals[0].sum(0) if d_finals else jnp.zeros_like(all_d[0, 0])
        d_leaving, d_initial = cotangents_between(_joined(all_M), _joined(all_d), d_final)
        first = lax.axis_index(self.axis_name) == 0
        return self.own(d_leaving.reshape(all_d.shape)), jnp.where(first, d_initial, 0)

    def gather(self, *arrays):
        """Each array with a leading dim for the ranks, by one all-gather."""
        message = lax.all_gather(jnp.concatenate([x.ravel() for x in arrays]), self.axis_name)
        parts = jnp.split(message, np.cumsum([x.size for x in arrays])[:-1], axis=1)
        return [part.reshape(-1, *x.shape) for part, x in zip(parts, arrays, strict=True)]

    def own(self, x):
        return lax.dynamic_index_in_dim(x, lax.axis_index(self.axis_name), keepdims=False)


def _continues(first, last, *, segments: int) -> jax.Array:
    """Whether a segment goes on with the document before it, [ranks, segments, B, 1, 1, 1]; first and last document ids
    of each rank [ranks, B]. Only a rank's first segment asks: between the others, the maps themselves know."""
    starts = jnp.concatenate([jnp.ones_like(first[:1], bool), first[1:] == last[:-1]])[:, None]
    others = jnp.ones((len(first), segments - 1, first.shape[1]), bool)
    return jnp.concatenate([starts, vary_like(others, starts)], 1)[..., None, None, None]


def _joined(x):
    """[ranks, segments, ...] -> [R, ...]."""
    return x.reshape(-1, *x.shape[2:])


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
