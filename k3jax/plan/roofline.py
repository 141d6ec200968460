"""How long each part of a step takes on a target: as long as its products, its memory or its links need.

Best: a part lasts as long as the slowest of these at the better of the target's shares, all else hidden beside it. Worst:
the slower of products and memory at the worse share, then links, then the host's memory, nothing hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from k3jax.plan.cost import Costs
from k3jax.plan.links import Seconds, link_seconds
from k3jax.plan.traffic import PARTS, Traffic, part_of
from meshes import MeshSpec
from meshes.targets import Target


class Work(NamedTuple):
    """Of one part of a step, on a rank of the busiest stage."""

    part: str
    flops: dict[str, float]
    """Of matrix products, by dtype."""
    bytes: float
    """That products read and write, each operand once: kernels that keep operands on chip move less."""
    sent: tuple[Traffic, ...]
    hosted: float = 0.0
    """Bytes between the device and its host's memory, both ways."""


class Roofline(NamedTuple):
    """Seconds of a part in a step, each as if nothing else ran."""

    work: Work
    products: Seconds
    memory: Seconds
    links: Seconds
    host: Seconds

    @property
    def seconds(self) -> Seconds:
        """See the module."""
        computing = max(self.products.worst, self.memory.worst)
        return Seconds(max(each.best for each in self[1:]), computing + self.links.worst + self.host.worst)

    @property
    def bound(self) -> str:
        """What lasts longest, at its best."""
        return max(self._fields[1:], key=lambda name: getattr(self, name).best)


def works(costs: Costs, sent: list[Traffic], hosted: Mapping[str, float]) -> list[Work]:
    """Of all parts that do anything. hosted: bytes to and from host memory, by part."""
    flops: dict[str, dict[str, np.ndarray]] = {part: {} for part in PARTS}
    moved: dict[str, np.ndarray | float] = dict.fromkeys(PARTS, 0.0)
    for item, cost in costs.items():
        part = part_of(item.scope)
        if item.what == "flops":
            flops[part][item.kind] = flops[part].get(item.kind, 0.0) + cost
        elif item.what == "bytes":
            moved[part] = moved[part] + cost
    made = (
        Work(
            part,
            {dtype: float(of.max()) for dtype, of in flops[part].items()},
            float(np.max(moved[part])),
            tuple(one for one in sent if one.part == part),
            hosted.get(part, 0.0),
        )
        for part in PARTS
    )
    return [work for work in made if work.flops or work.sent or work.hosted]


def roofline(work: Work, spec: MeshSpec, target: Target) -> Roofline:
    """On a target's devices and links."""
    rate = {"bfloat16": target.products.bfloat16, "float16": target.products.bfloat16}
    products = sum(flops / rate.get(dtype, target.products.float32) for dtype, flops in work.flops.items())
    links = [link_seconds(one.bytes, one.messages, one.axes, one.kind, spec, target) for one in work.sent]
    shares = target.efficiency
    at = lambda seconds, share: Seconds(seconds / share.high, seconds / share.low)
    return Roofline(
        work,
        at(products, shares.products),
        at(work.bytes / target.memory.bandwidth, shares.memory),
        Seconds(sum(each.best for each in links), sum(each.worst for each in links)),
        at(work.hosted / target.host.memory_link, shares.links),
    )
