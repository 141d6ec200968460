"""config.json says the model, in each dialect; what is not understood is refused by name."""

import copy
import dataclasses

import pytest
from hf_directories import K3, KIMI_LINEAR
from hypothesis import given
from hypothesis import strategies as st

from k3jax.configs import ModelConfig, get
from k3jax.interop.huggingface import config_from_hf, config_to_hf
from k3jax.interop.huggingface.config import pattern_of

MLA = [4, 8, 12, 16, 20, 24, 27]
RELEASED = {
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"},
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": MLA,
        "head_dim": 128,
        "kda_layers": [layer for layer in range(1, 28) if layer not in MLA],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
K3_TEXT = {
    **{key: value for key, value in RELEASED.items() if key != "architectures"},
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 12,
    "hidden_act": "situ",
    "hidden_size": 7168,
    "intermediate_size": 33792,
    "latent_moe_use_norm": True,
    "linear_attn_config": {
        "full_attn_layers": [*range(4, 93, 4), 93],
        "gate_lower_bound": -5.0,
        "head_dim": 128,
        "kda_layers": [layer for layer in range(1, 93) if layer % 4],
        "num_heads": 96,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    },
    "mla_use_output_gate": True,
    "moe_intermediate_size": 3072,
    "num_attention_heads": 96,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_hidden_layers": 93,
    "num_key_value_heads": 96,
    "num_shared_experts": 2,
    "q_lora_rank": 1536,
    "routed_expert_hidden_size": 3584,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
}


def test_released_documents_are_the_presets():
    assert config_from_hf(RELEASED, name="kimi_linear_48b") == get("kimi_linear_48b")
    outer = {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"], "text_config": K3_TEXT}
    assert config_from_hf(outer, name="k3") == config_from_hf(K3_TEXT, name="k3") == get("k3")


@pytest.mark.quick
@pytest.mark.parametrize("config", [get("kimi_linear_48b"), get("k3"), get("nano"), get("mini"), KIMI_LINEAR, K3])
def test_a_model_is_the_one_that_was_written(config):
    document = config_to_hf(config)
    assert config_from_hf(document, name=config.name) == config
    kind = "kimi_linear" if config in (get("kimi_linear_48b"), KIMI_LINEAR) else "kimi_k3"
    assert document["model_type"] == kind


def test_the_dialect_of_transformers_is_read():
    fields = copy.deepcopy(RELEASED)
    linear = fields.pop("linear_attn_config")
    del fields["first_k_dense_replace"], fields["num_experts"], fields["num_shared_experts"]
    fields |= {
        "num_local_experts": 256,
        "n_shared_experts": 1,
        "linear_head_dim": linear["head_dim"],
        "linear_num_heads": linear["num_heads"],
        "linear_conv_kernel_dim": 4,
        "layer_types": ["full_attention" if n + 1 in MLA else "linear_attention" for n in range(27)],
        "mlp_layer_types": ["dense"] + ["sparse"] * 26,
    }
    assert config_from_hf(fields, name="kimi_linear_48b") == get("kimi_linear_48b")
    fields["mlp_layer_types"] = ["sparse", "dense"] + ["sparse"] * 25
    with pytest.raises(ValueError, match="mlp_layer_types must be dense layers, then sparse ones"):
        config_from_hf(fields)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sliding_window": 512}, "sliding_window=512 is not known"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config={'quant_method': 'fp8'} is not known"),
        ({"vision_config": {"depth": 2}}, "vision_config={'depth': 2} is not known"),
        ({"model_type": "llama"}, "model_type='llama' is not supported, only 'kimi_linear' or 'kimi_k3'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not known: this model has silu and situ"),
        ({"hidden_act": "situ"}, "activation_situ_beta and activation_situ_linear_beta missing"),
        ({"mla_use_nope": False}, "mla_use_nope=False is not supported, only True"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax' is not supported"),
        ({"moe_renormalize": False}, "moe_renormalize=False"),
        ({"num_expert_group": 8, "topk_group": 4}, "num_expert_group=8 .* topk_group=4"),
        ({"attention_bias": True, "moe_layer_freq": 2}, "moe_layer_freq=2 .* attention_bias=True"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"hidden_size": "2304"}, "'2304' where hidden_size needs int"),
        ({"rms_norm_eps": 10**400}, "where norm_eps needs float"),
        ({"num_key_value_heads": 8}, "num_key_value_heads are 8, num_attention_heads 32"),
        ({"linear_attn_config": {"num_heads": 16}}, "KDA heads are 16, num_attention_heads 32"),
        ({"linear_attn_config": {"conv_bias": True}}, "linear_attn_config.conv_bias is not known"),
        ({"linear_attn_config": {"kda_layers": [1, 2]}}, "every layer from 1 to 27 once"),
        ({"linear_attn_config": {"head_dim": None}}, "linear_attn_config.head_dim is missing"),
        ({"linear_attn_config": {"kda_layers": 5}}, "kda_layers must be a list of int; got 5"),
        ({"linear_attn_config": {"kda_layers": ["1"]}}, "kda_layers must be a list of int"),
        ({"linear_attn_config": {"gate_lower_bound": "-5"}}, "'-5' where gate_lower_bound needs float"),
        ({"linear_attn_config": {"use_full_rank_gate": "no"}}, "'no' where use_full_rank_gate needs bool"),
        ({"num_hidden_layers": 10**12}, "every layer from 1 to 1000000000000 once"),
        ({"num_hidden_layers": 10**12, "mlp_layer_types": ["dense"]}, "sparse ones, 1000000000000 in all"),
        ({"mlp_layer_types": 27}, "mlp_layer_types must be a list of str"),
        ({"num_experts_per_tok": 2}, "num_experts_per_token is both 8 and 2, by its two names"),
        ({"num_experts_per_token": 256}, "experts_per_token=256 needs at least 257 experts"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change, said):
    fields = copy.deepcopy(RELEASED)
    fields |= {"linear_attn_config": fields["linear_attn_config"] | change.pop("linear_attn_config", {})}
    with pytest.raises(ValueError, match=said):
        config_from_hf(fields | change)


@pytest.mark.parametrize("linear", [["head_dim"], "head_dim", 5])
def test_the_group_of_kda_fields_must_be_an_object(linear):
    with pytest.raises(ValueError, match="linear_attn_config=.* is not an object"):
        config_from_hf(RELEASED | {"linear_attn_config": linear})


def test_null_is_as_absent():
    nulls = {"num_local_experts": None, "layer_types": None, "num_key_value_heads": None}
    assert config_from_hf(RELEASED | nulls, name="kimi_linear_48b") == get("kimi_linear_48b")


def test_what_no_field_can_say_is_refused():
    with pytest.raises(ValueError, match="model.kda_value_dim=8, not 6; model.output_gate_rank=3, not 6 or None"):
        config_to_hf(dataclasses.replace(KIMI_LINEAR, kda_value_dim=8, output_gate_rank=3))


@given(st.text("KM", min_size=1, max_size=30))
def test_any_order_of_layers_can_be_said(kinds):
    assert ModelConfig(num_layers=len(kinds), dense_layers=0, **pattern_of(kinds)).layer_kinds == kinds
