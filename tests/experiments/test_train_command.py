"""`python -m experiments.train`: what it refuses, what a person sees, and that killing it changes no loss."""

import dataclasses
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from runs import STEP, STEPS, content, refusal, without_speed

from experiments.train import Options, main
from k3jax import configs
from k3jax.train.run import Run

ROOT = Path(__file__).parents[2]
EIGHT = "--mesh=data=2,pipe=2,expert=2,context=1"


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def bad_files(tmp_path, monkeypatch):
    """A current directory full of traps; whoever gets to load fails the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Run, "load", lambda job: pytest.fail("got past the checks"))
    Path("empty.txt").touch()
    Path("short.txt").write_text("a word")
    Path("few.txt").write_text("a word " * 100)
    np.save("ids.npy", np.full(5000, 400))
    Path("wrong.json").write_text('{"hiden_size": 32}')
    Path("typed.json").write_text('{"hidden_size": "32"}')
    Path("list.json").write_text("[]")
    Path("held").mkdir()
    Path("held", "metrics.jsonl").touch()
    Path("file").touch()


BAD = [
    (["--mesh=data=2,pip=2"], ["'pip=2'", "data, pipe, expert, context"]),
    (["--mesh=data=2,data=2"], ["'data=2' gives axis 'data' again"]),
    (["--mesh=data=0"], ["'0'", "positive integer"]),
    (["--mesh=data=x"], ["'x'", "positive integer"]),
    (["--mesh="], ["empty"]),
    (["--mesh=data=2, pipe=2"], ["space"]),
    (["--mesh", "data=2", "pipe=2"], ["unexpected argument 'pipe=2'"]),
    (["--mesh=data=3", "--global-batch=24"], ["needs 3 devices", "8 there are"]),
    (["--mesh=data=16", "--global-batch=64"], ["16 devices", "8"]),
    (["--mesh=data=-1,pipe=-1"], ["second -1"]),
    (["--me=data=2"], ["unknown option '--me=data=2'", "--mesh"]),
    (["--stepz=10"], ["unknown option '--stepz=10'", "--steps"]),
    (["--zero=3"], ["'3'", "--zero", "'0', '1', '2'"]),
    (["--workdir=new", "--resume", "False"], ["'False'", "switch"]),
    (["--mesh=pipe=4", "--model.num-layers=3"], ["pipe=4", "3 layers", "make 3"]),
    (["--schedule=1f1b", "--virtual=2"], ["1f1b", "virtual=2", "interleaved_1f1b"]),
    (["--schedule=eager"], ["eager", "gpipe", "zbv"]),
    (["--mesh=expert=3"], ["num_experts=8", "expert=3"]),
    (["--mesh=context=5"], ["seq_len=24", "context=5"]),
    (["--global-batch=9"], ["global_batch=9", "microbatches=2"]),
    (["--steps=-1"], ["steps=-1", "at least 1"]),
    (["--steps=1.5"], ["--steps", "1.5"]),
    (["--learning-rate=nan"], ["learning_rate=nan", "positive"]),
    (["--clip-norm=0"], ["clip_norm=0", "positive"]),
    (["--warmup=2"], ["warmup=2", "0 to 1"]),
    (["--checkpoint-every=0"], ["checkpoint_every=0", "at least 1"]),
    (["--keep=0"], ["keep=0", "at least 1"]),
    (["--log-every=0"], ["log_every=0", "at least 1"]),
    (["--eval-every=-1"], ["eval_every=-1", "at least 0"]),
    (["--on-nonfinite=ignore"], ["ignore", "stop", "skip"]),
    (["--dtype=fp8"], ["fp8", "bfloat16"]),
    (["--activations=foo=keep"], ["'foo'", "moe.combined"]),
    (["--activations=kda.o=remote-offload"], ["kda.o=remote-offload", "pipe=1", "at least 2"]),
    (["--model=micro"], ["'micro'", "nano, mini, kimi_linear_48b, k3"]),
    (["--model="], ["''", "nano"]),
    (["--model=wrong.json"], ["wrong.json", "'hiden_size'", "did you mean hidden_size"]),
    (["--model=typed.json"], ["typed.json", 'hidden_size is "32"', "an integer"]),
    (["--model=list.json"], ["list.json", "object"]),
    (["--model.num-layer=3"], ["'--model.num-layer=3'", "--model.num-layers"]),
    (["--model.num-layers=0"], ["num_layers=0", "at least 1"]),
    (["--model.activation=relu"], ["relu", "situ", "swiglu"]),
    (["--data=empty.txt"], ["empty.txt", "no documents"]),
    (["--data=short.txt"], ["short.txt", "7 tokens", "25"]),
    (["--data=few.txt", "--global-batch=64"], ["29 training sequences", "global_batch=64"]),
    (["--data=ids.npy"], ["token id 400", "320"]),
    (["--model.vocab-size=200"], ["vocab_size", "200", "257"]),
    (["--workdir=held"], ["held", "metrics.jsonl", "--resume"]),
    (["--workdir=file"], ["file", "not a directory"]),
    (["--workdir=file/new"], ["file/new", "file is a file"]),
    (["--mesh=data=1000000", "--global-batch=2000000"], ["1000000 devices", "8"]),
    (["--resume"], ["resume needs a workdir"]),
]
UNREADABLE = [
    (["--data=missing.txt"], ["missing.txt", "does not exist"]),
    (["--tokenizer=missing.json"], ["tokenizer missing.json"]),
    (["--model=missing.json"], ["missing.json"]),
    (["--init-from=held"], ["held", "no whole checkpoint"]),
]


@pytest.mark.quick
@pytest.mark.parametrize(("argv", "said"), BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_what_cannot_work_is_one_line_and_two_before_anything_is_written(bad_files, options, capsys, argv, said):
    before = content(Path("."))
    line = refusal(capsys, [*options, *argv])
    assert all(part in line for part in said), line
    assert content(Path(".")) == before and {p.name for p in Path(".").iterdir() if p.is_dir()} == {"held"}


@pytest.mark.parametrize(("argv", "said"), UNREADABLE, ids=[" ".join(argv) for argv, _ in UNREADABLE])
def test_what_cannot_be_read_is_one_line_and_one(bad_files, options, capsys, argv, said):
    line = refusal(capsys, [*options, *argv], status=1)
    assert all(part in line for part in said), line
    assert {p.name for p in Path(".").iterdir() if p.is_dir()} == {"held"}


def test_a_workdir_that_cannot_be_made_is_one_line_and_one(options, tmp_path, capsys):
    assert "too long" in refusal(capsys, [*options, f"--workdir={tmp_path / ('n' * 300)}"], status=1)


# ---- what a person sees ----------------------------------------------------------------------------------------------


def test_a_dry_run_resolves_and_plans_and_writes_nothing(options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main([*options, "--mesh=data=-1,pipe=2", "--model.hidden-size=32", "--microbatches=1", "--dry-run"])
    out = capsys.readouterr().out
    # -1 was filled from the eight devices of the tests
    for text in ("--mesh=data=4,pipe=2,expert=1,context=1", "--model.hidden-size=32", "8 ranks", "entropy", "on muon"):
        assert text in out
    assert ["chunks.0.moe.router", "2x1x2x32x8", "muon", "4", "of", "32x8", "yes"] in map(str.split, out.splitlines())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "said"),
    [("nano", "active"), ("mini", "active"), ("kimi_linear_48b", "49.1B total, 3.11B"), ("k3", "2.78T total, 104.2B")],
)
def test_a_dry_run_counts_the_parameters_of_every_preset(model, said, capsys):
    main([f"--model={model}", "--dry-run"])
    assert said in capsys.readouterr().out


def test_printed_options_give_the_same_configuration(options, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    main([*options, "--workdir=a b", "--dry-run", "--model.latent-size=None", "--clip-norm=inf", "--no-resume"])
    first = capsys.readouterr().out
    words = shlex.split(first[: first.index("\nmesh ")])
    main(words)
    assert capsys.readouterr().out == first


def test_help_is_complete_and_starts_no_backend():
    code = """
