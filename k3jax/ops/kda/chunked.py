"""KDA in chunks of tokens, with a hand-written gradient: what is parallel over chunks, and the recurrence between them.

K key dim, V value dim, Z recurrences side by side, P chunks that are worked on at once, n of each recurrence, C tokens of a
chunk, I tiles of a chunk, i tokens of a tile, s stacked rows (queries, keys).
K3 report, section 2.1 and its chunk form. Names: q⁺ and k⁺ decay from the chunk's start to their token, k_C from their token
to the chunk's end; A pairs of keys (strictly lower, with β), R pairs of queries and keys (lower), X = (I + A)⁻¹;

    W = X β k⁺    U = X β v    Ṽ = U − W S    o = q⁺ S + R Ṽ    S ← Diag(through) S + k_Cᵀ Ṽ.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.ops.kda.affine import contract, matmul
from k3jax.ops.kda.layout import Layout
from k3jax.ops.kda.pairs import TILE, Decays, decays, pairs, unit_lower_inverse

UNROLL = 4
"""Chunks of a recurrence between two steps of its loop: few enough to compile, enough to save most copies of the loop."""


class Chunks(NamedTuple):
    """Everything of each chunk that does not depend on the state that enters it; leading dim P."""

    queries: jax.Array
    """q⁺ [C, K], 0 where the entering state is of another document."""
    W: jax.Array
    """X β k⁺ [C, K]."""
    U: jax.Array
    """X β v [C, V]."""
    reads: jax.Array
    """R [C, C]."""
    inverse: jax.Array
    """X [C, C]."""
    ending: jax.Array
    """k_C [C, K], 0 where the leaving state is of another document."""
    through: jax.Array
    """Decay of the whole chunk [K], 0 if a document starts in it."""


class Masks(NamedTuple):
    """Which documents meet; None without documents. Leading dim P."""

    visible: jax.Array
    """[C, C]: both tokens are of one document."""
    entering: jax.Array
    """[C, 1]: the state that enters the chunk is of the token's document."""
    leaving: jax.Array
    """[C, 1]: the token is of the document that leaves the chunk."""
    through: jax.Array
    """[1]: the document that enters the chunk leaves it."""


def masks(ids: jax.Array, before: jax.Array) -> Masks:
    """Of chunks: the document of each token, and that of the state that enters; [P, C, 1]."""
    last = ids[:, -1:]
    return Masks(ids == ids.mT, ids == before, ids == last, (before == last)[:, 0])


def masked(mask: jax.Array | None, x: jax.Array) -> jax.Array:
    return x if mask is None else jnp.where(mask, x, 0)


class Inputs(NamedTuple):
    """The inputs of chunks, [P, C, ...], q scaled, and their decays."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    beta: jax.Array
    """[P, C, 1]."""
    decay: Decays

    def tiled(self, x: jax.Array) -> jax.Array:
        P, C, D = x.shape
        return x.reshape(P, C // TILE, TILE, D)

    def from_start(self, x: jax.Array) -> jax.Array:
        """x ⊙ exp(G)."""
        return (self.tiled(x) * self.decay.from_anchor * self.decay.start[:, :, None]).reshape(x.shape)

    def to_end(self, x: jax.Array) -> jax.Array:
        """x ⊙ exp(G_C − G)."""
        return (self.tiled(x) * self.decay.to_tile_end * self.decay.end[:, :, None]).reshape(x.shape)

    def pairs(self, queries: jax.Array, keys: jax.Array, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Pairs of both rows with the columns, [P, C, C] each: below the diagonal and on it, 0 or finite above."""
        x = jnp.stack([self.tiled(queries), self.tiled(keys)], 2)
        out = pairs(x, self.tiled(columns), self.decay)
        C = queries.shape[1]
        return out[:, :, 0].reshape(-1, C, C), out[:, :, 1].reshape(-1, C, C)


def inputs(q, k, v, g, beta, scale: float, gate_lower_bound: float | None) -> Inputs:
    return Inputs(scale * q, k, v, beta, decays(g, gate_lower_bound))


def prepare(r: Inputs, m: Masks | None, solved: tuple[jax.Array, jax.Array] | None = None) -> Chunks:
    """`solved`: reads and inverse, if they are known already."""
    if solved is None:
        C = r.q.shape[1]
        row, column = (lax.broadcasted_iota(jnp.int32, (C, C), axis) for axis in (0, 1))
        reads, A = r.pairs(r.q, r.k, r.k)
        visible = None if m is None else m.visible
        reads = jnp.where(row >= column, masked(visible, reads), 0)
        inverse = unit_lower_inverse(jnp.where(row > column, masked(visible, r.beta * A), 0))
    else:
        reads, inverse = solved
    entering, leaving, through = (None, None, None) if m is None else m[1:]
    solve = inverse * r.beta.mT
    return Chunks(
        queries=masked(entering, r.from_start(r.q)),
        W=matmul(solve, masked(entering, r.from_start(r.k))),
        U=matmul(solve, r.v),
        reads=reads,
        inverse=inverse,
        ending=masked(leaving, r.to_end(r.k)),
        through=masked(through, r.decay.through),
    )


