"""`python -m experiments.train`: what it refuses, what it writes, and that no interruption changes a loss."""

import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from jax.experimental.compilation_cache import compilation_cache

from experiments.train import Options, main
from k3jax import configs
from k3jax.train import metrics, step_directory
from k3jax.train.run import NonFiniteError, Run
from k3jax.train.run_config import RunConfig
from k3jax.train.signals import stop_on_signals

ROOT = Path(__file__).parents[2]
STEPS = 6
MODEL = dataclasses.replace(tiny.MODEL, vocab_size=320)
STEP = dataclasses.replace(tiny.STEP, model=MODEL, steps=STEPS)
EIGHT = "--mesh=data=2,pipe=2,expert=2,context=1"


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """One directory of compiled programs for this process and those that it starts."""
    directory = tmp_path_factory.mktemp("compiled")
    names = ("compilation_cache_dir", "persistent_cache_min_compile_time_secs", "persistent_cache_min_entry_size_bytes")
    before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(directory))
    yield directory
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A directory with a model and some text."""
    directory = tmp_path_factory.mktemp("files")
    (directory / "tiny.json").write_text(json.dumps(dataclasses.asdict(MODEL)))
    words = "the expert routes a token through its latent and then the state decays while keys write".split()
    draw = random.Random(0)
    (directory / "text.txt").write_text(" ".join(draw.choice(words) for _ in range(4000)))
    return directory


@pytest.fixture
def options(cache, files):
    """The options of all runs here; `config` as a value."""
    step = {field.name: getattr(STEP, field.name) for field in dataclasses.fields(STEP) if field.name != "model"}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in step.items()]
    return [*words, f"--model={files / 'tiny.json'}", f"--data={files / 'text.txt'}", *CHECKPOINTS, "--log-every=1"]


CHECKPOINTS = ["--checkpoint-every=2", "--eval-every=3"]


def config_for(files, workdir, **changes) -> RunConfig:
    common = dict(step=STEP, data=str(files / "text.txt"), checkpoint_every=2, eval_every=3)
    return RunConfig(workdir=str(workdir), **(common | changes))


def train(config: RunConfig, on_step=None):
    job = Run(config)
    with stop_on_signals(job.stop):
        job.load()
        job.compile()
        return job.train(None if on_step is None else lambda m: on_step(job, m))


def without_speed(workdir) -> list[dict]:
    """The metrics of every step, but for the time it took."""
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in metrics.read(workdir / "metrics.jsonl")]


def content(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def refusal(capsys, argv, status=2) -> str:
    """The one line that the command ends with."""
    with pytest.raises(SystemExit) as stop:
        main(argv)
    err = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("step ")]
    assert stop.value.code == status, err
    assert len(err) == 1 and err[0].startswith("train: error: "), err
    return err[0].removeprefix("train: error: ")


@pytest.fixture(scope="session")
def unbroken(cache, files, tmp_path_factory):
    """A finished run."""
    workdir = tmp_path_factory.mktemp("runs") / "unbroken"
    return train(config_for(files, workdir))


# ---- what a run leaves ----------------------------------------------------------------------------------------------------


def test_metrics_have_a_line_a_step_with_all_fields(unbroken):
    lines = [json.loads(line) for line in (unbroken.workdir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    fields = "step loss grad_norm learning_rate tokens tokens_per_second bubble_fraction moe_rows_max_over_mean skipped"
    assert all(set(fields.split()) <= set(line) for line in lines)
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6]
    assert {line["tokens"] for line in lines} == {8 * 24} and {line["skipped"] for line in lines} == {0}
    assert all(line["tokens_per_second"] > 0 for line in lines)
    assert unbroken.losses == [line["loss"] for line in lines]
    assert unbroken.losses[-1] < unbroken.losses[0]


def test_the_configuration_is_saved_and_the_last_step_too(unbroken, files):
    saved = json.loads((unbroken.workdir / "config.json").read_text())
    assert saved["mesh"] == "data=1,pipe=1,expert=1,context=1"
    assert saved["step"]["model"] == json.loads((files / "tiny.json").read_text())
    assert step_directory.steps(unbroken.workdir / "checkpoints") == [6, 4, 2]
    assert step_directory.latest_whole(unbroken.workdir / "checkpoints") == (6, [])


def test_a_workdir_that_holds_a_run_is_refused_and_left_alone(unbroken, options, capsys):
    before = content(unbroken.workdir)
    line = refusal(capsys, [*options, f"--workdir={unbroken.workdir}"])
    assert "already holds a run (config.json, metrics.jsonl, checkpoints)" in line and "--resume" in line
    assert content(unbroken.workdir) == before


def test_a_finished_run_has_nothing_left_to_do(unbroken, options, capsys):
    before = content(unbroken.workdir)
    main([*options, f"--workdir={unbroken.workdir}", "--resume"])
    assert "step 6 of 6: nothing left to do" in capsys.readouterr().out
    assert content(unbroken.workdir) == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["--model.num-layers=5"], ["another model", "num_layers is 7 there and 5 here"]),
        (["--optimizer=adamw"], ["optimizer is muon", "adamw"]),
        (["--seed=1"], ["fingerprint", "seed"]),
        (["--data=stdlib"], ["fingerprint", "text.txt", "stdlib"]),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_and_left_alone(unbroken, options, capsys, changes, said):
    before = content(unbroken.workdir)
    line = refusal(capsys, [*options, f"--workdir={unbroken.workdir}", "--resume", *changes])
    assert all(part in line for part in said), line
    assert content(unbroken.workdir) == before


# ---- interruptions --------------------------------------------------------------------------------------------------------


def test_a_signal_saves_the_current_step_and_a_resume_repeats_no_loss(unbroken, files, options, tmp_path, capsys):
    stopped = train(
        config_for(files, tmp_path / "run"),
        lambda job, m: m["step"] == 2 and os.kill(os.getpid(), signal.SIGTERM),
    )
    assert stopped.stopped_by == "SIGTERM" and 2 <= stopped.step < STEPS
    assert step_directory.latest_whole(stopped.workdir / "checkpoints") == (stopped.step, [])
    with open(stopped.workdir / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')  # as if the machine had died
    (stopped.workdir / "checkpoints" / "5").mkdir()
    main([*options, f"--workdir={stopped.workdir}", "--resume"])
    out = capsys.readouterr().out
    assert f"resuming {stopped.workdir} from step {stopped.step}" in out
    assert re.search(r"skipped .*checkpoints/5: not whole", out)
    assert without_speed(stopped.workdir) == without_speed(unbroken.workdir)
    assert len((stopped.workdir / "metrics.jsonl").read_text().splitlines()) == STEPS


def test_steps_after_the_checkpoint_are_logged_again_with_the_same_values(unbroken, files, tmp_path):
    class Crash(Exception):
        pass

    def crash(job, m):
        if m["step"] == 5:
            raise Crash

    with pytest.raises(Crash):
        train(config_for(files, tmp_path / "run"), crash)
    resumed = train(config_for(files, tmp_path / "run", resume=True))
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 5, 6]
    assert resumed.losses == unbroken.losses[4:]
    assert without_speed(tmp_path / "run") == without_speed(unbroken.workdir)


def test_a_run_continues_on_another_mesh(unbroken, files, tmp_path):
    train(config_for(files, tmp_path / "run"), lambda job, m: m["step"] == 2 and job.stop("test"))
    step = dataclasses.replace(STEP, virtual=2)
    moved = train(config_for(files, tmp_path / "run", resume=True, mesh="data=2,pipe=2", step=step))
    # float32 sums in another order, after three steps that let it grow
    np.testing.assert_allclose(moved.losses, unbroken.losses[-len(moved.losses) :], rtol=2e-5)


def test_without_a_checkpoint_a_resume_starts_at_zero_and_says_so(options, tmp_path, capsys):
    main([*options, f"--workdir={tmp_path}", "--resume", "--dry-run"])
    assert f"nothing to resume in {tmp_path}: starting at step 0" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


# ---- failures -------------------------------------------------------------------------------------------------------------


def poison(job, m, step=3):
    """NaN in one parameter, after that step."""
    if m["step"] == step:
        table = job.state.params["embed"]["table"]
        bad = jax.device_put(np.full(table.shape, np.nan, np.float32), table.sharding)
        job.state = job.state._replace(params=job.state.params | {"embed": {"table": bad}})


def test_what_is_not_finite_ends_the_run_with_the_last_good_checkpoint_intact(unbroken, files, tmp_path):
    with pytest.raises(NonFiniteError) as stop:
        train(config_for(files, tmp_path / "run"), poison)
    assert re.match(r"step [45]: loss nan, gradient norm nan; not finite in \d+ of \d+ parameters", str(stop.value))
    assert "embed.table (adamw)" in str(stop.value) or ", ..." in str(stop.value)
    lines = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert lines[-1]["loss"] is None and lines[-1]["skipped"] == 1
    good, _ = step_directory.latest_whole(tmp_path / "run" / "checkpoints")
    assert good in (2, 4) and good < lines[-1]["step"] and f"the last checkpoint is step {good}" in str(stop.value)
    train(config_for(files, tmp_path / "run", resume=True))
    assert without_speed(tmp_path / "run") == without_speed(unbroken.workdir)


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_command_stops_or_skips_what_is_not_finite(options, tmp_path, capsys, policy):
    argv = [*options, "--model.init-range=1e30", f"--on-nonfinite={policy}", f"--workdir={tmp_path / 'run'}"]
    if policy == "stop":
        line = refusal(capsys, argv, status=1)
        assert line.startswith("step 1: loss") and "parameters" in line and "no checkpoint was saved" in line
        assert not (tmp_path / "run" / "checkpoints").exists()
    else:
        main(argv)
        assert f"skipped {STEPS}" in capsys.readouterr().err
        assert [line["skipped"] for line in metrics.read(tmp_path / "run" / "metrics.jsonl")] == [*range(1, STEPS + 1)]


def test_a_save_that_fails_in_the_background_fails_the_run_and_harms_no_earlier_step(
    options, tmp_path, capsys, monkeypatch
):
    whole = step_directory.complete

    def no_space(directory, step, about):
        if step == STEPS:
            raise OSError(28, "No space left on device")
        whole(directory, step, about)

    monkeypatch.setattr(step_directory, "complete", no_space)
    line = refusal(capsys, [*options, f"--workdir={tmp_path / 'run'}"], status=1)
    assert "step 6" in line and "No space left on device" in line
    assert step_directory.latest_whole(tmp_path / "run" / "checkpoints")[0] == 4
    assert len(metrics.read(tmp_path / "run" / "metrics.jsonl")) == STEPS


def test_weights_alone_are_taken_on_any_mesh(unbroken, files, tmp_path):
    source = Run(config_for(files, unbroken.workdir, resume=True))
    source.load()
    step = dataclasses.replace(STEP, optimizer="adamw", seed=1)
    job = Run(config_for(files, tmp_path / "run", init_from=str(unbroken.workdir), mesh="data=2,expert=2", step=step))
    job.load()
    assert job.start == 0 and int(job.state.step) == 0
    for mine, theirs in zip(jax.tree.leaves(job.state.params), jax.tree.leaves(source.state.params), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert not any(np.any(np.asarray(a)) for a in jax.tree.leaves(job.state.opt_state))


# ---- refusals -------------------------------------------------------------------------------------------------------------


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
    (["--zero=1"], ["unknown option '--zero=1'"]),
    (["--workdir=new", "--resume", "False"], ["'False'", "switch"]),
    (["--mesh=pipe=4", "--model.num-layers=4"], ["pipe=4", "4 layers", "make 2"]),
    (["--schedule=1f1b", "--virtual=2"], ["1f1b", "virtual=2", "interleaved_1f1b"]),
    (["--schedule=gpipe"], ["gpipe", "1f1b"]),
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
    (["--data=few.txt", "--global-batch=64"], ["27 training sequences", "global_batch=64"]),
    (["--data=ids.npy"], ["token id 400", "320"]),
    (["--model.vocab-size=200"], ["vocab_size", "200", "257"]),
    (["--workdir=held"], ["held", "metrics.jsonl", "--resume"]),
    (["--workdir=file"], ["file", "not a directory"]),
    (["--resume"], ["resume needs a workdir"]),
]
UNREADABLE = [
    (["--data=missing.txt"], ["missing.txt", "does not exist"]),
    (["--tokenizer=missing.json"], ["missing.json"]),
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
    (tmp_path / "file").touch()
    assert "file" in refusal(capsys, [*options, f"--workdir={tmp_path / 'file' / 'run'}"], status=1)


# ---- what a person sees ---------------------------------------------------------------------------------------------------


def test_a_dry_run_resolves_and_plans_and_writes_nothing(options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main([*options, "--mesh=data=-1,pipe=2", "--model.hidden-size=32", "--microbatches=1", "--dry-run"])
    out = capsys.readouterr().out
    # -1 was filled from the eight devices of the tests
    for text in ("--mesh=data=4,pipe=2,expert=1,context=1", "--model.hidden-size=32", "8 ranks", "unigram entropy", "muon"):
        assert text in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "said"),
    [("nano", "K active"), ("mini", "M active"), ("kimi_linear_48b", "49.1B total, 3.11B"), ("k3", "2.78T total, 104.2B")],
)
def test_a_dry_run_counts_the_parameters_of_every_preset(model, said, capsys):
    main([f"--model={model}", "--dry-run"])
    assert said in capsys.readouterr().out


def test_printed_options_give_the_same_configuration(options, capsys, monkeypatch, tmp_path):
    import shlex

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
    fields = [*dataclasses.fields(Options), *dataclasses.fields(STEP)]
    names = {f.name.replace("_", "-") for f in fields} - {"step", "preset", "model"}
    for name in ("model", *names, *(f"model.{f.name.replace('_', '-')}" for f in dataclasses.fields(configs.ModelConfig))):
        assert f"--{name}" in run.stdout, name


# ---- as a user runs it ----------------------------------------------------------------------------------------------------


def command(options, *more) -> subprocess.Popen:
    """The command in a process of its own, without any setting of devices in the environment."""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    env["JAX_COMPILATION_CACHE_DIR"] = str(jax.config.jax_compilation_cache_dir)
    argv = [sys.executable, "-m", "experiments.train", *options, *more]
    return subprocess.Popen(argv, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process) -> tuple[str, str]:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out, err


def test_kill_minus_nine_on_eight_ranks_changes_no_loss(options, tmp_path):
    out, err = finish(command(options, EIGHT, f"--workdir={tmp_path / 'whole'}"))
    assert "data=2,pipe=2,expert=2,context=1, 8 ranks" in out and "compiled in" in out
    assert re.search(r"done at step 6: loss .* the unigram entropy of .* s a step", out)
    assert f"{tmp_path / 'whole'}: config.json, metrics.jsonl, checkpoints/6" in out
    assert len(err.splitlines()) == STEPS and "eta" in err  # a line a step, and no warnings

    broken = command(options, EIGHT, f"--workdir={tmp_path / 'broken'}")
    assert broken.stderr is not None
    for line in broken.stderr:
        if line.startswith("step 4/"):
            break
    broken.kill()
    broken.communicate()
    finish(command(options, EIGHT, f"--workdir={tmp_path / 'broken'}", "--resume"))
    assert without_speed(tmp_path / "broken") == without_speed(tmp_path / "whole")


@pytest.mark.slow
def test_ten_kills_at_random_moments_change_no_loss(options, tmp_path):
    argv = [*options, EIGHT, "--steps=40", "--checkpoint-every=5"]
    finish(command(argv, f"--workdir={tmp_path / 'whole'}"))
    draw, kills = random.Random(0), 0
    argv += [f"--workdir={tmp_path / 'broken'}", "--resume"]
    while kills < 10:
        run = command(argv)
        try:
            run.communicate(timeout=draw.uniform(1, 20))  # somewhere between import and the last save
        except subprocess.TimeoutExpired:
            run.kill()
            run.communicate()
            kills += 1
        else:
            break
    if run.returncode != 0:
        finish(command(argv))
    assert without_speed(tmp_path / "broken") == without_speed(tmp_path / "whole")
