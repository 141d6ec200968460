"""Every layer has exactly one slot, whatever the pipe and virtual counts; what does not fit is refused with numbers."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from k3jax import model as lm
from k3jax.configs import get
from k3jax.parallel.layout import StackLayout
from k3jax.sharding import check_divisible


def model(layers, pattern="KM", **fields):
    return dataclasses.replace(tiny.MODEL, num_layers=layers, pattern=pattern, **fields)


@pytest.mark.quick
@given(
    layers=st.integers(1, 40),
    pattern=st.sampled_from(["KM", "KKKM", "KKM"]),
    stages=st.integers(1, 6),
    virtual=st.integers(1, 4),
)
def test_every_layer_once_in_order_or_refused(layers, pattern, stages, virtual):
    config = model(layers, pattern)
    groups = StackLayout(config).num_groups
    if stages > groups:
        with pytest.raises(ValueError, match=f"pipe={stages} .* {layers} layers .* make {groups}"):
            StackLayout(config, stages, virtual)
        return
    if virtual > groups:
        with pytest.raises(ValueError, match=f"virtual={virtual} .* {groups} groups"):
            StackLayout(config, stages, virtual)
        return
    layout = StackLayout(config, stages, virtual)
    in_order = layout.layer_table.swapaxes(0, 1).reshape(-1)  # chunk c is stage c % S, virtual c // S
    assert in_order[in_order >= 0].tolist() == list(range(layers))
    kinds = np.array(list(pattern))[np.nonzero(layout.layer_table >= 0)[3]]
    at = {
        layout.layer_table[i]: layout.config.pattern[i[3]]
        for i in zip(*np.nonzero(layout.layer_table >= 0), strict=True)
    }
    assert "".join(at[layer] for layer in range(layers)) == config.layer_kinds
    assert len(kinds) == layers


@pytest.mark.quick
@pytest.mark.parametrize(("layers", "stages", "virtual"), [(10, 2, 2), (6, 4, 1), (1, 2, 1)])
def test_counts_that_do_not_divide_lose_no_layer(layers, stages, virtual):
    """Neighbours floored: 80 layers over 16 x 2 stages ran as 64, 30 over 4 as 28."""
    config = model(layers)
    if stages > StackLayout(config).num_groups:
        with pytest.raises(ValueError, match=f"pipe={stages}"):
            StackLayout(config, stages, virtual)
    else:
        layout = StackLayout(config, stages, virtual)
        assert (layout.layer_table >= 0).sum() == layers
        assert layout.num_inactive == layout.layer_table.size - layers


@pytest.mark.quick
def test_released_models_fill_the_slots_as_published():
    k3 = StackLayout(get("k3"), 8, 3)
    assert (k3.num_groups, k3.groups_per_chunk, k3.num_inactive) == (24, 1, 3)
    assert get("k3").layer_kinds.count("M") == 24 and get("k3").layer_kinds.endswith("KMM")
    assert [i + 1 for i, kind in enumerate(get("kimi_linear_48b").layer_kinds) if kind == "M"] == [
        4,
        8,
        12,
        16,
        20,
        24,
        27,
    ]
    assert StackLayout(get("k3"), 8, 4).layer_table.shape == (8, 4, 1, 4)  # eight empty chunks, nothing lost
    with pytest.raises(ValueError, match="pipe=25"):
        StackLayout(get("k3"), 25)


@pytest.mark.quick
def test_residual_blocks_are_counted_over_chunk_borders():
    config = model(7, attn_res_block=3)
    layout = StackLayout(config, 2, 2)
    for layer in range(7):
        s, v, j, p = layout.position(layer)
        flags = {name: int(table[s, v, j, p]) for name, table in layout.flag_tables.items()}
        assert flags["starts"] == (layer % 3 == 0)
        assert flags["attn_blocks"] == len([b for b in range(layer) if b % 3 == 0])
        assert flags["ffn_blocks"] == len([b for b in range(layer + 1) if b % 3 == 0])
        assert flags["dense"] == (1 if layer == 0 else 0)


@pytest.mark.quick
def test_sizes_that_do_not_divide_are_named():
    sizes = {"data": 1, "pipe": 3, "expert": 1, "context": 1}
    with pytest.raises(ValueError, match="vocab_size=32 does not divide by pipe=3"):
        check_divisible(tiny.MODEL, sizes)
    with pytest.raises(ValueError, match="num_experts=8 does not divide by expert=3"):
        check_divisible(tiny.MODEL, sizes | {"pipe": 1, "expert": 3})


@pytest.mark.quick
@pytest.mark.parametrize("name", ["nano", "kimi_linear_48b"])
def test_shapes_of_parameters_are_those_of_initial_ones(name):
    config = get(name)
    layout = StackLayout(config, 2)
    told, made = lm.init_shapes(config, layout), jax.eval_shape(lambda: lm.init(config, layout, 0))
    of = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree, is_leaf=lambda x: hasattr(x, "dtype"))
    assert of(told) == of(made)
