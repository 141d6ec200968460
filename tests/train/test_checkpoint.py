"""Checkpoints: bitwise on any mesh, whole or invisible whatever happens, and clear about what does not fit."""

import dataclasses
import errno
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from k3jax.configs import ModelConfig
from k3jax.train import step_directory
from k3jax.train.checkpoint import Checkpoints, check_arrays, read_arrays
from k3jax.train.config import StepConfig
from k3jax.train.step import TrainStep
from meshes import MeshSpec

ROOT = Path(__file__).parents[2]
MODEL = ModelConfig(
    name="tiny", pattern="KM", num_layers=7, vocab_size=16, hidden_size=8, num_heads=2, kda_key_dim=3, kda_value_dim=5,
    gate_rank=2, q_lora_rank=4, kv_lora_rank=4, qk_nope_dim=3, qk_rope_dim=2, v_head_dim=3, dense_width=8,
    num_experts=4, experts_per_token=2, shared_experts=1, expert_width=3, latent_size=4, attn_res_block=2,
    balance_bins=8,
)  # fmt: skip
CONFIG = StepConfig(model=MODEL, global_batch=16, seq_len=8, microbatches=2, schedule="interleaved_1f1b")
SAVED_ON = ("data=2,pipe=2,expert=2", 1)
EXTRA = {"position": 12345678901, "fingerprint": "ab12", "order": [3, 1, 2]}


@functools.cache
def train_step(mesh: str, virtual: int = 1, **changes) -> TrainStep:
    spec = MeshSpec.parse(mesh)
    config = dataclasses.replace(CONFIG, virtual=virtual, **changes)
    return TrainStep(config, spec.build(jax.devices()[: spec.num_devices]))


def fill(step: TrainStep, seed: int):
    """A state of distinct random values, as if trained."""
    rng = np.random.default_rng(seed)
    values = jax.tree.map(lambda a: (rng.normal(size=a.shape) * 1000).astype(a.dtype), step.state_shapes)
    return step.with_params(jax.device_put(values, step.state_shardings))


def arrays(checkpoints: Checkpoints, state) -> dict[str, bytes]:
    """The bits of every named array of a state."""
    form = checkpoints.form
    records = form.to_records(state)
    return {name: place.take(np.asarray(records[place.record])).tobytes() for name, place in form.index.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with step 2, and the bits that were saved."""
    checkpoints = Checkpoints(tmp_path_factory.mktemp("run") / "checkpoints", train_step(*SAVED_ON))
    state = fill(train_step(*SAVED_ON), seed=0)
    checkpoints.save(2, state, EXTRA)
    checkpoints.wait()
    return checkpoints.directory, arrays(checkpoints, state)


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of `saved` to break, opened where it was saved."""
    shutil.copytree(saved[0], tmp_path / "checkpoints")
    return Checkpoints(tmp_path / "checkpoints", train_step(*SAVED_ON))


# ---- restore ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "virtual"),
    [
        SAVED_ON,
        pytest.param("expert=4,context=2", 2, marks=pytest.mark.quick),
        ("pipe=4,expert=2", 2),
        ("data=8", 1),
        ("data=1", 1),
    ],
)
def test_every_mesh_restores_the_same_bits(saved, mesh, virtual):
    directory, bits = saved
    target = train_step(mesh, virtual)
    checkpoints = Checkpoints(directory, target)
    state, extra = checkpoints.restore(2)
    assert extra == EXTRA
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == target.state_shardings
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), target.state_shapes
    )
    assert arrays(checkpoints, state) == bits


@pytest.fixture(scope="module")
def saved_by_owners(tmp_path_factory):
    """A directory with step 2 of a run whose optimizer state is with its owners, and the bits that were saved."""
    step = train_step(*SAVED_ON, zero=1)
    checkpoints = Checkpoints(tmp_path_factory.mktemp("run") / "checkpoints", step)
    state = fill(step, seed=0)
    checkpoints.save(2, state, EXTRA)
    checkpoints.wait()
    return checkpoints.directory, arrays(checkpoints, state)


