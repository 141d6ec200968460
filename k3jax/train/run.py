"""A training run from the first check to the last checkpoint.

`Run(config)` checks everything and writes nothing, `load` makes or restores the state and opens the work directory,
`compile` compiles, `train` runs the steps. `run(config)` does all of it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from k3jax.model import Batch
from k3jax.optim.groups import Group, parameter_groups
from k3jax.train import data, inputs, workdir
from k3jax.train.checkpoint import Checkpoints
from k3jax.train.devices import abstract_mesh, build_mesh, resolve_mesh
from k3jax.train.held_out import held_out_batches
from k3jax.train.metrics import MetricsLog
from k3jax.train.run_config import RunConfig
from k3jax.train.signals import stop_on_signals
from k3jax.train.step import TrainStep

Metrics = dict[str, Any]


class NonFiniteError(ArithmeticError):
    """A loss or gradient norm is not finite; says the step and the parameters. Nothing was saved since."""


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What a run came to."""

    workdir: Path
    step: int
    """Steps taken in all, those before a resume included; the last checkpoint is of this step."""
    metrics: list[Metrics]
    """What was logged in this run, a step each."""
    unigram_entropy: float
    """Loss in nats of the best model that ignores its input."""
    stopped_by: str | None = None
    """What ended the run before its last step, such as SIGTERM."""

    @property
    def losses(self) -> list[float]:
        return [metrics["loss"] for metrics in self.metrics]


def run(config: RunConfig, *, on_step: Callable[[Metrics], None] | None = None) -> RunResult:
    """Check, load, compile and train; on_step is called with the metrics of every step.

    SIGTERM and SIGINT end it after the current step and a last checkpoint. Raises ValueError, before anything is
    written, if the configuration cannot work; OSError if something cannot be read or written; NonFiniteError.
    """
    job = Run(config)
    with stop_on_signals(job.stop):
        job.load()
        job.compile()
        return job.train(on_step)


class InFlight(NamedTuple):
    """A step whose results have not been fetched."""

    step: int
    metrics: dict[str, jax.Array]
    evaluation: list[tuple[jax.Array, jax.Array]]
    """(sum of losses, targets) of the held-out batches; empty if this step is not evaluated."""


