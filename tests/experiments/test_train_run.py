"""A training run: what it leaves behind, and that no interruption or failure changes a loss or harms a checkpoint."""

import dataclasses
import gzip
import json
import os
import re
import signal

import jax
import numpy as np
import pytest
from runs import STEP, STEPS, config_for, content, refusal, steps_logged, train, without_speed

from experiments.train import main
from k3jax.train import metrics, step_directory
from k3jax.train.run import MisplacedError, NonFiniteError, Run

# ---- what a run leaves -----------------------------------------------------------------------------------------------


def test_metrics_have_a_line_a_step_with_all_fields(unbroken):
    lines = [json.loads(line) for line in (unbroken.workdir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    fields = "step loss grad_norm learning_rate tokens tokens_per_second bubble_fraction moe_rows_max_over_mean "
    fields += "moe_max_vio moe_replicas moe_dropped skipped max_logit"
    assert all(set(fields.split()) <= set(line) for line in lines)
    assert {(line["moe_rows_max_over_mean"], line["moe_dropped"]) for line in lines} == {(1.0, 0)}
    assert all(line["moe_max_vio"] > 0 for line in lines)
    assert {line["max_logit"] for line in lines} == {None}, "no layer of this model is MLA"
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
        (["--model.num-layers=5"], ["another model", "num_layers is 4 there and 5 here"]),
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


def test_a_profile_traces_just_its_steps_by_named_scopes(unbroken, files, tmp_path):
    run = train(config_for(files, tmp_path / "run", profile="2:3"))
    assert run.losses == unbroken.losses
    (trace,), (events,) = (
        [*(tmp_path / "run" / "profile").rglob(f"*.{kind}")] for kind in ("xplane.pb", "trace.json.gz")
    )
    told = trace.read_bytes()
    scopes = (
        "gradients optimizer reduce pipeline.send pipeline.embed pipeline.operation forward backward pipeline.head "
    )
    scopes += "pipeline.embed_backward pipeline.sums"
    assert [scope for scope in scopes.split() if scope.encode() not in told] == []
    steps = [e["args"]["step_num"] for e in json.loads(gzip.decompress(events.read_bytes()))["traceEvents"]
             if e.get("name") == "step"]  # fmt: skip
    assert [*map(int, steps)] == [2, 3]


# ---- interruptions ---------------------------------------------------------------------------------------------------


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
    assert steps_logged(stopped.workdir) == [*range(1, STEPS + 1)]


def test_steps_after_the_checkpoint_are_logged_again_with_the_same_values(unbroken, files, tmp_path):
    class Crash(Exception):
        pass

    def crash(job, m):
        if m["step"] == 5:
            raise Crash

    with pytest.raises(Crash):
        train(config_for(files, tmp_path / "run"), crash)
    resumed = train(config_for(files, tmp_path / "run", resume=True))
    assert steps_logged(tmp_path / "run") == [1, 2, 3, 4, 5, 5, 6]
    assert resumed.losses == unbroken.losses[4:]
    assert without_speed(tmp_path / "run") == without_speed(unbroken.workdir)


@pytest.mark.slow
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


# ---- failures --------------------------------------------------------------------------------------------------------


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
def test_a_run_ends_at_a_step_that_found_what_is_not_its_own(cache, files, tmp_path, policy):
    """Such a table is wrong in every step: nothing to skip."""
    job = Run(config_for(files, tmp_path / "run", on_nonfinite=policy))
    job.load()
    job.compile()
    step = job._step

    def misplacing(*operands):
        state, metrics = step(*operands)
        return state, metrics | {"misplaced": metrics["misplaced"] + 3}

    job._step = misplacing
    with pytest.raises(MisplacedError, match="step 1: 3 times an operation of interleaved_1f1b found .* no checkpoint"):
        job.train()


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
