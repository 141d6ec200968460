"""Pages: equal pieces of one array on the device, which hold latents of MLA or states of KDA.

B sequences, T tokens, S places of a page, n pages, m pages of a state, W words of 32 bits, H heads, K key dim, V value
dim, C channels before the convolution.

A page has one part for each MLA layer. As a page of latents it holds the same tokens of all MLA layers. As a page of
states, each part holds heads of one KDA layer, one after the other: KDA layers fill the parts in groups, and a sequence
holds m pages for each group. So there is one pool with one allocator (as `k3jax.serve.cache` counts it).
Pages are words, not numbers: a copy moves them bit by bit, whatever they hold. K3 report, serving.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from k3jax.configs import KDA, MLA, ModelConfig
from k3jax.parallel.layout import StackLayout

WORD = 4  # bytes
DTYPES = ("bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """What is where in a page.

    tokens: of a page of latents. dtype: of latents and of convolution tails; states are float32 (float64 with it).
    Raises ValueError for a page that holds no head of a state, or a dtype that does not compute.
    """

    config: ModelConfig
    tokens: int
    dtype: str = "float32"

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: pages hold one of {', '.join(DTYPES)}")
        least = max(1, -(-self.head_words // self.latent_words) if KDA in self.config.layer_kinds else 1)
        if self.tokens < least:
            raise ValueError(
                f"tokens={self.tokens}: a page must have room for a head's state, which is that of {least} tokens; "
                f"give pages at least {least}"
            )

    @property
    def parts(self) -> int:
        """Of a page: MLA layers."""
        return self.config.layer_kinds.count(MLA)

    @property
    def latent_size(self) -> int:
        """Numbers of a token and layer of MLA."""
        return self.config.kv_lora_rank + self.config.qk_rope_dim

    @property
    def latent_words(self) -> int:
        """Of a token and layer of MLA."""
        return words_of(self.latent_size, self.dtype)

    @property
    def state_dtype(self) -> np.dtype:
        return jnp.promote_types(self.dtype, jnp.float32)

    @property
    def state_shape(self) -> tuple[int, int]:
        """Of a head."""
        return self.config.kda_key_dim, self.config.kda_value_dim

    @property
    def tail_shape(self) -> tuple[int, int]:
        """Of a head: W − 1 rows before the convolution, channels of q, k and v."""
        return self.config.conv_width - 1, 2 * self.config.kda_key_dim + self.config.kda_value_dim

    @property
    def head_words(self) -> int:
        """Of a head's state and tail."""
        return words_of(math.prod(self.state_shape), self.state_dtype) + words_of(
            math.prod(self.tail_shape), self.dtype
        )

    @property
    def words(self) -> int:
        """Of a part of a page."""
        return self.tokens * self.latent_words

    @property
    def page_bytes(self) -> int:
        return self.parts * self.words * WORD

    @property
    def groups(self) -> int:
        """Groups of KDA layers: as many in each as a page has parts, fewer in the last."""
        return -(-self.config.layer_kinds.count(KDA) // self.parts)

    @property
    def pages_per_state(self) -> int:
        """m: pages of one group's state."""
        return -(-self.config.num_heads // (self.words // self.head_words))

    @property
    def heads_per_page(self) -> int:
        return -(-self.config.num_heads // self.pages_per_state)

    def pages_for(self, tokens: int) -> int:
        """Pages of latents that so many tokens need."""
        return -(-tokens // self.tokens)

    @functools.cached_property
    def tables(self) -> dict[str, np.ndarray]:
        """For each slot of a layer [J, P]: its part of a page, and of KDA its group; part −1 for no layer."""
        layers = StackLayout(self.config).layer_table[0, 0]
        kinds, part, group = self.config.layer_kinds, np.full_like(layers, -1), np.zeros_like(layers)
        for at, layer in np.ndenumerate(layers):
            if layer >= 0:
                before = kinds[:layer].count(kinds[layer])
                part[at], group[at] = before % self.parts, before // self.parts
        return {"part": part.astype(np.int32), "group": group.astype(np.int32)}

    # ---- on the device: pages that are −1, and part −1, are neither read nor written ---------------------------------------

    def read_state(
        self, pool: UInt32[Array, "parts pages W"], part: Int[Array, ""], pages_Bm: Int[Array, "B m"]
    ) -> tuple[Float[Array, "B H K V"], Float[Array, "B tail H C"]]:
        """A layer's state and tail; zeros where there is no page."""
        B, m = pages_Bm.shape
        words = _read(pool, part, pages_Bm)[..., : self.heads_per_page * self.head_words]
        words = words.reshape(B, m * self.heads_per_page, self.head_words)[:, : self.config.num_heads]
        split = words_of(math.prod(self.state_shape), self.state_dtype)
        state_BHKV = from_words(words[..., :split], self.state_dtype, self.state_shape)
        return state_BHKV, jnp.swapaxes(from_words(words[..., split:], self.dtype, self.tail_shape), 1, 2)

    def write_state(
        self,
        pool: UInt32[Array, "parts pages W"],
        part: Int[Array, ""],
        pages_Bm: Int[Array, "B m"],
        state_BHKV: Float[Array, "B H K V"],
        tail_BWHC: Float[Array, "B tail H C"],
    ) -> UInt32[Array, "parts pages W"]:
        (B, m), H = pages_Bm.shape, self.config.num_heads
        heads = state_BHKV, jnp.swapaxes(tail_BWHC, 1, 2).astype(self.dtype)
        words = jnp.concatenate([to_words(a.reshape(B, H, -1)) for a in heads], -1)
        words = jnp.pad(words, ((0, 0), (0, m * self.heads_per_page - H), (0, 0)))
        pages = pages_Bm.ravel()
        return _write(pool, part, pages, jnp.zeros_like(pages), words.reshape(B * m, -1))

    def read_latents(
        self, pool: UInt32[Array, "parts pages W"], part: Int[Array, ""], pages_B: Int[Array, " B"]
    ) -> Float[Array, "B S L"]:
        """All latents of a page; zeros where there is none, anything where nothing is written yet."""
        words = _read(pool, part, pages_B).reshape(len(pages_B), self.tokens, self.latent_words)
        return from_words(words, self.dtype, (self.latent_size,))

    def write_latents(
        self,
        pool: UInt32[Array, "parts pages W"],
        part: Int[Array, ""],
        pages_BT: Int[Array, "B T"],
        places_BT: Int[Array, "B T"],
        latents_BTL: Float[Array, "B T L"],
    ) -> UInt32[Array, "parts pages W"]:
        """The latent of each token in its page, at its place there."""
        words = to_words(latents_BTL.astype(self.dtype)).reshape(-1, self.latent_words)
        return _write(pool, part, pages_BT.ravel(), (places_BT * self.latent_words).ravel(), words)


def _read(pool, part, pages):
    return pool.at[_or_nowhere(part, pool.shape[0]), _or_nowhere(pages, pool.shape[1])].get(mode="fill", fill_value=0)


def _write(pool, part, pages_N, starts_N, words_NW):
    """Words into pages, from a word on, in place."""
    part = jnp.broadcast_to(_or_nowhere(part, pool.shape[0]), pages_N.shape)
    at = jnp.stack([part, _or_nowhere(pages_N, pool.shape[1]), starts_N], -1)
    windows = lax.ScatterDimensionNumbers((1,), (0, 1), (0, 1, 2))
    return lax.scatter(pool, at, words_NW, windows, mode=lax.GatherScatterMode.FILL_OR_DROP)


def _or_nowhere(index, size: int):
    """−1 is the last one for an array; here it is none."""
    return jnp.where(index < 0, size, index)


def copy_pages(
    pool: UInt32[Array, "parts pages W"], sources: Int[Array, " copies"], targets: Int[Array, " copies"]
) -> UInt32[Array, "parts pages W"]:
    """Every target as a copy of its source, zeros for source −1; target −1: nowhere. All are read before any is written."""
    words = pool.at[:, _or_nowhere(sources, pool.shape[1])].get(mode="fill", fill_value=0)
    return pool.at[:, _or_nowhere(targets, pool.shape[1])].set(words, mode="drop")


def words_of(numbers: int, dtype: jax.typing.DTypeLike) -> int:
    return -(-numbers * np.dtype(dtype).itemsize // WORD)


def to_words(x: Float[Array, "*batch n"]) -> UInt32[Array, "*batch W"]:
    """The same bits; an odd number of 16-bit ones gets a zero more."""
    size = x.dtype.itemsize
    if size < WORD:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % (WORD // size))])
        x = x.reshape(*x.shape[:-1], -1, WORD // size)
    words = lax.bitcast_convert_type(x, jnp.uint32)
    return words.reshape(*words.shape[:-2], -1) if size > WORD else words


def from_words(
    words: UInt32[Array, "*batch W"], dtype: jax.typing.DTypeLike, shape: tuple[int, ...]
) -> Float[Array, "..."]:
    """The inverse of `to_words`, [*batch, *shape]."""
    size, lead = np.dtype(dtype).itemsize, words.shape[:-1]
    if size > WORD:
        words = words.reshape(*lead, -1, size // WORD)
    numbers = lax.bitcast_convert_type(words, dtype).reshape(*lead, -1)
    return numbers[..., : math.prod(shape)].reshape(*lead, *shape)
