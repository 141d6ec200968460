"""Everything that a training run is told, as one value."""

from __future__ import annotations

import dataclasses
from typing import Literal

from k3jax.train.config import StepConfig, require
from k3jax.train.profile import steps_named


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A training run: the step, and everything around it. Raises ValueError for values out of range."""

    mesh: str = "data=1"
    """Axis sizes, such as data=2,pipe=2,expert=2,context=1; a missing axis is 1, one may be -1 (fills the devices)."""
    step: StepConfig = dataclasses.field(default_factory=StepConfig)
    """What the compiled step depends on."""
    data: str = "stdlib"
    """Comma-separated text files, directories, globs, .jsonl, .npy; stdlib is the source of Python's own library."""
    tokenizer: str = ""
    """A local tokenizer.json; empty: bytes."""
    workdir: str = ""
    """Where configuration, metrics and checkpoints go; empty: a new directory runs/MODEL-TIME."""
    checkpoint_every: int = 100
    """Steps between checkpoints. One is saved at the end in any case."""
    keep: int = 3
    """How many of the newest checkpoints to keep."""
    resume: bool = False
    """Continue from the newest whole checkpoint of the workdir, on any mesh; without one, start at step 0."""
    init_from: str = ""
    """Workdir or checkpoints directory whose newest whole checkpoint gives the weights and the router's bias."""
    eval_every: int = 0
    """Steps between evaluations on held-out data, which also follow the last step; 0: never."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What a loss or gradient that is not finite does: end the run, or drop this update and count it."""
    profile: str = ""
    """FIRST:LAST, steps whose trace goes to WORKDIR/profile; empty: none."""
    tensorboard: bool = False
    """Metrics also as TensorBoard's event files, in WORKDIR/tensorboard (extra: tensorboard)."""
    wandb: str = ""
    """Project of Weights & Biases that metrics also go to; empty: none (extra: wandb)."""

    def __post_init__(self):
        require(self.checkpoint_every >= 1, "checkpoint_every", self.checkpoint_every, "at least 1")
        require(self.keep >= 1, "keep", self.keep, "at least 1")
        require(self.eval_every >= 0, "eval_every", self.eval_every, "at least 0, which is never")
        traced = steps_named(self.profile)
        require(traced.stop <= self.step.steps + 1, "profile", self.profile, f"within the {self.step.steps} steps")
        if self.resume and not self.workdir:
            raise ValueError("resume needs a workdir: name the directory of the run to continue")
