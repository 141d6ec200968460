"""What a traced program costs each rank: products, bytes they move through memory, bytes received by mesh axis.

The program is walked as it would run. Loops multiply; of a branch it is counted how often each rank takes it. That is read from
the program too: what decides branches of a pipeline's tick are integers of the schedule's tables and the rank's stage, so these
are computed for all ticks and stages at once, each an *instance* of the loop's body. A branch that data decide counts as its
dearest side, on every rank.

N instances of a program, P stages.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from k3jax.activations.flops import PRODUCTS, product_flops
from k3jax.activations.leaves import subjaxprs
from k3jax.compat import scan_arity
from meshes import AXES

COLLECTIVES = {
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_to_all": "all-to-all",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "ppermute": "collective-permute",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "ragged_all_to_all": "ragged-all-to-all",
    "reduce_scatter": "reduce-scatter",
}
"""Primitives that communicate, as XLA calls what they become."""
MESSAGES = "messages"
SAME_VALUE = ("pvary", "pcast", "copy", "optimization_barrier")
MOST = 1 << 12
"""Elements of the largest value that is computed to decide branches: tables are small."""


class Item(NamedTuple):
    """What is counted apart."""

    scope: str
    """Named scopes of the program, outermost first: "gradients/pipeline.operation/forward"."""
    what: str
    """"flops", "bytes" that products read and write, a kind of collective: bytes received, or "messages" of that kind."""
    axes: tuple[str, ...] = ()
    """Of a collective, those with more than one rank."""
    kind: str = ""
    """Of messages; of flops the dtype of the products."""


Costs = dict[Item, np.ndarray]
"""Of one run of the program, [P]: the mean over the ranks of each stage."""


class Instances(NamedTuple):
    """Runs of one sub-program."""

    stage: np.ndarray
    """[N]"""
    times: np.ndarray
    """[N] How often, on each rank of that stage."""
    known: dict[Any, np.ndarray]
    """Values of variables that decide branches, [N, ...]."""


class Walk(NamedTuple):
    """Of one run of a program."""

    costs: Costs
    branches: dict[str, list[np.ndarray]]
    """By the scope of conditionals: how often each branch of each counts when it is run once, on the mean rank."""


def walk(program: core.ClosedJaxpr, mesh: Mapping[str, int]) -> Walk:
    """Walks a program whose work is inside shard_map; what stands outside, on whole arrays, is not counted.

    mesh: sizes of the axes.
    """
    counter = _Counter(dict(mesh))
    jaxpr, _ = dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars), instantiate=True)  # XLA drops it too
    stages = np.arange(mesh["pipe"])
    known = {
        var: np.repeat(np.asarray(value)[None], len(stages), 0)
        for var, value in zip(jaxpr.constvars, program.consts, strict=True)
        if _integers(var) and not isinstance(value, Tracer)
    }
    counter.outside(jaxpr, Instances(stages, np.ones(len(stages)), known), "")
    return Walk(counter.found, counter.taken)


def total(found: Costs, what: str, scope: str = "") -> np.ndarray:
    """Of everything in a scope and those inside it, [P]."""
    within = lambda item: not scope or f"{item.scope}/".startswith(f"{scope}/")
    inside = [cost for item, cost in found.items() if item.what == what and within(item)]
    return np.sum(inside, axis=0) if inside else np.zeros(1)


def received(found: Costs) -> dict[tuple[tuple[str, ...], str], float]:
    """Bytes that a rank gets from others, the mean over all ranks, by axes and kind of collective."""
    sums: dict[tuple[tuple[str, ...], str], float] = {}
    for item, cost in found.items():
        if item.axes and item.what != MESSAGES:
            sums[item.axes, item.what] = sums.get((item.axes, item.what), 0.0) + float(cost.mean())
    return sums


class _Counter:
    def __init__(self, mesh: dict[str, int]):
        self.mesh = mesh
        self.found: Costs = {}
        self.taken: dict[str, list[np.ndarray]] = {}

    def outside(self, jaxpr: core.Jaxpr, runs: Instances, path: str) -> None:
        """Finds the shard_maps."""
        for eqn, inner, values in self._steps(jaxpr, runs, path):
            if eqn.primitive.name == "shard_map":
                body = eqn.params["jaxpr"]
                specs = eqn.params["in_specs"]
                given = {}
                for var, operand, spec in zip(body.invars, eqn.invars, specs, strict=True):
                    if (value := values(operand)) is not None and _integers(var):
                        if (mine := _of_stage(value, spec, runs.stage, self.mesh)) is not None:
                            given[var] = mine
                self.inside(body, runs._replace(known=given), inner)
            else:
                for sub in subjaxprs(eqn):
                    given = {v: x for v, o in zip(sub.invars, eqn.invars, strict=False) if (x := values(o)) is not None}
                    self.outside(sub, runs._replace(known=given), inner)

    def inside(self, jaxpr: core.Jaxpr, runs: Instances, path: str) -> None:
        """Counts one rank's program."""
        for eqn, inner, values in self._steps(jaxpr, runs, path):
            subs = list(subjaxprs(eqn))
            name = eqn.primitive.name
            if name in COLLECTIVES:
                self._communicates(eqn, runs, inner)
            elif name in PRODUCTS:
                self._add(Item(inner, "flops", kind=str(eqn.invars[0].aval.dtype)), runs, product_flops(eqn))
                self._add(Item(inner, "bytes"), runs, sum(map(_nbytes, [*eqn.invars, *eqn.outvars])))
            elif not any(map(_counts, subs)):
                continue
            elif name == "cond":
                self._branches(eqn, subs, runs, inner, values)
            elif name == "scan":
                self._loop(eqn, subs[0], runs, inner, values)
            else:
                for sub in subs[:1] if name.startswith("custom_") else subs:
                    skip = len(eqn.invars) - len(sub.invars)
                    operands = eqn.invars[skip:] if skip >= 0 else []
                    self.inside(sub, runs._replace(known=_given(sub.invars, operands, values)), inner)

    # ---- kinds of equations -------------------------------------------------------------------------------------------

    def _communicates(self, eqn: Any, runs: Instances, path: str) -> None:
        axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        axes = axes if isinstance(axes, tuple) else (axes,)
        axes = tuple(axis for axis in AXES if axis in axes and self.mesh[axis] > 1)
        ranks, kind = math.prod(self.mesh[axis] for axis in axes), COLLECTIVES[eqn.primitive.name]
        if ranks == 1:
            return
        share = {
            "all-reduce": 2 * (ranks - 1) / ranks,
            "reduce-scatter": ranks - 1,
            "collective-permute": len(eqn.params.get("perm", ())) / ranks,
        }
        size = sum(map(_nbytes, eqn.outvars))
        self._add(Item(path, kind, axes), runs, share.get(kind, (ranks - 1) / ranks) * size)
        self._add(Item(path, MESSAGES, axes, kind), runs, 1)

    def _branches(self, eqn: Any, subs: list[core.Jaxpr], runs: Instances, path: str, values: Any) -> None:
        taken = values(eqn.invars[0])
        if taken is None:
            return self._dearest(eqn, subs, runs, path, values)
        taken = np.clip(taken.astype(np.int64), 0, len(subs) - 1)
        self.taken.setdefault(path, []).append(np.bincount(taken, runs.times, len(subs)) / runs.times.sum())
        for branch, sub in enumerate(subs):
            if (mine := taken == branch).any() and _counts(sub):
                known = {var: x[mine] for var, x in _given(sub.invars, eqn.invars[1:], values).items()}
                self.inside(sub, Instances(runs.stage[mine], runs.times[mine], known), path)

    def _dearest(self, eqn: Any, subs: list[core.Jaxpr], runs: Instances, path: str, values: Any) -> None:
        """Data decide: the branch with most operations, or else with most bytes received."""
        sides = []
        for sub in subs:
            side = _Counter(self.mesh)
            side.inside(sub, runs._replace(known=_given(sub.invars, eqn.invars[1:], values)), path)
            sides.append(side.found)
        weight = lambda found: (total(found, "flops").sum(), sum(received(found).values()))
        dearest = max(range(len(subs)), key=lambda branch: weight(sides[branch]))
        self.taken.setdefault(path, []).append(np.eye(len(subs))[dearest])
        for item, cost in sides[dearest].items():
            self.found[item] = self.found.get(item, 0) + cost

    def _loop(self, eqn: Any, body: core.Jaxpr, runs: Instances, path: str, values: Any) -> None:
        consts, carries = scan_arity(eqn)
        length, N = eqn.params["length"], len(runs.stage)
        steps = range(length)[::-1] if eqn.params["reverse"] else range(length)
        known = {}
        for i, (var, operand) in enumerate(zip(body.invars, eqn.invars, strict=True)):
            if consts <= i < consts + carries or (x := values(operand)) is None or not _integers(var):
                continue
            known[var] = np.repeat(x, length, 0) if i < consts else x[:, list(steps)].reshape(N * length, *x.shape[2:])
        repeat = lambda a: np.repeat(a, length, 0)
        if not known:  # all rounds are alike
            return self.inside(body, Instances(runs.stage, runs.times * length, {}), path)
        self.inside(body, Instances(repeat(runs.stage), repeat(runs.times), known), path)

    # ---- how ----------------------------------------------------------------------------------------------------------

    def _add(self, item: Item, runs: Instances, cost: int | float) -> None:
        of_stage = np.bincount(runs.stage, runs.times, self.mesh["pipe"]) * cost
        self.found[item] = self.found.get(item, 0) + of_stage

    def _steps(self, jaxpr: core.Jaxpr, runs: Instances, path: str) -> Iterable[tuple[Any, str, Any]]:
        """Each equation with its scope, and how to look up values that are known."""
        known = runs.known | _computed(jaxpr, runs)

        def values(var: Any) -> np.ndarray | None:
            if isinstance(var, core.Literal):
                return np.repeat(np.asarray(var.val)[None], len(runs.stage), 0) if _integers(var) else None
            return known.get(var)

        for eqn in jaxpr.eqns:
            names = str(eqn.source_info.name_stack).split("/")
            mine = [name for name in names if re.fullmatch(r"[\w.]+", name) and name != "rematted_computation"]
            yield eqn, "/".join([*([path] if path else []), *mine]), values


