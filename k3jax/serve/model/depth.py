"""Attention residuals in two phases: blocks are mixed once for all sites that meet the same ones, the live sum joins later.

B batch, T tokens, D model, N stored blocks, J groups, P slots of a group, I sites that meet the same blocks.

The sites of a model in their order: attention and FFN of layer 0, of layer 1, …, and last the exit before the head. When a
layer begins a block, the next I = 2 · attn_res_block sites (its FFN first) meet the same stored blocks: reading those once
and keeping I softmaxes open costs less than reading them at every site. K3 report, inference of attention residuals.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from k3jax import model as lm
from k3jax.configs import ModelConfig
from k3jax.layers.residual import BlockMix
from k3jax.parallel.layout import Flag, StackLayout


class MixedStream(NamedTuple):
    """A `Stream` whose blocks are mixed ahead: a `Residual`. blocks and mixed are None for plain residuals."""

    prefix: Float[Array, "B T D"]
    blocks: Float[Array, "N B T D"] | None
    mixed: BlockMix | None

    @classmethod
    def of(cls, config: ModelConfig, stream: lm.Stream) -> MixedStream:
        """Of the stream that enters layer 0."""
        prefix, blocks = stream
        return cls(
            prefix, blocks, None if blocks is None else BlockMix.of_none(2 * (config.attn_res_block or 0), prefix)
        )

    def enter(self, layer: Any, flags: dict[str, Flag]) -> tuple[jax.Array, MixedStream]:
        prefix, blocks, mixed = self
        if blocks is None or mixed is None:
            return prefix, self
        h = layer.attn_mix.merge(mixed, flags["attn_site"], prefix)
        blocks, prefix = lm.begin_block(prefix, blocks, flags)

        every, first, sites = jnp.asarray(flags["directions"]), jnp.asarray(flags["next_site"]), len(mixed.top_SBT)

        def mix(blocks):
            next_sites = lax.dynamic_slice_in_dim(every, first, sites)
            return BlockMix.of(next_sites, blocks, flags["ffn_blocks"], eps=layer.attn_mix.norm.eps)

        if isinstance(flags["starts"], int):
            mixed = mix(blocks) if flags["starts"] else mixed
        else:
            mixed = lax.cond(flags["starts"] > 0, mix, lambda _: mixed, blocks)
        return h, MixedStream(prefix, blocks, mixed)

    def plus(self, out: jax.Array) -> MixedStream:
        return self._replace(prefix=self.prefix + out)

    def for_ffn(self, layer: Any, flags: dict[str, Flag]) -> jax.Array:
        return self.prefix if self.blocks is None else layer.ffn_mix.merge(self.mixed, flags["ffn_site"], self.prefix)

    def leave(self, config: ModelConfig, head: Any) -> jax.Array:
        """What the final norm sees."""
        if self.blocks is None:
            return self.prefix
        return head.mix.merge(self.mixed, jnp.asarray(place(config, 2 * config.num_layers)), self.prefix)


def place(config: ModelConfig, site: Any) -> Any:
    """Of a site, counted through the model, among those that meet the same blocks."""
    return (site - 1) % (2 * (config.attn_res_block or 1))


def site_tables(config: ModelConfig) -> dict[str, np.ndarray]:
    """For each slot [J, P]: the places of its two sites, and the site after its attention."""
    layers = np.maximum(StackLayout(config).layer_table[0, 0], 0)
    tables = {
        "attn_site": place(config, 2 * layers),
        "ffn_site": place(config, 2 * layers + 1),
        "next_site": 2 * layers + 1,
    }
    return {name: table.astype(np.int32) for name, table in tables.items()}


def directions(config: ModelConfig, params: lm.Params) -> jax.Array:
    """Of all sites of the model in order, and zeros up to a whole block more; [sites, D]. Empty for plain residuals."""
    if not config.num_blocks:
        return jnp.zeros((0, config.hidden_size))
    slots = enumerate(config.pattern)
    parts = [(kind, params["chunks"][str(p)], name) for p, kind in slots for name in ("attn_mix", "ffn_mix")]
    of_slots = jnp.stack(
        [lm.bind(config, kind, part[name], inside=name).direction[0, 0] for kind, part, name in parts], 1
    )
    j, p = np.array([StackLayout(config).position(layer)[2:] for layer in range(config.num_layers)]).T
    of_layers = of_slots.reshape(-1, len(config.pattern), 2, config.hidden_size)[j, p].reshape(-1, config.hidden_size)
    exit_site = lm.bind(config, "head", params["head"]["mix"], inside="mix").direction[None]
    return jnp.concatenate([of_layers, exit_site, jnp.zeros((2 * (config.attn_res_block or 0), config.hidden_size))])
