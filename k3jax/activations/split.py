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
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from k3jax.activations.min_cut import sink_side
from k3jax.activations.program import Atom, Known, Program, Step, Type, Value, demand, read, with_carries
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
    refine: bool = True,
) -> Split:
    """Splits a program into what makes its outputs with first[i], and what makes the others.

    free[i]: W may read input i at no cost (weights are there anyway); another counts as held bytes, like what crosses, so
    that it is read where that is less. None: all are free. refine: choose what crosses by the minimum cut.
    Raises ValueError if first or free do not fit the program.
    """
    program = read(closed.jaxpr, closed.consts)
    free = [True] * len(program.inputs) if free is None else free
    for what, given, needed in (("first", first, program.outputs), ("free", free, program.inputs)):
        if len(given) != len(needed):
            raise ValueError(f"{what} has {len(given)} entries, the program needs {len(needed)}: give one for each")
    sources = [Source(Have.FREE if f else Have.HELD, v.type.bytes) for f, v in zip(free, program.inputs, strict=True)]
    cut = Cut(program, first, [not f for f in first], sources, refine)
    wanted, reads = sum(map(bool, first)), (cut.before.reads, cut.after.reads)
    before = Program(reads[0], cut.before.steps, chosen(program.outputs, first) + cut.crossing)
    after = Program(reads[1] + cut.crossing, cut.after.steps, chosen(program.outputs, [not f for f in first]))

    def run_before(*values):
        made = before(*values)
        return made[:wanted], made[wanted:]

    before_reads, after_reads = (tuple(map(program.inputs.index, half)) for half in reads)
    crossing = tuple(jax.ShapeDtypeStruct(v.type.shape, v.type.dtype) for v in cut.crossing)
    return Split(run_before, after, before_reads, after_reads, crossing)


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


class Half(NamedTuple):
    reads: list[Value]
    """Inputs of the program, in order."""
    steps: list[Step]


Pieces = tuple[Step | None, Step | None]


class Cut:
    """A program's steps in two halves, and the values that cross.

    early, late: its outputs that B and W make. sources: what is known of its inputs. times: how often it runs.
    """

    def __init__(self, program: Program, early, late, sources: Sequence[Source], refine: bool, times: int = 1):
        self.program, self.refine, self.times = program, refine, times
        self.have = {v: s.have for v, s in zip(program.inputs, sources, strict=True)}
        self.bytes = {v: s.bytes for v, s in zip(program.inputs, sources, strict=True)}
        early_outputs, late_outputs = chosen(program.outputs, early), chosen(program.outputs, late)
        first, second = self._assign(demand(program, early), demand(program, late))
        held, movable = self._choose(first, second, late_outputs)
        self.crossing = [v for v in held if self.have[v] is not Have.HELD]
        there = {v for v in program.inputs if self.have[v] in (Have.FREE, Have.LATE)}
        self.before = self._half(first + movable, early_outputs + self.crossing, set(program.inputs))
        again = [step for step in first + second if not step.effects]
        self.after = self._half(again, late_outputs, there | set(held))

    def _half(self, steps: list[Step], outputs: list, given: set) -> Half:
        """The steps that make the outputs from what is given, in order."""
        need, kept = set(outputs), []
        for step in reversed(steps):
            if step.effects or any(r in need and r not in given for r in step.results):
                kept.append(step)
                need.update(step.operands)
        return Half([v for v in self.program.inputs if v in need and v in given], kept[::-1])

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
                pieces = divide(step, mask, rest, list(map(self._source, step.operands)), self.refine, self.times)
            for piece, half, have in zip(pieces, (first, second), (Have.MADE, Have.LATE), strict=True):
                if piece is not None:
                    derived = piece.name in CHEAP and all(self._of(o) is Have.FREE for o in piece.operands)
                    (first if derived else half).append(piece)  # loops' bodies may read it in both halves
                    self.have.update(dict.fromkeys(piece.results, Have.FREE if derived else have))
        return first, second

    def _of(self, atom: Atom) -> Have:
        return Have.FREE if isinstance(atom, Known) else self.have.get(atom, Have.LATE)

    def _source(self, atom: Atom) -> Source:
        """What a body knows of an operand: what B made outside can be read in W, and crosses there."""
        have = self._of(atom)
        have = Have.HELD if have is Have.MADE else have
        return Source(have, 0 if isinstance(atom, Known) else self._bytes(atom))

    def _bytes(self, value: Value) -> int:
        return self.bytes.get(value, value.type.bytes * self.times)

    def _choose(self, first: list[Step], second: list[Step], late_outputs: list) -> tuple[list[Value], list[Step]]:
        """The values held from B to W for the least price, and W's steps that could as well run in B.

        A value is an edge from being made to being there for W, and is held if the cut takes it. What only B can make hangs
        on the source, what W cannot do without leads to the sink; other edges are the prices of making a cheap value again
        in W, or earlier in B.
        """
        made, there, edges = (lambda v: (v, 0)), (lambda v: (v, 1)), []
        ready: dict[Value, None] = {}  # what B has or could have, in order
        movable, moved = [], set()

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
            again = self.refine and step.name in CHEAP
            for v in step.results:
                value(v, step.operands if again else None)
                if again:
                    edges.append(("B", made(v), RUN * self._bytes(v)))
        inputs = set(self.program.inputs)
        at_hand = lambda o: isinstance(o, Known) or o in ready or (o in inputs and self.have[o] is Have.FREE)
        for step in second:
            if self.refine and (step.name in CHEAP or is_vector_product(step)) and all(map(at_hand, step.operands)):
                for v in step.results:
                    value(v, step.operands)
                    edges.append((made(v), "W", RUN * self._bytes(v)))
                    # Moved with all that it is made of: nothing of W's runs twice.
                    edges.extend((made(v), made(o), math.inf) for o in step.operands if o in moved)
                moved.update(step.results)
                movable.append(step)
            else:
                edges.extend((there(o), "W", math.inf) for o in step.operands if o in ready)
        edges.extend((there(o), "W", math.inf) for o in late_outputs if o in ready)
        late = sink_side(edges, "B", "W")
        return [v for v in ready if there(v) in late and made(v) not in late], movable


