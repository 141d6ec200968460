"""What a step stores for backward on one rank, found by tracing: no device, nothing compiled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax

from k3jax.activations.flops import flops_by_name
from k3jax.activations.machine import Machine
from k3jax.activations.planner import Activation
from k3jax.activations.policy import Policy
from k3jax.activations.records import Leaf
from k3jax.activations.residency import transfers
from k3jax.activations.stores import Leaf as StoreLeaf
from k3jax.activations.stores import Span
from k3jax.parallel import pipeline
from k3jax.parallel.histories import Histories
from k3jax.parallel.schedules import BACKWARD, FORWARD, WEIGHT, Schedule
from k3jax.parallel.zero import buffering
from k3jax.train.plan import shard_bytes
from k3jax.train.step import TrainStep


class StoredLeaf(NamedTuple):
    """One leaf that each (chunk, microbatch) of a rank puts away."""

    names: frozenset[str]
    """One, or one for each branch that makes it."""
    span: Span
    """Kind of operation that makes it, and the last kind that reads it."""
    shape: jax.ShapeDtypeStruct
    """Of this rank, before it is encoded."""
    policy: Policy
    bytes: int
    """As stored."""

    @property
    def label(self) -> str:
        return "|".join(sorted(self.names))


def stored_leaves(step: TrainStep) -> list[StoredLeaf]:
    """All that the pullback of one rank's chunk stores under the step's policy; names it recomputes are not among them."""

    def trace(program: pipeline.Program, params: Any):
        schedule = step.resolved.schedule
        return of_program(step, schedule, program, *pipeline.example_of(schedule, program, params))

    return step.on_one_rank(trace)


def hosted_bytes(step: TrainStep) -> dict[str, float]:
    """Bytes between a rank's device and its host's memory in a step, the mean over ranks, by who waits for them."""
    schedule, moved = step.resolved.schedule, {}
    names = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "weight gradients"}
    for leaf in stored_leaves(step):
        if leaf.policy.storage == "local-offload":
            crossing = transfers(schedule, *leaf.span, leaf.policy.storage) * leaf.bytes / schedule.stages
            for kind in leaf.span:
                moved[names[kind]] = moved.get(names[kind], 0.0) + crossing / 2
    if step.masters.local_chunk_owners is not None:  # a flush reads a chunk's shard, but the first, and writes it
        plan = buffering(schedule)
        flushes = (plan.flush[:, :, 0] >= 0).sum() / schedule.stages + plan.num_buffers
        shard = shard_bytes(step) / schedule.virtual
        moved["sums of gradients"] = shard * (2 * flushes - schedule.virtual) + shard_bytes(step)
    return moved


def stored_and_flops(step: TrainStep) -> tuple[list[StoredLeaf], dict[str, int]]:
    """The stored leaves, and by name the floating-point operations of the matrix products that make it from named values."""

    def trace(program: pipeline.Program, params: Any):
        example, histories = pipeline.example_of(step.resolved.schedule, program, params)
        flops = flops_by_name(jax.make_jaxpr(program.chunk)(*example).jaxpr)
        return of_program(step, step.resolved.schedule, program, example, histories), flops

    return step.on_one_rank(trace)


def of_program(
    step: TrainStep, schedule: Schedule, program: pipeline.Program, example: Any, histories: Histories
) -> list[StoredLeaf]:
    """The stored leaves, of a rank's program, the arguments of a chunk, and what chunks append."""
    pullback = pipeline.pullback_of(schedule, program, example, histories)
    return [
        StoredLeaf(names, span, jax.ShapeDtypeStruct(leaf.shape.shape, leaf.shape.dtype), leaf.policy, leaf.bytes)
        for span, of_span in pullback.leaves(step.resolved.policy).items()
        for names, leaf in zip(pullback.names[span], of_span, strict=True)
    ]


def summed(leaves: Iterable[StoredLeaf]) -> list[Leaf]:
    """For the ledger: a leaf for each name and span, with the bytes of all that carry that name."""
    total: dict[tuple[str, Span, Policy], int] = {}
    for leaf in leaves:
        key = leaf.label, leaf.span, leaf.policy
        total[key] = total.get(key, 0) + leaf.bytes
    return [Leaf(label, size, policy, *span) for (label, span, policy), size in total.items()]


def activations(leaves: Iterable[StoredLeaf], flops: Mapping[str, int], machine: Machine) -> list[Activation]:
    """What a planner is told of leaves that are all kept.

    Estimates: recomputing a name takes its matrix products at the machine's rate, and reading and writing its bytes once;
    encoding and decoding reads and writes both forms once.
    """
    parts: dict[tuple[str, Span], list[StoredLeaf]] = {}
    for leaf in leaves:
        parts.setdefault((min(leaf.names), leaf.span), []).append(leaf)
    flops = dict(flops)
    made = []
    for (name, span), part in parts.items():
        whole = sum(leaf.bytes for leaf in part)
        encoded = sum(StoreLeaf(leaf.shape, Policy(quantized=True)).bytes for leaf in part)
        products = flops.pop(name, 0) / machine.flops  # once, if the name has several spans
        made.append(
            Activation(
                name,
                whole,
                quantized_bytes=encoded if encoded < whole else None,
                recompute=products + 2 * whole / machine.memory_bandwidth,
                codec=2 * (whole + encoded) / machine.memory_bandwidth,
                producer=span[0],
                consumer=span[1],
            )
        )
    return made
