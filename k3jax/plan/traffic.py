"""What a step sends between ranks, by part of the step, axes and kind of collective; traced, not compiled."""

from __future__ import annotations

from typing import NamedTuple

from k3jax.plan.cost import MESSAGES, Costs, walk
from k3jax.plan.links import Seconds, link_seconds
from k3jax.train.step import TrainStep
from meshes.targets import Target

PARTS = {
    "forward": ("gradients/pipeline.operation/forward",),
    "backward": ("gradients/pipeline.operation/backward",),
    "weight gradients": ("gradients/pipeline.operation/weight",),
    "embedding and head": (
        "gradients/pipeline.embed",
        "gradients/pipeline.head",
        "gradients/pipeline.embed_backward",
    ),
    "between stages": ("gradients/pipeline.send", "gradients/pipeline.stores", "gradients/pipeline.histories"),
    "sums of gradients": ("gradients/pipeline.sums", "gradients/reduce"),
    "optimizer": ("optimizer",),
    "the rest": ("",),
}
"""By the named scopes that it is in, the first that fits."""
ONCE = "moe.to_owners"
"""Rounds of messages in one of which a rank sends what it has: together they carry one message's buffer at most."""


class Traffic(NamedTuple):
    """Of a step, on the rank of the busiest stage."""

    part: str
    axes: tuple[str, ...]
    kind: str
    bytes: float
    """Received from other ranks; of a ragged all-to-all at most, as routing has it."""
    messages: float


def traffic(step: TrainStep) -> list[Traffic]:
    """All that is sent along axes with more than one rank, the largest part of a step first."""
    mesh = step.resolved.mesh.sizes
    return by_part(walk(step.step.trace(*step.operands()).jaxpr, mesh).costs, rounds=mesh["expert"] - 1)


def by_part(costs: Costs, rounds: int) -> list[Traffic]:
    """The same from a step's costs; rounds: of messages that are sent `ONCE`."""
    sums: dict[tuple[str, tuple[str, ...], str], list] = {}
    for item, cost in costs.items():
        if not item.axes or item.what == MESSAGES:
            continue
        of = sums.setdefault((part_of(item.scope), item.axes, item.what), [0.0, 0.0])
        of[0] = of[0] + cost / (rounds if ONCE in item.scope.split("/") else 1)
        of[1] = of[1] + costs[item._replace(what=MESSAGES, kind=item.what)]
    found = [Traffic(*key, float(size.max()), float(messages.max())) for key, (size, messages) in sums.items()]
    order = {part: sum(t.bytes for t in found if t.part == part) for part in PARTS}
    return sorted(found, key=lambda t: (-order[t.part], t.part, -t.bytes))


def seconds(sent: Traffic, step: TrainStep, target: Target) -> Seconds:
    """On a target's links, nothing beside it."""
    return link_seconds(sent.bytes, sent.messages, sent.axes, sent.kind, step.resolved.mesh, target)


def part_of(scope: str) -> str:
    """Of PARTS, the one that a scope is in."""
    return next(
        name for name, scopes in PARTS.items() if any(f"{scope}/".startswith(f"{s}/" if s else s) for s in scopes)
    )
