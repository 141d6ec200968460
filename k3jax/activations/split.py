"""Cuts a backward program in two: B makes what is wanted early, W the rest, from inputs and from what crosses.

A zero-bubble schedule runs the input gradients of a chunk at once and its weight gradients later. No equation that costs
much runs twice: what early outputs need is in B, everything else in W, and a value of B that W reads crosses. Loops and
branches are cut inside; a loop's carry that only W needs (the sum of gradients of a weight that all iterations share)
moves to W's loop, and what crosses is stacked over iterations.

Then a minimum cut chooses what crosses: cheap equations (elementwise, layout, sums) may run again in W, or move to B, where
that holds fewer bytes: a norm's weight gradient is summed in B, rather than hold all that it is summed over.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from k3jax.activations.min_cut import sink_side
from k3jax.activations.program import Known, Program, Step, Type, Value, demand, read, with_carries
from k3jax.compat import scan_arity, vary

CHEAP = frozenset(
    """abs add add_any and axis_index bitcast_convert_type broadcast_in_dim ceil clamp concatenate convert_element_type
    copy copy_p cos div dynamic_slice dynamic_update_slice empty2 eq erf exp exp2 expand_dims expm1 floor ge gt
    integer_pow iota is_finite le le_to log log1p logistic lt lt_to max min mul name ne neg not one_minus_square or pad pow
    pvary reduce_and reduce_max reduce_min reduce_or reduce_precision reduce_sum rem reshape rev round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin slice split sqrt square squeeze stack stop_gradient sub
    tan tanh transpose unstack xor""".split()
)
"""Equations whose time is that of reading and writing: never a product, a collective, a loop or a kernel."""
HOLD, RUN = 8, 1
"""Price of a byte that is held from B to W, and of one that an equation makes again in W or earlier in B."""


class Split(NamedTuple):
    """The two halves. They are traced where they run, so that types hold on any mesh."""

    before: Callable[..., tuple[list[jax.Array], list[jax.Array]]]
    """Inputs `before_reads` -> (outputs wanted early, crossing values)."""
    after: Callable[..., list[jax.Array]]
    """Inputs `after_reads`, then crossing values -> the other outputs."""
    before_reads: tuple[int, ...]
    after_reads: tuple[int, ...]
    crossing: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def crossing_bytes(self) -> int:
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in self.crossing)


def split(
    closed: core.ClosedJaxpr,
    first: Sequence[bool],
    *,
    free: Sequence[bool] | None = None,
    cheap: frozenset[str] = CHEAP,
) -> Split:
    """Splits a program into what makes its outputs with first[i], and what makes the others.

    free[i]: W may read input i at no cost (weights are there anyway); another counts as held bytes, like what crosses, so
    that it is read where that is less. None: all are free. cheap: names of equations that may run twice, or move to B.
    Raises ValueError if first or free do not fit the program.
    """
    program = read(closed.jaxpr, closed.consts)
    free = [True] * len(program.inputs) if free is None else free
    for what, given, needed in (("first", first, program.outputs), ("free", free, program.inputs)):
        if len(given) != len(needed):
            raise ValueError(f"{what} has {len(given)} entries, the program needs {len(needed)}: give one for each")
    sources = [Source(Have.FREE if f else Have.HELD, v.type.bytes) for f, v in zip(free, program.inputs, strict=True)]
    cut = Cut(program, first, [not f for f in first], sources, cheap)
    wanted, index = sum(map(bool, first)), {v: i for i, v in enumerate(program.inputs)}
    early, late = cut.early_reads(), cut.late_reads()
    before = Program(early, cut.before, cut.early_outputs + cut.crossing)
    after = Program(late + cut.crossing, cut.after, cut.late_outputs)

    def run_before(*values):
        made = before(*values)
        return made[:wanted], made[wanted:]

    crossing = tuple(jax.ShapeDtypeStruct(v.type.shape, v.type.dtype) for v in cut.crossing)
    return Split(run_before, after, tuple(index[v] for v in early), tuple(index[v] for v in late), crossing)


# ---- the cut -------------------------------------------------------------------------------------------------------------


class Have(enum.Enum):
    """Where a value is there."""

    FREE = "in both halves"
    HELD = "in both halves, but W pays for its bytes"
    MADE = "in B; W has it if it crosses"
    LATE = "in W"


class Source(NamedTuple):
    have: Have
    bytes: int


class Cut:
    """A program's steps in two halves, and the values that cross.

    early, late: its outputs that B and W make. sources: what is known of its inputs. times: how often it runs.
    """

    def __init__(self, program: Program, early, late, sources: Sequence[Source], cheap: frozenset[str], times: int = 1):
        self.program, self.cheap, self.times = program, cheap, times
        self.have = {v: s.have for v, s in zip(program.inputs, sources, strict=True)}
        self.bytes = {v: s.bytes for v, s in zip(program.inputs, sources, strict=True)}
        self.early_outputs = [v for v, e in zip(program.outputs, early, strict=True) if e]
        self.late_outputs = [v for v, e in zip(program.outputs, late, strict=True) if e]
        first, second = self._assign(demand(program, early), demand(program, late))
        held, movable = self._choose(first, second)
        inputs = set(program.inputs)
        there = {v for v in inputs if self.have[v] in (Have.FREE, Have.LATE)}
        self.crossing = [v for v in held if self.have[v] is not Have.HELD]
        self.before = needed_steps(first + movable, [*self.early_outputs, *self.crossing], inputs)
        self.after = needed_steps([s for s in first + second if not s.effects], self.late_outputs, there | set(held))

    def early_reads(self) -> list[Value]:
        return self._reads(self.before, [*self.early_outputs, *self.crossing])

    def late_reads(self) -> list[Value]:
        crossing = set(self.crossing)
        return [v for v in self._reads(self.after, self.late_outputs) if v not in crossing]

    def _reads(self, steps, outputs) -> list[Value]:
        read = {v for step in steps for v in step.operands} | set(outputs)
        return [v for v in self.program.inputs if v in read]

    def _assign(self, early: set, late: set) -> tuple[list[Step], list[Step]]:
        """Steps that early outputs need, and those that only the others need; loops and branches are divided."""
        first, second = [], []
        for step in self.program.steps:
            mask = [r in early for r in step.results]
            rest = [r in late and r not in early for r in step.results]
            if not step.effects and not any(mask + rest):
                continue
            if step.effects or all(mask) or (any(mask) and not step.inner):
                pieces = (step, None)
            elif not any(mask) and (all(rest) or not step.inner):
                pieces = (None, step)
            else:
                divide = divide_branches if step.name == "cond" else divide_loop
                pieces = divide(step, mask, rest, list(map(self._source, step.operands)), self.cheap, self.times)
            for piece, half, have in zip(pieces, (first, second), (Have.MADE, Have.LATE), strict=True):
                if piece is not None:
                    half.append(piece)
                    derived = piece.name in self.cheap and all(self._of(o) is Have.FREE for o in piece.operands)
                    self.have.update(dict.fromkeys(piece.results, Have.FREE if derived else have))
        return first, second

    def _of(self, atom: Value | Known) -> Have:
        return Have.FREE if isinstance(atom, Known) else self.have.get(atom, Have.LATE)

    def _source(self, atom: Value | Known) -> Source:
        """What a body knows of an operand: what B made outside can be read in W, and crosses there."""
        have = self._of(atom)
        have = Have.HELD if have is Have.MADE else have
        return Source(have, 0 if isinstance(atom, Known) else self._bytes(atom))

    def _bytes(self, value: Value) -> int:
        return self.bytes.get(value, value.type.bytes * self.times)

    def _choose(self, first: list[Step], second: list[Step]) -> tuple[list[Value], list[Step]]:
        """The values held from B to W for the least price, and W's steps that could as well run in B.

        In the graph a value is an edge from being made to being there for W; a path from the source is a need of B's time.
        """
        made, there, edges = (lambda v: (v, 0)), (lambda v: (v, 1)), []
        ready: dict[Value, None] = {}
        movable = []

        def value(v: Value, operands: Iterable | None):
            """Held, or made from operands in W; None: it cannot be."""
            ready[v] = None
            edges.append((made(v), there(v), HOLD * self._bytes(v)))
            if operands is None:
                edges.append(("B", made(v), math.inf))
            else:
                edges.extend((there(o), made(v), math.inf) for o in operands if o in ready)

        for v in self.program.inputs:
            if self.have[v] in (Have.HELD, Have.MADE):
                value(v, None)
        for step in first:
            again = step.name in self.cheap and not step.effects
            for v in step.results:
                value(v, step.operands if again else None)
                if again:
                    edges.append(("B", made(v), RUN * self._bytes(v)))
        inputs = set(self.program.inputs)
        known = lambda o: isinstance(o, Known) or o in ready or (o in inputs and self.have[o] is Have.FREE)
        for step in second:
            if step.name in self.cheap and all(map(known, step.operands)):
                movable.append(step)
                for v in step.results:
                    value(v, step.operands)
                    edges.append((made(v), "W", RUN * self._bytes(v)))
            else:
                edges.extend((there(o), "W", math.inf) for o in step.operands if o in ready)
        edges.extend((there(o), "W", math.inf) for o in self.late_outputs if o in ready)
        late = sink_side(edges, "B", "W")
        return [v for v in ready if there(v) in late and made(v) not in late], movable


def needed_steps(steps: list[Step], outputs: Iterable, given: set) -> list[Step]:
    """The steps that make the outputs from what is given, in order."""
    need, kept = set(outputs) - given, []
    for step in reversed(steps):
        if step.effects or any(r in need for r in step.results):
            kept.append(step)
            need.update(v for v in step.operands if v not in given)
    return kept[::-1]


# ---- loops and branches --------------------------------------------------------------------------------------------------


def divide_loop(step: Step, mask, rest, sources, cheap, times) -> tuple[Step | None, Step | None]:
    """Two loops in the same direction; what crosses is stacked by the first and scanned by the second."""
    assert step.eqn is not None
    (consts, carries), body = scan_arity(step.eqn), step.inner[0]
    length = step.eqn.params["length"]
    early = with_carries(step, mask)
    alive = with_carries(step, [m or r for m, r in zip(mask, rest, strict=True)])
    late = [a and not e for a, e in zip(alive, early, strict=True)]
    of_carries = [
        Source(Have.MADE if e else Have.LATE, v.type.bytes * times * length)
        for e, v in zip(early, body.inputs[consts : consts + carries], strict=False)
    ]
    sources = [*sources[:consts], *of_carries, *sources[consts + carries :]]
    cut = Cut(body, early, late, sources, cheap, times * length)
    stacked = [Value(v.type._replace(shape=(length, *v.type.shape))) for v in cut.crossing]
    outer = dict(zip(body.inputs, step.operands, strict=True))
    how = {name: step.eqn.params[name] for name in ("length", "reverse", "unroll")}

    def loop(which, reads, steps, outputs, entering, leaving):
        """entering, leaving: what crosses, inside and outside of the loop."""
        carried = [v for v, w in zip(body.inputs[consts : consts + carries], which, strict=False) if w]
        fixed = [v for v in body.inputs[:consts] if v in reads]
        scanned = [v for v in body.inputs[consts + carries :] if v in reads]
        half = Program([*fixed, *carried, *scanned, *entering], steps, outputs)
        n, m = len(fixed), len(fixed) + len(carried)

        def run(*values):
            def iteration(carry, xs):
                made = half(*values[:n], *carry, *xs)
                return made[: m - n], made[m - n :]

            carry, ys = lax.scan(iteration, list(values[n:m]), list(values[m:]), **how)
            return [*carry, *ys]

        results = [r for r, w in zip(step.results, which, strict=True) if w]
        operands = [outer[v] for v in (*fixed, *carried, *scanned)]
        extra_in, extra_out = (stacked, []) if entering else ([], leaving)
        return Step("scan", run, operands + extra_in, results + extra_out)

    first = loop(early, set(cut.early_reads()), cut.before, cut.early_outputs + cut.crossing, [], stacked)
    if not any(late):
        return first, None
    return first, loop(late, set(cut.late_reads()), cut.after, cut.late_outputs, cut.crossing, [])


def divide_branches(step: Step, mask, rest, sources, cheap, times) -> tuple[Step | None, Step | None]:
    """Two branchings on the same index; branches share room for values of one type, and fill what they lack with zeros."""
    cuts = [Cut(branch, mask, rest, sources[1:], cheap, times) for branch in step.inner]
    room: list[Value] = []
    places: list[dict[Value, Value]] = []
    for cut in cuts:
        vacant, mine = list(room), {}
        for v in cut.crossing:
            place = next((place for place in vacant if place.type == v.type), None)
            if place is None:
                room.append(place := Value(v.type))
            else:
                vacant.remove(place)
            mine[place] = v
        places.append(mine)

    def branching(reads, halves, wanted, extra_in, extra_out):
        """halves: (steps, outputs, crossing values that enter) of every branch."""
        read = [
            i
            for i in range(len(step.operands) - 1)
            if any(b.inputs[i] in r for b, r in zip(step.inner, reads, strict=True))
        ]
        programs = [
            Program([*(branch.inputs[i] for i in read), *entering], steps, outputs)
            for branch, (steps, outputs, entering) in zip(step.inner, halves, strict=True)
        ]

        def run(index, *values):
            return lax.switch(index, [lambda *values, p=p: p(*values) for p in programs], *values)

        operands = [step.operands[0], *(step.operands[i + 1] for i in read), *extra_in]
        return Step("cond", run, operands, [r for r, w in zip(step.results, wanted, strict=True) if w] + extra_out)

    def before(cut, mine):
        lacking = [zeros(place.type) for place in room if place not in mine]
        fill = iter(lacking)
        leaving = [mine[place] if place in mine else next(fill).results[0] for place in room]
        return cut.before + lacking, cut.early_outputs + leaving, []

    def after(cut, mine):
        return cut.after, cut.late_outputs, [mine.get(place, place) for place in room]

    pairs = list(zip(cuts, places, strict=True))
    first = branching([set(c.early_reads()) for c in cuts], [before(*p) for p in pairs], mask, [], room)
    if not any(rest):
        return first, None
    return first, branching([set(c.late_reads()) for c in cuts], [after(*p) for p in pairs], rest, room, [])


def zeros(of: Type) -> Step:
    return Step("zeros", lambda: [vary(jnp.zeros(of.shape, of.dtype), of.varying)], [], [Value(of)])