@pytest.mark.parametrize(
    ("mesh", "virtual", "zero", "dtype"),
    [
        (*SAVED_ON, 1, "float32"),
        ("pipe=2,expert=4", SAVED_ON[1], 1, "float32"),  # the same chunks, other owners
        ("expert=4,context=2", 2, 2, "bfloat16"),
        ("pipe=4,expert=2", 2, 0, "float32"),
    ],
)
def test_every_mesh_restores_what_owners_saved(saved_by_owners, mesh, virtual, zero, dtype):
    """On the mesh that saved, with other owners, and without; weights follow from the master weights."""
    directory, bits = saved_by_owners
    target = train_step(mesh, virtual, zero=zero, dtype=dtype)
    checkpoints = Checkpoints(directory, target)
    state, extra = checkpoints.restore(2)
    assert extra == EXTRA and arrays(checkpoints, state) == bits
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), target.state_shapes
    )
    if zero:
        np.testing.assert_array_equal(  # the embedding's elements are whole again, in the compute dtype
            np.asarray(state.params["embed"]["table"]),
            np.frombuffer(bits["params/embed/table"], np.float32).reshape(16, 8).astype(dtype),
        )
    found = dict(read_arrays(directory, 2, step_directory.read_manifest(directory, 2)))
    assert {name: array.tobytes() for name, array in found.items()} == bits


def test_owners_take_up_what_was_saved_whole(saved):
    directory, bits = saved
    target = train_step("data=4,expert=2", zero=1)
    checkpoints = Checkpoints(directory, target)
    state, _ = checkpoints.restore(2)
    assert arrays(checkpoints, state) == bits
    weights = checkpoints.restore_weights(2)
    for restored in (weights.params, state.params):
        table = np.frombuffer(bits["params/embed/table"], np.float32).reshape(16, 8)
        np.testing.assert_array_equal(np.asarray(restored["embed"]["table"]), table)


def test_weights_alone_serve_a_run_with_another_optimizer(saved):
    directory, bits = saved
    other = train_step("pipe=2,context=2", 2, optimizer="adamw")
    checkpoints = Checkpoints(directory, other)
    with pytest.raises(ValueError, match="optimizer is muon, this run's is adamw: use --optimizer=muon, or"):
        checkpoints.restore(2)
    halved = Checkpoints(directory, train_step("data=1", momentum_dtype="bfloat16"))
    with pytest.raises(ValueError, match="is float32, this run's is bfloat16: use --momentum-dtype=float32, or"):
        halved.restore(2)
    weights = checkpoints.restore_weights(2)
    assert jax.tree.map(lambda leaf: leaf.sharding, weights.params) == other.state_shardings.params
    assert weights.master is None and weights.opt_state is None
    found = arrays(checkpoints, fill(other, seed=1)._replace(params=weights.params, balance=weights.balance))
    kept = ("params/", "balance/")
    weights = {name: value for name, value in bits.items() if name.startswith(kept)}
    assert weights and weights == {name: value for name, value in found.items() if name.startswith(kept)}


def test_another_model_is_refused_by_its_fields(saved):
    model = dataclasses.replace(MODEL, name="other", num_layers=5, kda_key_dim=4)
    checkpoints = Checkpoints(saved[0], train_step("data=1", model=model))
    for restore in (checkpoints.restore, checkpoints.restore_weights):
        with pytest.raises(
            ValueError, match="another model, tiny: kda_key_dim is 3 there and 4 here, num_layers is 7 .* 5"
        ):
            restore(2)
    renamed = train_step("data=1", model=dataclasses.replace(MODEL, name="renamed"))
    assert Checkpoints(saved[0], renamed).restore(2)[1] == EXTRA


