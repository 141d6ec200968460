"""Tensors come and go bit by bit in every layout, land on any mesh, and are all accounted for."""

import dataclasses
import json
import math
import os

import jax
import numpy as np
import pytest
import safetensors.numpy
from hf_directories import CASES, FUSED, K3, KIMI_LINEAR, read, same_bits, write

from k3jax.interop.huggingface import Source, open_directory, write_directory
from k3jax.interop.huggingface.tensors import Style
from k3jax.train.checkpoint import weights_form
from k3jax.train.config import StepConfig
from k3jax.train.step import TrainStep
from meshes import MeshSpec


def form_of(config, mesh="data=1"):
    spec = MeshSpec.parse(mesh)
    batch = dict(microbatches=spec.pipe, global_batch=spec.pipe * spec.expert * spec.data)
    step = StepConfig(model=config, schedule="interleaved_1f1b", **batch)
    return weights_form(TrainStep(step, spec.build(jax.devices()[: spec.num_devices])))


def arrays_of(form, records) -> dict[str, np.ndarray]:
    records = {name: np.asarray(record) for name, record in records.items()}
    return {name: place.take(records[place.record]) for name, place in form.index.items()}


def whole(source: Source, name: str, shape) -> np.ndarray:
    return source.read(name, tuple(slice(0, size) for size in shape))


@pytest.mark.parametrize("case", CASES)
def test_every_bit_of_every_layout_comes_back(case, tmp_path):
    config, style = CASES[case]
    made = write(tmp_path / "there", config, style)
    source = open_directory(tmp_path / "there", name=config.name)
    shape = style.a_log_shape or (1, 1, config.num_heads, 1)
    assert (source.config, source.style) == (config, dataclasses.replace(style, a_log_shape=shape))
    record = json.loads(json.dumps(source.record))
    places = form_of(config).index
    arrays = [(name, whole(source, name, place.shape)) for name, place in places.items()]
    (tmp_path / "back").mkdir()
    write_directory(tmp_path / "back", config, reversed(arrays), record=record, shard_bytes=2000)
    same_bits(made, read(tmp_path / "back"))
    again = open_directory(tmp_path / "back", name=config.name)
    assert again.config == config and json.loads(json.dumps(again.record)) == record
    assert len({at.file for at in again.stored.values()}) > 2


@pytest.mark.quick
def test_layouts_are_those_of_linear_layers_heads_and_experts(tmp_path):
    """Written out index by index for both ways to pack: D, H, K, V, N, F as in the model's own names."""
    D, H, K, N, V, F = 12, 2, 6, 4, 5, 7
    for style, at in ((Style(), "self_attn."), (FUSED, "self_attn.forget_gate.")):
        made = write(tmp_path / at, KIMI_LINEAR, style)
        source = open_directory(tmp_path / at)
        theirs = lambda name, made=made: made[f"model.layers.{name}"].astype(np.float32)
        ours = lambda name, *shape, source=source: whole(source, f"params/layers/{name}", shape)
        for x, number in zip("qkv", range(3), strict=True):
            q = theirs(f"1.self_attn.{x}_proj.weight")
            assert all(ours(f"1/attn/{x}_proj", H, D, K)[h, d, k] == q[h * K + k, d] for h, d, k in np.ndindex(H, D, K))
            name, start = (
                (f"1.self_attn.{x}_conv1d.weight", 0) if style == Style() else ("1.self_attn.conv1d.weight", number)
            )
            conv = theirs(name)[start * H * K :]
            mine = ours(f"1/attn/{x}_conv", 4, H, K)
            assert all(mine[w, h, k] == conv[h * K + k, 0, w] for w, h, k in np.ndindex(4, H, K))
        np.testing.assert_array_equal(ours("1/attn/gate_bias", H, K).ravel(), theirs(f"1.{at}dt_bias"))
        np.testing.assert_array_equal(ours("1/attn/a_log", H), theirs(f"1.{at}A_log")[0, 0, :, 0])
        np.testing.assert_array_equal(ours("1/attn/gate_up", K, H * K), theirs(f"1.{at}f_b_proj.weight").T)
        kv, k_up, v_up = (
            theirs("2.self_attn.kv_b_proj.weight"),
            ours("2/attn/k_up", H, 8, N),
            ours("2/attn/v_up", H, 8, V),
        )
        assert all(k_up[h, r, n] == kv[h * (N + V) + n, r] for h, r, n in np.ndindex(H, 8, N))
        assert all(v_up[h, r, v] == kv[h * (N + V) + N + v, r] for h, r, v in np.ndindex(H, 8, V))
        moe = f"1.{style.moe}."
        for e in range(4):
            if style == Style():
                gate, down, up = (theirs(f"{moe}experts.{e}.w{n}.weight") for n in (1, 2, 3))
            else:
                (gate, up), down = (
                    np.split(theirs(f"{moe}experts.gate_up_proj")[e], 2),
                    theirs(f"{moe}experts.down_proj")[e],
                )
            np.testing.assert_array_equal(ours("1/moe/expert_gate", 4, D, F)[e], gate.T)
            np.testing.assert_array_equal(ours("1/moe/expert_up", 4, D, F)[e], up.T)
            np.testing.assert_array_equal(ours("1/moe/expert_down", 4, F, D)[e], down.T)
        np.testing.assert_array_equal(ours("1/moe/router", D, 4), theirs(f"{moe}gate.weight").T)
        bias = whole(source, "balance/layers/1/bias", (4,))
        np.testing.assert_array_equal(bias, theirs(f"{moe}gate.e_score_correction_bias"))


