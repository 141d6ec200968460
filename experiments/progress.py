"""How far a training run is, on stderr: a live line on a terminal, a line every few steps elsewhere."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class TrainingProgress:
    """A context manager to call with the metrics of each step, from step start + 1 to `steps`."""

    def __init__(self, start: int, steps: int, *, log_every: int):
        self.steps, self.log_every = steps, log_every
        self._first, self._begun = start + 1, time.perf_counter()
        console = Console(stderr=True)
        self._bar = None
        if console.is_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, TextColumn("eta"), TimeRemainingColumn(), console=console)
            self._task = self._bar.add_task("", total=steps, completed=start)

    def __enter__(self) -> TrainingProgress:
        self._begun = time.perf_counter()
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, metrics: dict[str, Any]) -> None:
        step = metrics["step"]
        if self._bar:
            self._bar.update(self._task, completed=step, description=described(metrics))
        elif step in (self._first, self.steps) or step % self.log_every == 0 or "eval_loss" in metrics:
            pace = (time.perf_counter() - self._begun) / (step + 1 - self._first)
            left = timedelta(seconds=round(pace * (self.steps - step)))
            print(f"step {step}/{self.steps}  {described(metrics)}  eta {left}", file=sys.stderr, flush=True)


def described(metrics: dict[str, Any]) -> str:
    """Loss and speed, the held-out loss where there is one, and skipped updates if there were any."""
    words = [f"loss {metrics['loss']:.4f}", f"grad norm {metrics['grad_norm']:.3g}"]
    if "eval_loss" in metrics:
        words.append(f"held-out loss {metrics['eval_loss']:.4f}")
    if metrics["skipped"]:
        words.append(f"skipped {metrics['skipped']}")
    return "  ".join([*words, f"{metrics['tokens_per_second']:,.0f} tokens/s"])
