"""What a compiled program sends between devices, read from its text."""

from __future__ import annotations

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


def collectives(compiled: jax.stages.Compiled) -> list[Collective]:
    """Every collective of the program, in the order of its text. One in a loop counts once."""
    found = re.findall(rf"^[^=\n]*= (.*?) ({KINDS})(?:-start)?\(", compiled.as_text() or "", re.MULTILINE)
    return [Collective(kind, sum(bytes_of(*item) for item in re.findall(ITEM, result))) for result, kind in found]


def bytes_of(dtype: str, dims: str) -> int:
    """Of an array as the program's text writes its type: `f32`, `128,64`."""
    bits = int(re.sub(r"\D", "", dtype[:4]) or 8) if dtype != "pred" else 8
    return int(np.prod([int(n) for n in dims.split(",") if n] or [1])) * bits // 8


def received_bytes(compiled: jax.stages.Compiled, ranks: int) -> int:
    """Bytes that a rank gets from others if every collective is over `ranks` ranks and moves no byte needlessly."""
    share = {"all-gather": 1 - 1 / ranks, "all-to-all": 1 - 1 / ranks, "reduce-scatter": ranks - 1}
    share |= {"all-reduce": 2 * (1 - 1 / ranks), "collective-permute": 1}
    return round(sum(share[c.kind] * c.result_bytes for c in collectives(compiled)))
