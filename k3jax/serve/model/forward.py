"""The next tokens of many sequences through all layers, from what pages hold to what they shall hold.

B sequences, T tokens of each in this call, S tokens of a page, n pages of a sequence, m pages of a state, G groups of KDA
layers, D model, W words of a page.

A block of a prompt and one decoded token are the same program but for T: with one token KDA takes its recurrence, and MLA
reads latents as keys and values. Groups of layers are scanned; the pool is carried and changed in place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from k3jax import model as lm
from k3jax.compat import vary_like
from k3jax.layers.common import Axes, Tokens
from k3jax.layers.kda import KDA
from k3jax.layers.mla import MLA
from k3jax.ops.attention import KeyPart, attention_in_parts
from k3jax.parallel.layout import StackLayout
from k3jax.serve.model.depth import MixedStream, directions, site_tables
from k3jax.serve.model.pages import PageLayout


class Rows(NamedTuple):
    """One call's sequences, as arrays: what `k3jax.serve.model.rows` makes of a list."""

    tokens_BT: Int[Array, "B T"]
    """Ids; −1 behind the last one, and everywhere in a row that is not used."""
    starts_B: Int[Array, " B"]
    """Position of the first token. At 0 states start from zero, whatever their pages hold."""
    writes_B: Int[Array, " B"]
    """First position whose latents are written: of tokens before it, which run again for the state alone, pages have them."""
    latents_Bn: Int[Array, "B n"]
    """Pages of latents in the order of their tokens; −1 where there is none."""
    states_BGm: Int[Array, "B G m"]
    """Pages of each group's state; read and overwritten."""

    @property
    def real_BT(self) -> Bool[Array, "B T"]:
        return self.tokens_BT >= 0

    @property
    def ends_B(self) -> Int[Array, " B"]:
        """Position after the last token."""
        return self.starts_B + self.real_BT.sum(1, dtype=jnp.int32)


class Weights(NamedTuple):
    """Parameters, cast for compute, and the router's biases, in the layout of one chunk, `StackLayout(config)`."""

    params: dict[str, Any]
    bias: dict[str, Any]


def forward(
    pages: PageLayout,
    weights: Weights,
    pool: UInt32[Array, "parts pages W"],
    rows: Rows,
    *,
    chunk_size: int,
    every_logit: bool,
    axes: Axes = Axes(),  # noqa: B008
) -> tuple[Float[Array, "B vocabulary"] | Float[Array, "B T vocabulary"], UInt32[Array, "parts pages W"]]:
    """Logits after each row's last token, or after every one; and the pool with these tokens in its pages.

    No token is dropped by an expert. With an expert axis each rank holds its own rows and its own pool, and its share of the
    experts; the logits of a row that is not used mean nothing.
    """
    config = pages.config
    layout, params = StackLayout(config), weights.params
    only = lambda tree: jax.tree.map(lambda a: a[0, 0], tree)
    tables = {name: jnp.asarray(table[0, 0]) for name, table in layout.flag_tables.items()}
    own = {name: jnp.asarray(table) for name, table in (site_tables(config) | pages.tables).items()}
    of_sites = {"directions": directions(config, params)}
    tokens = Tokens(jnp.zeros_like(rows.tokens_BT), rows.tokens_BT, axes)
    stream = lm.embed(
        params["embed"], rows.tokens_BT, num_blocks=config.num_blocks, axes=axes, dtype=jnp.dtype(pages.dtype)
    )

    def group(carry, inputs):
        stream, pool = carry
        weights, bias, flags, own = inputs
        for p, kind in enumerate(config.pattern):
            slot = layout.flags(p, flags) | {name: table[p] for name, table in own.items()} | of_sites
            memory = Memory(pages, pool, rows, own["part"][p], own["group"][p])
            after, _, pool = lm.run_layer(
                config,
                lm.bind(config, kind, weights[str(p)]),
                params["dense"],
                stream,
                bias[str(p)],
                slot,
                tokens,
                attend=lambda *args, memory=memory: memory.attend(*args, chunk_size=chunk_size),
            )
            stream = lm.select(slot["active"], after, stream)
        return (stream, pool), None

    stream = jax.tree.map(lambda x: vary_like(x, rows.tokens_BT), MixedStream.of(config, stream))
    groups = only(params["chunks"]), only(weights.bias["chunks"]), tables, own
    (stream, pool), _ = lax.scan(group, (stream, pool), groups)

    head = lm.bind(config, "head", params["head"])
    h_BTD = stream.leave(config, head)
    if not every_logit:
        last_B = jnp.maximum(rows.real_BT.sum(1) - 1, 0)
        h_BTD = jnp.take_along_axis(h_BTD, last_B[:, None, None], 1)[:, 0]
    return head.project(head.norm(h_BTD)), pool


