"""How long messages take on a target's links, as a range from what is best to what is worst of what is assumed.

Assumed: a rank takes equally much from each peer of its group, at the same time through the host's links and the network.
In gathers and sums each byte enters a host once at best, and once for each of its ranks at worst. Links reach the shares of
their rates that the target says. Start-up times count once a message.
"""

from __future__ import annotations

from typing import NamedTuple

from meshes import MeshSpec
from meshes.placement import placement
from meshes.targets import Target


class Seconds(NamedTuple):
    best: float
    worst: float


def link_seconds(
    size: float, messages: float, axes: tuple[str, ...], kind: str, spec: MeshSpec, target: Target
) -> Seconds:
    """Of so many messages of one kind in which a rank receives `size` bytes in all from its group along these axes."""
    where = placement(spec, axes, target.host.devices)
    start = messages * (target.latency.network if where.hosts > 1 else target.latency.host)
    if kind == "collective-permute":  # the pair that is farthest apart decides
        inside = size if where.steps_inside == 1 else 0.0
        once = each = size - inside
    else:
        inside = where.inside * size
        each = size - inside
        once = each if kind.endswith("all-to-all") else each * where.hosts / where.ranks
    seconds = lambda away: max(inside / target.host.link, away / target.network.link)
    shares = target.efficiency.links
    return Seconds(start + seconds(once) / shares.high, start + seconds(each) / shares.low)
