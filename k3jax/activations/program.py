"""A jaxpr as data that can be cut and put together again: values by identity, steps with their calls inlined."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from k3jax.compat import axes_of_type, scan_arity

CALLS = frozenset(
    "jit pjit closed_call core_call checkpoint remat2 custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr".split()
)
"""Equations that only wrap a program; remat wraps the forward that backward runs again, and must be cut inside."""


class Type(NamedTuple):
    """Of an array, with the mesh axes over which it varies."""

    shape: tuple[int, ...]
    dtype: Any
    varying: frozenset[str]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A value by identity."""

    type: Type


def value_like(var: Any) -> Value:
    return Value(Type(var.aval.shape, var.aval.dtype, axes_of_type(var.aval)))


@dataclasses.dataclass(frozen=True, eq=False)
class Known:
    """A literal or a constant: there in both halves."""

    value: Any


Atom = Value | Known


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """An equation whose calls are inlined; `inner`: bodies that can be cut."""

    name: str
    run: Callable[..., Sequence[Any]]
    operands: Sequence[Atom]
    results: list[Value]
    eqn: Any = None
    inner: tuple[Program, ...] = ()
    effects: bool = False


class Program(NamedTuple):
    inputs: list[Value]
    steps: list[Step]
    outputs: Sequence[Atom]

    def __call__(self, *values):
        env = dict(zip(self.inputs, values, strict=True))
        get = lambda atom: atom.value if isinstance(atom, Known) else env[atom]
        for step in self.steps:
            env.update(zip(step.results, step.run(*map(get, step.operands)), strict=True))
        return list(map(get, self.outputs))


def read(jaxpr: core.Jaxpr, consts: Iterable[Any] = ()) -> Program:
    """The program with its calls inlined, every value made once."""
    steps: list[Step] = []

    def inline(jaxpr, consts, inputs) -> list[Atom]:
        env: dict[Any, Atom] = dict(zip(jaxpr.constvars, map(Known, consts), strict=True))
        env.update(zip(jaxpr.invars, inputs, strict=True))
        get = lambda atom: Known(atom.val) if isinstance(atom, core.Literal) else env[atom]
        for eqn in jaxpr.eqns:
            operands = list(map(get, eqn.invars))
            if eqn.primitive.name in CALLS:
                called = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
                results = inline(called.jaxpr if hasattr(called, "jaxpr") else called, consts_of(called), operands)
            else:
                results = [value_like(v) for v in eqn.outvars]
                steps.append(as_step(eqn, operands, results))
            env.update(zip(eqn.outvars, results, strict=True))
        return list(map(get, jaxpr.outvars))

    inputs = [value_like(v) for v in jaxpr.invars]
    return Program(inputs, steps, inline(jaxpr, consts, inputs))


def consts_of(jaxpr: Any) -> Sequence[Any]:
    return getattr(jaxpr, "consts", ())


def as_step(eqn: core.JaxprEqn, operands: Sequence[Atom], results: list[Value]) -> Step:
    name = eqn.primitive.name
    # That an equation names a mesh axis is listed as an effect, and orders nothing.
    effects = any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)
    inner = {"scan": [eqn.params.get("jaxpr")], "cond": eqn.params.get("branches")}.get(name, ())
    bodies = () if effects else tuple(read(body.jaxpr, body.consts) for body in inner)
    return Step(name, functools.partial(bind, eqn), operands, results, eqn, bodies, effects)


def bind(eqn: core.JaxprEqn, *values: Any) -> Sequence[Any]:
    """Results of one equation."""
    with eqn.ctx.manager:
        made = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return made if eqn.primitive.multiple_results else [made]


def demand(program: Program, wanted: Iterable[bool]) -> set[Atom]:
    """All values that the wanted outputs, and effects, are made of."""
    need = {v for v, w in zip(program.outputs, wanted, strict=True) if w}
    for step in reversed(program.steps):
        mask = [r in need for r in step.results]
        if step.effects or any(mask):
            whole = all(mask) or not step.inner
            need.update(step.operands if whole else itertools.compress(step.operands, operands_needed(step, mask)))
    return need


def operands_needed(step: Step, mask: list[bool]) -> list[bool]:
    """Which operands of a loop or of branches some of its results are made of."""
    if step.name == "cond":
        needs = [demand(branch, mask) for branch in step.inner]
        of_branch = zip(*(branch.inputs for branch in step.inner), strict=True)
        return [True] + [any(v in need for v, need in zip(same, needs, strict=True)) for same in of_branch]
    consts, carries = scan_arity(step.eqn)
    mask = with_carries(step, mask)
    need = demand(step.inner[0], mask)
    return [
        mask[i - consts] if consts <= i < consts + carries else v in need for i, v in enumerate(step.inner[0].inputs)
    ]


def with_carries(scan: Step, mask: list[bool]) -> list[bool]:
    """The wanted outputs of a loop, and all carries that they depend on through any number of iterations."""
    (consts, carries), body = scan_arity(scan.eqn), scan.inner[0]
    while True:
        need = demand(body, mask)
        more = [m or (i < carries and body.inputs[consts + i] in need) for i, m in enumerate(mask)]
        if more == mask:
            return mask
        mask = more
