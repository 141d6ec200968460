"""Hugging Face directories made without their library: documents as released, tensors with random values."""

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors.numpy

from k3jax.configs import ModelConfig, get
from k3jax.interop.huggingface import config_to_hf
from k3jax.interop.huggingface.tensors import Style, tensors

KIMI_LINEAR = dataclasses.replace(
    get("kimi_linear_48b"),
    name="kimi",
    vocab_size=24,
    hidden_size=12,
    num_layers=4,
    num_heads=2,
    pattern="KKM",
    kda_key_dim=6,
    kda_value_dim=6,
    gate_rank=6,
    output_gate_rank=6,
    kv_lora_rank=8,
    qk_nope_dim=4,
    qk_rope_dim=2,
    v_head_dim=5,
    dense_width=16,
    num_experts=4,
    experts_per_token=2,
    expert_width=7,
)
K3 = dataclasses.replace(
    KIMI_LINEAR,
    name="k3 like",
    gate_lower_bound=-5.0,
    output_gate_rank=None,
    q_lora_rank=9,
    mla_output_gate=True,
    activation="situ",
    shared_experts=2,
    latent_size=10,
    routed_scaling=1.0,
    attn_res_block=2,
)
FUSED = Style(moe="mlp", fused_experts=True, fused_conv=True, forget_gate="forget_gate.")
CASES = {
    "kimi linear as released": (KIMI_LINEAR, Style()),
    "kimi linear as transformers saves it": (KIMI_LINEAR, Style(dense="block_sparse_moe")),
    "kimi linear as transformers computes": (KIMI_LINEAR, FUSED),
    "no shared experts": (dataclasses.replace(KIMI_LINEAR, shared_experts=0), Style()),
    "no tensors for no shared experts": (dataclasses.replace(KIMI_LINEAR, shared_experts=0), Style(empty=False)),
    "no dense layer": (dataclasses.replace(KIMI_LINEAR, dense_layers=0), Style()),
    "tied": (KIMI_LINEAR, Style(tied=True)),
    "k3, A_log padded": (K3, Style(prefix="language_model.", a_log_shape=(6,))),
    "k3, fused": (K3, dataclasses.replace(FUSED, a_log_shape=(2,))),
}


def values(config: ModelConfig, style: Style, seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor: bfloat16, but for what is stored in float32."""
    random = np.random.default_rng(seed)
    fp32 = ("A_log", "dt_bias", "bias", "o_norm.weight")
    made = {}
    for tensor in tensors(config, style):
        dtype = np.float32 if tensor.name.endswith(fp32) else ml_dtypes.bfloat16
        made[tensor.name] = random.normal(size=tensor.shape).astype(dtype)
    return made


def write(path: Path, config: ModelConfig, style: Style = Style(), files: int = 2) -> dict[str, np.ndarray]:  # noqa: B008
    """A directory with this model in this style, in several files; its tensors."""
    path.mkdir(parents=True)
    document = config_to_hf(config)
    document.get("text_config", document)["tie_word_embeddings"] = style.tied
    (path / "config.json").write_text(json.dumps(document))
    made = values(config, style)
    names = np.array_split(list(made), files)
    where = {}
    for number, part in enumerate(names, 1):
        file = f"model-{number:05}-of-{files:05}.safetensors"
        where |= dict.fromkeys(part.tolist(), file)
        safetensors.numpy.save_file({name: made[name] for name in part.tolist()}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return made


def read(path: Path) -> dict[str, np.ndarray]:
    made = {}
    for file in sorted(path.glob("*.safetensors")):
        made |= safetensors.numpy.load_file(file)
    return made


def same_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value.dtype, value.shape) == (other[name].dtype, other[name].shape), name
        assert value.tobytes() == other[name].tobytes(), name