def is_vector_product(step: Step) -> bool:
    """Whether one factor is a vector: the product costs as much as a sum over the other one."""
    if step.name != "dot_general":
        return False
    contracted, batch = step.eqn.params["dimension_numbers"]
    return any(len(v.aval.shape) == len(c) + len(b) for v, c, b in zip(step.eqn.invars, contracted, batch, strict=True))


# ---- loops and branches --------------------------------------------------------------------------------------------------


def divide_loop(step: Step, mask, rest, sources, refine, times) -> Pieces:
    """Two loops in the same direction; what crosses is stacked by the first and scanned by the second."""
    (consts, carries), body = scan_arity(step.eqn), step.inner[0]
    how = {name: step.eqn.params[name] for name in ("length", "reverse", "unroll")}
    times, stack = times * how["length"], lambda t: t._replace(shape=(how["length"], *t.shape))
    early = with_carries(step, mask)
    late = with_carries(step, [m or r for m, r in zip(mask, rest, strict=True)])
    late = [a and not e for a, e in zip(late, early, strict=True)]

    constants, states = body.inputs[:consts], body.inputs[consts : consts + carries]
    of_states = [
        Source(Have.MADE if e else Have.LATE, v.type.bytes * times) for v, e in zip(states, early, strict=False)
    ]
    cut = Cut(body, early, late, [*sources[:consts], *of_states, *sources[consts + carries :]], refine, times)
    outer = dict(zip(body.inputs, step.operands, strict=True))
    # A stacked output of W that is nothing but what crosses needs no loop.
    outputs = {v: i for i, v in enumerate(body.outputs) if i >= carries and late[i]}
    crossing = {v: step.results[outputs[v]] if v in outputs else Value(stack(v.type)) for v in cut.crossing}
    late = [w and r not in crossing.values() for w, r in zip(late, step.results, strict=True)]

    def loop(half: Half, made: list[bool], entering: dict, leaving: dict) -> Step:
        """made: which outputs; entering, leaving: what crosses, inside: outside."""
        carried = [v for v, m in zip(states, made, strict=False) if m]
        fixed = [v for v in constants if v in half.reads]
        scanned = [v for v in body.inputs[consts + carries :] if v in half.reads]
        n, m = len(fixed), len(fixed) + len(carried)
        one = Program([*fixed, *carried, *scanned, *entering], half.steps, [*chosen(body.outputs, made), *leaving])

        def run(*values):
            def iteration(carry, xs):
                made = one(*values[:n], *carry, *xs)
                return made[: m - n], made[m - n :]

            carry, ys = lax.scan(iteration, list(values[n:m]), list(values[m:]), **how)
            return [*carry, *ys]

        operands = [outer[v] for v in (*fixed, *carried, *scanned)]
        return Step("scan", run, [*operands, *entering.values()], [*chosen(step.results, made), *leaving.values()])

    second = loop(cut.after, late, crossing, {}) if any(late) else None
    return loop(cut.before, early, {}, crossing), second


def divide_branches(step: Step, mask, rest, sources, refine, times) -> Pieces:
    """Two branchings on one index; branches share room for what crosses, and fill what they lack with zeros."""
    cuts = [Cut(branch, mask, rest, sources[1:], refine, times) for branch in step.inner]
    room: list[Value] = []
    crossing = [places(cut.crossing, room) for cut in cuts]

    def branching(halves: list[Half], made: list[bool], entering: list[Value], leaving: list[Value]) -> Step:
        reads = [
            i
            for i in range(len(step.operands) - 1)
            if any(branch.inputs[i] in half.reads for branch, half in zip(step.inner, halves, strict=True))
        ]
        branches = []
        for branch, half, at in zip(step.inner, halves, crossing, strict=True):
            lacking = {place: zeros(place.type) for place in leaving if place not in at}
            out = [at[place] if place in at else lacking[place].results[0] for place in leaving]
            inputs = [*(branch.inputs[i] for i in reads), *(at.get(place, place) for place in entering)]
            program = Program(inputs, [*half.steps, *lacking.values()], [*chosen(branch.outputs, made), *out])
            branches.append(functools.partial(Program.__call__, program))

        run = lambda index, *values: lax.switch(index, branches, *values)
        operands = [step.operands[0], *(step.operands[i + 1] for i in reads)]
        return Step("cond", run, operands + entering, chosen(step.results, made) + leaving)

    second = branching([cut.after for cut in cuts], rest, room, []) if any(rest) else None
    return branching([cut.before for cut in cuts], mask, [], room), second


def places(values: list[Value], room: list[Value]) -> dict[Value, Value]:
    """{place: value}, a place of its type for each; room grows where it lacks one."""
    vacant, taken = list(room), {}
    for v in values:
        place = next((place for place in vacant if place.type == v.type), None)
        if place is None:
            room.append(place := Value(v.type))
        else:
            vacant.remove(place)
        taken[place] = v
    return taken


def zeros(of: Type) -> Step:
    return Step("zeros", lambda: [vary(jnp.zeros(of.shape, of.dtype), of.varying)], [], [Value(of)])


def chosen(items: Iterable, mask: Iterable[bool]) -> list:
    return list(itertools.compress(items, mask))