def test_padding_of_a_log_is_kept_and_not_read(tmp_path):
    made = write(tmp_path / "k3", K3, Style(prefix="language_model.", a_log_shape=(6,)))
    source = open_directory(tmp_path / "k3")
    name = "language_model.model.layers.0.self_attn.A_log"
    np.testing.assert_array_equal(whole(source, "params/layers/0/attn/a_log", (2,)), made[name][:2])
    assert source.record["padding"][name] == made[name][2:].tolist()


@pytest.mark.parametrize(("config", "style"), [CASES["kimi linear as released"], CASES["k3, fused"]])
def test_weights_land_on_a_mesh_part_by_part(config, style, tmp_path):
    write(tmp_path / "there", config, style)
    source = open_directory(tmp_path / "there")
    one = form_of(config)
    expected = {name: whole(source, name, place.shape) for name, place in one.index.items()}
    for mesh in ("data=1", "pipe=2,expert=2,data=2"):
        form, asked = form_of(config, mesh), []

        def read_part(name, index, asked=asked):
            asked.append((name, tuple(at.stop - at.start for at in index)))
            return source.read(name, index)

        records = form.records_of(read_part)
        assert {name: at.sharding for name, at in records.items()} == {n: at.sharding for n, at in form.records.items()}
        found = arrays_of(form, records)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)
        sizes = [size for name, size in asked if name.endswith("expert_gate")]
        assert sizes and {size[0] for size in sizes} == {4 if mesh == "data=1" else 2}
        # What replicas share is read once.
        assert sum(math.prod(size) for _, size in asked) == sum(value.size for value in expected.values())


# ---- what is wrong with a directory ----------------------------------------------------------------------------------


@pytest.fixture
def there(tmp_path):
    write(tmp_path / "there", KIMI_LINEAR)
    return tmp_path / "there"


def edit(directory, change):
    """Change the tensors of the last file."""
    file = sorted(directory.glob("*.safetensors"))[-1]
    made = safetensors.numpy.load_file(file)
    change(made)
    safetensors.numpy.save_file(made, file)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if f != file.name} | dict.fromkeys(
        made, file.name
    )
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_all_that_does_not_fit_is_in_one_line(there):
    def change(made):
        made["model.surplus"] = made.pop("model.norm.weight")
        made["lm_head.weight"] = made["lm_head.weight"].T.copy()
        made["model.layers.3.input_layernorm.weight"] = np.zeros(12, np.int8)

    edit(there, change)
    with pytest.raises(ValueError) as refused:
        open_directory(there)
    said = str(refused.value)
    assert "\n" not in said
    for part in (
        "1 missing: model.norm.weight",
        "1 unexpected: model.surplus",
        "1 of another shape: lm_head.weight is [12, 24], not [24, 12]",
        "1 of a dtype that is not F32, BF16, F16: model.layers.3.input_layernorm.weight is I8",
    ):
        assert part in said


