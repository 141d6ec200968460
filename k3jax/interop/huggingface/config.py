"""config.json to and from `ModelConfig`, for `kimi_linear` and the text model of `kimi_k3`.

A field either has a counterpart here, or has one value that this model computes with, or cannot change what the model
computes. Everything else is refused by name: a field that is not understood may be the one that matters.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from k3jax.configs import KDA, MLA, ModelConfig

SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "rms_norm_eps": "norm_eps",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_dim",
    "qk_rope_head_dim": "qk_rope_dim",
    "v_head_dim": "v_head_dim",
    "intermediate_size": "dense_width",
    "num_experts": "num_experts",
    "num_experts_per_token": "experts_per_token",
    "num_shared_experts": "shared_experts",
    "moe_intermediate_size": "expert_width",
    "routed_scaling_factor": "routed_scaling",
}
"""Fields that must be there, by their names here."""

DEFAULTS = {
    "initializer_range": ("init_range", 0.02),
    "q_lora_rank": ("q_lora_rank", None),
    "mla_use_output_gate": ("mla_output_gate", False),
    "routed_expert_hidden_size": ("latent_size", None),
    "attn_res_block_size": ("attn_res_block", None),
}
"""Fields that may be absent: their names here, and what absence means."""

ALIASES = {
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
}

ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_dropout": (0,),
    "mla_use_nope": (True,),
    "mla_use_rope": (False,),
    "latent_moe_use_norm": (True,),
    "moe_layer_freq": (1,),
    "moe_renormalize": (True,),
    "moe_router_activation_func": ("sigmoid",),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "num_expert_group": (1,),
    "topk_group": (1,),
    "num_nextn_predict_layers": (0,),
    "tie_word_embeddings": (False, True),  # a tied head is filled from the embedding
    "model_type": ("kimi_linear", "kimi_k3"),
}
"""Fields that this model computes with one value of; absent or null is that value."""

INERT = set(
    "architectures auto_map dtype torch_dtype transformers_version bos_token_id eos_token_id pad_token_id use_cache "
    "max_position_embeddings model_max_length output_router_logits pretraining_tp head_dim qk_head_dim rope_theta "
    "rope_scaling rope_parameters use_grouped_topk _name_or_path media_placeholder_token_id "
    "output_attentions output_hidden_states return_dict use_return_dict".split()
)
"""Fields that cannot change logits: there are no positions to rotate, and one group of experts is no group."""

READ_APART = {"hidden_act", "activation_situ_beta", "activation_situ_linear_beta", "num_key_value_heads"}
LAYERS = {
    "layer_types", "mlp_layer_types", "first_k_dense_replace", "linear_attn_config",
    "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim",
}  # fmt: skip
LINEAR = {
    "kda_layers", "full_attn_layers", "head_dim", "num_heads", "short_conv_kernel_size", "gate_lower_bound",
    "use_full_rank_gate",
}  # fmt: skip


def text_fields(document: dict[str, Any]) -> dict[str, Any]:
    """The fields of the language model: `text_config` of a `kimi_k3` document, all of a `kimi_linear` one."""
    return document["text_config"] if isinstance(document.get("text_config"), dict) else document


def config_from_hf(document: dict[str, Any], *, name: str = "custom") -> ModelConfig:
    """The model that a config.json describes.

    Raises ValueError that names every field which is missing, unknown, or of a value that this model does not have.
    """
    fields, problems = renamed(text_fields(document))
    if text_fields(document) is not document:
        outer, more = renamed({key: value for key, value in document.items() if key != "text_config"})
        problems += more + refused(outer)
    linear = fields.get("linear_attn_config", {})
    problems += refused(fields)
    if isinstance(linear, dict):
        linear = {key: value for key, value in linear.items() if value is not None}
        problems += [f"linear_attn_config.{key} is not known" for key in sorted(set(linear) - LINEAR)]
    else:
        problems.append(f"linear_attn_config={brief(linear)} is not an object")
    problems += [f"{key} is missing" for key in SIZES if key not in fields]
    if problems:
        raise ValueError(f"config.json: {'; '.join(problems)}")

    values: dict[str, Any] = {ours: fields[key] for key, ours in SIZES.items()}
    values |= {ours: fields.get(key, absent) for key, (ours, absent) in DEFAULTS.items()}
    values |= activation_fields(fields)

    def of_linear(key: str, flat: str) -> int:
        value = linear.get(key, fields.get(flat))
        if value is None:
            raise ValueError(f"config.json: linear_attn_config.{key} is missing, and so is {flat}")
        return value

    width, heads = of_linear("head_dim", "linear_head_dim"), of_linear("num_heads", "linear_num_heads")
    for key, got in (("KDA heads", heads), ("num_key_value_heads", fields.get("num_key_value_heads"))):
        if got not in (None, values["num_heads"]):
            raise ValueError(
                f"config.json: {key} are {got}, num_attention_heads {values['num_heads']}: this model has one count"
            )
    full_rank = linear.get("use_full_rank_gate", False)
    if not isinstance(full_rank, bool):
        raise ValueError(f"config.json: {brief(full_rank)} where use_full_rank_gate needs bool")
    values |= {
        "name": name,
        "kda_key_dim": width,
        "kda_value_dim": width,
        "gate_rank": width,
        "conv_width": of_linear("short_conv_kernel_size", "linear_conv_kernel_dim"),
        "gate_lower_bound": linear.get("gate_lower_bound"),
        "output_gate_rank": None if full_rank else width,
        "dense_layers": dense_layers(fields),
    }
    check_types(values)
    return ModelConfig(**values, **pattern_of(layer_kinds(fields, linear)))


def renamed(fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fields without aliases and nulls, which are as absent; and what is said of those that contradict their aliases."""
    result: dict[str, Any] = {}
    problems = []
    for alias, value in fields.items():
        key = ALIASES.get(alias, alias)
        if value is not None and result.setdefault(key, value) != value:
            problems.append(f"{key} is both {brief(result[key])} and {brief(value)}, by its two names")
    return result, problems


