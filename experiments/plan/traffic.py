"""What a step sends over each axis of the mesh, against the links of a cluster."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from experiments.plan.step_options import StepOptions, said_schedule
from k3jax.plan.traffic import Traffic, seconds, traffic
from k3jax.train.plan import in_bytes
from meshes.command_line import parse
from meshes.placement import placement
from meshes.tables import print_table
from meshes.targets import Target

HEADER = ("part of the step", "axes", "collective", "ranks", "hosts", "messages", "bytes", "seconds")


@dataclasses.dataclass(frozen=True)
class PlanTraffic(StepOptions):
    """Bytes that a rank receives from others in a step, on the busiest stage, and the time that links need for them.

    Read from the traced program of the target's devices: loops and the schedule's branches as often as they run. Rows of
    ragged messages are counted as full as they can be. Seconds: from best to worst of what is assumed, as if nothing else ran;
    what runs beside messages hides them.
    """

    target: str = "h200"
    """A target by name, or a .toml file like meshes/targets/h200.toml with a cluster's figures."""
    json: bool = False

    def __post_init__(self) -> None:
        Target.load(self.target)


def main(argv: Sequence[str] | None, prog: str) -> None:
    """Print the table, or all figures as JSON."""
    asked = parse(PlanTraffic, argv, prog=prog)
    target, step = Target.load(asked.target), asked.train_step(platform="cuda")
    spec = step.resolved.mesh
    rows = [(one, placement(spec, one.axes, target.host.devices), seconds(one, step, target)) for one in traffic(step)]
    if asked.json:
        told = [one._asdict() | {"hosts": p.hosts, "ranks": p.ranks, "seconds": t._asdict()} for one, p, t in rows]
        print(json.dumps({"mesh": spec.sizes, "target": target.name, "traffic": told}))
        return
    print(f"{said_schedule(step)}")
    hosts = -(-spec.num_devices // target.host.devices)
    print(f"{target.name}: {hosts} hosts of {target.host.devices} devices\n")
    if not rows:
        print("one rank sends nothing")
        return
    print_table(HEADER, [cells(one, p.ranks, p.hosts, t) for one, p, t in rows], HEADER[3:])
    best, worst = (sum(each) for each in zip(*(t for *_, t in rows), strict=True))
    print(
        f"\nin all {in_bytes(round(sum(one.bytes for one, *_ in rows)))}, {best:.3g} to {worst:.3g} s if nothing hides it"
    )


def cells(sent: Traffic, ranks: int, hosts: int, time: tuple[float, float]) -> tuple[str, ...]:
    """Under HEADER."""
    figures = (
        f"{ranks}",
        f"{hosts}",
        f"{sent.messages:,.0f}",
        in_bytes(round(sent.bytes)),
        f"{time[0]:.3g} to {time[1]:.3g}",
    )
    return (sent.part, ",".join(sent.axes), sent.kind, *figures)