def test_a_file_cut_short_is_named(there):
    file = there / "model-00002-of-00002.safetensors"
    size = file.stat().st_size
    for left in (size - 1, 200, 4):
        os.truncate(file, left)
        with pytest.raises(ValueError, match="model-00002-of-00002.safetensors: cut short"):
            open_directory(there)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data_offsets": [-24, 0]}, "damaged, model.norm.weight is at bytes -24 to 0 and should begin at 0"),
        ({"data_offsets": [0, 24]}, "damaged, .* is at bytes 0 to 24 and should begin at 16"),
        ({"data_offsets": [0.0, 24.0]}, "cannot be read at model.norm.weight"),
        ({"shape": [12.0]}, "cannot be read at model.norm.weight"),
        ({"shape": [-12]}, "cannot be read at model.norm.weight"),
        ({"shape": [10**9, 10**9]}, "damaged, model.norm.weight of shape .* has 24 bytes"),
        ({"dtype": ["BF16"]}, "cannot be read at model.norm.weight"),
        (None, "not JSON"),
    ],
)
def test_values_are_where_a_header_can_put_them(change, said, there):
    file = there / "model-00002-of-00002.safetensors"
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["model.norm.weight"] |= change or {}
    text = b"[" * 100_000 if change is None else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
    with pytest.raises(ValueError, match=said):
        open_directory(there)


def test_bytes_after_the_last_tensor_are_refused(there):
    with open(there / "model-00001-of-00002.safetensors", "ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match="model-00001-of-00002.safetensors: damaged, its tensors end at byte"):
        open_directory(there)


def test_more_experts_than_tensors_are_not_listed_one_by_one(there):
    document = json.loads((there / "config.json").read_text())
    (there / "config.json").write_text(json.dumps(document | {"num_experts": 10**9}))
    with pytest.raises(ValueError, match="num_experts is 1000000000, and there are [0-9]+ tensors in all"):
        open_directory(there)


def test_index_and_files_must_agree(there):
    index = there / "model.safetensors.index.json"
    whole_index = json.loads(index.read_text())

    def refused(kind, said, drop=None, **more):
        places = {name: file for name, file in whole_index["weight_map"].items() if name != drop} | more
        index.write_text(json.dumps({"weight_map": places}))
        with pytest.raises(kind, match=said):
            open_directory(there)

    one, two = sorted(set(whole_index["weight_map"].values()))
    refused(ValueError, f"does not list model.norm.weight of {two}", drop="model.norm.weight")
    refused(ValueError, f"lists new of {one}, which is not there", new=one)
    refused(FileNotFoundError, "lacks model-00009.safetensors", new="model-00009.safetensors")
    refused(ValueError, "names ../x.safetensors; files must lie beside it", new="../x.safetensors")
    refused(ValueError, "not an index", new=7)
    index.write_text("[]")
    with pytest.raises(ValueError, match="got a JSON list"):
        open_directory(there)
    # A tensor in two files is refused, whichever of them is listed.
    held = safetensors.numpy.load_file(there / one)
    safetensors.numpy.save_file(held | {"model.norm.weight": np.zeros(12, np.float32)}, there / one)
    refused(ValueError, f"does not list model.norm.weight of {one}")
    refused(ValueError, f"does not list model.norm.weight of {two}", **{"model.norm.weight": one})
    index.unlink()
    with pytest.raises(FileNotFoundError, match="2 .safetensors files and no model.safetensors.index.json"):
        open_directory(there)


def test_a_tied_head_must_be_told(there):
    document = json.loads((there / "config.json").read_text())
    (there / "config.json").write_text(json.dumps(document | {"tie_word_embeddings": True}))
    with pytest.raises(ValueError, match="there is an lm_head.weight, and tie_word_embeddings is true: make it false"):
        open_directory(there)


def test_a_head_that_left_its_embedding_is_not_written_as_tied(tmp_path):
    write(tmp_path / "there", KIMI_LINEAR, Style(tied=True))
    source = open_directory(tmp_path / "there")
    arrays = {name: whole(source, name, place.shape) for name, place in form_of(KIMI_LINEAR).index.items()}
    (tmp_path / "back").mkdir()
    arrays["params/head/weight"][0, 0] += 1
    with pytest.raises(ValueError, match="no longer tied"):
        write_directory(tmp_path / "back", KIMI_LINEAR, arrays.items(), record=source.record)
    arrays.pop("params/layers/0/attn/a_log")
    with pytest.raises(ValueError, match="lacks 1 arrays: params/layers/0/attn/a_log"):
        write_directory(tmp_path / "back", KIMI_LINEAR, arrays.items())
