"""The converter's directories are whole or absent, and open in the other programs."""

import dataclasses
import json

import numpy as np
import pytest
from hf_directories import FUSED, KIMI_LINEAR, read, same_bits, write
from runs import STEP, config_for

from experiments import inspect_checkpoint
from experiments.convert import main
from experiments.model_option import model_named
from k3jax.interop.huggingface import open_directory
from k3jax.train.run import Run

# The runs' text is of bytes.
MODEL = dataclasses.replace(KIMI_LINEAR, vocab_size=320)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A Hugging Face directory and the checkpoint of it, made on two devices."""
    root = tmp_path_factory.mktemp("converted")
    made = write(root / "there", MODEL, FUSED)
    main(["hf-to-orbax", str(root / "there"), str(root / "here"), "--mesh=pipe=2"])
    return root, made


def refusal(capsys, argv, code) -> str:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in argv])
    out, err = capsys.readouterr()
    assert stop.value.code == code and out == "" and err.count("\n") == 1, err
    return err


@pytest.mark.quick
def test_a_checkpoint_gives_back_what_it_was_made_of(converted, tmp_path, capsys):
    root, made = converted
    main(["orbax-to-hf", str(root / "here"), str(tmp_path / "back")])
    same_bits(made, read(tmp_path / "back"))
    documents = [json.loads((path / "config.json").read_text()) for path in (root / "there", tmp_path / "back")]
    assert documents[0] == documents[1] and "step 0" in capsys.readouterr().out


def test_the_inspector_and_a_run_open_it(converted, files, tmp_path, capsys):
    root, _ = converted
    inspect_checkpoint.main([str(root / "here")])
    out = capsys.readouterr().out
    assert "params/layers/1/moe/expert_gate" in out and "optimizer" not in out.split("params:")[1]
    model = model_named(str(root / "here" / "model.json"))
    assert model == dataclasses.replace(MODEL, name="there")
    step = dataclasses.replace(STEP, model=model)
    job = Run(config_for(files, tmp_path / "run", init_from=str(root / "here"), mesh="expert=2", step=step))
    job.load()
    source = open_directory(root / "there")
    every = lambda *shape: tuple(slice(0, size) for size in shape)
    np.testing.assert_array_equal(job.state.params["embed"]["table"], source.read("params/embed/table", every(320, 12)))
    s, v, j, p = job.train_step.layout.position(3)
    bias = job.state.balance["chunks"][str(p)][s, v, j]
    np.testing.assert_array_equal(bias, source.read("balance/layers/3/bias", every(4)))
    job.checkpoints.save(1, job.state, {})
    job.checkpoints.wait()
    main(["orbax-to-hf", str(tmp_path / "run"), str(tmp_path / "trained")])
    trained = open_directory(tmp_path / "trained")
    assert trained.config == dataclasses.replace(MODEL, name="custom")
    assert {at.dtype for at in trained.stored.values()} == {"F32"}
    for name, shape in (("params/layers/3/attn/k_up", (2, 8, 4)), ("balance/layers/1/bias", (4,))):
        np.testing.assert_array_equal(trained.read(name, every(*shape)), source.read(name, every(*shape)))


def break_file(directory):
    file = directory / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def break_index(directory):
    index = directory / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model.norm.weight"', '"model.other.weight"'))


def break_dtype(directory):
    file = directory / "model-00001-of-00002.safetensors"
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"dtype":"BF16"', b'"dtype":"I16" ', 1))


def break_activation(directory):
    config = directory / "config.json"
    config.write_text(config.read_text().replace('"silu"', '"relu6"'))


def break_value(directory):
    config = directory / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 12', '"hidden_size": 13'))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (break_file, "model-00002-of-00002.safetensors: cut short"),
        (break_index, "and lists model.other.weight of model-00002-of-00002.safetensors, which is not there"),
        (break_dtype, "1 of a dtype that is not F32, BF16, F16"),
        (break_activation, "hidden_act='relu6' is not known"),
        (break_value, "of another shape"),
    ],
)
def test_a_bad_directory_is_one_line_and_leaves_nothing(harm, said, tmp_path, capsys):
    write(tmp_path / "there", KIMI_LINEAR)
    harm(tmp_path / "there")
    assert said in refusal(capsys, ["hf-to-orbax", tmp_path / "there", tmp_path / "here"], 2)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_failure_in_the_middle_leaves_nothing(converted, tmp_path, capsys, monkeypatch):
    root, _ = converted

    def no_space(*args, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("k3jax.interop.huggingface.weights.fill", no_space)
        assert "No space left" in refusal(capsys, ["orbax-to-hf", root / "here", tmp_path / "back"], 1)
    with monkeypatch.context() as patch:
        patch.setattr("k3jax.train.step_directory.complete", no_space)
        assert "No space left" in refusal(capsys, ["hf-to-orbax", root / "there", tmp_path / "here"], 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["hf-to-orbax", "{root}/there", "{root}/here"], 1, "here exists: name a directory to be made"),
        (["hf-to-orbax", "{root}/there", "{root}/no/where"], 1, "no is not a directory"),
        (["hf-to-orbax", "{root}/nowhere", "{tmp}/here"], 1, "nowhere is not a directory"),
        (["hf-to-orbax", "{tmp}", "{tmp}/here"], 1, "config.json"),
        (["hf-to-orbax", "{root}/there", "{tmp}/here", "--mesh=pipe=3"], 2, "pipe=3"),
        (["hf-to-orbax", "{root}/there"], 2, "DST"),
        (["orbax-to-hf", "{root}/there", "{tmp}/back"], 1, "holds no whole checkpoint"),
        (["orbax-to-hf", "{root}/here", "{tmp}/back", "--step=4"], 1, "no such step"),
        (["orbax-to-hf", "{root}/here", "{tmp}/back", "--step=-1"], 2, "a step is 0 or more"),
        (["orbax-to-hf", "{root}/here", "{tmp}/back", "--stpe=1"], 2, "did you mean --step?"),
        (["hf-to-obax"], 2, "choose one of hf-to-orbax, orbax-to-hf"),
    ],
)
def test_a_mistake_is_one_line(converted, tmp_path, capsys, argv, code, said):
    root, _ = converted
    assert said in refusal(capsys, [word.format(root=root, tmp=tmp_path) for word in argv], code)
    assert not list(tmp_path.iterdir())