def check_types(values: dict[str, Any]) -> None:
    """ValueError for a value of another type than the field it is for."""
    types = {"int": (int,), "float": (int, float), "bool": (bool,), "None": (type(None),)}
    for field in dataclasses.fields(ModelConfig):
        fitting = [kind for word in str(field.type).split(" | ") for kind in types.get(word, ())]
        if field.name not in values or not fitting:
            continue
        value = values[field.name]
        endless = type(value) is int and value.bit_length() > 63  # no size, and may be too large for a float
        if type(value) not in fitting or endless:
            raise ValueError(f"config.json: {brief(value)} where {field.name} needs {field.type}")


def refused(fields: dict[str, Any]) -> list[str]:
    """What is said about each field that is unknown or has a value which this model does not compute with."""
    known = SIZES.keys() | DEFAULTS.keys() | INERT | READ_APART | LAYERS
    problems = []
    for key, value in fields.items():
        if key in known:
            continue
        if key not in ONLY:
            problems.append(f"{key}={brief(value)} is not known")
        elif value not in ONLY[key]:
            problems.append(f"{key}={brief(value)} is not supported, only {' or '.join(map(repr, ONLY[key]))}")
    return problems


def brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def activation_fields(fields: dict[str, Any]) -> dict[str, Any]:
    act, betas = fields.get("hidden_act"), ("activation_situ_beta", "activation_situ_linear_beta")
    if act in ("silu", "swish"):
        return {"activation": "swiglu"}
    if act != "situ":
        raise ValueError(f"config.json: hidden_act={act!r} is not known: this model has silu and situ")
    missing = [key for key in betas if key not in fields]
    if missing:
        raise ValueError(f"config.json: hidden_act is situ, but {' and '.join(missing)} missing")
    return {"activation": "situ", "situ_beta": fields[betas[0]], "situ_linear_beta": fields[betas[1]]}


def layer_kinds(fields: dict[str, Any], linear: dict[str, Any]) -> str:
    """K or M of every layer; layers are counted from 1 in `linear_attn_config`."""
    count = fields["num_hidden_layers"]
    if "kda_layers" in linear and "full_attn_layers" in linear:
        told = [
            (layer, kind)
            for key, kind in (("kda_layers", KDA), ("full_attn_layers", MLA))
            for layer in list_of(int, linear, key)
        ]
        if len(told) != count or {layer for layer, _ in told} != set(range(1, len(told) + 1)):
            raise ValueError(
                f"config.json: kda_layers and full_attn_layers must hold every layer from 1 to {count} once"
            )
        return "".join(kind for _, kind in sorted(told))
    if "layer_types" not in fields:
        raise ValueError("config.json: neither linear_attn_config nor layer_types says which layers are KDA")
    types, names = list_of(str, fields, "layer_types"), {"linear_attention": KDA, "full_attention": MLA}
    if len(types) != count or set(types) - set(names):
        raise ValueError(
            f"config.json: layer_types must name {count!r} layers, each {' or '.join(names)}; got {brief(types)}"
        )
    return "".join(names[kind] for kind in types)


