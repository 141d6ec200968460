"""Reads compiled programs: their operations in order, and what they send over which axes of the mesh, how often."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

COLLECTIVES = (
    "all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "ragged-all-to-all",
    "reduce-scatter",
)  # fmt: skip
ITEM = re.compile(r"([a-z]+\d\w*|pred)\[([\d,]*)\]")


class Operation(NamedTuple):
    name: str
    type: str
    kind: str
    rest: str
    """Operands and attributes."""

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest.split(")")[0])

    @property
    def called(self) -> list[str]:
        """Names of computations."""
        lists = re.findall(r"(?:calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)", self.rest)
        return re.findall(r"[\w.\-]+", " ".join(lists))

    @property
    def path(self) -> str:
        """Scopes and primitive that it was made of, as JAX names them."""
        return self.attribute("op_name").replace("\\", "")

    def attribute(self, name: str) -> str:
        """In quotes; empty if it has none."""
        found = re.search(rf'{name}="([^"]*)"', self.rest)
        return found[1] if found else ""


def operations(text: str) -> dict[str, list[Operation]]:
    """Of every computation of a program, in their order; the program itself is "ENTRY"."""
    of: dict[str, list[Operation]] = {}
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            inside = of.setdefault("ENTRY" if head[1] else head[2], [])
        elif one := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)", line):
            inside.append(Operation(*one.groups()))
    return of


class Collective(NamedTuple):
    """A message of all ranks, each with the others of its group."""

    kind: str
    axes: tuple[str, ...]
    """Along which the ranks of a group differ; () if the mesh is not known."""
    ranks: int
    """In a group."""
    received: float
    """Bytes that a rank gets from others if no byte moves needlessly, the mean over ranks."""
    result: int
    """Bytes of the result on one device."""
    times: float
    """How often it runs when the program runs once, on the mean rank."""
    path: str


Taken = Callable[[Operation, int], Sequence[float]]
"""(conditional, number of branches) -> how often each branch is taken when it is run once, on the mean rank."""


def collectives(text: str, mesh: Mapping[str, int] | None = None, taken: Taken | None = None) -> list[Collective]:
    """All that a program sends, loops first met first; each branch of a conditional counts once if nothing says how often."""
    of = operations(text)
    everyone = int((re.search(r"num_partitions=(\d+)", text) or ["", "1"])[1])
    return list(_inside(of, "ENTRY", 1.0, dict(mesh or {}), everyone, taken or (lambda _, branches: [1] * branches)))


def taken_as(branches: Mapping[str, Sequence[np.ndarray]]) -> Taken:
    """How often branches are taken, from a walk of the traced program (`cost.Walk.branches`): by the conditionals' scopes.

    Conditionals that the walk did not meet count as if each branch were taken. ValueError where two of one scope differ.
    """
    names = {name for scope in branches for name in scope.split("/")}

    def taken(conditional: Operation, count: int) -> Sequence[float]:
        scope = "/".join(name for name in conditional.path.split("/") if name in names)
        found = [shares for shares in branches.get(scope, []) if len(shares) == count]
        if any(not np.allclose(shares, found[0]) for shares in found):
            raise ValueError(f"conditionals in {scope} are taken in different ways")
        return found[0].tolist() if found else [1.0] * count

    return taken


def received(found: Sequence[Collective]) -> dict[tuple[tuple[str, ...], str], float]:
    """Bytes that a rank gets in one run, by axes and kind."""
    sums: dict[tuple[tuple[str, ...], str], float] = {}
    for one in found:
        sums[one.axes, one.kind] = sums.get((one.axes, one.kind), 0.0) + one.received * one.times
    return sums


def received_by_kind(text: str) -> dict[str, int]:
    """The same of a program's text, by kind, where no mesh is asked for."""
    sums: dict[str, float] = {}
    for (_, kind), size in received(collectives(text)).items():
        sums[kind] = sums.get(kind, 0.0) + size
    return {kind: round(size) for kind, size in sorted(sums.items())}