def recur(chunks: Chunks, entering: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Outputs [P, C, V], the state entering each chunk [P, K, V], and those that leave the segments [Z, K, V]."""

    def step(state, chunk):
        queries, W, U, reads, ending, through = chunk
        written = U - matmul(W, state)
        o = matmul(queries, state) + matmul(reads, written)
        return through[..., None] * state + contract("ck,cv->kv", ending, written), (o, state)

    inputs = chunks.queries, chunks.W, chunks.U, chunks.reads, chunks.ending, chunks.through
    leaving, (o, states) = lax.scan(step, entering, tuple(map(layout.steps, inputs)), unroll=UNROLL)
    return o.reshape(-1, *o.shape[2:]), states.reshape(-1, *states.shape[2:]), leaving


def segment_maps(chunks: Chunks, before: jax.Array, layout: Layout) -> jax.Array:
    """Maps of the state [Z, K, K + V], M and S side by side: those `before`, then the chunks."""

    def step(maps, chunk):
        W, U, ending, through = chunk
        written = jnp.concatenate([jnp.zeros_like(W), U], -1) - matmul(W, maps)
        return through[..., None] * maps + contract("ck,cv->kv", ending, written), None

    inputs = chunks.W, chunks.U, chunks.ending, chunks.through
    return lax.scan(step, before, tuple(map(layout.steps, inputs)), unroll=UNROLL)[0]


def recur_backward(chunks: Chunks, do: jax.Array, d_leaving: jax.Array, layout: Layout):
    """Cotangents of Ṽ [P, C, V], of the state leaving each chunk [P, K, V], and of those entering segments [Z, K, V]."""

    def step(d_state, chunk):
        queries, W, own, ending, through, do = chunk
        d_written = own + matmul(ending, d_state)
        entering = contract("ck,cv->kv", queries, do) - contract("ck,cv->kv", W, d_written)
        return through[..., None] * d_state + entering, (d_written, d_state)

    own = contract("ic,iv->cv", chunks.reads, do)
    inputs = chunks.queries, chunks.W, own, chunks.ending, chunks.through, do
    entering, (d_written, d_states) = lax.scan(
        step, d_leaving, tuple(map(layout.steps, inputs)), reverse=True, unroll=UNROLL
    )
    return d_written.reshape(do.shape), d_states.reshape(-1, *d_states.shape[2:]), entering


def prepare_backward(r: Inputs, m: Masks | None, chunks: Chunks, states, do, d_written, d_states):
    """Cotangents of q, k, v, g and β [P, C, ...] from those of the outputs, of Ṽ and of the states between chunks."""
    C, K = r.q.shape[1:]
    row, column = (lax.broadcasted_iota(jnp.int32, (C, C), axis) for axis in (0, 1))
    visible, entering, leaving, _ = (None,) * 4 if m is None else m
    written = chunks.U - matmul(chunks.W, states)
    through = chunks.through * jnp.sum(states * d_states, -1)

    d_W = -contract("cv,kv->ck", d_written, states)
    d_keys, d_values = contract("ic,ik->ck", chunks.inverse, d_W), contract("ic,iv->cv", chunks.inverse, d_written)
    d_A = -contract("ik,jk->ij", d_keys, chunks.W) - contract("iv,jv->ij", d_values, chunks.U)
    d_A = jnp.where(row > column, masked(visible, d_A), 0)
    d_reads = jnp.where(row > column, masked(visible, contract("iv,jv->ij", do, written)), 0)
    keys = r.beta * r.k
    _, transpose = jax.vjp(r.pairs, r.q, keys, r.k)
    d_q, d_rows, d_columns = transpose((d_reads, d_A))

    d_q += r.from_start(masked(entering, contract("cv,kv->ck", do, states)))
    d_keys = d_rows + r.from_start(masked(entering, d_keys))
    ending = r.to_end(masked(leaving, contract("cv,kv->ck", written, d_states)))
    # Pairs and what the entering state gives decay by G up to their row, and pairs from their column on: g_t has a part in
    # all of its chunk from t on. What reaches the chunk's end decays by the g after it: g_t has a part in all before t.
    d_sum = r.q * d_q + keys * d_keys - r.k * d_columns
    d_columns += ending
    # A query meets the key of its own token without decay: in d_sum that would only leave rounding.
    d_same = jnp.sum(do * written, -1, keepdims=True)
    d_q += d_same * r.k
    d_columns += d_same * r.q
    spread = lambda mask: jnp.broadcast_to(mask.astype(d_sum.dtype), (len(d_sum), C, C))
    d_g = matmul(spread(row <= column), d_sum) + matmul(spread(column < row), r.k * ending) + through[:, None]
    d_beta = jnp.sum(d_keys * r.k, -1, keepdims=True) + jnp.sum(d_values * r.v, -1, keepdims=True)
    return d_q, r.beta * d_keys + d_columns, r.beta * d_values, d_g, d_beta
