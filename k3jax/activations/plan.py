"""A plan of activations: a policy for each name, what it stores and what it costs; as text, and as JSON on disk."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import Any

from k3jax.activations.policy import Policy
from k3jax.activations.records import Leaf

HEADER = ("name", "policy", "bytes", "seconds")


@dataclass(frozen=True)
class ActivationPlan:
    """What `planner.plan` decided; `records(schedule, plan.leaves)` is its ledger."""

    budget: int
    """Bytes of activations that a rank may hold."""
    peak: tuple[int, ...]
    """Most bytes alive on each rank, its own and those it holds for others."""
    reserved: int
    """Bytes that the executor's stores take on every rank, for the whole step."""
    leaves: tuple[Leaf, ...]
    """One for each name and span."""
    seconds: tuple[float, ...]
    """Cost of each leaf's policy: time spent on encoding, moving, recomputing in one step, summed over ranks."""

    @property
    def cost(self) -> float:
        """Seconds of the whole plan, summed over ranks."""
        return math.fsum(self.seconds)

    @property
    def activations(self) -> str:
        """The policies as `ActivationPolicy.parse` reads them."""
        policies = {leaf.name: leaf.policy for leaf in self.leaves}
        return ",".join(f"{name}={policy}" for name, policy in policies.items())

    def rows(self) -> list[tuple[str, ...]]:
        """Cells under `HEADER`: bytes of one chunk and microbatch, seconds of all."""
        pairs = zip(self.leaves, self.seconds, strict=True)
        return [(leaf.name, str(leaf.policy), f"{leaf.bytes:,}", f"{seconds:.4g}") for leaf, seconds in pairs]

    def __str__(self) -> str:
        table = [HEADER, *self.rows()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        align = [str.ljust, str.ljust, str.rjust, str.rjust]
        lines = ["  ".join(f(c, w) for f, c, w in zip(align, cells, widths, strict=True)).rstrip() for cells in table]
        held = f"at most {max(self.peak):,} bytes alive on a rank, {self.reserved:,} reserved"
        return "\n".join([*lines, f"{self.cost:.4g} seconds of all ranks; {held}, budget {self.budget:,}"])

    def save(self, path: str | os.PathLike) -> None:
        """Writes the plan as JSON, to a new file; `load` gives back an equal one. FileExistsError for a file that is there."""
        names = [
            {**leaf._asdict(), "policy": str(leaf.policy), "seconds": seconds}
            for leaf, seconds in zip(self.leaves, self.seconds, strict=True)
        ]
        with open(path, "x") as file:
            json.dump(
                {"budget": self.budget, "peak": self.peak, "reserved": self.reserved, "names": names}, file, indent=1
            )

    @classmethod
    def load(cls, path: str | os.PathLike) -> ActivationPlan:
        """Reads what `save` wrote; ValueError, in one line, for a file that is no such plan, OSError for none at all."""
        with open(path, "rb") as file:
            text = file.read()
        try:
            whole = _fields(json.loads(text), "the plan", {"budget", "peak", "reserved", "names"})
            budget, reserved = (_checked(whole[field], int, field) for field in ("budget", "reserved"))
            peak = tuple(_checked(bytes, int, "peak") for bytes in _checked(whole["peak"], list, "peak"))
            names = [_named(entry) for entry in _checked(whole["names"], list, "names")]
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{os.fspath(path)} is not a plan of activations: {error}") from None
        leaves, seconds = tuple(leaf for leaf, _ in names), tuple(seconds for _, seconds in names)
        return cls(budget, peak, reserved, leaves, seconds)


def _named(entry: Any) -> tuple[Leaf, float]:
    entry = _fields(entry, "a name", {*Leaf._fields, "seconds"})
    seconds = _checked(entry.pop("seconds"), float, "seconds")
    _checked(entry["name"], str, "name")
    for field in ("bytes", "producer"):
        _checked(entry[field], int, field)
    if entry["consumer"] is not None:
        _checked(entry["consumer"], int, "consumer")
    entry["policy"] = Policy.parse(_checked(entry["policy"], str, "policy"))
    return Leaf(**entry), seconds


def _fields(value: Any, what: str, names: set[str]) -> dict[str, Any]:
    found = set(_checked(value, dict, what))
    if found != names:
        raise ValueError(f"{what} has {', '.join(sorted(found)) or 'nothing'}, needs {', '.join(sorted(names))}")
    return value


def _checked(value: Any, kind: type, what: str) -> Any:
    """The value, if it is exactly of this type (a bool is no int), and a number that counts something, 0 or more."""
    if type(value) is not kind or (kind in (int, float) and not 0 <= value < math.inf):
        raise ValueError(f"{what} is {str(value)[:40]}, must be of type {kind.__name__}, numbers finite and at least 0")
    return value
