"""The leaves of a pullback, and where each came from: an input, or a value tagged with a name.

`jax.vjp` returns a pytree whose leaves are exactly what backward needs. Leaves that are inputs are handed in again;
named ones go to the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.extend import core

TRANSPARENT = frozenset(
    {"reduce_precision", "convert_element_type", "optimization_barrier", "copy", "copy_p", "pcast", "pvary", "reshape"}
)
"""Primitives that do not make a new value of their first kind: the walk goes on to their operand."""


class Origin(NamedTuple):
    """Where a leaf comes from; exactly one of the three is set."""

    input: int | None = None
    """Index of a flat input, which is handed in again."""
    names: frozenset[str] = frozenset()
    """Names it was tagged with, one a branch: it goes to the store."""
    constant: Any = None
    """A value known when the program is made."""

    @property
    def stored(self) -> bool:
        return bool(self.names)


class Unknown(NamedTuple):
    """A leaf that is neither an input nor a named value."""

    aval: Any
    found: list[str]
    """Where walks end."""


def names_in(jaxpr: core.Jaxpr) -> frozenset[str]:
    """All names that a program tags, in its sub-programs too."""
    found = {e.params["name"] for e in jaxpr.eqns if e.primitive.name == "name"}
    return frozenset(found).union(*(names_in(sub) for e in jaxpr.eqns for sub in subjaxprs(e)))


def tagged_names(function: Callable, *args: Any) -> frozenset[str]:
    """All names that `function(*args)` tags."""
    return names_in(jax.make_jaxpr(function)(*args).jaxpr)


def leaf_origins(function: Callable, *args: Any) -> list[Origin]:
    """Origin of each output leaf of `function(*args)`, by walking its jaxpr from the outputs back.

    Raises ValueError for a leaf that is neither an input nor named: nothing could say what to do with it.
    """
    return known(output_origins(jax.make_jaxpr(function)(*args)))


def known(found: list[Origin | Unknown]) -> list[Origin]:
    """The same, of a pullback's leaves; ValueError for one that is neither an input nor named."""
    origins = []
    for index, origin in enumerate(found):
        if isinstance(origin, Unknown):
            raise ValueError(
                f"leaf {index} of the pullback, {origin.aval}, is neither an input nor a named value "
                f"(found {origin.found}): tag what produced it with checkpoint_name"
            )
        origins.append(origin)
    return origins


def output_origins(closed: core.ClosedJaxpr) -> list[Origin | Unknown]:
    """Origin of each output of a program."""
    constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    origins: list[Origin | Unknown] = []
    for var in closed.jaxpr.outvars:
        if isinstance(var, core.Literal):
            origins.append(Origin(constant=var.val))
            continue
        if var in constants and not isinstance(constants[var], Tracer):
            origins.append(Origin(constant=constants[var]))
            continue
        found = set(walk(closed.jaxpr, var)) - {"zeros"}
        names = frozenset(o.removeprefix("name:") for o in found if isinstance(o, str) and o.startswith("name:"))
        if found and len(names) == len(found):
            origins.append(Origin(names=names))
        elif len(found) == 1 and isinstance(only := next(iter(found)), int):
            origins.append(Origin(input=only))
        else:
            origins.append(Unknown(var.aval, sorted(map(str, found))))
    return origins


def walk(jaxpr: core.Jaxpr, var: Any) -> Iterator[int | str]:
    """Yields input indices, "name:…", "zeros" (a branch that has no such value) and names of other primitives."""
    if isinstance(var, core.Literal):
        yield "zeros"
        return
    inputs = {v: i for i, v in enumerate(jaxpr.invars)}
    if var in inputs:
        yield inputs[var]
        return
    if var in jaxpr.constvars:
        yield "constant"
        return
    eqn = next(e for e in jaxpr.eqns if var in e.outvars)
    primitive, position = eqn.primitive.name, eqn.outvars.index(var)
    subs = list(subjaxprs(eqn))
    if primitive == "name":
        yield "name:" + eqn.params["name"]
    elif primitive in TRANSPARENT:
        yield from walk(jaxpr, eqn.invars[position])
    elif primitive in ("empty", "empty2"):  # stands for a leaf that only another branch has
        yield "zeros"
    elif primitive == "broadcast_in_dim" and set(walk(jaxpr, eqn.invars[0])) == {"zeros"}:
        yield "zeros"
    elif subs:
        skip = len(eqn.invars) - len(subs[0].invars)  # the operands that choose a branch
        for sub in subs:
            for origin in walk(sub, sub.outvars[position]):
                if not isinstance(origin, int):
                    yield origin
                elif primitive == "scan" and not is_whole_operand(eqn, sub, position, origin):
                    yield "loop state"
                else:
                    yield from walk(jaxpr, eqn.invars[skip + origin])
    else:
        yield primitive


def is_whole_operand(scan: core.JaxprEqn, body: core.Jaxpr, position: int, origin: int) -> bool:
    """Whether a scan's stacked output repeats one of its scanned operands, slice by slice."""
    scanned = lambda outer, inner: outer.aval.ndim == inner.aval.ndim + 1
    return scanned(scan.outvars[position], body.outvars[position]) and scanned(scan.invars[origin], body.invars[origin])


def subjaxprs(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """Programs inside an equation: branches, loop bodies, calls."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, core.Jaxpr):
                yield item