def dense_layers(fields: dict[str, Any]) -> int:
    if "mlp_layer_types" not in fields:
        return fields.get("first_k_dense_replace", 1)
    types, count = list_of(str, fields, "mlp_layer_types"), fields["num_hidden_layers"]
    dense = types.count("dense")
    if len(types) != count or types != ["dense"] * dense + ["sparse"] * (len(types) - dense):
        raise ValueError(
            f"config.json: mlp_layer_types must be dense layers, then sparse ones, {count!r} in all; got {brief(types)}"
        )
    return dense


def list_of(kind: type, fields: dict[str, Any], key: str) -> list[Any]:
    value = fields[key]
    if not isinstance(value, list) or any(type(item) is not kind for item in value):
        raise ValueError(f"config.json: {key} must be a list of {kind.__name__}; got {brief(value)}")
    return value


def pattern_of(kinds: str) -> dict[str, Any]:
    """The shortest pattern K…KM whose rule gives these kinds; if there is none, the kinds spelt out."""
    candidates = [KDA] if MLA not in kinds else [KDA * n + MLA for n in range(len(kinds))]
    for pattern in candidates:
        repeated = pattern * len(kinds)
        if repeated[: len(kinds) - 1] + pattern[-1] == kinds:
            return {"pattern": pattern}
    longest = max(map(len, re.findall(f"{KDA}+", kinds)), default=0)
    return {"pattern": KDA * longest + MLA, "layers": kinds}


# ---- back ------------------------------------------------------------------------------------------------------------


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json of this model: `kimi_linear` where that can express it, else `kimi_k3`.

    Raises ValueError for what no field of theirs can say.
    """
    width = config.kda_key_dim
    fixed = {"kda_value_dim": width, "gate_rank": width, "latent_norm_eps": 1e-6}
    wrong = [f"model.{k}={getattr(config, k)}, not {v}" for k, v in fixed.items() if getattr(config, k) != v]
    if config.output_gate_rank not in (None, width):
        wrong.append(f"model.output_gate_rank={config.output_gate_rank}, not {width} or None")
    if wrong:
        raise ValueError(f"config.json cannot say {'; '.join(wrong)}: those widths have no fields of their own")
    fields: dict[str, Any] = {key: getattr(config, ours) for key, ours in SIZES.items()}
    fields |= {key: getattr(config, ours) for key, (ours, _) in DEFAULTS.items()}
    kinds = config.layer_kinds
    linear = {
        "kda_layers": [n + 1 for n, kind in enumerate(kinds) if kind == KDA],
        "full_attn_layers": [n + 1 for n, kind in enumerate(kinds) if kind == MLA],
        "head_dim": width,
        "num_heads": config.num_heads,
        "short_conv_kernel_size": config.conv_width,
    }
    fields |= {
        "model_type": "kimi_linear",
        "num_key_value_heads": config.num_heads,
        "first_k_dense_replace": config.dense_layers,
        "moe_layer_freq": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "mla_use_nope": True,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "float32",
        # Absent ones would be those of the released tokenizer, whatever the vocabulary.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    if is_kimi_linear(config):
        for key in ("mla_use_output_gate", "routed_expert_hidden_size", "attn_res_block_size"):
            del fields[key]
        return {"architectures": ["KimiLinearForCausalLM"], **fields, "linear_attn_config": linear}
    linear |= {"gate_lower_bound": config.gate_lower_bound, "use_full_rank_gate": config.output_gate_rank is None}
    if config.activation == "situ":
        betas = {"activation_situ_beta": config.situ_beta, "activation_situ_linear_beta": config.situ_linear_beta}
        fields |= {"hidden_act": "situ", **betas}
    fields["latent_moe_use_norm"] = True
    return {"model_type": "kimi_k3", "text_config": {**fields, "linear_attn_config": linear}}


def is_kimi_linear(config: ModelConfig) -> bool:
    """Whether the predecessor's model computes this, so that `KimiLinearForCausalLM` can open it."""
    return (
        config.activation == "swiglu"
        and config.gate_lower_bound is None
        and config.output_gate_rank is not None
        and not config.mla_output_gate
        and config.latent_size is None
        and config.attn_res_block is None
    )
