"""Everything a training run is told, checked as far as possible before anything is compiled."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from k3jax.activations.policy import ActivationPolicy
from k3jax.configs import ModelConfig, get
from k3jax.parallel.layout import StackLayout
from k3jax.parallel.schedules import Schedule, build, candidates
from k3jax.sharding import check_divisible
from meshes import MeshSpec


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What the compiled step depends on.

    Raises ValueError for values out of range; `resolve` raises for combinations that do not fit each other.
    """

    model: ModelConfig = dataclasses.field(default_factory=lambda: get("nano"))
    global_batch: int = 32
    """Sequences in one optimizer step, over all ranks and microbatches."""
    seq_len: int = 128
    """Tokens of one sequence."""
    microbatches: int = 4
    """Parts of the batch that pass the pipeline one after the other; gradients add up."""
    schedule: Literal["auto", "gpipe", "plain_1f1b", "1f1b", "interleaved_1f1b", "zb1p", "zbv"] = "auto"
    """Pipeline schedule; auto: of those made for so many virtual stages the fastest in lock-step that fits on a device."""
    virtual: int = 1
    """Virtual stages: chunks of layers on each pipeline stage."""
    zero: Literal[0, 1, 2] = 0
    """What is sharded over replicas (data, expert, context): 0 nothing; 1 master weights and optimizer state; 2 gradients too:
    buffers for two chunks on the device, the sums over microbatches in host memory."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """muon keeps AdamW for what is not a matrix."""
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the stored average of gradients; bfloat16 halves it, and rounds it every step."""
    learning_rate: float = 3e-3
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices, embedding and head."""
    qk_clip: float = 100.0
    """Largest attention logit of an MLA head; after a step in which one was larger, its weights are scaled down. inf: never."""
    clip_norm: float = 1.0
    """Largest global gradient norm; gradients above it are scaled down to it. inf: never."""
    warmup: float = 0.01
    """Share of the steps in which the learning rate rises linearly; a cosine to a tenth of the peak follows."""
    steps: int = 100
    """Optimizer steps of the whole run."""
    activations: str = "*=keep"
    """PATTERN=POLICY,…: where named activations wait for backward; the first match decides. POLICY: keep, recompute,
    local-offload (host memory), remote-offload (another pipeline rank's), or quantize (fp8), which + joins with an offload."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; master weights are float32."""
    seed: int = 0
    """Seed of the initial weights and of the data order."""

    def __post_init__(self):
        for name in ("global_batch", "seq_len", "microbatches", "virtual", "steps"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(
            self.zero in (0, 1, 2),
            "zero",
            self.zero,
            "0 (nothing sharded over replicas), 1 (optimizer) or 2 (gradients too)",
        )
        require(0 < self.learning_rate < math.inf, "learning_rate", self.learning_rate, "positive and finite")
        require(0 <= self.weight_decay < math.inf, "weight_decay", self.weight_decay, "at least 0 and finite")
        require(self.qk_clip > 0, "qk_clip", self.qk_clip, "positive (inf: never clip)")
        require(self.clip_norm > 0, "clip_norm", self.clip_norm, "positive (inf: never clip)")
        require(0 <= self.warmup <= 1, "warmup", self.warmup, "a share of the steps, 0 to 1")
        require(0 <= self.seed < 2**31, "seed", self.seed, "0 to 2147483647")
        ActivationPolicy.parse(self.activations)

    def tables(self, mesh: MeshSpec) -> list[Schedule]:
        """The schedule on this mesh; those to choose from if it is auto. ValueError if it is not made for that."""
        if self.schedule == "auto":
            return candidates(mesh.pipe, self.virtual, self.microbatches)
        return [build(self.schedule, stages=mesh.pipe, virtual=self.virtual, microbatches=self.microbatches)]

    def resolve(self, mesh: MeshSpec, schedule: Schedule | None = None) -> Resolved:
        """The pieces of the step on this mesh; ValueError names what does not fit, with the numbers.

        schedule: one of `tables`; not given, the first.
        """
        sizes, schedule = mesh.sizes, schedule or self.tables(mesh)[0]
        layout = StackLayout(self.model, sizes["pipe"], self.virtual, schedule.placement)
        check_divisible(self.model, sizes)
        ranks = sizes["data"] * sizes["expert"]
        if self.global_batch % (self.microbatches * ranks):
            raise ValueError(
                f"global_batch={self.global_batch} does not divide by microbatches={self.microbatches} x data={sizes['data']} "
                f"x expert={sizes['expert']} = {self.microbatches * ranks}: choose a multiple of {self.microbatches * ranks}"
            )
        if self.seq_len % sizes["context"]:
            raise ValueError(
                f"seq_len={self.seq_len} does not divide by context={sizes['context']}: choose a multiple of it"
            )
        policy = ActivationPolicy.parse(self.activations)
        parked = [f"{pattern}={each}" for pattern, each in policy.rules if each.storage == "remote-offload"]
        if parked and sizes["pipe"] == 1:
            raise ValueError(
                f"activations: {parked[0]} needs another pipeline rank: got pipe=1, choose pipe of at least 2"
            )
        return Resolved(mesh, layout, schedule, policy)


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A step configuration on a mesh."""

    mesh: MeshSpec
    layout: StackLayout
    schedule: Schedule
    policy: ActivationPolicy


def require(holds: bool, name: str, got: object, needed: str) -> None:
    """ValueError with what was got and what is needed; written so that nan never holds."""
    if not holds:
        raise ValueError(f"{name}={got}: must be {needed}")