def _given(variables: Iterable[Any], operands: Iterable[Any], values: Any) -> dict[Any, np.ndarray]:
    """What a sub-program knows of its inputs."""
    pairs = zip(variables, operands, strict=False)
    return {var: x for var, operand in pairs if _integers(var) and (x := values(operand)) is not None}


def _computed(jaxpr: core.Jaxpr, runs: Instances) -> dict[Any, np.ndarray]:
    """Values that follow from the known ones, as far as branches or sub-programs with costs ask for them."""
    can, made = set(runs.known), []
    for eqn in jaxpr.eqns:
        is_stage = eqn.primitive.name == "axis_index" and eqn.params["axis_name"] in ("pipe", ("pipe",))
        plain = not eqn.effects and all(isinstance(v, core.Literal) or v in can for v in eqn.invars) and eqn.invars
        if (
            (is_stage or plain)
            and all(map(_small, eqn.outvars))
            and eqn.primitive.name not in ("scan", "while", "cond")
        ):
            can |= set(eqn.outvars)
            made.append(eqn)
    wanted = {
        v
        for eqn in jaxpr.eqns
        if any(map(_counts, subjaxprs(eqn)))
        for v in eqn.invars
        if not isinstance(v, core.Literal)
    }
    needed, slice_ = set(wanted), []
    for eqn in reversed(made):
        if needed & set(eqn.outvars):
            slice_.append(eqn)
            needed |= {v for v in eqn.invars if not isinstance(v, core.Literal)}
    asked = [v for v in wanted if v in can and v not in runs.known and _integers(v)]
    if not asked:
        return {}
    given = [v for v in runs.known if v in needed]

    def one(stage: jax.Array, *operands: jax.Array) -> list[Any]:
        env = dict(zip(given, operands, strict=True))
        _run(slice_[::-1], env, stage)
        return [env[v] for v in asked]

    answers = jax.jit(jax.vmap(one))(jnp.asarray(runs.stage), *(runs.known[v] for v in given))
    return dict(zip(asked, map(np.asarray, answers), strict=True))