import sys
from experiments.train import main
try:
    main(["--help"])
except SystemExit as stop:
    assert stop.code == 0
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
assert "orbax" not in sys.modules
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    fields = [field.name for config in (Options, STEP) for field in dataclasses.fields(config)]
    names = {*fields, *(f"model.{field.name}" for field in dataclasses.fields(configs.ModelConfig))}
    for name in names - {"step", "preset"}:
        assert f"--{name.replace('_', '-')}" in run.stdout, name


# ---- as a user runs it -----------------------------------------------------------------------------------------------


def command(options, *more) -> subprocess.Popen:
    """The command in a process of its own, without any setting of devices in the environment."""
    env = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    argv = [sys.executable, "-m", "experiments.train", *options, "--eval-every=0", *more]
    return subprocess.Popen(argv, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process) -> tuple[str, str]:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out, err


@pytest.mark.parametrize(
    ("mesh", "ranks"), [("--mesh=data=1", "1 ranks"), pytest.param(EIGHT, "8 ranks", marks=pytest.mark.slow)]
)
def test_kill_minus_nine_changes_no_loss(options, tmp_path, mesh, ranks):
    out, err = finish(command(options, mesh, f"--workdir={tmp_path / 'whole'}"))
    assert ranks in out and "compiled in" in out
    assert re.search(r"done at step 6: loss .* the unigram entropy of .* s a step", out)
    assert f"{tmp_path / 'whole'}: config.json, metrics.jsonl, checkpoints/6" in out
    assert len(err.splitlines()) == STEPS and "eta" in err  # a line a step, and no warnings
    lines = without_speed(tmp_path / "whole")
    assert {(line["moe_rows_max_over_mean"], line["moe_dropped"]) for line in lines} == {(1.0, 0)}
    assert all(line["moe_max_vio"] > 0 for line in lines)
    assert all((line["moe_replicas"] > 0) == (mesh == EIGHT) for line in lines)  # the plan had to even it

    broken = command(options, mesh, f"--workdir={tmp_path / 'broken'}")
    assert broken.stderr is not None
    for line in broken.stderr:
        if line.startswith("step 4/"):
            break
    broken.kill()
    broken.communicate()
    finish(command(options, mesh, f"--workdir={tmp_path / 'broken'}", "--resume"))
    assert without_speed(tmp_path / "broken") == without_speed(tmp_path / "whole")


@pytest.mark.slow
def test_ten_kills_at_random_moments_change_no_loss(options, tmp_path):
    argv = [*options, "--mesh=data=1", "--steps=40", "--checkpoint-every=5"]
    finish(command(argv, f"--workdir={tmp_path / 'whole'}"))
    argv += [f"--workdir={tmp_path / 'broken'}", "--resume"]
    draw = random.Random(0)
    # After so many steps and a little more: before the first, between checkpoints, while one is being saved. None comes
    # far enough for the run to end.
    for steps in (0, 7, 3, 11, 1, 9, 5, 6, 2, 5):
        run = command(argv)
        assert run.stderr is not None
        assert all(run.stderr.readline().startswith("step ") for _ in range(steps))
        with pytest.raises(subprocess.TimeoutExpired):
            run.wait(timeout=draw.uniform(0, 0.1 if steps else 8))
        run.kill()
        run.communicate()
    finish(command(argv))
    assert without_speed(tmp_path / "broken") == without_speed(tmp_path / "whole")
