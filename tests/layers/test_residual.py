"""The exact order of block attention residuals: it equals a plain transcription, and no wrong order does."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import model as lm
from k3jax.configs import ModelConfig
from k3jax.layers.common import Tokens
from k3jax.layers.residual import DepthMix
from k3jax.model import Stream
from k3jax.parallel.layout import StackLayout

D, T, BLOCK = 6, 5, 3
TRAPS = [
    "mix over the new block set at the boundary's attention site",
    "store the mixed vector as the block",
    "store the block after attention",
    "skip the FFN-site mix in layer 0",
    "mix normalised values",
    "skip the exit mix",
]


class Site(NamedTuple):
    query: np.ndarray
    norm: np.ndarray


class Weights(NamedTuple):
    attn_site: list[Site]
    ffn_site: list[Site]
    exit_site: Site
    attn: list[np.ndarray]
    ffn: list[np.ndarray]


def weights(layers: int) -> Weights:
    random = np.random.default_rng(0)
    site = lambda: Site(random.normal(size=D), 1 + 0.3 * random.normal(size=D))
    matrix = lambda: random.normal(size=(D, D)) / D**0.5
    each = lambda make: [make() for _ in range(layers)]
    return Weights(each(site), each(site), site(), each(matrix), each(matrix))


def normalise(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def transcription(w: Weights, x: np.ndarray, wrong: str = "") -> np.ndarray:
    """The steps of the specification in float64 numpy; `wrong` makes one of the known mistakes."""

    def mix(site, prefix, blocks):
        sources = np.stack([*blocks, prefix])
        scores = (normalise(sources) * site.norm) @ site.query
        share = np.exp(scores - scores.max(0))
        share /= share.sum(0)
        values = normalise(sources) if wrong == "mix normalised values" else sources
        return (share[..., None] * values).sum(0)

    prefix, blocks = x, []
    for layer in range(len(w.attn)):
        starts = layer % BLOCK == 0
        entering = prefix
        if starts and wrong == "mix over the new block set at the boundary's attention site":
            h = mix(w.attn_site[layer], prefix, [*blocks, prefix]) if blocks else prefix
        else:
            h = mix(w.attn_site[layer], prefix, blocks) if blocks else prefix
        attention = np.tanh(normalise(h) @ w.attn[layer])
        if starts:
            stored = entering
            if wrong == "store the mixed vector as the block":
                stored = h
            if wrong == "store the block after attention":
                stored = entering + attention
            blocks = [*blocks, stored]
            prefix = attention
        else:
            prefix = prefix + attention
        skipped = layer == 0 and wrong == "skip the FFN-site mix in layer 0"
        h = prefix if skipped else mix(w.ffn_site[layer], prefix, blocks)
        prefix = prefix + np.tanh(normalise(h) @ w.ffn[layer])
    return prefix if wrong == "skip the exit mix" else mix(w.exit_site, prefix, blocks)


class Toy:
    """A layer whose attention and FFN are matrices, with the real mixes and norms."""

    def __init__(self, layer, w: Weights):
        self.attn_mix, self.ffn_mix = mix_module(w.attn_site[layer]), mix_module(w.ffn_site[layer])
        self.attn_norm = self.ffn_norm = lambda x: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        self.attn = lambda h, tokens: (jnp.tanh(h @ w.attn[layer]), None)
        self.moe = lambda h, bias, tokens: (jnp.tanh(h @ w.ffn[layer]), lm.no_stats(CONFIG))


def mix_module(site: Site) -> DepthMix:
    mix = DepthMix(D, 1e-5)
    mix.query[...], mix.norm.weight[...] = jnp.asarray(site.query, jnp.float32), jnp.asarray(site.norm, jnp.float32)
    return mix


CONFIG = ModelConfig(
    num_layers=8, pattern="KM", attn_res_block=BLOCK, hidden_size=D, dense_layers=0, num_experts=4, balance_bins=4
)


def library(w: Weights, x: np.ndarray, layout: StackLayout) -> np.ndarray:
    """The same through the model's own layer loop, flags and head mix."""

    @jax.jit
    def run(x, flags):
        prefix, nothing = x[None].astype(jnp.float32), jnp.zeros((1, T), jnp.int32)
        tokens = Tokens(nothing, nothing)
        stream = Stream(prefix, jnp.zeros((CONFIG.num_blocks, *prefix.shape)))
        for layer in range(CONFIG.num_layers):
            s, v, j, p = layout.position(layer)
            slot = layout.flags(p, {name: table[s, v, j] for name, table in flags.items()})
            stream, *_ = lm.run_layer(CONFIG, Toy(layer, w), {}, stream, jnp.zeros(4), slot, tokens)
        return mix_module(w.exit_site)(stream.prefix, stream.blocks, CONFIG.num_blocks)[0]

    return np.asarray(run(x, {name: jnp.asarray(table) for name, table in layout.flag_tables.items()}))


@pytest.fixture(scope="module")
def problem():
    return weights(CONFIG.num_layers), np.random.default_rng(1).normal(size=(T, D))


@pytest.mark.quick
@pytest.mark.parametrize(("stages", "virtual"), [(1, 1), (2, 2)])
def test_order_equals_the_specification(problem, stages, virtual):
    w, x = problem
    got = library(w, x, StackLayout(CONFIG, stages, virtual))
    np.testing.assert_allclose(got, transcription(w, x), atol=1e-5)  # float32 against float64


@pytest.mark.quick
@pytest.mark.parametrize("wrong", TRAPS)
def test_every_wrong_order_is_noticed(problem, wrong):
    w, x = problem
    got = library(w, x, StackLayout(CONFIG))
    assert np.abs(got - transcription(w, x, wrong)).max() > 1e-2


@pytest.mark.quick
def test_mix_starts_as_the_mean_and_ignores_blocks_not_made_yet():
    mix = DepthMix(D, 1e-5)
    x = jax.random.normal(jax.random.key(0), (4, 1, T, D))
    prefix, blocks = x[0], x[1:].at[2].set(jnp.nan)
    np.testing.assert_allclose(mix(prefix, blocks, 2), (x[0] + x[1] + x[2]) / 3, rtol=1e-6)
    blocks = blocks.at[2].set(1e6)
    np.testing.assert_allclose(
        jax.jit(lambda p, b, n: mix(p, b, n))(prefix, blocks, jnp.int32(2)), mix(prefix, blocks, 2), rtol=1e-6
    )
    np.testing.assert_array_equal(mix(prefix, blocks, 0), prefix)
