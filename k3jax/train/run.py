"""A training run from the first check to the last checkpoint.

`Run(config)` checks everything and writes nothing, `load` makes or restores the state and writes config.json,
`compile` compiles, `train` runs the steps. `run(config)` does all of it.

Several processes (`processes.py`) do all of this side by side: each makes and feeds its own rows of every batch and writes
its own part of every checkpoint, the first one alone writes the rest of the work directory.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from k3jax.model import Batch
from k3jax.optim.groups import is_group
from k3jax.train import data, inputs, processes, workdir
from k3jax.train.checkpoint import Checkpoints
from k3jax.train.devices import abstract_mesh, build_mesh, resolve_mesh
from k3jax.train.held_out import held_out_batches
from k3jax.train.metrics import MetricsLog, Sink
from k3jax.train.profile import Profile, steps_named
from k3jax.train.run_config import RunConfig
from k3jax.train.signals import stop_on_signals
from k3jax.train.sinks import check_installed, open_sinks
from k3jax.train.step import TrainStep

Metrics = dict[str, Any]


class StepFailedError(Exception):
    """A step after which the run cannot go on. Nothing was saved since."""


class NonFiniteError(StepFailedError, ArithmeticError):
    """A loss or gradient norm is not finite; says the step and the parameters."""


class MisplacedError(StepFailedError):
    """Operations of the pipeline found something of another microbatch in their slots: a table or a store is wrong."""


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

    @property
    def seconds_per_step(self) -> float:
        """Median over the steps of this run; nan without steps."""
        return statistics.median([m["tokens"] / m["tokens_per_second"] for m in self.metrics] or [math.nan])


def run(config: RunConfig, *, on_step: Callable[[Metrics], None] | None = None) -> RunResult:
    """Check, load, compile and train; on_step is called with the metrics of every step.

    SIGTERM and SIGINT end it after the current step and a last checkpoint. Raises ValueError, before anything is
    written, if the configuration cannot work; OSError if something cannot be read or written; StepFailedError.
    """
    job = Run(config)
    with stop_on_signals(job.stop):
        job.load()
        job.compile()
        return job.train(on_step)


class InFlight(NamedTuple):
    """A step that was started and not logged yet."""

    step: int
    metrics: dict[str, jax.Array]
    begun: float
    """When it was started, in seconds of the process's clock."""
    done: float | None
    """When it was done, if the call that started it waited for it, as small programs on CPU do."""


