"""Training: the step, its state and data, checkpoints, metrics and the run."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`make_train_step`, imported on use: the data and checkpoints of a run need no model."""
    if name == "make_train_step":
        from k3jax.train.step import make_train_step

        return make_train_step
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
