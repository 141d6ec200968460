"""Who is who on a mesh: `python -m meshes --mesh=data=2,pipe=2,expert=2`. Arithmetic only: no devices are needed."""

from __future__ import annotations

import dataclasses
import math
import signal
import sys
from collections.abc import Sequence

from meshes.command_line import parse
from meshes.membership import Membership, membership
from meshes.placement import placement
from meshes.spec import AXES, MeshSpec
from meshes.tables import print_table

PROG = "python -m meshes"


@dataclasses.dataclass(frozen=True)
class WhoIsWho:
    """Stage, chunks, expert group, context shard and replica groups of every rank of a mesh, or of one."""

    mesh: str
    """Axis sizes, such as data=2,pipe=2,expert=2,context=1; a missing axis is 1, one may be -1."""
    rank: int | None = None
    """Show this rank's card only."""
    virtual: int = 1
    """Chunks of the layer stack on each pipeline stage (virtual stages)."""
    devices: int | None = None
    """Devices there will be: fills -1 and must be a multiple of the mesh. Not given, -1 counts JAX's devices here."""
    hosts: int | None = None
    """Hosts that the devices are spread over, equally many on each: shows which groups lie inside a host."""

    def __post_init__(self) -> None:
        if self.devices is not None and self.devices < 1:
            raise ValueError(f"--devices={self.devices}: a number of devices is 1 or more")
        membership(self.spec, self.rank or 0, self.virtual)  # refuses a bad mesh, rank or virtual
        if self.hosts is not None and (self.hosts < 1 or self.spec.num_devices % self.hosts):
            raise ValueError(
                f"--hosts={self.hosts} must be 1 or more and divide the mesh's {self.spec.num_devices} devices"
            )

    @property
    def spec(self) -> MeshSpec:
        return MeshSpec.parse(self.mesh, self.devices)


def main(argv: Sequence[str] | None = None) -> None:
    """Print where groups lie if hosts are given, else all ranks or one rank's card.

    Wrapped to fit a terminal, plain aligned text elsewhere.
    """
    asked = parse(WhoIsWho, argv, prog=PROG)
    spec = asked.spec
    print(summary(spec, asked.virtual))
    if asked.hosts is not None:
        print_placement(spec, spec.num_devices // asked.hosts)
        if asked.rank is None:
            return
    if asked.rank is not None:
        print_table(("rank", str(asked.rank)), card(spec, membership(spec, asked.rank, asked.virtual)))
    else:
        print_table(HEADER, [row(spec, membership(spec, rank, asked.virtual)) for rank in range(spec.num_devices)])


HEADER = (
    *("rank", "data", "pipe (stage)", "expert", "context (shard)"),
    *("chunks", "expert group", "dense replicas", "expert replicas"),
)


GROUPS = {
    "expert (rows travel)": ("expert",),
    "context (states travel)": ("context",),
    "pipe (streams travel)": ("pipe",),
    "replicas of dense parameters": ("data", "expert", "context"),
    "replicas of experts": ("data", "context"),
}


def print_placement(spec: MeshSpec, per_host: int) -> None:
    """A line for each kind of group; a warning on stderr if rows leave their host on the way to experts."""
    where = {name: placement(spec, axes, per_host) for name, axes in GROUPS.items()}
    print(f"{spec.num_devices // per_host} hosts of {per_host} devices")
    header = ("groups along", "ranks", "hosts", "peers in the host", "next rank in the host")
    rows = [(n, str(p.ranks), str(p.hosts), f"{p.inside:.0%}", f"{p.steps_inside:.0%}") for n, p in where.items()]
    print_table(header, rows, header[1:])
    if (away := placement(spec, "expert", per_host)).hosts > 1:
        fits = math.gcd(spec.expert, max(per_host // spec.context, 1))
        print(
            f"warning: rows for experts leave their host: a group of {away.ranks} ranks is spread over {away.hosts} hosts and "
            f"finds {away.inside:.0%} of its peers in its own; expert={fits} would stay inside",
            file=sys.stderr,
        )


def summary(spec: MeshSpec, virtual: int) -> str:
    """The resolved mesh in one line."""
    chunks = f"stages {spec.pipe} x virtual {virtual} = chunks {spec.pipe * virtual}"
    return f"mesh {spec}: devices {spec.num_devices}, {chunks}"


def row(spec: MeshSpec, who: Membership) -> tuple[str, ...]:
    """One rank as cells under HEADER; long groups are shortened."""
    return (
        str(who.rank),
        *map(str, who.coordinates),
        ",".join(map(str, who.chunks)),
        ranks(who.expert_group, limit=8),
        ranks(who.dense_replicas, limit=8),
        ranks(who.expert_replicas, limit=8),
    )


def card(spec: MeshSpec, who: Membership) -> list[tuple[str, str]]:
    """One rank as pairs of a property and its value; groups in full."""
    return [
        ("coordinates", ", ".join(f"{axis}={at}" for axis, at in zip(AXES, who.coordinates, strict=True))),
        ("stage", f"{who.stage} of {spec.pipe}"),
        ("chunks", ",".join(map(str, who.chunks))),
        ("pipeline", ranks(who.pipeline)),
        ("previous stage", neighbour(who.previous_stage)),
        ("next stage", neighbour(who.next_stage)),
        ("expert group", ranks(who.expert_group)),
        ("context shard", f"{who.context_shard} of {spec.context}"),
        ("context group", ranks(who.context_group)),
        ("previous context", neighbour(who.previous_context)),
        ("next context", neighbour(who.next_context)),
        ("dense replicas", ranks(who.dense_replicas)),
        ("expert replicas", ranks(who.expert_replicas)),
    ]


def neighbour(rank: int | None) -> str:
    return "none" if rank is None else f"rank {rank}"


def ranks(group: tuple[int, ...], limit: int | None = None) -> str:
    """Ranks with commas, three or more in a row as first-last; beyond `limit` parts, just the ends and the count."""
    parts: list[str] = []
    start = 0
    for end in range(1, len(group) + 1):
        if end == len(group) or group[end] != group[end - 1] + 1:
            run = group[start:end]
            parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
            start = end
    if limit is not None and len(parts) > limit:
        parts = [*parts[:3], "...", f"{parts[-1]} ({len(group)} ranks)"]
    return ",".join(parts)


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the table quietly
    main()