class Run:
    """One run. Construction checks all that can be checked without compiling; raises as `run`.

    planning: no devices are needed; `load` and what follows it cannot be called.
    """

    def __init__(self, config: RunConfig, *, planning: bool = False):
        self.config = config
        self.spec = resolve_mesh(config.mesh)
        self.workdir = processes.by_first(self._workdir)
        check_installed(tensorboard=config.tensorboard, wandb=config.wandb)
        config.step.resolve(self.spec)
        self.train_step = TrainStep(config.step, abstract_mesh(self.spec) if planning else build_mesh(self.spec))
        self.corpus = inputs.open_data(config)
        self.unigram_entropy = self.corpus.unigram_entropy()
        self.resumed = processes.by_first(lambda: inputs.to_resume(config, self.corpus)) if config.resume else None
        """The checkpoint to continue; its step is None if there was nothing to resume."""
        self.start = (self.resumed and self.resumed.step) or 0
        """Steps taken before this run."""
        fresh = not self.resumed or self.resumed.step is None
        self.weights = processes.by_first(lambda: inputs.to_start_from(config)) if config.init_from and fresh else None
        """The checkpoint to take the weights from; a run that resumes has its own."""
        self.stopped_by: str | None = None
        processes.agree(self.told | {"fingerprint": self.corpus.fingerprint})

    @property
    def told(self) -> dict[str, Any]:
        """What the run was told and what it made of that, as config.json has it."""
        told = {field.name: getattr(self.config, field.name) for field in dataclasses.fields(RunConfig)}
        told |= {"mesh": str(self.spec), "step": dataclasses.asdict(self.config.step)}
        return told | {
            "schedule": {"name": self.train_step.resolved.schedule.name, "why": self.train_step.why_schedule}
        }

    def _workdir(self) -> Path:
        path = workdir.choose(self.config.workdir, self.config.step.model.name)
        workdir.check(path, resume=self.config.resume)
        return path

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self.start >= self.config.step.steps

    def stop(self, reason: str) -> None:
        """Ask `train` to end after the current step."""
        self.stopped_by = reason

    # ---- load -----------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Make or restore the state, then put the configuration into the work directory. Raises as `run`."""
        self.checkpoints = Checkpoints(self.workdir / workdir.CHECKPOINTS, self.train_step, keep=self.config.keep)
        self._position, self._saved = 0, None
        if self.resumed and self.resumed.step is not None:
            self.state, _ = self.checkpoints.restore(self.resumed.step)
            self._position, self._saved = self.resumed.position, self.resumed.step
        else:
            self.state = self.train_step.init()
        if self.weights and self.weights.step is not None:
            other = Checkpoints(self.weights.directory, self.train_step)
            weights = other.restore_weights(self.weights.step)
            self.state = self.state._replace(**{k: v for k, v in weights._asdict().items() if v is not None})
        self._skipped = int(self.state.skipped)
        written = processes.by_first(lambda: workdir.write_config(self.workdir, self.told))
        config = self.workdir / workdir.CONFIG
        if not config.exists() or config.read_text(encoding="utf-8") != written:
            raise OSError(
                f"{config} is not what the first process wrote: the workdir must be on a file system that all share"
            )
        self._sinks: list[Sink] = []
        if processes.is_first():
            asked: Any = dict(tensorboard=self.config.tensorboard, wandb=self.config.wandb)
            self._sinks = open_sinks(self.workdir, **asked, start=self.start, config=self.told)

    # ---- compile --------------------------------------------------------------------------------------------------

    def compile(self) -> tuple[float, float]:
        """Compile the step, and the evaluation if there is one; returns the seconds of tracing and of compiling."""
        begun = time.perf_counter()
        size, seq_len = self.config.step.global_batch, self.config.step.seq_len
        rows = self.train_step.own_rows
        nothing: Any = np.zeros((len(rows), seq_len), np.int32)
        batch = self.train_step.place(Batch(nothing, nothing, nothing))
        step = self.train_step.step.lower(self.state, batch)
        evaluate = self.train_step.evaluate.lower(self.state, batch) if self.config.eval_every else None
        traced = time.perf_counter()
        self._step = step.compile()
        self._held_out: list[Batch] = []
        if evaluate:
            self._evaluate = evaluate.compile()
            self._held_out = [on_host(batch) for batch in held_out_batches(self.corpus, size, rows)]
        return traced - begun, time.perf_counter() - traced

    # ---- train ----------------------------------------------------------------------------------------------------

    def train(self, on_step: Callable[[Metrics], None] | None = None) -> RunResult:
        """Run the remaining steps and save; `on_step` gets the metrics of each. Raises as `run`.

        A step's metrics are fetched when the next one is under way. A checkpoint is begun only when the metrics of all
        its steps are on disk, so that no resume can leave a gap.
        """
        self._logged: list[Metrics] = []
        self._on_step = on_step or (lambda metrics: None)
        self._in_flight: InFlight | None = None
        self._clock = 0.0
        if processes.is_first():
            self._sinks.append(MetricsLog(self.workdir / workdir.METRICS))
        self._profile = Profile(steps_named(self.config.profile), self.workdir / workdir.PROFILE)
        step = self.start
        rows = self.train_step.own_rows
        batches = self.corpus.batches("train", self.config.step.global_batch, self._position, rows=rows)
        try:
            while step < self.config.step.steps and not self._ends(step):
                step += 1
                self._start(step, next(batches))
                if self._held_out and (step % self.config.eval_every == 0 or step == self.config.step.steps):
                    self._settle(evaluate=True)
                if step % self.config.checkpoint_every == 0:
                    self._save(step)
            self._save(step)
        finally:
            del batches  # ends its thread
            self._profile.close()
            for sink in self._sinks:
                sink.close()
            self.checkpoints.wait()
        stopped_by = self.stopped_by if step < self.config.step.steps else None
        return RunResult(self.workdir, step, self._logged, self.unigram_entropy, stopped_by)

    def _ends(self, step: int) -> bool:
        """Whether the run ends after this step, because one of its processes was asked to."""
        told = processes.told_to_stop(step, self.stopped_by)
        if told:
            last, self.stopped_by = told
            return step >= last
        return False

    def _start(self, step: int, batch: data.Batch) -> None:
        """Start a step, then log the one before it."""
        if self._profile.before(step):
            self._settle()
        begun = time.perf_counter()
        with self._profile.start(step):
            self.state, metrics = self._step(self.state, self.train_step.place(on_host(batch)))
        done = time.perf_counter() if metrics["loss"].is_ready() else None
        self._position = batch.position
        before, self._in_flight = self._in_flight, InFlight(step, metrics, begun, done)
        if before:
            self._record(before)

    def _settle(self, *, evaluate: bool = False) -> None:
        """Log the step that is under way, if there is one."""
        last, self._in_flight = self._in_flight, None
        if last:
            self._record(last, evaluate=evaluate)

    def _save(self, step: int) -> None:
        """Save the state, unless this very step was saved; first the metrics of all its steps reach the disk."""
        self._settle()
        for sink in self._sinks:
            sink.sync()
        if step != self._saved:
            about = {"position": self._position, "fingerprint": self.corpus.fingerprint, "data": self.config.data}
            self.checkpoints.save(step, self.state, about)
            self._saved = step

    def _record(self, step: InFlight, *, evaluate: bool = False) -> None:
        """Wait for a step and log it. StepFailedError if it shall end the run."""
        values = jax.device_get(step.metrics)
        done = step.done or time.perf_counter()
        seconds, self._clock = done - max(self._clock, step.begun), done
        self._skipped += not values["finite"]
        metrics: Metrics = {"step": step.step}
        metrics |= {name: float(values[name]) for name in ("loss", "grad_norm", "learning_rate", "max_logit")}
        metrics |= {
            "tokens": int(values["tokens"]),
            "tokens_per_second": int(values["tokens"]) / seconds,
            "bubble_fraction": self.train_step.resolved.schedule.bubble_fraction(lockstep=True),
            "qk_clipped": int(values["qk_clipped"]),
            "moe_rows_max_over_mean": float(values["moe_rows_max_over_mean"]),
            "moe_max_vio": float(values["moe_max_vio"]),
            "moe_replicas": int(values["moe_replicas"]),
            "moe_dropped": int(values["moe_dropped"]),
            **{name: int(values[name]) for name in values if name.startswith("activations_")},
            "skipped": self._skipped,
        }
        if evaluate:
            metrics["eval_loss"] = self._held_out_loss()
        for sink in self._sinks:
            sink.write(metrics)
        self._logged.append(metrics)
        self._on_step(metrics)
        if values["misplaced"]:
            raise MisplacedError(
                f"step {step.step}: {values['misplaced']} times an operation of {self.train_step.resolved.schedule.name} found "
                f"something of another microbatch in its slot; nothing was changed in this step; {self._last_saved()}"
            )
        if not values["finite"] and self.config.on_nonfinite == "stop":
            raise NonFiniteError(
                f"step {step.step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}; "
                f"{self._not_finite(values['grad_finite'])}; {self._last_saved()}"
            )

    def _held_out_loss(self) -> float:
        """Mean loss in nats over the targets of the held-out batches; changes nothing."""
        sums = [jax.device_get(self._evaluate(self.state, self.train_step.place(batch))) for batch in self._held_out]
        return sum(float(loss) for loss, _ in sums) / max(1, sum(int(targets) for _, targets in sums))

    def _not_finite(self, grad_finite: np.ndarray) -> str:
        """Which parameters have a gradient that is not finite, and how they are trained."""
        groups = jax.tree.leaves(self.train_step.masters.groups, is_leaf=is_group)
        named = zip(self.train_step.param_names, groups, grad_finite, strict=True)
        bad = [f"{name} ({group.label})" for name, group, finite in named if not finite]
        if not bad:
            return "all gradients are finite"
        first = ", ".join([*bad[:4], *["..."] * (len(bad) > 4)])
        return f"not finite in {len(bad)} of {len(grad_finite)} parameters: {first}"

    def _last_saved(self) -> str:
        """What there is to resume from, once it is on disk."""
        try:
            self.checkpoints.wait()
        except OSError as failure:
            return str(failure)
        return "no checkpoint was saved" if self._saved is None else f"the last checkpoint is step {self._saved}"


def on_host(batch: data.Batch) -> Batch:
    """What the model takes of a batch, still in host memory."""
    arrays: tuple[Any, ...] = (batch.tokens, batch.targets, batch.segment_ids)
    return Batch(*arrays)
