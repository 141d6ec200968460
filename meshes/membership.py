"""Who is who: what every rank of a mesh holds, and with whom. Pure arithmetic on rank numbers, no devices."""

from __future__ import annotations

import dataclasses
import itertools
import math

from meshes.spec import AXES, MeshSpec


@dataclasses.dataclass(frozen=True)
class Membership:
    """One rank's place in the mesh. Groups are ranks in ascending order and include the rank itself."""

    rank: int
    coordinates: tuple[int, int, int, int]
    """Position on every axis, in AXES order."""
    chunks: tuple[int, ...]
    """Chunks of the layer stack held by this rank, one per virtual stage v: v · stages + stage."""
    previous_stage: int | None
    """Rank that hands activations to this one, None where the pipeline begins; virtual stages close it to a ring."""
    next_stage: int | None
    """Rank that takes activations from this one, None where the pipeline ends."""
    pipeline: tuple[int, ...]
    """Ranks that hold the other stages of the same pipeline."""
    expert_group: tuple[int, ...]
    """Ranks that share out the experts of a layer and exchange tokens for them."""
    previous_context: int | None
    """Rank with the tokens just before this rank's, None at the start of the sequence."""
    next_context: int | None
    """Rank with the tokens just after this rank's, None at the end of the sequence."""
    context_group: tuple[int, ...]
    """Ranks that share out one sequence."""
    dense_replicas: tuple[int, ...]
    """Ranks with the same dense parameters: all of this stage, over data × expert × context."""
    expert_replicas: tuple[int, ...]
    """Ranks with the same expert parameters: those of this stage and expert shard, over data × context."""

    @property
    def stage(self) -> int:
        """Pipeline stage: the position on the pipe axis."""
        return self.coordinates[AXES.index("pipe")]

    @property
    def context_shard(self) -> int:
        """Which part of the sequence: the position on the context axis."""
        return self.coordinates[AXES.index("context")]


def membership(spec: MeshSpec, rank: int, virtual: int = 1) -> Membership:
    """Place of `rank` in the mesh that `spec` describes, with `virtual` chunks of the layer stack on each stage.

    Ranks count row-major in AXES order: `rank` is the device mesh.devices.flat[rank] of spec.build().
    Raises ValueError if the mesh has no such rank or virtual < 1.
    """
    if not 0 <= rank < spec.num_devices:
        raise ValueError(f"rank {rank} is not in mesh {spec}: its ranks are 0 to {spec.num_devices - 1}")
    if virtual < 1:
        raise ValueError(f"virtual={virtual}: every stage holds at least one chunk, so virtual is 1 or more")
    at = _coordinates(spec, rank)
    stages, stage, context = spec.pipe, at["pipe"], at["context"]
    ring = virtual > 1 and stages > 1

    def neighbour(axis: str, step: int, wraps: bool) -> int | None:
        position, size = at[axis] + step, spec.sizes[axis]
        if not wraps and not 0 <= position < size:
            return None
        return _group(spec, rank, axis)[position % size]

    return Membership(
        rank=rank,
        coordinates=(at["data"], stage, at["expert"], context),
        chunks=tuple(v * stages + stage for v in range(virtual)),
        previous_stage=neighbour("pipe", -1, ring),
        next_stage=neighbour("pipe", +1, ring),
        pipeline=_group(spec, rank, "pipe"),
        expert_group=_group(spec, rank, "expert"),
        previous_context=neighbour("context", -1, False),
        next_context=neighbour("context", +1, False),
        context_group=_group(spec, rank, "context"),
        dense_replicas=_group(spec, rank, "data", "expert", "context"),
        expert_replicas=_group(spec, rank, "data", "context"),
    )


def _strides(spec: MeshSpec) -> dict[str, int]:
    """How far apart in rank two neighbours on each axis are."""
    sizes = tuple(spec.sizes.values())
    return {axis: math.prod(sizes[i + 1 :]) for i, axis in enumerate(AXES)}


def _coordinates(spec: MeshSpec, rank: int) -> dict[str, int]:
    strides = _strides(spec)
    return {axis: rank // strides[axis] % size for axis, size in spec.sizes.items()}


def _group(spec: MeshSpec, rank: int, *along: str) -> tuple[int, ...]:
    """Ranks that differ from `rank` only on the axes `along` (named in AXES order, so that the ranks ascend)."""
    strides, at = _strides(spec), _coordinates(spec, rank)
    first = rank - sum(at[axis] * strides[axis] for axis in along)
    steps = [range(0, spec.sizes[axis] * strides[axis], strides[axis]) for axis in along]
    return tuple(first + sum(step) for step in itertools.product(*steps))