def test_arrays_that_do_not_fit_are_listed(saved):
    here = Checkpoints(saved[0], train_step(*SAVED_ON)).form.index
    place = here["params/embed/table"]
    there = dict(here) | {"params/new": place, "step": place}
    del there["params/head/weight"]
    with pytest.raises(ValueError) as error:
        check_arrays(there, here)
    text = str(error.value)
    assert "lacks 1: params/head/weight" in text and "has besides 1: params/new" in text and "otherwise 1: step" in text


def test_arrays_are_read_by_name_without_a_mesh(saved):
    directory, bits = saved
    found = dict(read_arrays(directory, 2, step_directory.read_manifest(directory, 2)))
    assert {name: array.tobytes() for name, array in found.items()} == bits
    assert found["params/layers/3/moe/expert_up"].shape == (4, 4, 3)


# ---- what is whole ---------------------------------------------------------------------------------------------------


def largest_file(step: Path) -> Path:
    return max((step / "state").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)


@pytest.mark.quick
def test_the_newest_whole_step_is_used_and_the_rest_is_named(copy):
    directory = copy.directory
    (directory / "4").mkdir()
    for step in (5, 6, 7, 8):
        shutil.copytree(directory / "2", directory / str(step))
        manifest = directory / str(step) / "checkpoint.json"
        manifest.write_text(manifest.read_text().replace('"step": 2', f'"step": {step}', 1))
    os.truncate(largest_file(directory / "5"), 200)
    (directory / "6" / "checkpoint.json").write_text('{"format": 1, "step"')
    flipped = largest_file(directory / "7")
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    largest_file(directory / "8").unlink()
    shutil.copytree(directory / "2", directory / "9")
    (directory / "10.incomplete").mkdir()
    (directory / "11.orbax-checkpoint-tmp-3").mkdir()
    (directory / "notes").mkdir()

    step, skipped = copy.latest_whole()
    assert step == 2
    said = {Path(line.partition(": ")[0]).name: line.partition(": ")[2] for line in skipped}
    assert set(said) == {"4", "5", "6", "7", "8", "9", "10.incomplete", "11.orbax-checkpoint-tmp-3"}
    assert "no readable checkpoint.json" in said["4"] and "no readable checkpoint.json" in said["6"]
    assert "has 200 bytes instead of" in said["5"] and "is missing" in said["8"]
    assert "is not what was saved" in said["7"] and said["9"] == "a copy of step 2"
    with pytest.raises(OSError, match="5: not whole"):
        copy.restore(5)
    with pytest.raises(OSError, match="7: damaged"):
        copy.restore(7)

    state = fill(train_step(*SAVED_ON), seed=1)
    for step in (4, 7, 9, 10):
        copy.save(step, state, {})
    assert copy.latest_whole() == (10, [f"{directory}/11.orbax-checkpoint-tmp-3: left by a save that did not finish"])
    assert arrays(copy, copy.restore(10)[0]) == arrays(copy, state)


def test_an_empty_place_has_no_step(tmp_path):
    checkpoints = Checkpoints(tmp_path / "none", train_step(*SAVED_ON))
    assert checkpoints.latest_whole() == (None, [])
    with pytest.raises(OSError, match="2: no such step"):
        checkpoints.restore(2)
    assert not (tmp_path / "none").exists()


def test_a_whole_step_is_never_overwritten(copy):
    before = (copy.directory / "2" / "checkpoint.json").read_bytes()
    with pytest.raises(FileExistsError, match="step 2 is already saved"):
        copy.save(2, fill(train_step(*SAVED_ON), seed=1), {})
    assert (copy.directory / "2" / "checkpoint.json").read_bytes() == before


def test_extra_that_is_not_json_is_refused_before_anything_is_written(copy):
    with pytest.raises(TypeError, match="not JSON serializable"):
        copy.save(4, fill(train_step(*SAVED_ON), seed=1), {"position": np.int64(3)})
    assert [path.name for path in copy.directory.iterdir()] == ["2"]


