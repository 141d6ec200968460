"""What it takes to make values of a program: floating-point operations of matrix products. Of branches the dearest counts.

Of named values this is an estimate of recomputation: they are made from the named values before them (which are stored, or
recomputed themselves) and from what enters the loop body, branch or checkpoint that they stand in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from jax.extend import core

from k3jax.activations.leaves import subjaxprs
from k3jax.compat import scan_arity

PRODUCTS = ("dot_general", "ragged_dot", "ragged_dot_general")
NAME = "name"


def flops(jaxpr: core.Jaxpr, outputs: Iterable[int] | None = None) -> int:
    """Operations of all that these outputs, by position, are made of; None: all outputs. Inside shard_map, one rank's."""
    asked = jaxpr.outvars if outputs is None else [jaxpr.outvars[i] for i in outputs]
    return _made_from(jaxpr, set(map(id, asked)), None)[0]


def flops_by_name(jaxpr: core.Jaxpr) -> dict[str, int]:
    """For each name that a program tags: operations of one run, summed over all places that tag it."""
    found: dict[str, int] = {}
    _search(jaxpr, 1, found)
    return found


def _search(jaxpr: core.Jaxpr, times: int, found: dict[str, int]) -> None:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == NAME:
            made, _ = _made_from(jaxpr, set(map(id, eqn.invars)), NAME)
            found[eqn.params["name"]] = found.get(eqn.params["name"], 0) + made * times
        for sub in subjaxprs(eqn):
            _search(sub, times * _runs(eqn), found)


def _made_from(jaxpr: core.Jaxpr, needed: set[int], end: str | None) -> tuple[int, set[int]]:
    """Operations that make these variables (by id), and the positions of the inputs they need; what equations called
    `end` make is there already."""
    total = 0
    for eqn in reversed(jaxpr.eqns):
        outs = {i for i, var in enumerate(eqn.outvars) if id(var) in needed}
        if not outs or eqn.primitive.name == end:
            continue
        subs = list(subjaxprs(eqn))
        if subs:
            made, operands = _inside(eqn, subs, outs, end)
            total += made
        else:
            total += product_flops(eqn)
            operands = set(range(len(eqn.invars)))
        needed = needed | {id(eqn.invars[i]) for i in operands}
    return total, {i for i, var in enumerate(jaxpr.invars) if id(var) in needed}


def _inside(eqn: core.JaxprEqn, subs: list[core.Jaxpr], outs: set[int], end: str | None) -> tuple[int, set[int]]:
    """As `_made_from`, for an equation that runs programs: operations, and the operands they need."""
    most, operands = 0, set()
    for sub in subs:
        skip = len(eqn.invars) - len(sub.invars)  # the operands that choose a branch
        asked, inputs = set(), set()
        while not outs <= asked:  # a loop's state is needed in the next round if it is in this one
            asked |= outs
            made, inputs = _made_from(sub, {id(sub.outvars[i]) for i in asked if i < len(sub.outvars)}, end)
            outs = asked | _carried(eqn, inputs)
        most = max(most, made * _runs(eqn))
        operands |= {skip + i for i in inputs if skip + i >= 0} | set(range(max(skip, 0)))
    return most, operands


def _carried(eqn: core.JaxprEqn, inputs: set[int]) -> set[int]:
    if eqn.primitive.name != "scan":
        return set()
    first, carry = scan_arity(eqn)
    return {i - first for i in inputs if first <= i < first + carry}


def _runs(eqn: core.JaxprEqn) -> int:
    return eqn.params["length"] if eqn.primitive.name == "scan" else 1


def product_flops(eqn: core.JaxprEqn) -> int:
    """Two for each multiplication and addition of a matrix product."""
    if eqn.primitive.name not in PRODUCTS:
        return 0
    avals: list[Any] = [eqn.invars[0].aval, eqn.outvars[0].aval]
    left, made = (aval.shape for aval in avals)
    contracted = eqn.params["dimension_numbers"][0][0] if eqn.primitive.name == "dot_general" else [-1]
    return 2 * math.prod(made) * math.prod(left[i] for i in contracted)
