"""What a compiled program sends between devices, read from its text."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import jax
import numpy as np

KINDS = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
ITEM = r"([a-z]+\d+)\[([\d,]*)\]"


class Collective(NamedTuple):
    kind: str
    result_bytes: int
    """Of the result on one device."""
    ranks: int
    """That take part together."""

    @property
    def received_bytes(self) -> float:
        """What a rank gets from others if no byte moves needlessly."""
        others = self.ranks - 1
        share = {"reduce-scatter": others, "all-reduce": 2 * others / self.ranks, "collective-permute": 1}
        return share.get(self.kind, others / self.ranks) * self.result_bytes


def collectives(compiled: jax.stages.Compiled) -> list[Collective]:
    """Every collective of the program, in the order of its text. One in a loop counts once."""
    text = compiled.as_text() or ""
    everyone = int((re.search(r"num_partitions=(\d+)", text) or ["", "1"])[1])
    found = []
    for result, kind, rest in re.findall(rf"^[^=\n]*= (.*?) ({KINDS})(?:-start)?\((.*)", text, re.MULTILINE):
        size = sum(bytes_of(*item) for item in re.findall(ITEM, result))
        found.append(Collective(kind, size, group_size(rest) or everyone))
    return found


def group_size(attributes: str) -> int | None:
    """Ranks in a group, from `replica_groups={{0,1},{2,3}}`, `[groups,ranks]<=[…]` or `mesh['a'=2,'b'=4] {'b'}`; None: all."""
    if named := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(counted[1])
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
    return len(listed[1].split(",")) if listed else None


def bytes_of(dtype: str, dims: str) -> int:
    """Of an array as the program's text writes its type: `f32`, `128,64`."""
    bits = int(re.sub(r"\D", "", dtype[:4]) or 8) if dtype != "pred" else 8
    return int(np.prod([int(n) for n in dims.split(",") if n] or [1])) * bits // 8


def received_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes that a rank gets from others."""
    return sum(received_by_kind(compiled).values())


def received_by_kind(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes that a rank gets from others, {kind of collective: bytes}."""
    found: dict[str, float] = {}
    for each in collectives(compiled):
        found[each.kind] = found.get(each.kind, 0) + each.received_bytes
    return {kind: round(size) for kind, size in sorted(found.items())}
