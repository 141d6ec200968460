"""How MLA pages and KDA states share one pool: pages equal in bytes, counted in tokens here and in heads there.

A page has one slot per MLA layer. As a KV page it holds `page_tokens` tokens of every MLA layer. As part of a state, each
slot holds some heads of one KDA layer: the KDA layers fill the slots in groups, and a state takes `pages_per_state` pages
in each group. So one allocator, one page table and one free queue serve both. K3 report, section on serving.
"""

from __future__ import annotations

import dataclasses

from k3jax.configs import KDA, MLA, ModelConfig

FLOAT32_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Grid:
    """Columns of `unit` tokens of one kind of cached thing. Each kind counts in its own unit, and no other's."""

    name: str
    unit: int
    width: int
    """Columns that exist."""

    def complete(self, tokens: int) -> int:
        """Columns that `tokens` fill."""
        return tokens // self.unit

    def column(self, boundary: int) -> int:
        """The column whose last token may be token boundary − 1. Raises ValueError outside the table."""
        column = (boundary - 1) // self.unit
        if boundary < 1 or column >= self.width:
            raise ValueError(
                f"boundary {boundary} lies outside the {self.name} table: {self.width} columns of {self.unit} tokens"
            )
        return column

    def boundaries(self, after: int, upto: int) -> range:
        """Multiples of the unit in (after, upto]."""
        return range((after // self.unit + 1) * self.unit, upto + 1, self.unit)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """Sizes of pages and states on one device. Counts in tokens, layers and heads; sizes in bytes.

    Raises ValueError for numbers that do not fit each other, naming them.
    """

    hash_unit: int
    """Tokens between boundaries that can be named."""
    page_tokens: int
    """Tokens of a KV page (the physical block)."""
    chunk_size: int
    """KDA's chunk. Its edges are absolute, so S_b does not depend on how a prefill was split: it must divide the unit."""
    kv_layers: int
    kda_layers: int
    heads: int
    """KDA heads on this device."""
    kv_token_bytes: int
    """Of one token in one MLA layer: the latent and the key dims that all heads share."""
    head_bytes: int
    """Of one head's state in one layer, convolution tails included."""
    record_token_bytes: int
    """Of one token's records (k, g, u) in one head of one layer."""
    tail_bytes: int
    """Of one head's convolution tails in one layer."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), 0 if field.name == "tail_bytes" else 1
            if value < least:
                raise ValueError(f"geometry.{field.name}={value}: must be at least {least}")
        if self.hash_unit % self.chunk_size:
            raise ValueError(
                f"geometry.chunk_size={self.chunk_size} does not divide hash_unit={self.hash_unit}: a state is only exact "
                f"at an edge of its chunks; choose a hash unit that is a multiple of the chunk"
            )
        if self.page_tokens % self.hash_unit:
            raise ValueError(
                f"geometry.page_tokens={self.page_tokens} is no multiple of hash_unit={self.hash_unit}: "
                f"a page must end where a hash does"
            )
        if self.slot_bytes < self.head_bytes:
            raise ValueError(
                f"geometry.page_tokens={self.page_tokens}: a layer's {self.slot_bytes} bytes of a page hold no KDA head of "
                f"{self.head_bytes} bytes; needs at least {-(-self.head_bytes // self.kv_token_bytes)} tokens"
            )

    @classmethod
    def for_model(
        cls,
        config: ModelConfig,
        *,
        hash_unit: int = 512,
        chunk_size: int = 64,
        page_tokens: int | None = None,
        kv_bytes: int = 2,
        conv_bytes: int = 2,
        head_shards: int = 1,
    ) -> Geometry:
        """The geometry of a model. Bytes are those of one element; states and records are float32.

        page_tokens None: the fewest, in hash units, whose page holds a layer's whole state.
        head_shards: over how many devices the heads are split; latents are whole on each.
        """
        if config.num_heads % head_shards:
            raise ValueError(f"head_shards={head_shards} does not divide the model's {config.num_heads} heads")
        heads, K, V = config.num_heads // head_shards, config.kda_key_dim, config.kda_value_dim
        kv_token_bytes = (config.kv_lora_rank + config.qk_rope_dim) * kv_bytes
        tail_bytes = (config.conv_width - 1) * (2 * K + V) * conv_bytes
        head_bytes = K * V * FLOAT32_BYTES + tail_bytes
        if page_tokens is None:
            page_tokens = -(-heads * head_bytes // (kv_token_bytes * hash_unit)) * hash_unit
        return cls(
            hash_unit=hash_unit,
            page_tokens=page_tokens,
            chunk_size=chunk_size,
            kv_layers=config.layer_kinds.count(MLA),
            kda_layers=config.layer_kinds.count(KDA),
            heads=heads,
            kv_token_bytes=kv_token_bytes,
            head_bytes=head_bytes,
            record_token_bytes=(2 * K + V) * FLOAT32_BYTES,
            tail_bytes=tail_bytes,
        )

    @property
    def slot_bytes(self) -> int:
        """Of one layer's part of a page."""
        return self.page_tokens * self.kv_token_bytes

    @property
    def page_bytes(self) -> int:
        return self.kv_layers * self.slot_bytes

    @property
    def groups(self) -> int:
        """KDA groups: as many layers in each as a page has slots; the last may have fewer."""
        return -(-self.kda_layers // self.kv_layers)

    @property
    def pages_per_state(self) -> int:
        """Pages of one group's state."""
        return -(-self.heads // (self.slot_bytes // self.head_bytes))

    @property
    def heads_per_page(self) -> int:
        """Heads of a layer that lie in one page, one after the other; the last page may have fewer."""
        return -(-self.heads // self.pages_per_state)

    @property
    def state_pages(self) -> int:
        """Pages of a whole state, all groups."""
        return self.groups * self.pages_per_state

    @property
    def state_waste(self) -> float:
        """Share of a state's pages that stays empty."""
        return 1 - self.kda_layers * self.heads * self.head_bytes / (self.state_pages * self.page_bytes)

    def record_pages(self, tokens: int) -> int:
        """Pages that the records of `tokens` tokens take, all groups, with the convolution tails at their end."""
        return self.groups * -(-self.heads * (tokens * self.record_token_bytes + self.tail_bytes) // self.slot_bytes)

    def kv_pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def align(self, tokens: int) -> int:
        """The last boundary that can be named, at or before `tokens`."""
        return tokens // self.hash_unit * self.hash_unit
