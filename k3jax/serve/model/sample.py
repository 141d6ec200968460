"""Choosing the next token. What is drawn depends on seed, request and position, never on where in a batch a row stands.

B rows, W vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32


@dataclasses.dataclass(frozen=True)
class Sampler:
    """How one request's tokens are chosen.

    temperature 0: the most likely token, the lower id of equals. top_p: only the most likely tokens that together reach this
    probability, the first one always. seed, request: whole numbers from 0 up to 2^64 − 1.
    Raises ValueError for what lies outside.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    request: int = 0

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature}: must be 0 (the most likely token) or more, and finite")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must be above 0 and at most 1")
        for name in ("seed", "request"):
            if not 0 <= getattr(self, name) < 1 << 64:
                raise ValueError(f"{name}={getattr(self, name)}: must be a whole number from 0 to 2^64 - 1")


class Draws(NamedTuple):
    """The samplers of a batch, and the position of the token that each draws next."""

    temperature_B: Float[Array, " B"]
    top_p_B: Float[Array, " B"]
    words_Bw: UInt32[Array, "B w"]
    """Seed, request and position, in words of 32 bits."""


def draws(samplers: Sequence[Sampler], positions: Sequence[int]) -> Draws:
    """Of the rows in their order; position: of the token to be drawn, counted from the prompt's first."""
    split = lambda n: (n & 0xFFFFFFFF, n >> 32)
    words = [(*split(s.seed), *split(s.request), at) for s, at in zip(samplers, positions, strict=True)]
    as_float = lambda name: jnp.asarray([getattr(s, name) for s in samplers], jnp.float32)
    return Draws(as_float("temperature"), as_float("top_p"), jnp.asarray(np.asarray(words, np.uint32).reshape(-1, 5)))


@jax.jit
def sample(logits_BW: Float[Array, "B W"], draws: Draws) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Each row's token, and its log probability under the model (temperature 1, all tokens), in nats.

    Gumbel's maximum: the token with the largest logit/temperature + noise, among those that top_p leaves.
    """

    def one(logits_W, temperature, top_p, words_w):
        logits_W = logits_W.astype(jnp.promote_types(logits_W.dtype, jnp.float32))
        key = jax.random.key(0)
        for word in words_w:
            key = jax.random.fold_in(key, word)
        scaled_W = logits_W / jnp.where(temperature > 0, temperature, 1)
        order_W = jnp.argsort(-scaled_W, stable=True)
        shares_W = jax.nn.softmax(scaled_W)[order_W]
        before_W = jnp.cumsum(shares_W) - shares_W
        kept_W = jnp.zeros_like(order_W, bool).at[order_W].set((before_W < top_p).at[0].set(True))
        noisy_W = jnp.where(kept_W, scaled_W + jax.random.gumbel(key, scaled_W.shape, scaled_W.dtype), -jnp.inf)
        token = jnp.where(temperature > 0, jnp.argmax(noisy_W), jnp.argmax(logits_W)).astype(jnp.int32)
        return token, jax.nn.log_softmax(logits_W)[token]

    return jax.vmap(one)(logits_BW, *draws)