# ---- save ------------------------------------------------------------------------------------------------------------


def test_the_state_may_be_consumed_as_soon_as_save_returns(copy):
    state = fill(train_step(*SAVED_ON), seed=3)
    bits = arrays(copy, state)
    copy.save(4, state, {})
    spoilt = jax.jit(lambda s: jax.tree.map(lambda a: a * 0 - 1, s), donate_argnums=0)(state)
    jax.block_until_ready(spoilt)
    copy.wait()
    assert {name: a.tobytes() for name, a in read_arrays(copy.directory, 4, manifest_of(copy, 4))} == bits


def manifest_of(checkpoints: Checkpoints, step: int):
    return step_directory.read_manifest(checkpoints.directory, step)


def test_old_steps_go_only_after_the_new_one_is_whole(copy, monkeypatch):
    checkpoints = Checkpoints(copy.directory, train_step(*SAVED_ON), keep=2)
    state, seen = fill(train_step(*SAVED_ON), seed=1), []

    def watched(directory, keep, newest):
        seen.append([s for s in step_directory.steps(directory) if not step_directory.problem(directory, s)])
        prune(directory, keep, newest)

    prune = step_directory.prune
    monkeypatch.setattr(step_directory, "prune", watched)
    for step in (3, 4, 10):
        checkpoints.save(step, state, {})
    checkpoints.wait()
    assert seen == [[3, 2], [4, 3, 2], [10, 4, 3]]
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == ["10", "4"]
    with pytest.raises(ValueError, match="keep=0: must be at least 1"):
        Checkpoints(copy.directory, train_step(*SAVED_ON), keep=0)


@pytest.mark.parametrize("surfaces_at", ["wait", "save", "latest_whole"])
def test_a_failure_in_the_background_is_not_swallowed(copy, monkeypatch, surfaces_at):
    checkpoints = Checkpoints(copy.directory, train_step(*SAVED_ON), keep=1)
    state = fill(train_step(*SAVED_ON), seed=1)
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr(step_directory, "digest", lambda path: (_ for _ in ()).throw(full))
        checkpoints.save(4, state, {})
        surface = {
            "wait": checkpoints.wait,
            "save": lambda: checkpoints.save(6, state, {}),
            "latest_whole": checkpoints.latest_whole,
        }[surfaces_at]
        with pytest.raises(OSError, match=r"step 4 could not be saved in .*checkpoints: .*No space left"):
            surface()
    assert checkpoints.latest_whole() == (2, [f"{copy.directory}/4.incomplete: left by a save that did not finish"])
    checkpoints.save(4, state, {})
    checkpoints.wait()
    assert checkpoints.latest_whole() == (4, []) and step_directory.steps(copy.directory) == [4]


def test_a_save_that_cannot_begin_names_its_step(copy, tmp_path):
    away = copy.directory.rename(tmp_path / "away")
    copy.directory.write_text("in the way")
    with pytest.raises(OSError, match="step 4 could not be saved"):
        copy.save(4, fill(train_step(*SAVED_ON), seed=1), {})
    assert step_directory.latest_whole(away) == (2, [])


# ---- kill -9 ---------------------------------------------------------------------------------------------------------

KILL_SAVE = """
import os, signal, sys
sys.path.insert(0, "tests/train")
import meshes
meshes.require_devices(8)
import test_checkpoint as t
from k3jax.train import step_directory

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

checkpoints = t.Checkpoints(sys.argv[1], t.train_step(*t.SAVED_ON), keep=1)
state = t.fill(t.train_step(*t.SAVED_ON), seed=0)
checkpoints.save(2, state, {})
checkpoints.wait()
if sys.argv[2] == "committed":
    step_directory.complete = die
checkpoints.save(4, state, {})
if sys.argv[2] == "writing":
    die()
checkpoints.wait()
"""


