"""A model with every part of K3, as small as it goes, and batches with what breaks others: documents, masks, padding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from k3jax import model as lm
from k3jax.configs import ModelConfig
from k3jax.model import Batch
from k3jax.parallel.layout import StackLayout
from k3jax.train.config import StepConfig
from k3jax.train.step import TrainStep, make_train_step
from meshes import MeshSpec

MODEL = ModelConfig(
    name="tiny",
    vocab_size=32,
    hidden_size=16,
    num_layers=7,  # K M K M K M M: four groups, one inactive slot, MLA last twice
    num_heads=2,
    pattern="KM",
    kda_key_dim=8,
    kda_value_dim=12,
    gate_rank=4,
    q_lora_rank=8,
    kv_lora_rank=12,
    qk_nope_dim=6,
    qk_rope_dim=4,
    v_head_dim=10,
    dense_width=24,
    num_experts=8,
    experts_per_token=2,
    shared_experts=1,
    expert_width=12,
    latent_size=12,
    attn_res_block=3,  # blocks begin in different slots of a group: traced flags
)

# A schedule by name: choosing one means to trace the step more than once.
STEP = StepConfig(model=MODEL, global_batch=8, seq_len=64, microbatches=2, schedule="interleaved_1f1b", steps=10)


def batch(config: StepConfig, seed: int = 0) -> Batch:
    """Several documents a sequence, one of a single token; the last sequences end in padding; uneven loss masks."""
    random = np.random.default_rng(seed)
    N, T = config.global_batch, config.seq_len
    tokens = random.integers(0, config.model.vocab_size, (N, T)).astype(np.int32)
    starts = np.zeros((N, T), np.int32)
    starts[:, [T // 8, T // 8 + 1, T // 2]] = 1
    starts[::2, T // 3] = 1
    segments = np.cumsum(starts, 1).astype(np.int32)
    targets = np.roll(tokens, -1, 1)
    targets[:, -1] = -1
    targets[:, :-1][segments[:, 1:] != segments[:, :-1]] = -1
    tokens[N // 2 :, -5:] = -1
    segments[N // 2 :, -5:] = segments.max() + 1
    targets[N // 2 :, -6:] = -1
    targets[0, 1:] = -1  # a shard with almost nothing to learn from
    return Batch(tokens, targets, segments)


def skewed_balance(config: ModelConfig, layout: StackLayout):
    """A selection bias that sends most tokens to two experts of one rank."""
    skew = jnp.zeros(config.num_experts).at[:2].set(0.4)
    return jax.tree.map(lambda a: a + skew, lm.init_balance(config, layout))


def train_step(mesh: str, config: StepConfig = STEP, **changes) -> TrainStep:
    return make_train_step(dataclasses.replace(config, **changes), MeshSpec.parse(mesh).build())


def by_layer(config: ModelConfig, layout: StackLayout, tree) -> dict[str, np.ndarray]:
    """{dotted name with the global layer: value} of a stacked tree, whatever its layout."""
    named = {}
    for layer in range(config.num_layers):
        s, v, j, p = layout.position(layer)
        for path, a in jax.tree_util.tree_leaves_with_path(tree["chunks"][str(p)]):
            named[f"{layer}.{jax.tree_util.keystr(path, simple=True, separator='.')}"] = np.asarray(a)[s, v, j]
    for part in ("embed", "dense", "head"):
        for path, a in jax.tree_util.tree_leaves_with_path(tree[part]):
            named[f"{part}.{jax.tree_util.keystr(path, simple=True, separator='.')}"] = np.asarray(a)
    return named