def _inside(
    of: dict[str, list[Operation]], name: str, times: float, mesh: dict[str, int], everyone: int, taken: Taken
) -> Iterator[Collective]:
    for operation in of.get(name, ()):
        kind = operation.kind.removesuffix("-start")
        into = lambda inner, share=1.0: _inside(of, inner, times * share, mesh, everyone, taken)
        if kind in COLLECTIVES:
            yield _collective(operation, kind, times, mesh, everyone)
        elif kind == "while":
            body = re.search(r"body=%?([\w.\-]+)", operation.rest)
            rounds = re.search(r'known_trip_count":\{"n":"(\d+)"', operation.rest)
            if body:
                yield from into(body[1], int(rounds[1]) if rounds else 1)
        elif kind == "conditional":
            branches = _branches(operation)
            for inner, share in zip(branches, taken(operation, len(branches)), strict=True):
                yield from into(inner, share)
        elif not operation.kind.endswith("-done"):
            for inner in operation.called:
                yield from into(inner)


def _branches(conditional: Operation) -> list[str]:
    """In the order of the integer, or of false and true."""
    if listed := re.search(r"branch_computations=\{([^}]*)\}", conditional.rest):
        return re.findall(r"[\w.\-]+", listed[1])
    found = (re.search(rf"{side}_computation=%?([\w.\-]+)", conditional.rest) for side in ("false", "true"))
    return [one[1] for one in found if one]


def _collective(operation: Operation, kind: str, times: float, mesh: dict[str, int], everyone: int) -> Collective:
    items = ITEM.findall(operation.type)
    if operation.kind in ("all-gather-start", "collective-permute-start"):  # operands, results, and counters of devices
        items = [item for item in items if item != ("u32", "")]
        items = items[len(items) // 2 :]
    result = sum(bytes_of(*item) for item in items)
    if kind == "collective-permute":
        pairs = re.findall(
            r"\{(\d+),(\d+)\}", operation.rest.partition("source_target_pairs=")[2].partition("}}")[0] + "}"
        )
        moved = [(int(a), int(b)) for a, b in pairs if a != b]
        axes = _axes(np.array(moved or [(0, 0)]), mesh)
        return Collective(kind, axes, 2, result * len(moved) / everyone, result, times, operation.path)
    groups = _groups(operation.rest, everyone)
    ranks = groups.shape[1]
    share = {"reduce-scatter": ranks - 1, "all-reduce": 2 * (ranks - 1) / ranks}.get(kind, (ranks - 1) / ranks)
    return Collective(kind, _axes(groups, mesh), ranks, share * result, result, times, operation.path)


def _groups(attributes: str, everyone: int) -> np.ndarray:
    """[groups, ranks] from `{{0,1},{2,3}}`, `[groups,ranks]<=[dims]T(order)` or `mesh['a'=2,'b'=4] {'b'}`; none: all."""
    if named := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        along = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", named[2])]
        ranks = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        size = math.prod(ranks.shape[i] for i in along)
        return np.moveaxis(ranks, along, range(-len(along), 0)).reshape(-1, size)
    if counted := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        dims = [int(n) for n in counted[3].split(",")]
        ranks = np.arange(math.prod(dims)).reshape(dims)
        if counted[4]:
            ranks = ranks.transpose([int(n) for n in counted[4].split(",")])
        return ranks.reshape(int(counted[1]), int(counted[2]))
    if listed := re.search(r"replica_groups=\{(\{[\d,{}]+\})\}", attributes):
        return np.array([[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])])
    return np.arange(everyone)[None]


def _axes(groups: np.ndarray, mesh: dict[str, int]) -> tuple[str, ...]:
    """Along which ranks that are together differ."""
    if not mesh:
        return ()
    at = np.array(np.unravel_index(groups, tuple(mesh.values())))  # [axes, groups, ranks]
    differ = (at != at[:, :, :1]).any(axis=(1, 2))
    return tuple(axis for axis, apart in zip(mesh, differ, strict=True) if apart)


def bytes_of(dtype: str, dims: str) -> int:
    """Of an array as the program's text writes its type: `f32`, `128,64`."""
    bits = int(re.sub(r"\D", "", dtype[:4]) or 8) if dtype != "pred" else 8
    return math.prod(int(n) for n in dims.split(",") if n) * bits // 8
