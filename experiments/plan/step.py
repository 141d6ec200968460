"""A step on a cluster that is not there: does it fit, what does it send, how long does it take."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from experiments.plan.memory import row, total
from experiments.plan.step_options import StepOptions, said_schedule
from k3jax.plan.compiled import Compiled, compile_step
from k3jax.plan.cost import received
from k3jax.plan.links import Seconds
from k3jax.plan.roofline import Roofline
from k3jax.plan.step_plan import Axis, StepPlan, assumptions, plan_step, told
from k3jax.train.choice import NothingFitsError
from k3jax.train.plan import in_bytes, short
from k3jax.train.step import TrainStep
from meshes import MeshSpec
from meshes.absent import TARGETS, absent_devices
from meshes.command_line import parse, refuse
from meshes.tables import print_table
from meshes.targets import Target


@dataclasses.dataclass(frozen=True)
class PlanStep(StepOptions):
    """A training step on a cluster: bytes of a rank by purpose, whether they fit and what would, the bubble, bytes over each
    axis against the links, what each part of the step waits for, the step's time and its share of useful operations.

    Read from the traced program: nothing is allocated, no device is needed, and nothing is compiled without --compile.
    """

    global_batch: int = 0
    """Sequences in one optimizer step; 0: one for each microbatch of each data and expert rank."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype."""
    target: str = "h200"
    """A target by name, or a .toml file like meshes/targets/h200.toml with a cluster's figures."""
    json: bool = False
    """All figures as one JSON object."""
    compile: bool = False
    """Compile the step ahead of time for those devices too (extra gpu-compile, Python 3.12 or newer), and compare."""
    anyway: bool = False
    """Compile also what does not fit; XLA then does not try to make it fit."""

    def __post_init__(self) -> None:
        Target.load(self.target)
        if self.anyway and not self.compile:
            raise ValueError("--anyway is about --compile: give both")
        if self.compile and self.target not in TARGETS:
            raise ValueError(f"--compile is for {', '.join(TARGETS)}: no devices of {self.target} are described")


def main(argv: Sequence[str] | None, prog: str) -> None:
    """Print the plan, or all figures as JSON."""
    asked = parse(PlanStep, argv, prog=prog)
    target = Target.load(asked.target)
    if not asked.global_batch:
        sizes = MeshSpec.parse(asked.mesh).sizes
        asked = dataclasses.replace(asked, global_batch=asked.microbatches * sizes["data"] * sizes["expert"])
    devices = absent(asked, target) if asked.compile else []
    plan = plan_step(planned(asked, target), target)
    if not asked.json:
        show(plan)
    made = None
    if asked.compile:
        if not plan.fit.holds and not asked.anyway:
            refuse(prog, "not compiled, for it does not fit: change it, or give --anyway")
        step = plan.step
        there = TrainStep(
            dataclasses.replace(step.config, schedule=step.resolved.schedule.name), step.resolved.mesh.build(devices)
        )
        made = compile_step(there, plan.walk, as_it_is=asked.anyway)
    if asked.json:
        print(json.dumps(told(plan) | ({"compiled": compiled_figures(made)} if made else {})))
    elif made:
        show_compiled(plan, made)


def absent(asked: PlanStep, target: Target) -> list[Any]:
    """The devices to compile for; ValueError if they cannot be had."""
    number, each = MeshSpec.parse(asked.mesh).num_devices, target.host.devices
    if number > each and number % each:
        raise ValueError(f"--mesh={asked.mesh}: {number} devices do not fill hosts of {each}")
    try:
        return absent_devices(asked.target, hosts=max(1, number // each), per_host=min(number, each))
    except RuntimeError as missing:
        raise ValueError(str(missing)) from None


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


def show_compiled(plan: StepPlan, made: Compiled) -> None:
    """What the plan says beside what XLA made, of one device."""
    of_state = ("parameters", "master weights", "optimizer state")
    state = sum(part.reserved for part in plan.fit.parts if part.name in of_state)
    rows = [
        ("arguments: parameters, optimizer state", state, made.arguments),
        ("temporaries", plan.fit.device - state, made.temporaries),
        ("most at one time", plan.fit.device, made.peak),
        ("host memory", plan.fit.host, made.host),
    ]
    print()
    header = ("bytes of a device", "planned", "compiled")
    print_table(header, [(name, *map(in_bytes, sizes)) for name, *sizes in rows], header[1:])
    planned, compiled = (by_axes_alone(of) for of in (received(plan.walk.costs), made.received))
    sizes = lambda axes: (in_bytes(round(of.get(axes, 0.0))) for of in (planned, compiled))
    print()
    header = ("bytes received along", "planned", "compiled")
    axes = sorted({*planned, *compiled}, key=lambda axes: -planned.get(axes, 0.0))
    print_table(header, [(",".join(one) or "no axis", *sizes(one)) for one in axes], header[1:])
    print(
        f"\n{made.asynchronous} of {made.messages} messages are asynchronous, {made.covered} have matrix products beside "
        f"them; lowered in {made.lowering:.0f} s, compiled in {made.compiling:.0f} s"
    )


def compiled_figures(made: Compiled) -> dict[str, Any]:
    """For JSON."""
    sent = [{"axes": axes, "kind": kind, "bytes": size} for (axes, kind), size in made.received.items()]
    return made._asdict() | {"received": sent}


def by_axes_alone(sent: Mapping[tuple[tuple[str, ...], str], float]) -> dict[tuple[str, ...], float]:
    """Bytes along each set of axes, by whatever kind of collective."""
    sums: dict[tuple[str, ...], float] = {}
    for (axes, _), size in sent.items():
        sums[axes] = sums.get(axes, 0.0) + size
    return sums


def part_row(one: Roofline) -> tuple[str, ...]:
    cells = (span(one.products), span(one.memory), span(one.links), span(one.host), span(one.seconds))
    return (one.work.part, short(round(sum(one.work.flops.values()))), *cells, one.bound)


def axis_row(one: Axis) -> tuple[str, ...]:
    figures = f"{one.ranks}", f"{one.hosts}", f"{one.messages:,.0f}", in_bytes(round(one.bytes)), span(one.seconds)
    return (",".join(one.axes), *figures)


def span(seconds: Seconds) -> str:
    """From best to worst."""
    if not seconds.worst:
        return "0"
    best, worst = f"{seconds.best:.3g}", f"{seconds.worst:.3g}"
    return best if best == worst else f"{best} to {worst}"
