"""Model configurations: presets as released, and contradictions refused by name."""

import dataclasses

import pytest

from k3jax import configs
from k3jax.configs import ModelConfig


@pytest.mark.quick
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 0}, ["hidden_size=0", "at least 1"]),
        ({"num_layers": -3}, ["num_layers=-3", "at least 1"]),
        ({"shared_experts": -1}, ["shared_experts=-1", "at least 0"]),
        ({"q_lora_rank": 0}, ["q_lora_rank=0", "at least 1"]),
        ({"attn_res_block": 0}, ["attn_res_block=0", "at least 1"]),
        ({"norm_eps": 0.0}, ["norm_eps=0.0", "positive"]),
        ({"init_range": float("nan")}, ["init_range=nan", "finite"]),
        ({"situ_beta": float("inf")}, ["situ_beta=inf", "finite"]),
        ({"gate_lower_bound": 0.0}, ["gate_lower_bound=0.0", "negative"]),
        ({"gate_lower_bound": float("nan")}, ["gate_lower_bound=nan", "negative"]),
        ({"pattern": "KKX"}, ["pattern='KKX'", "K (KDA) and M (MLA)"]),
        ({"pattern": ""}, ["pattern is empty"]),
        ({"layers": "KQ", "num_layers": 2}, ["layers='KQ'", "K (KDA) and M (MLA)"]),
        ({"layers": "KKM", "num_layers": 4}, ["3 layers", "num_layers=4"]),
        ({"layers": "KM", "num_layers": 2, "pattern": "K"}, ["pattern='K'", "no slot", "M"]),
        ({"dense_layers": 5, "num_layers": 4}, ["dense_layers=5", "num_layers=4"]),
        ({"experts_per_token": 8, "num_experts": 8}, ["experts_per_token=8", "at least 9", "num_experts=8"]),
    ],
)
def test_contradictory_fields_are_refused_by_name(changes, said):
    with pytest.raises(ValueError) as refusal:
        ModelConfig(**changes)
    assert all(part in str(refusal.value) for part in said), refusal.value


@pytest.mark.quick
def test_unknown_presets_and_fields_are_refused():
    with pytest.raises(ValueError, match="'micro'.*nano, mini, kimi_linear_48b, k3"):
        configs.get("micro")
    with pytest.raises(TypeError, match="num_layer"):
        dataclasses.replace(configs.get("nano"), num_layer=3)


@pytest.mark.parametrize("name", configs.PRESETS)
def test_presets_carry_their_name_and_have_both_kinds_of_layers(name):
    config = configs.get(name)
    assert config.name == name and set(config.layer_kinds) == {"K", "M"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_layers = 1


def test_layers_of_the_released_models():
    """K3: MLA at 4, 8, ..., 92 and 93, counted from one. Kimi Linear: at 4, 8, ..., 24 and 27."""
    mla = lambda name: [i for i, kind in enumerate(configs.get(name).layer_kinds, 1) if kind == "M"]
    assert mla("k3") == [*range(4, 93, 4), 93]
    assert mla("kimi_linear_48b") == [*range(4, 25, 4), 27]
    assert configs.get("k3").shared_width == 6144


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        (dict(num_layers=1), "M"),
        (dict(num_layers=4), "KKKM"),
        (dict(num_layers=6), "KKKMKM"),
        (dict(num_layers=3, pattern="K"), "KKK"),
        (dict(num_layers=3, layers="MKM"), "MKM"),
    ],
)
def test_the_last_layer_is_mla_wherever_the_pattern_has_it(changes, kinds):
    assert ModelConfig(**changes).layer_kinds == kinds


def test_blocks_of_attention_residuals_round_up():
    assert [ModelConfig(num_layers=n, attn_res_block=4).num_blocks for n in (1, 4, 5, 15)] == [1, 1, 2, 4]
    assert ModelConfig(attn_res_block=None).num_blocks == 0