def _run(eqns: Iterable[Any], env: dict[Any, Any], stage: jax.Array) -> None:
    read = lambda v: v.val if isinstance(v, core.Literal) else env[v]
    for eqn in eqns:
        operands, name = [read(v) for v in eqn.invars], eqn.primitive.name
        if name == "axis_index":
            made = [stage.astype(eqn.outvars[0].aval.dtype)]
        elif name in SAME_VALUE:
            made = operands
        elif inner := list(subjaxprs(eqn)):
            env_inside = dict(zip(inner[0].invars, operands, strict=True))
            _run(inner[0].eqns, env_inside, stage)
            made = [v.val if isinstance(v, core.Literal) else env_inside[v] for v in inner[0].outvars]
        else:
            made = eqn.primitive.bind(*operands, **eqn.params)
            made = made if eqn.primitive.multiple_results else [made]
        env.update(zip(eqn.outvars, made, strict=True))


@functools.lru_cache(maxsize=4096)
def _counts(jaxpr: core.Jaxpr) -> bool:
    """Whether anything in a program costs."""
    return any(e.primitive.name in (*PRODUCTS, *COLLECTIVES) or any(map(_counts, subjaxprs(e))) for e in jaxpr.eqns)


def _of_stage(value: np.ndarray, spec: Any, stage: np.ndarray, mesh: Mapping[str, int]) -> np.ndarray | None:
    """A whole array's part on each instance's stage; None if it is shared out over other axes."""
    for dim, axes in enumerate(spec):
        axes = axes if isinstance(axes, tuple) else (axes,) if axes else ()
        if [axis for axis in axes if mesh[axis] > 1 and axis != "pipe"]:
            return None
        if "pipe" in axes:
            parts = np.split(value, mesh["pipe"], dim + 1)
            value = np.stack([parts[s][i] for i, s in enumerate(stage)])
    return value


def _integers(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.integer) or var.aval.dtype == bool


def _small(var: Any) -> bool:
    return hasattr(var.aval, "dtype") and math.prod(var.aval.shape) <= MOST


def _nbytes(var: Any) -> int:
    return math.prod(var.aval.shape) * var.aval.dtype.itemsize
