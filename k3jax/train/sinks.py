"""Where else metrics go, beside metrics.jsonl: TensorBoard and Weights & Biases, if asked for."""

from __future__ import annotations

import importlib.util
import math
import uuid
from pathlib import Path
from typing import Any

from k3jax.train.metrics import Sink

TENSORBOARD, WANDB_ID = "tensorboard", "wandb-id"


def check_installed(*, tensorboard: bool, wandb: str) -> None:
    """ValueError if something is asked for whose package is not installed."""
    for asked, option, package, extra in (
        (tensorboard, "--tensorboard", "tensorboardX", "tensorboard"),
        (bool(wandb), "--wandb", "wandb", "wandb"),
    ):
        if asked and importlib.util.find_spec(package) is None:
            raise ValueError(f'{option} needs the package {package}: pip install "k3jax[{extra}]"')


def open_sinks(workdir: Path, *, tensorboard: bool, wandb: str, start: int, config: dict[str, Any]) -> list[Sink]:
    """The sinks asked for. start: steps taken before this run. OSError if one cannot be written or reached."""
    sinks: list[Sink] = []
    if tensorboard:
        sinks.append(TensorBoard(workdir / TENSORBOARD, start))
    if wandb:
        sinks.append(WeightsAndBiases(workdir, wandb, config))
    return sinks


class TensorBoard:
    """Event files. What an earlier run logged of steps that run again is dropped."""

    def __init__(self, directory: Path, start: int):
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

        self._writer = SummaryWriter(str(directory), purge_step=start + 1 if start else None)

    def write(self, metrics: dict[str, Any]) -> None:
        for name, value in numbers(metrics).items():
            self._writer.add_scalar(name, value, metrics["step"])

    def sync(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A W&B run named after the work directory, which remembers its id: a run that resumes goes on in it.

    A step that runs again is logged again. The environment decides the rest (WANDB_MODE=offline, WANDB_API_KEY, ...).
    """

    def __init__(self, workdir: Path, project: str, config: dict[str, Any]):
        import wandb  # pyright: ignore[reportMissingImports]

        remembered = workdir / WANDB_ID
        if not remembered.exists():
            remembered.write_text(uuid.uuid4().hex[:8])
        known = dict(project=project, id=remembered.read_text(), name=workdir.name, dir=str(workdir), config=config)
        try:
            self._run = wandb.init(**known, resume="allow")
        except wandb.Error as failure:
            raise OSError(f"W&B project {project!r}: {failure}") from None
        self._run.define_metric("*", step_metric="step")

    def write(self, metrics: dict[str, Any]) -> None:
        self._run.log(numbers(metrics))

    def sync(self) -> None:
        pass

    def close(self) -> None:
        self._run.finish()


def numbers(metrics: dict[str, Any]) -> dict[str, int | float]:
    """What can be drawn: infinite values and text are left out, nan stays a gap that shows."""
    return {name: value for name, value in metrics.items() if isinstance(value, int | float) and not math.isinf(value)}
