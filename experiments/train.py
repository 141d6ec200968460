"""The main job: `python -m experiments.train --mesh=data=2,pipe=2,expert=2,context=1`."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from experiments.model_option import model_named, model_option
from k3jax.train.config import StepConfig, require
from k3jax.train.run_config import RunConfig
from meshes.command_line import failed, parse, refused

if TYPE_CHECKING:  # what the run needs is imported when there is something to run: --help should not wait for it
    from k3jax.train.run import Run, RunResult

PROG = "train"


@dataclasses.dataclass(frozen=True)
class Options(RunConfig):
    """Train a K3 language model.

    Results go to the workdir: config.json, metrics.jsonl (one object a step) and checkpoints that open on any mesh.
    SIGTERM or Ctrl-C ends a run after its current step, with a checkpoint. Exit status: 0 when the run is done or was
    ended that way, 1 if it failed, 2 if it could not begin.
    """

    step: Annotated[StepConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=StepConfig)
    preset: Annotated[str, tyro.conf.arg(name="model", metavar="NAME|FILE.json")] = "nano"
    """nano, mini, kimi_linear_48b or k3, or a file with fields of the model; every field can be changed, see below."""
    log_every: int = 10
    """Steps between lines on stderr where it is not a terminal."""
    dry_run: bool = False
    """Check everything, print the plan, and end: nothing is written, and no devices are needed."""
    coordinator: str = ""
    """HOST:PORT of the first of several processes, or auto where SLURM, Open MPI, Kubernetes or TPUs tell; empty: there is
    one. Every process gets the same options, but for its id (docs/clusters.md)."""
    process_id: int | None = None
    """Which one of several processes this is, from 0."""
    processes: int | None = None
    """How many there are."""
    peer_timeout: int = 100
    """Seconds without a sign of life of one process after which the others end, with status 1."""

    def __post_init__(self):
        super().__post_init__()
        require(self.log_every >= 1, "log_every", self.log_every, "at least 1")
        require(self.peer_timeout >= 5, "peer_timeout", self.peer_timeout, "at least 5 seconds")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line. SystemExit: 1 if the run failed, 2 if it could not begin, 130 if it was interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    with interruptible():
        with refused(PROG):
            named = model_option(argv)
            preset = model_named(Options.preset if named is None else named)
            options = parse(Options, argv, prog=PROG, default=Options(step=StepConfig(model=preset)))
        with joined(options), interruptible():
            train(options)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """One line and exit status 130 for Ctrl-C, where it does not end a run in good order."""
    try:
        yield
    except KeyboardInterrupt:  # before the first step, or twice
        print(f"{PROG}: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def joined(options: Options) -> contextlib.AbstractContextManager[None]:
    """With the other processes, if there are any."""
    from k3jax.train import processes

    where: Any = options.coordinator, options.process_id, options.processes
    with refused(PROG):
        processes.join(*where, peer_timeout=options.peer_timeout)
    return processes.together()


def train(options: Options) -> None:
    """Print configuration and plan, train, and print where everything is."""
    from experiments.progress import TrainingProgress
    from k3jax.train import processes
    from k3jax.train.compilation_cache import use_compilation_cache
    from k3jax.train.run import Run, StepFailedError
    from k3jax.train.signals import stop_on_signals

    with refused(PROG):
        run = Run(options, planning=options.dry_run)
    use_compilation_cache(run.spec.num_devices)
    show_plan(options, run)
    show_start(run)
    if options.dry_run or run.finished:
        return
    with stop_on_signals(run.stop), failed(PROG, StepFailedError, OSError), processes.losses_told():
        with refused(PROG):
            run.load()
        print(f"workdir {run.workdir}", flush=True)
        traced, compiled = run.compile()
        print(f"traced in {traced:.1f} s, compiled in {compiled:.1f} s", flush=True)
        if processes.is_first():
            with TrainingProgress(run.start, options.step.steps, log_every=options.log_every) as progress:
                result = run.train(progress)
        else:
            result = run.train()
    show_result(result)


# ---- what a person sees ----------------------------------------------------------------------------------------------


def show_plan(options: Options, run: Run) -> None:
    from k3jax.train.plan import ownership_table, parameter_table, plan, table

    resolved = dataclasses.replace(options, mesh=str(run.spec), workdir=str(run.workdir))
    text = " ".join(as_options(resolved))
    print(textwrap.fill(text, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
    data = [("data", run.corpus.describe()), ("unigram entropy", f"{run.unigram_entropy:.4f} nats")]
    print(table([*plan(run.train_step), *data]), flush=True)
    if options.dry_run:
        for listed in (parameter_table(run.train_step), ownership_table(run.train_step)):
            print(f"\n{listed}" if listed else "", flush=True)


def as_options(config: Any, prefix: str = "--") -> list[str]:
    """The command line that gives this configuration, every option spelt out except empty ones."""
    words = []
    for field in dataclasses.fields(config):
        name, value = f"{prefix}{field.name.replace('_', '-')}", getattr(config, field.name)
        if isinstance(value, StepConfig):
            words += as_options(value, prefix)
        elif dataclasses.is_dataclass(value):
            words += as_options(value, f"{name}.")
        elif isinstance(value, bool):
            words.append(name if value else f"{prefix}no-{name.removeprefix(prefix)}")
        elif value != "":
            words.append(shlex.quote(f"{name.replace('--preset', '--model')}={value}"))
    return words


def show_start(run: Run) -> None:
    """Where the run starts, and what was not good enough to start from."""
    for found in (run.resumed, run.weights):
        for reason in found.skipped if found else ():
            print(f"skipped {reason}")
        for difference in found.changed if found else ():
            print(f"differs from the checkpoint: {difference}")
    if run.finished:
        print(f"{run.workdir} is at step {run.start} of {run.config.step.steps}: nothing left to do", flush=True)
    elif run.resumed and run.resumed.step is not None:
        print(f"resuming {run.workdir} from step {run.start}", flush=True)
    elif run.resumed:
        print(f"nothing to resume in {run.workdir}: starting at step 0", flush=True)
    if run.weights:
        print(f"weights from {run.weights.directory}, step {run.weights.step}", flush=True)
    elif run.config.init_from:
        print(f"init_from {run.config.init_from} is not read: a run that resumes has its own weights", flush=True)


def show_result(result: RunResult) -> None:
    ended = "done" if result.stopped_by is None else f"stopped by {result.stopped_by}"
    print(f"{ended} at step {result.step}", end="")
    if result.metrics:
        loss, entropy = result.losses[-1], result.unigram_entropy
        side = "below" if loss < entropy else "above"
        print(f": loss {loss:.4f} nats, {abs(entropy - loss):.4f} {side} the unigram entropy of {entropy:.4f}", end="")
        print(f"; {result.seconds_per_step:.2f} s a step", end="")
    print(f"\n{result.workdir}: config.json, metrics.jsonl, checkpoints/{result.step}")


if __name__ == "__main__":
    main()
