"""Which leaf is on what, how its matrices lie, and how a user changes it."""

import jax
import jax.numpy as jnp
import pytest
import tiny

from k3jax.optim import Group, group_table, parameter_groups
from k3jax.optim.groups import is_group, path_name


def zeros(shapes):
    return jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))


def by_name(groups):
    return {path_name(path): g for path, g in jax.tree_util.tree_leaves_with_path(groups, is_leaf=is_group)}


PARAMS = zeros(
    {
        "chunks": {
            "attn": {"q_proj": (3, 8, 8), "k_conv": (4, 16), "a_log": (2,), "gate_bias": (2, 8), "beta_proj": (8, 2)},
            "moe": {"expert_up": (2, 3, 4, 4), "router": (8, 4), "latent_norm": {"weight": (8,)}},
            "attn_mix": {"query": (8,), "norm": {"weight": (8,)}},
        },
        "embed": {"table": (16, 8)},
        "head": {"weight": (8, 16), "norm": {"weight": (8,)}},
    }
)


@pytest.mark.quick
def test_known_names_go_to_adamw():
    label = {name: group.label for name, group in by_name(parameter_groups(PARAMS)).items()}
    assert {name for name in label if label[name] == "muon"} == {
        *("chunks.attn.q_proj", "chunks.moe.expert_up", "chunks.moe.router"),
    }
    assert {name for name in label if label[name] == "adamw"} == {
        *("embed.table", "head.weight", "chunks.attn.beta_proj"),
    }


@pytest.mark.quick
@pytest.mark.parametrize("name", ["lm_head", "embed_tokens", "embedding", "LayerNorm_0", "conv1d", "out_bias"])
def test_names_of_other_models_are_known_too(name):
    assert parameter_groups({name: {"kernel": jnp.zeros((4, 8))}})[name]["kernel"].optimizer == "adamw"


@pytest.mark.quick
@pytest.mark.parametrize("name", ["w", "query", "heads", "header", "kernel", "dense"])
def test_names_that_only_resemble_known_ones_stay_on_muon(name):
    assert parameter_groups({name: {"kernel": jnp.zeros((4, 8))}})[name]["kernel"].optimizer == "muon"


@pytest.mark.quick
def test_heads_experts_and_stacked_layers_of_the_model_are_batch_axes():
    """Each head's block of Q, K and V is a matrix of its own, each expert one; a stack's norms are never matrices."""
    config = tiny.MODEL
    shapes = tiny.train_step("data=1").state_shapes.params
    groups = parameter_groups(shapes)
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)}
    D, H = config.hidden_size, config.num_heads
    blocks = {  # slot 0 is KDA, slot 1 MLA
        "0.attn.q_proj": (H, D, config.kda_key_dim),
        "0.attn.k_proj": (H, D, config.kda_key_dim),
        "0.attn.v_proj": (H, D, config.kda_value_dim),
        "1.attn.q_up": (H, config.q_lora_rank, config.qk_nope_dim + config.qk_rope_dim),
        "1.attn.k_up": (H, config.kv_lora_rank, config.qk_nope_dim),
        "1.attn.v_up": (H, config.kv_lora_rank, config.v_head_dim),
        "0.moe.expert_gate": (config.num_experts, config.latent_size, config.expert_width),
        "0.moe.expert_up": (config.num_experts, config.latent_size, config.expert_width),
        "0.moe.expert_down": (config.num_experts, config.expert_width, config.latent_size),
        "0.moe.router": (D, config.num_experts),
        "1.attn.q_down": (D, config.q_lora_rank),
    }
    named = by_name(groups)
    for name, shape in blocks.items():
        leaf, group = leaves[f"chunks.{name}"], named[f"chunks.{name}"]
        assert leaf.shape == (*leaf.shape[:3], *shape), name
        assert group == Group("muon", True, (-2, -1), tuple(range(-leaf.ndim, -2))), name
    slot = groups["chunks"]["0"]
    assert slot["attn_norm"]["weight"].label == slot["attn"]["q_conv"].label == "adamw_no_decay"
    assert groups["dense"]["gate"].label == "muon"
    assert groups["embed"]["table"].label == groups["head"]["weight"].label == "adamw"


@pytest.mark.quick
def test_a_name_is_overridden_by_the_end_of_it():
    plain, changed = (
        by_name(parameter_groups(PARAMS, overrides))
        for overrides in (None, {"moe.router": Group("adamw", decay=False), "attn.*_conv": Group("muon")})
    )
    assert changed["chunks.moe.router"] == Group("adamw", decay=False)
    assert changed["chunks.attn.k_conv"] == Group("muon", True, (-2, -1), ())
    others = plain.keys() - {"chunks.moe.router", "chunks.attn.k_conv"}
    assert all(changed[name] == plain[name] for name in others)
    first = parameter_groups(PARAMS, {"q_proj": Group("adamw"), "chunks.*": Group("adamw", decay=False)})
    assert by_name(first)["chunks.attn.q_proj"].decay and not by_name(first)["chunks.moe.router"].decay


@pytest.mark.quick
@pytest.mark.parametrize(
    "overrides, said",
    [
        ({"attn.out_gate": Group("adamw")}, "by attn.out_gate: .* there are chunks.attn.a_log, "),
        ({"proj": Group("adamw")}, "by proj"),  # the end of a name begins at a dot
        ({"*": Group("adamw"), "router": Group("muon")}, "by router"),
        ({"router": Group("sgd")}, "moe.router: optimizer='sgd' must be muon or adamw"),
        ({"a_log": Group("muon")}, r"a_log: matrix_axes=\(-2, -1\) must be two axes of 1"),
        ({"router": Group("muon", matrix_axes=(0, -2))}, r"matrix_axes=\(0, -2\) must be two axes of 2"),
        ({"router": Group("muon", matrix_axes=(0, 2))}, r"matrix_axes=\(0, 2\) must be two axes of 2"),
    ],
)
def test_overrides_that_cannot_be_are_refused(overrides, said):
    with pytest.raises(ValueError, match=said):
        parameter_groups(PARAMS, overrides)


@pytest.mark.quick
def test_the_table_names_every_leaf_and_its_matrices():
    params = {"chunks": {"q_proj": jnp.zeros((2, 3, 8, 4)), "norm": jnp.zeros((2, 8))}, "temperature": jnp.zeros(())}
    groups = parameter_groups(params, {"q_proj": Group("muon", decay=False, matrix_axes=(1, 2))})
    assert [line.split("  ") and " ".join(line.split()) for line in group_table(params, groups).splitlines()] == [
        "parameter shape optimizer matrices decay",
        "chunks.norm 2x8 adamw no",
        "chunks.q_proj 2x3x8x4 muon 8 of 3x8 no",
        "temperature scalar adamw no",
    ]
    assert "6 of 8x4  yes" in group_table(params)
