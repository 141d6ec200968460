"""What a step stores for backward on each rank, name by name, and policies that fit a budget."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import tyro

from experiments.plan.step_options import StepOptions, said_schedule
from k3jax.activations.machine import Machine
from k3jax.activations.plan import ActivationPlan
from k3jax.activations.planner import Planner
from k3jax.activations.policy import RECOMPUTE, ActivationPolicy
from k3jax.activations.records import Leaf, names_table, records
from k3jax.activations.residency import reserved, resident
from k3jax.parallel.schedules.kinds import LETTERS
from k3jax.train.plan import bytes_of, in_bytes
from k3jax.train.step import TrainStep
from k3jax.train.stored import activations, stored_and_flops, stored_leaves, summed
from meshes.command_line import parse
from meshes.tables import print_table

HEADER = ("name", "bytes", "span", "ticks", "policy", "where", "restored by")


@dataclasses.dataclass(frozen=True)
class PlanActivations(StepOptions):
    """What a step stores for backward, and where it waits: bytes of one chunk and microbatch, and of each rank.

    With --budget, policies are chosen that cost the least time. Costs are estimates: recomputing a name takes its matrix
    products, and reading and writing it once; encoding and decoding reads and writes both forms; transfers hide nothing.
    """

    budget: str = ""
    """Bytes of activations that the stores may take on a rank's device, such as 40GiB: choose the policies."""
    machine: Annotated[Machine, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Machine)
    save: str = ""
    """Write the plan to this file, which must not exist yet."""
    load: str = ""
    """Take the policies from a plan that was saved."""

    def __post_init__(self) -> None:
        given = [f"--{name}" for name in ("budget", "load") if getattr(self, name)]
        given += ["--activations"] * (self.activations != StepOptions.activations)
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: each says which policies there are, give one of them")
        if self.save and not self.budget:
            raise ValueError(f"--save={self.save}: there is a plan to save only with --budget")
        if self.save and os.path.lexists(self.save):
            raise ValueError(f"--save={self.save} exists: name a file to be made")
        if self.budget:
            bytes_of(self.budget)


def main(argv: Sequence[str] | None, prog: str) -> None:
    """Print the plan, if one is made or loaded, what is stored under it, and the totals."""
    asked = parse(PlanActivations, argv, prog=prog)
    step = asked.train_step()
    print(f"{said_schedule(step)}\n")
    chosen = loaded(asked) if asked.load else planned(asked, step) if asked.budget else None
    if chosen is not None:
        # A plan is for lifetimes in one table: under other policies another one may be chosen.
        name, text = step.resolved.schedule.name, chosen.activations
        print(f"{chosen}\n\n--schedule={name}\n--activations={shlex.quote(text)}\n")
        step = asked.train_step(activations=text, schedule=name)
    leaves = summed(stored_leaves(step))
    show(step, leaves)
    if chosen is not None and (taken := total_reserved(step, leaves)) > chosen.budget:
        print(f"that is {in_bytes(taken - chosen.budget)} more than the budget: plan with less")
    if asked.save and chosen is not None:
        chosen.save(asked.save)


def planned(asked: PlanActivations, step: TrainStep) -> ActivationPlan:
    """The plan within the budget; ValueError if there is none."""
    machine = asked.machine
    leaves, flops = stored_and_flops(step)
    planner = Planner(
        step.resolved.schedule,
        activations(leaves, flops, machine),
        host_bandwidth=machine.host_bandwidth or None,
        remote_bandwidth=machine.remote_bandwidth or None,
    )
    return planner.plan(bytes_of(asked.budget))


def loaded(asked: PlanActivations) -> ActivationPlan:
    return ActivationPlan.load(asked.load)


def show(step: TrainStep, leaves: Sequence[Leaf]) -> None:
    """The table of names, and what all of them take on each rank."""
    schedule, policy = step.resolved.schedule, step.resolved.policy
    spans: dict[str, set[str]] = {}
    for leaf in leaves:
        spans.setdefault(leaf.name, set()).add(f"{LETTERS[leaf.producer]}-{LETTERS[leaf.consumer or 0]}")
    rows = [
        (name.name, in_bytes(name.bytes), ", ".join(sorted(spans[name.name])), str(name.ticks), str(name.policy),
         places(name.where), ", ".join(sorted({re.sub(r" from .*?(?= and|$)", "", r) for r in name.restorations})))
        for name in names_table(records(schedule, leaves))
    ]  # fmt: skip
    print_table(HEADER, rows, ("bytes", "ticks"))
    for what, names in unstored(step.activation_names, policy, spans).items():
        if names:
            print(f"{what}: {', '.join(names)}")
    print()
    print_table(
        ("rank", "own", "parked", "device", "host"), [*rank_rows(step, leaves)], ("own", "parked", "device", "host")
    )
    device, host = total_reserved(step, leaves), total_reserved(step, leaves, "host")
    print(
        f"\nreserved on every rank for the whole step: {in_bytes(device)} on the device, {in_bytes(host)} in host memory"
    )


def places(where: Sequence[str]) -> str:
    """Locations with commas, several other ranks as one."""
    ranks = sorted(int(place.removeprefix("rank ")) for place in where if place.startswith("rank"))
    words = [place for place in where if not place.startswith("rank")]
    return ", ".join(words + [f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"] * bool(ranks))


def unstored(names: frozenset[str], policy: ActivationPolicy, stored: dict[str, set[str]]) -> dict[str, list[str]]:
    """Names of which nothing is put away, by the reason."""
    rest = sorted(names - {part for label in stored for part in label.split("|")})
    is_recomputed = {name: policy.of(name) == RECOMPUTE for name in rest}
    return {
        "recomputed": [name for name in rest if is_recomputed[name]],
        "not read by backward": [name for name in rest if not is_recomputed[name]],
    }


def rank_rows(step: TrainStep, leaves: Sequence[Leaf]) -> list[tuple[str, ...]]:
    """Peaks of each pipeline rank, their maximum and mean."""
    schedule = step.resolved.schedule
    alive = np.zeros((3, 1, schedule.stages), np.int64)
    for leaf in leaves:
        alive = alive + leaf.bytes * np.stack(resident(schedule, *span(step, leaf), leaf.policy.storage))
    own, parked, host = alive
    peaks = np.stack([own, parked, own + parked, host]).max(axis=1)
    cells = lambda name, values: (name, *(in_bytes(round(float(value))) for value in values))
    each = [cells(str(rank), values) for rank, values in enumerate(peaks.T)]
    return [*each, cells("max", peaks.max(axis=1)), cells("mean", peaks.mean(axis=1))]


def total_reserved(step: TrainStep, leaves: Sequence[Leaf], where: str = "device") -> int:
    """Bytes of slots, the same on all ranks."""
    slots = lambda leaf: reserved(step.resolved.schedule, *span(step, leaf), leaf.policy.storage)
    return sum(leaf.bytes * getattr(slots(leaf), where) for leaf in leaves)


def span(step: TrainStep, leaf: Leaf) -> tuple[int, int]:
    return leaf.producer, leaf.consumer or step.resolved.schedule.kinds[-1]