class Memory(NamedTuple):
    """What one layer remembers of each row's sequence."""

    pages: PageLayout
    pool: UInt32[Array, "parts pages W"]
    rows: Rows
    part: Int[Array, ""]
    """Of its pages; −1 for a slot without a layer, which remembers nothing."""
    group: Int[Array, ""]
    """Of KDA layers."""

    def attend(self, attn: Any, x_BTD: jax.Array, tokens: Tokens, *, chunk_size: int) -> tuple[jax.Array, jax.Array]:
        """Attention's output, and the pool after it: for `model.run_layer`."""
        if isinstance(attn, KDA):
            return self.recur(attn, x_BTD, chunk_size)
        return self.look_back(attn, x_BTD)

    def recur(self, attn: KDA, x_BTD: jax.Array, chunk_size: int) -> tuple[jax.Array, jax.Array]:
        real_BT = self.rows.real_BT
        used_B1 = real_BT.any(1, keepdims=True)
        pages_Bm = lax.dynamic_index_in_dim(self.rows.states_BGm, self.group, 1, keepdims=False)
        known_Bm = jnp.where(used_B1 & (self.rows.starts_B > 0)[:, None], pages_Bm, -1)
        state, tail = self.pages.read_state(self.pool, self.part, known_Bm)
        y_BTD, state, tail = attn.resume(x_BTD, real_BT, state, tail, chunk_size=chunk_size)
        return y_BTD, self.pages.write_state(self.pool, self.part, jnp.where(used_B1, pages_Bm, -1), state, tail)

    def look_back(self, attn: MLA, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Latents of this call's tokens are written first, so that queries find them where they find all others."""
        rows, size, T = self.rows, self.pages.tokens, x_BTD.shape[1]
        at_BT = rows.starts_B[:, None] + jnp.arange(T)
        column_BT = jnp.minimum(at_BT // size, rows.latents_Bn.shape[1] - 1)
        written_BT = rows.real_BT & (at_BT >= rows.writes_B[:, None])
        page_BT = jnp.where(written_BT, jnp.take_along_axis(rows.latents_Bn, column_BT, 1), -1)
        pool = self.pages.write_latents(self.pool, self.part, page_BT, at_BT % size, attn.latents(x_BTD))
        absorbed = attn.absorbs(T)

        def part(i):
            pages_B = lax.dynamic_index_in_dim(rows.latents_Bn, i, 1, keepdims=False)
            at_S = i * size + jnp.arange(size)
            written_BS1 = (at_S < rows.ends_B[:, None])[..., None]  # elsewhere anything may be, also what is no number
            kv_BSL = jnp.where(written_BS1, self.pages.read_latents(pool, self.part, pages_B), 0)
            allowed_BTS = (at_S <= at_BT[..., None]) & rows.real_BT[..., None]
            return KeyPart(*attn.keys_and_values(kv_BSL, absorbed=absorbed), allowed_BTS)

        q_BTHK = attn.queries(x_BTD, absorbed=absorbed)
        o = attention_in_parts(q_BTHK, part, parts=rows.latents_Bn.shape[1], scale=attn.scale)
        return attn.output(x_BTD, o, absorbed=absorbed), pool
