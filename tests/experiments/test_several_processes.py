"""A run of two processes, four fake devices each, is the run of one process with eight; when one ends, so does the other."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from runs import STEP, config_for, options_for, refusal, steps_logged, train, without_speed

from k3jax.train import metrics, step_directory

ROOT = Path(__file__).parents[2]
STEPS = 5
MESH = "data=2,expert=4"
# What several processes add is the same for every model: the smallest one compiles soonest.
SMALL = {"optimizer": "adamw", "global_batch": 16, "steps": STEPS}
MODEL = dataclasses.replace(STEP.model, num_layers=2)
# Between processes Gloo adds up in another order: 1e-7 of a loss is its last bit.
LAST_BITS = dict(rtol=1e-6, atol=0)


@pytest.fixture(scope="module")
def alone(cache, files, tmp_path_factory):
    """The run of one process."""
    return train(one_process(files, tmp_path_factory.mktemp("runs") / "alone"))


def one_process(files, workdir, **changes):
    """Its configuration."""
    step = dataclasses.replace(STEP, model=MODEL, **SMALL)
    return config_for(files, workdir, step=step, mesh=MESH, eval_every=0, **changes)


def options(files, workdir, *more) -> list[str]:
    """The same as a command."""
    small = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    return [*options_for(files), "--model.num-layers=2", *small, f"--mesh={MESH}", "--eval-every=0",
            "--peer-timeout=10", f"--workdir={workdir}", *more]  # fmt: skip


class Pair:
    """Two processes of one run."""

    def __init__(self, argv: list[str], *, second: tuple[str, ...] = ()):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
        env = os.environ | {"XLA_FLAGS": " ".join(flags)}
        command = [sys.executable, "-m", "experiments.train", *argv, "--processes=2", f"--coordinator=127.0.0.1:{port}"]
        pipes: dict = dict(cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        ids = ["--process-id=0"], ["--process-id=1", *second]
        self.processes = [subprocess.Popen([*command, *more], **pipes) for more in ids]

    def until(self, step: int) -> None:
        """Wait until this step is logged."""
        stderr = self.processes[0].stderr
        assert stderr is not None
        lines = []
        for line in stderr:
            lines.append(line)
            if line.startswith(f"step {step}/"):
                return
        pytest.fail("".join(lines))

    def finish(self) -> list[tuple[int, str, str]]:
        """Exit status, stdout and stderr of each."""
        ended = [process.communicate(timeout=300) for process in self.processes]
        return [(p.returncode, out, err) for p, (out, err) in zip(self.processes, ended, strict=True)]


@pytest.mark.slow
def test_two_processes_train_like_one(alone, files, tmp_path):
    pair = Pair(options(files, tmp_path / "pair"))
    (status, out, _), (status_of_second, *silent) = pair.finish()
    assert (status, status_of_second) == (0, 0)
    assert "done at step 5" in out and "Gloo" not in out and silent == ["", ""]
    assert steps_logged(tmp_path / "pair") == [1, 2, 3, 4, 5]
    told = metrics.read(tmp_path / "pair" / "metrics.jsonl")
    np.testing.assert_allclose([line["loss"] for line in told], alone.losses, **LAST_BITS)
    assert step_directory.latest_whole(tmp_path / "pair" / "checkpoints") == (5, [])
    # what two processes saved, one process opens
    resumed = train(one_process(files, tmp_path / "pair", resume=True))
    assert resumed.step == 5 and not resumed.metrics


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_when_one_is_killed_the_other_ends_and_two_resume(alone, files, tmp_path, who):
    argv = options(files, tmp_path / "run", "--steps=400", "--checkpoint-every=2")
    pair = Pair(argv)
    pair.until(5)
    pair.processes[who].kill()
    killed = time.monotonic()
    ended = pair.finish()
    status, _, err = ended[1 - who]
    assert status not in (0, None)
    assert time.monotonic() - killed < 60  # ten seconds without a sign of life, on a busy machine
    # When the coordinator is gone JAX itself says so, and aborts.
    said = "process 1 has given no sign of life for 10 s", "perhaps because another is gone", "another task died"
    assert any(words in err for words in said), err
    saved, _ = step_directory.latest_whole(tmp_path / "run" / "checkpoints")
    assert saved is not None and saved >= 2
    again = Pair([*argv, "--resume", "--checkpoint-every=1000"])
    again.until(saved + 3)
    again.processes[1].send_signal(signal.SIGTERM)
    (status, out, _), (status_of_second, *_) = again.finish()
    assert (status, status_of_second) == (0, 0)
    assert "stopped by SIGTERM" in out
    lines = without_speed(tmp_path / "run")
    assert [line["step"] for line in lines] == [*range(1, lines[-1]["step"] + 1)]
    assert step_directory.latest_whole(tmp_path / "run" / "checkpoints") == (lines[-1]["step"], [])


@pytest.mark.slow
def test_stages_and_evaluation_over_two_processes(files, tmp_path):
    mesh = "--mesh=data=2,pipe=2,expert=2"
    pair = Pair([*options(files, tmp_path / "pair"), mesh, "--optimizer=muon", "--zero=2", "--eval-every=3"])
    assert [status for status, *_ in pair.finish()] == [0, 0]
    step = dataclasses.replace(STEP, model=MODEL, **SMALL | {"optimizer": "muon", "zero": 2})
    alone = train(config_for(files, tmp_path / "alone", step=step, mesh=mesh.removeprefix("--mesh=")))
    told = metrics.read(tmp_path / "pair" / "metrics.jsonl")
    for name in ("loss", "eval_loss"):
        assert [line["step"] for line in told if name in line] == [m["step"] for m in alone.metrics if name in m]
        values = [[line[name] for line in lines if name in line] for lines in (told, alone.metrics)]
        np.testing.assert_allclose(*values, **LAST_BITS)


def test_different_options_are_refused_with_their_names(files, tmp_path):
    (status, _, err), (status_of_second, *_) = Pair(options(files, tmp_path / "run"), second=("--seed=1",)).finish()
    assert (status, status_of_second) == (2, 2)
    assert err.startswith("train: error: step.seed is 0 in process 0 and 1 in process 1"), err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--process-id=0"], ["not given: --coordinator, --processes"]),
        (["--coordinator=host:1", "--processes=2"], ["not given: --process-id"]),
        (["--coordinator=host", "--processes=2", "--process-id=0"], ["--coordinator=host", "HOST:PORT"]),
        (["--coordinator=host:1", "--processes=2", "--process-id=2"], ["--process-id=2", "--processes=2"]),
        (["--coordinator=auto", "--processes=2"], ["leave out --processes"]),
        (["--peer-timeout=1"], ["peer_timeout=1", "at least 5"]),
    ],
)
def test_half_an_address_is_refused(files, tmp_path, capsys, argv, said):
    line = refusal(capsys, [*options_for(files), f"--workdir={tmp_path / 'run'}", *argv])
    assert all(part in line for part in said), line
    assert not (tmp_path / "run").exists()


def test_slurm_is_asked_where_the_others_are(files, tmp_path):
    argv = [*options(files, tmp_path / "run"), "--coordinator=auto"]
    run = subprocess.run([sys.executable, "-m", "experiments.train", *argv], cwd=ROOT, text=True, capture_output=True)
    assert run.returncode == 2 and "--coordinator=auto finds no SLURM" in run.stderr