class Run:
    """One run. Construction checks all that can be checked without compiling; raises as `run`.

    planning: no devices are needed; `load` and what follows it cannot be called.
    """

    def __init__(self, config: RunConfig, *, planning: bool = False):
        self.config = config
        self.spec = resolve_mesh(config.mesh)
        self.workdir = workdir.choose(config.workdir, config.step.model.name)
        workdir.check(self.workdir, resume=config.resume)
        config.step.resolve(self.spec)
        self.train_step = TrainStep(config.step, abstract_mesh(self.spec) if planning else build_mesh(self.spec))
        self.corpus = inputs.open_data(config)
        self.unigram_entropy = self.corpus.unigram_entropy()
        self.resumed = inputs.to_resume(config, self.corpus) if config.resume else None
        """The checkpoint to continue; its step is None if there was nothing to resume."""
        self.start = (self.resumed and self.resumed.step) or 0
        """Steps taken before this run."""
        fresh = not self.resumed or self.resumed.step is None
        self.weights = inputs.to_start_from(config) if config.init_from and fresh else None
        """The checkpoint to take the weights from; a run that resumes has its own."""
        self.stopped_by: str | None = None

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self.start >= self.config.step.steps

    def stop(self, reason: str) -> None:
        """Ask `train` to end after the current step."""
        self.stopped_by = reason

    # ---- load -----------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Make or restore the state, then open the work directory. Raises as `run`."""
        self.checkpoints = Checkpoints(self.workdir / workdir.CHECKPOINTS, self.train_step, keep=self.config.keep)
        self._position, self._saved = 0, None
        if self.resumed and self.resumed.step is not None:
            self.state, _ = self.checkpoints.restore(self.resumed.step)
            self._position, self._saved = self.resumed.position, self.resumed.step
        else:
            self.state = self.train_step.init()
        if self.weights and self.weights.step is not None:
            other = Checkpoints(self.weights.directory, self.train_step)
            self.state = self.state._replace(params=other.restore_weights(self.weights.step))
        self._skipped = int(self.state.skipped)
        told = {field.name: getattr(self.config, field.name) for field in dataclasses.fields(RunConfig)}
        workdir.write_config(self.workdir, told | {"mesh": str(self.spec), "step": dataclasses.asdict(self.config.step)})
        self.log = MetricsLog(self.workdir / workdir.METRICS)

    # ---- compile --------------------------------------------------------------------------------------------------

    def compile(self) -> float:
        """Compile the step, and the evaluation if there is one; returns the seconds it took."""
        begun = time.perf_counter()
        shape = (self.config.step.global_batch, self.config.step.seq_len)
        batch = self.train_step.place(Batch(*[np.zeros(shape, np.int32)] * 3))
        self._step = self.train_step.step.lower(self.state, batch).compile()
        self._held_out: list[Batch] = []
        if self.config.eval_every:
            self._evaluate = self.train_step.evaluate.lower(self.state, batch).compile()
            self._held_out = [on_host(batch) for batch in held_out_batches(self.corpus, shape[0])]
        return time.perf_counter() - begun

    # ---- train ----------------------------------------------------------------------------------------------------

    def train(self, on_step: Callable[[Metrics], None] | None = None) -> RunResult:
        """Run the remaining steps and save; `on_step` gets the metrics of each. Raises as `run`.

        A step's metrics are fetched when the next one is under way. A checkpoint is begun only when the metrics of all
        its steps are on disk, so that no resume can leave a gap.
        """
        self._logged: list[Metrics] = []
        self._on_step = on_step or (lambda metrics: None)
        self._in_flight: InFlight | None = None
        self._clock = time.perf_counter()
        step = self.start
        batches = self.corpus.batches("train", self.config.step.global_batch, self._position)
        try:
            while step < self.config.step.steps and not self.stopped_by:
                step += 1
                self._dispatch(step, next(batches))
                if step % self.config.checkpoint_every == 0:
                    self._save(step)
            self._save(step)
            self.checkpoints.wait()
        finally:
            batches.close()
            self.log.close()
        stopped_by = self.stopped_by if step < self.config.step.steps else None
        return RunResult(self.workdir, step, self._logged, self.unigram_entropy, stopped_by)

    def _dispatch(self, step: int, batch: data.Batch) -> None:
        """Start a step, then log the one before it."""
        self.state, metrics = self._step(self.state, self.train_step.place(on_host(batch)))
        self._position = batch.position
        evaluation = []
        if self._held_out and (step % self.config.eval_every == 0 or step == self.config.step.steps):
            evaluation = [self._evaluate(self.state, self.train_step.place(held)) for held in self._held_out]
        before, self._in_flight = self._in_flight, InFlight(step, metrics, evaluation)
        if before:
            self._record(before)

    def _save(self, step: int) -> None:
        """Log what is left, and save the state unless this very step was saved."""
        if self._in_flight:
            last, self._in_flight = self._in_flight, None
            self._record(last)
        self.log.sync()
        if step != self._saved:
            about = {"position": self._position, "fingerprint": self.corpus.fingerprint, "data": self.config.data}
            self.checkpoints.save(step, self.state, about)
            self._saved = step

    def _record(self, done: InFlight) -> None:
        """Wait for a step and log it. NonFiniteError if it shall end the run."""
        values = jax.device_get(done.metrics)
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        self._skipped += not values["finite"]
        metrics: Metrics = {"step": done.step}
        metrics |= {name: float(values[name]) for name in ("loss", "grad_norm", "learning_rate")}
        metrics |= {
            "tokens": int(values["tokens"]),
            "tokens_per_second": int(values["tokens"]) / seconds,
            "bubble_fraction": self.train_step.resolved.schedule.bubble_fraction(lockstep=True),
            "moe_rows_max_over_mean": float(values["moe_rows_max_over_mean"]),
            "skipped": self._skipped,
        }
        if done.evaluation:
            losses, targets = np.sum(jax.device_get(done.evaluation), axis=0, dtype=np.float64)
            metrics["eval_loss"] = float(losses / targets)
        self.log.write(metrics)
        self._logged.append(metrics)
        self._on_step(metrics)
        if not values["finite"] and self.config.on_nonfinite == "stop":
            raise NonFiniteError(
                f"step {done.step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}; "
                f"{self._not_finite(values['grad_squares'])}; {self._last_saved()}"
            )

    def _not_finite(self, grad_squares: np.ndarray) -> str:
        """Which parameters have a gradient that is not finite, and how they are trained."""
        groups = jax.tree.leaves(
            parameter_groups(self.train_step.state_shapes.params), is_leaf=lambda x: isinstance(x, Group)
        )
        named = zip(self.train_step.param_names, groups, grad_squares, strict=True)
        bad = [f"{name} ({group.label})" for name, group, square in named if not math.isfinite(square)]
        if not bad:
            return "all gradients are finite"
        return f"not finite in {len(bad)} of {len(grad_squares)} parameters: {', '.join(bad[:4])}{', ...' * (len(bad) > 4)}"

    def _last_saved(self) -> str:
        """The last good checkpoint, once it is on disk."""
        self.checkpoints.wait()
        return "no checkpoint was saved" if self._saved is None else f"the last checkpoint is step {self._saved}"


def on_host(batch: data.Batch) -> Batch:
    return Batch(batch.tokens, batch.targets, batch.segment_ids)