@pytest.mark.parametrize("when", ["writing", pytest.param("committed", marks=pytest.mark.slow)])
def test_a_kill_during_a_save_leaves_the_step_before(tmp_path, when):
    run = subprocess.run(
        [sys.executable, "-c", KILL_SAVE, str(tmp_path), when], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert step_directory.latest_whole(tmp_path) == (
        2,
        [f"{tmp_path}/4.incomplete: left by a save that did not finish"],
    )
    checkpoints = Checkpoints(tmp_path, train_step("expert=4,context=2"), keep=1)
    state, _ = checkpoints.restore(2)
    checkpoints.save(4, state, {})
    checkpoints.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["4"] and checkpoints.latest_whole() == (4, [])


KILL_COMPLETE = """
import os, pathlib, shutil, signal, sys
from k3jax.train import step_directory
directory, calls = pathlib.Path(sys.argv[1]), [int(sys.argv[2])]

def counted(function):
    def call(*args, **kwargs):
        calls[0] -= 1
        if calls[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call

for name in ("fsync", "rename", "unlink", "rmdir", "mkdir"):
    setattr(os, name, counted(getattr(os, name)))
step_directory.begin(directory, 4)
(step_directory.incomplete(directory, 4) / "state").mkdir()
(step_directory.incomplete(directory, 4) / "state" / "data").write_text("four" * 99)
step_directory.complete(directory, 4, {"extra": 4})
step_directory.prune(directory, 1, 4)
"""


def test_a_kill_at_any_step_of_completion_leaves_one_whole_step(tmp_path):
    outcomes = []
    for calls in range(100):
        directory = tmp_path / str(calls)
        step_directory.begin(directory, 2)
        (step_directory.incomplete(directory, 2) / "data").write_text("two")
        step_directory.complete(directory, 2, {"extra": 2})
        run = subprocess.run([sys.executable, "-c", KILL_COMPLETE, str(directory), str(calls)], cwd=ROOT)
        step, _ = step_directory.latest_whole(directory)
        assert step in (2, 4) and step_directory.read_manifest(directory, step)["extra"] == step
        outcomes.append(step)
        if run.returncode == 0:
            break
        assert run.returncode == -signal.SIGKILL
        if step == 2:
            step_directory.begin(directory, 4)
            step_directory.complete(directory, 4, {"extra": 5})
            assert step_directory.latest_whole(directory) == (4, [])
        step_directory.prune(directory, 1, 4)
        assert [path.name for path in directory.iterdir()] == ["4"]
    # Seen from outside, one moment decides.
    assert outcomes == sorted(outcomes) and outcomes.count(2) > 3 and outcomes.count(4) > 3 and run.returncode == 0


def test_a_manifest_of_another_format_says_so(copy):
    manifest = copy.directory / "2" / "checkpoint.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
    assert copy.latest_whole() == (None, [f"{copy.directory}/2: of format 99, this program reads format 1"])


@pytest.mark.quick
def test_a_damaged_later_step_does_not_push_out_the_good_one(tmp_path):
    """Its sizes are right, so only its content tells; the step saved last must stay."""
    for step in (8, 4):
        step_directory.begin(tmp_path, step)
        (step_directory.incomplete(tmp_path, step) / "data").write_text("eight")
        step_directory.complete(tmp_path, step, {})
        if step == 8:
            (tmp_path / "8" / "data").write_text("ate..")
    step_directory.prune(tmp_path, 1, 4)
    assert step_directory.latest_whole(tmp_path)[0] == 4


def test_a_relative_directory_can_be_read(copy, monkeypatch):
    """The default work directory is one."""
    monkeypatch.chdir(copy.directory.parent)
    directory = Path(copy.directory.name)
    names = {name for name, _ in read_arrays(directory, 2, step_directory.read_manifest(directory, 2))}
    assert "params/embed/table" in names
