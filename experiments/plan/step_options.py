"""The options of `experiments.train` that decide what a step stores."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, get_type_hints

import tyro

from experiments.model_option import model_named
from k3jax.train.config import StepConfig
from k3jax.train.step import TrainStep

SCHEDULES = get_type_hints(StepConfig)["schedule"]


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """A step on a mesh that need not be there."""

    mesh: str = "data=1"
    """Axis sizes, such as data=2,pipe=2,expert=2,context=1; a missing axis is 1."""
    preset: Annotated[str, tyro.conf.arg(name="model", metavar="NAME|FILE.json")] = "nano"
    """nano, mini, kimi_linear_48b or k3, or a file with fields of the model."""
    global_batch: int = StepConfig.global_batch
    """Sequences in one optimizer step, over all ranks and microbatches."""
    seq_len: int = StepConfig.seq_len
    """Tokens of one sequence."""
    microbatches: int = StepConfig.microbatches
    """Parts of the batch that pass the pipeline one after the other."""
    schedule: SCHEDULES = StepConfig.schedule  # type: ignore[valid-type]
    """Pipeline schedule; auto: the fastest in lock-step, as nothing here limits memory."""
    virtual: int = StepConfig.virtual
    """Virtual stages: chunks of layers on each pipeline stage."""
    optimizer: Literal["muon", "adamw"] = StepConfig.optimizer
    """muon keeps AdamW for what is not a matrix."""
    zero: Literal[0, 1, 2] = StepConfig.zero
    """2: sums of a chunk's gradients are sharded over its replicas, and lie in host memory."""
    activations: str = StepConfig.activations
    """PATTERN=POLICY,…: where named activations wait for backward; the first match decides."""
    dtype: Literal["float32", "bfloat16"] = StepConfig.dtype
    """Compute dtype."""

    def train_step(
        self, *, on_devices: bool = False, platform: str | None = None, memory: int | None = None, **changes: str
    ) -> TrainStep:
        """The step, for shapes and tracing, on fake devices to be compiled too; ValueError if it cannot be.

        platform, memory: of the devices that it is planned for, if they are not like those here.
        """
        import jax

        from k3jax.train.devices import abstract_mesh, build_mesh, resolve_mesh

        jax.config.update("jax_platforms", "cpu")  # accelerators may be busy with a run
        fields = {f.name for f in dataclasses.fields(StepConfig)} & {f.name for f in dataclasses.fields(StepOptions)}
        values: dict[str, Any] = {name: getattr(self, name) for name in fields} | changes
        mesh = (build_mesh if on_devices else abstract_mesh)(resolve_mesh(self.mesh))
        return TrainStep(StepConfig(model=model_named(self.preset), **values), mesh, platform, memory)


def said_schedule(step: TrainStep) -> str:
    """A line with the step's schedule."""
    return f"schedule {step.resolved.schedule.name}: {step.why_schedule}"
