"""A served model with every part of K3, weights far from initial ones, and sequences that hold pages of a small pool."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import tiny

from k3jax import model as lm
from k3jax.serve.model import Buckets, PageLayout, Row, ServingModel, Weights, blocks
from k3jax.serve.model.weights import abstract_weights

# Norms of almost nothing would amplify rounding: large epsilons bound it, and a wrong one shows.
CONFIG = dataclasses.replace(tiny.MODEL, norm_eps=0.03, latent_norm_eps=0.2, balance_bins=8)
PAGES = PageLayout(CONFIG, tokens=16)  # room for one of two heads: a state is two pages
BLOCK, CHUNK, HASH_UNIT = 32, 16, 64
BUCKETS = Buckets(batch=(1, 4), pages=(10,))
T = 100  # of the longest prompt
POOL = 40
VECTORS = ("query", "weight", "a_log", "gate_bias", "q_conv", "k_conv", "v_conv")
NOT_A_NUMBER = np.uint32(0x7FC07FC0)  # in float32 and in both bfloat16 halves


def weights(config=CONFIG, seed=0) -> Weights:
    """Even signals through matrices, and every vector away from where it begins: queries over depth begin as zeros."""
    random = np.random.default_rng(seed)

    def leaf(path, a):
        name = path[-1].key
        scale = 0.5 if name in VECTORS else 0.5 * a.shape[-2] ** -0.5  # more would amplify rounding
        if name == "weight" and path[-2].key != "head":  # of a norm
            return jnp.asarray(random.uniform(0.4, 2, a.shape), jnp.float32)
        return jnp.asarray(scale * random.normal(size=a.shape), jnp.float32)

    params, bias = abstract_weights(config)
    params = jax.tree_util.tree_map_with_path(leaf, params)
    return Weights(params, jax.tree.map(lambda a: jnp.asarray(0.1 * random.normal(size=a.shape), jnp.float32), bias))


def serving(given: Weights, **changes) -> ServingModel:
    how = dict(pages=PAGES, block=BLOCK, hash_unit=HASH_UNIT, chunk_size=CHUNK, buckets=BUCKETS) | changes
    return ServingModel(given, **how)


@functools.partial(jax.jit, static_argnums=(0, 3))
def training_logits(config, given: Weights, tokens_BT, dtype="float32"):
    """Of the training forward, teacher-forced."""
    ids = jnp.zeros_like(tokens_BT)
    return lm.plain_logits(config, *given, lm.Batch(tokens_BT, tokens_BT, ids), dtype=dtype)


def dirty_pool(model: ServingModel, pages: int = POOL):
    return model.empty_pool(pages) + NOT_A_NUMBER


class Holder:
    """Pages for sequences, handed out in an order that is not sorted, each to one."""

    def __init__(self, pages: int = POOL, seed: int = 0, layout: PageLayout = PAGES):
        self.free = np.random.default_rng(seed).permutation(np.arange(1, pages)).tolist()
        self.layout = layout

    def take(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]

    def sequence(self, length: int = T, **how) -> "Held":
        states = [self.take(self.layout.pages_per_state) for _ in range(self.layout.groups)]
        return Held(self.take(self.layout.pages_for(length)), states, how)


@dataclasses.dataclass(frozen=True)
class Held:
    latents: list[int]
    states: list[list[int]]
    how: dict

    def row(self, tokens, start, end, **more) -> Row:
        return Row(tokens[start:end].tolist(), start, self.latents, self.states, **self.how, **more)

    @property
    def all(self) -> list[int]:
        return [*self.latents, *(page for group in self.states for page in group)]


def block(model, pool, held, tokens, first, last, **how):
    """One block of one sequence: the logits after each of its tokens, and the pool."""
    step, pool = model.prefill(pool, [held.row(tokens, first, last, **how)], every_logit=True)
    return np.asarray(step.logits)[step.at[0], : last - first], pool


def prefill(model, pool, held, tokens, start=0, end=None):
    """All blocks of one sequence: the logits of each, and the pool."""
    logits = []
    for first, last in blocks(start, len(tokens) if end is None else end, BLOCK):
        of_block, pool = block(model, pool, held, tokens, first, last)
        logits.append(of_block)
    return logits, pool


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(100 + seed).integers(0, CONFIG.vocab_size, length).astype(np.int32)


def assert_close(got, want, tolerance):
    """Relative to the largest logit."""
    got, want = np.asarray(got), np.asarray(want)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())
