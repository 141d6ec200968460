"""A step on a cluster that is not there: does it fit, what does it send, how long does it take. Traced, not compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from k3jax.plan.cost import Walk, walk
from k3jax.plan.fit import Change, Fit, fit, smallest_change
from k3jax.plan.links import Seconds, link_seconds
from k3jax.plan.roofline import Roofline, roofline, works
from k3jax.plan.step_time import StepTime, model_flops, step_time
from k3jax.plan.traffic import Traffic, by_part
from k3jax.train.choice import WORKSPACE
from k3jax.train.step import TrainStep
from k3jax.train.stored import hosted_bytes
from meshes.placement import placement
from meshes.targets import Target


class Axis(NamedTuple):
    """What a rank receives along one set of axes in a step."""

    axes: tuple[str, ...]
    ranks: int
    """In a group."""
    hosts: int
    """That a group is spread over."""
    bytes: float
    messages: float
    seconds: Seconds
    """As if nothing else ran."""


class StepPlan(NamedTuple):
    step: TrainStep
    walk: Walk
    """Of its traced program."""
    target: Target
    fit: Fit
    change: Change | None
    """With which it would fit, if it does not and there is one."""
    parts: list[Roofline]
    axes: list[Axis]
    time: StepTime

    @property
    def mfu(self) -> Seconds:
        """Share of the devices' full rate of operations that goes into what the model needs."""
        c, devices = self.step.config, self.step.resolved.mesh.num_devices
        needed = model_flops(c.model, c.global_batch, c.seq_len) / devices / rate(self.target, c.dtype)
        return Seconds(needed / self.time.total.best, needed / self.time.total.worst)

    @property
    def tokens_per_second(self) -> Seconds:
        tokens = self.step.config.global_batch * self.step.config.seq_len
        return Seconds(tokens / self.time.total.best, tokens / self.time.total.worst)

    @property
    def bubbles(self) -> dict[str, float]:
        """Of the table with the best times of its operations: free-running, and in lock-step, as the executor runs it."""
        forward, backward, *weight = (seconds.best for seconds in self.time.operations.values())
        free = self.step.resolved.schedule.bubble_fraction(
            forward, backward + sum(weight), weight[0] if weight else None
        )
        return {"free-running": free, "lock-step": self.time.bubble.best}


def plan_step(step: TrainStep, target: Target) -> StepPlan:
    """The whole plan; the step stands on an abstract mesh of devices like the target's."""
    mesh = step.resolved.mesh
    walked = walk(step.step.trace(*step.operands()).jaxpr, mesh.sizes)
    sent = by_part(walked.costs, rounds=mesh.expert - 1)
    fitting = fit(step, target)
    parts = [roofline(work, mesh, target) for work in works(walked.costs, sent, hosted_bytes(step))]
    change = None if fitting.holds else smallest_change(step, target)
    times = step_time(parts, step.resolved.schedule)
    return StepPlan(step, walked, target, fitting, change, parts, by_axes(sent, step, target), times)


def by_axes(sent: list[Traffic], step: TrainStep, target: Target) -> list[Axis]:
    """All messages along the same axes together, the longest first."""
    spec, found = step.resolved.mesh, []
    for axes in dict.fromkeys(one.axes for one in sent):
        mine = [one for one in sent if one.axes == axes]
        times = [link_seconds(one.bytes, one.messages, axes, one.kind, spec, target) for one in mine]
        where = placement(spec, axes, target.host.devices)
        found.append(
            Axis(
                axes,
                where.ranks,
                where.hosts,
                sum(one.bytes for one in mine),
                sum(one.messages for one in mine),
                Seconds(*np.sum(times, axis=0).tolist()),
            )
        )
    return sorted(found, key=lambda axis: -axis.seconds.worst)


def rate(target: Target, dtype: str) -> float:
    """Operations a second of products of this compute dtype."""
    return target.products.bfloat16 if dtype == "bfloat16" else target.products.float32


def assumptions(plan: StepPlan) -> list[str]:
    """Everything that is taken for granted."""
    t, share = plan.target, plan.target.efficiency
    percent = lambda r: f"{r.low:.0%} to {r.high:.0%}"
    return [
        f"{t.name}: {t.products.bfloat16 / 1e12:.0f} T operations/s in bfloat16, {t.products.float32 / 1e12:.0f} in float32; "
        f"programs reach {percent(share.products)} of them",
        f"memory {t.memory.bandwidth / 1e12:.1f} TB/s, {percent(share.memory)} reached; operands of products are read and "
        "results written each time, as XLA's portable code does; element-wise work is fused into it",
        f"links {t.host.link / 1e9:.0f} GB/s to devices of the host, {t.network.link / 1e9:.0f} to others, "
        f"{t.host.memory_link / 1e9:.0f} to host memory; {percent(share.links)} reached",
        f"ranks fill hosts of {t.host.devices} in their order; a rank takes equally much from every peer at once",
        "best: within a part, the slowest of products, memory and links hides the others; worst: links hide nothing",
        "a tick of the pipeline lasts as long as its longest operation; ragged messages are as full as they can be, which "
        "balance makes exact for rows",
        f"{WORKSPACE:.0%} of memory is kept free for what is not predicted",
        "model operations: six for each active parameter and token, and those of attention; recomputation is not counted",
    ]


def told(plan: StepPlan) -> dict[str, Any]:
    """All figures, for JSON: bytes, seconds, shares."""
    step, schedule = plan.step, plan.step.resolved.schedule
    span = lambda seconds: {"best": seconds.best, "worst": seconds.worst}
    parts = [
        {
            "part": one.work.part,
            "flops": sum(one.work.flops.values()),
            "memory_bytes": one.work.bytes,
            "received_bytes": sum(sent.bytes for sent in one.work.sent),
            "host_bytes": one.work.hosted,
            "bound_by": one.bound,
            **{name: span(getattr(one, name)) for name in (*Roofline._fields[1:], "seconds")},
        }
        for one in plan.parts
    ]
    memory = [
        {"for": p.name, "place": p.place, "reserved": p.reserved, "most_in_use": int(p.alive.max())}
        for p in plan.fit.parts
    ]
    return {
        "model": step.config.model.name,
        "mesh": step.resolved.mesh.sizes,
        "target": plan.target.name,
        "schedule": {"name": schedule.name, "ticks": schedule.num_ticks, "why": step.why_schedule},
        "memory": memory,
        "fits": plan.fit.holds,
        "device_bytes": plan.fit.device,
        "device_limit": plan.fit.limit,
        "host_bytes": plan.fit.host,
        "host_limit": plan.fit.host_limit,
        "smallest_change": plan.change and plan.change.changes,
        "bubble": plan.bubbles,
        "parts": parts,
        "axes": [one._asdict() | {"seconds": span(one.seconds)} for one in plan.axes],
        "pipeline_seconds": span(plan.time.pipeline),
        "step_seconds": span(plan.time.total),
        "mfu": span(plan.mfu),
        "tokens_per_second": span(plan.tokens_per_second),
        "assumptions": assumptions(plan),
    }
