"""A step on a cluster that is not there: does it fit, what does it send, how long does it take."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from typing import Literal

from experiments.plan.memory import row, total
from experiments.plan.step_options import StepOptions, said_schedule
from k3jax.plan.links import Seconds
from k3jax.plan.step_plan import StepPlan, assumptions, plan_step, told
from k3jax.train.choice import NothingFitsError
from k3jax.train.plan import in_bytes, short
from k3jax.train.step import TrainStep
from meshes import MeshSpec
from meshes.command_line import parse
from meshes.tables import print_table
from meshes.targets import Target


@dataclasses.dataclass(frozen=True)
class PlanStep(StepOptions):
    """A training step on a cluster: bytes of a rank by purpose, whether they fit and what would, the bubble, bytes over each
    axis against the links, what each part of the step waits for, the step's time and its share of useful operations.

    Read from the traced program; nothing is allocated or compiled, and no device is needed.
    """

    global_batch: int = 0
    """Sequences in one optimizer step; 0: one for each microbatch of each data and expert rank."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype."""
    target: str = "h200"
    """A target by name, or a .toml file like meshes/targets/h200.toml with a cluster's figures."""
    json: bool = False
    """All figures as one JSON object."""

    def __post_init__(self) -> None:
        Target.load(self.target)


def main(argv: Sequence[str] | None, prog: str) -> None:
    """Print the plan, or all figures as JSON."""
    asked = parse(PlanStep, argv, prog=prog)
    target = Target.load(asked.target)
    if not asked.global_batch:
        sizes = MeshSpec.parse(asked.mesh).sizes
        asked = dataclasses.replace(asked, global_batch=asked.microbatches * sizes["data"] * sizes["expert"])
    plan = plan_step(planned(asked, target), target)
    print(json.dumps(told(plan))) if asked.json else show(plan)


def planned(asked: PlanStep, target: Target) -> TrainStep:
    """The step with a schedule that fits on the target, or else with the fastest one."""
    try:
        return asked.train_step(platform="cuda", memory=target.memory.bytes)
    except NothingFitsError:
        return asked.train_step(platform="cuda")


def show(plan: StepPlan) -> None:
    """All of it as tables."""
    spec, target, time = plan.step.resolved.mesh, plan.target, plan.time
    hosts = -(-spec.num_devices // target.host.devices)
    print(f"{plan.step.config.model.name} on {spec}: {spec.num_devices:,} x {target.name}, {hosts:,} hosts")
    print(f"{said_schedule(plan.step)}\n")
    show_memory(plan)
    print(f"\nbubble {', '.join(f'{share:.3f} {which}' for which, share in plan.bubbles.items())}\n")
    header = ("part of the step", "operations", "products", "memory", "links", "host", "seconds", "bound by")
    print_table(header, [part_row(one) for one in plan.parts], header[1:7])
    print()
    header = ("axes", "ranks", "hosts", "messages", "bytes", "seconds")
    print_table(header, [axis_row(one) for one in plan.axes], header[1:])
    print(
        f"\nstep {span(time.total)} s: pipeline {span(time.pipeline)}, beside it {span(time.rest)}; "
        f"MFU {plan.mfu.worst:.1%} to {plan.mfu.best:.1%}, "
        f"{plan.tokens_per_second.worst:,.0f} to {plan.tokens_per_second.best:,.0f} tokens/s"
    )
    print("\nassumed, and to be changed in meshes/targets:")
    for line in assumptions(plan):
        print(textwrap.fill(line, 118, initial_indent="- ", subsequent_indent="  "))


def show_memory(plan: StepPlan) -> None:
    """Bytes by purpose, and whether they fit."""
    fit, header = plan.fit, ("bytes for", "place", "allocated", "in use, most", "in use, mean")
    print_table(header, [row(part) for part in fit.parts] + [row(total(fit.parts))], header[2:])
    said = f"{in_bytes(fit.device)} of {in_bytes(fit.limit)} on the device"
    if fit.host:
        said += f", {in_bytes(fit.host)} of {in_bytes(fit.host_limit)} in host memory"
    if fit.holds:
        print(f"\nfits: {said}")
    elif plan.change is None:
        print(f"\ndoes not fit: {said}; nor with any --zero, --activations or --microbatches tried: take more devices")
    else:
        with_it = plan.change.fit
        print(f"\ndoes not fit: {said}")
        print(f"the smallest change that would: {plan.change} ({in_bytes(with_it.device)} on the device)")


def part_row(one) -> tuple[str, ...]:
    cells = (span(one.products), span(one.memory), span(one.links), span(one.host), span(one.seconds))
    return (one.work.part, short(round(sum(one.work.flops.values()))), *cells, one.bound)


def axis_row(one) -> tuple[str, ...]:
    figures = f"{one.ranks}", f"{one.hosts}", f"{one.messages:,.0f}", in_bytes(round(one.bytes)), span(one.seconds)
    return (",".join(one.axes), *figures)


def span(seconds: Seconds) -> str:
    """From best to worst."""
    if not seconds.worst:
        return "0"
    best, worst = f"{seconds.best:.3g}", f"{seconds.worst:.3g}"
    return best if best == worst else f"{best} to {worst}"
