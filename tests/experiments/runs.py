"""Small runs of the main job, and what to compare of them."""

import dataclasses
import json
from pathlib import Path

import pytest
import tiny

from experiments.train import main
from k3jax.train import metrics
from k3jax.train.run import Run, RunResult
from k3jax.train.run_config import RunConfig
from k3jax.train.signals import stop_on_signals

STEPS = 6
# These tests are about runs, not models: one kind of layer and plain residuals compile in a third of the time.
MODEL = dataclasses.replace(
    tiny.MODEL, vocab_size=320, pattern="K", num_layers=4, attn_res_block=None, dense_layers=0, gate_lower_bound=None
)
STEP = dataclasses.replace(tiny.STEP, model=MODEL, steps=STEPS, global_batch=8, microbatches=2, seq_len=24)


def config_for(files: Path, workdir: Path, **changes) -> RunConfig:
    """The configuration of all runs here, as a value."""
    common = dict(step=STEP, data=str(files / "text.txt"), checkpoint_every=2, eval_every=3)
    return RunConfig(workdir=str(workdir), **(common | changes))


def options_for(files: Path) -> list[str]:
    """The same as options; without a workdir."""
    step = {field.name: getattr(STEP, field.name) for field in dataclasses.fields(STEP) if field.name != "model"}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in step.items()]
    words += ["--checkpoint-every=2", "--eval-every=3", "--log-every=1"]
    return [*words, f"--model={files / 'tiny.json'}", f"--data={files / 'text.txt'}"]


def train(config: RunConfig, on_step=None) -> RunResult:
    """`k3jax.train.run.run`, but on_step gets the job too."""
    job = Run(config)
    with stop_on_signals(job.stop):
        job.load()
        job.compile()
        return job.train(None if on_step is None else lambda m: on_step(job, m))


def without_speed(workdir: Path) -> list[dict]:
    """The metrics of every step, but for the time it took."""
    lines = metrics.read(workdir / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines]


def steps_logged(workdir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def content(directory: Path) -> dict[str, bytes]:
    """All files below a directory."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def refusal(capsys, argv: list[str], status: int = 2) -> str:
    """The one line that the command ends with."""
    with pytest.raises(SystemExit) as stop:
        main(argv)
    err = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("step ")]
    assert stop.value.code == status, err
    assert len(err) == 1 and err[0].startswith("train: error: "), err
    return err[0].removeprefix("train: error: ")
