"""Named schedules: each is a recipe of a few choices, from which one greedy simulation makes the table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from k3jax.parallel.schedules.kinds import BACKWARD, FORWARD, IDLE, WEIGHT
from k3jax.parallel.schedules.placement import STAY, Placement, route, stage_of
from k3jax.parallel.schedules.slots import Life, assign
from k3jax.parallel.schedules.table import Schedule

Operation = tuple[int, ...]
"""(kind, chunk, microbatch)."""


NO_LIMIT = sys.maxsize


@dataclass(frozen=True)
class Recipe:
    """What makes a schedule: in each row every stage takes the first operation of its queues that is ready."""

    limit: Callable[[int, int, int], int]
    """(stages, virtual, stage) -> forwards that a stage may be ahead of its last kind: what it holds at once."""
    turns: tuple[tuple[int, ...], ...] = ((FORWARD,), (BACKWARD,))
    """What rows take in turn: rows of forwards and rows of backwards, because a row lasts as long as its longest
    operation; or in each row what a stage has ready of several kinds, the preferred one first."""
    kinds: tuple[int, ...] = (FORWARD, BACKWARD)
    placement: Placement = "ring"
    flush: bool = False
    """Whether backwards wait until all forwards have run."""
    virtual: int | None = None
    """The only number of virtual stages it is made for."""


def _rows_of_one_kind(p: int, v: int, s: int) -> int:
    """Two microbatches a stage fill the way to the last stage and back, a round those of each further virtual stage."""
    return 2 * (p - s) - 1 + (v - 1) * p


SPLIT = (FORWARD, BACKWARD, WEIGHT)
RECIPES = {
    "gpipe": Recipe(lambda p, v, s: NO_LIMIT, flush=True),
    "plain_1f1b": Recipe(lambda p, v, s: p - s, ((BACKWARD, FORWARD),), virtual=1),
    "1f1b": Recipe(_rows_of_one_kind, virtual=1),
    "interleaved_1f1b": Recipe(_rows_of_one_kind),
    "zb1p": Recipe(lambda p, v, s: 2 * p - 1, ((BACKWARD, FORWARD, WEIGHT),), SPLIT, virtual=1),
    "zbv": Recipe(lambda p, v, s: 2 * p, (SPLIT,), SPLIT, "zigzag", virtual=2),
}
NAMES = tuple(RECIPES)
"""Schedules that train."""


def build(name: str, *, stages: int, virtual: int = 1, microbatches: int) -> Schedule:
    """The schedule of that name for `stages` pipe ranks with `virtual` chunks each; any number of microbatches works.

    gpipe (arXiv:1811.06965); 1f1b and interleaved_1f1b (arXiv:2104.04473; K3 report, pre-training) in rows of one kind;
    plain_1f1b, which holds the fewest activations and costs more time in lock-step; zb1p and zbv (arXiv:2401.10241,
    arXiv:2405.15362), whose weight gradients fill the bubble. Raises ValueError for an unknown name, a count below 1, and
    a number of virtual stages that the schedule is not made for.
    """
    if name not in RECIPES:
        raise ValueError(f"unknown schedule {name!r}: choose one of {', '.join(NAMES)}")
    recipe = RECIPES[name]
    got = f"{name} got microbatches={microbatches}, stages (pipe)={stages}, virtual={virtual}"
    if min(stages, virtual, microbatches) < 1:
        raise ValueError(f"{got}: each must be at least 1")
    if recipe.virtual not in (None, virtual):
        other = "interleaved_1f1b takes any number of chunks a stage"
        raise ValueError(f"{got}: it needs virtual={recipe.virtual}; {other}")
    return _schedule(name, recipe, stages, virtual, microbatches)


def forward_only(schedule: Schedule) -> Schedule:
    """A table without backwards for a model that lies as the schedule's: for evaluation."""
    recipe = Recipe(lambda p, v, s: NO_LIMIT, ((FORWARD,),), (FORWARD,), schedule.placement)
    return _schedule("forward", recipe, schedule.stages, schedule.virtual, schedule.microbatches)


def _schedule(name: str, recipe: Recipe, stages: int, virtual: int, microbatches: int) -> Schedule:
    rows = _rows(recipe, stages, virtual, microbatches)
    table = np.full((len(rows), stages, 4), -1, np.int32)
    table[:, :, 0] = IDLE
    for tick, row in enumerate(rows):
        for stage, operation in enumerate(row):
            if operation:
                table[tick, stage, :3] = operation
    mail, arrivals = np.full(table.shape[:2], -1, np.int32), np.full((*table.shape[:2], 3), -1, np.int32)
    schedule = Schedule(name, recipe.placement, recipe.kinds, stages, virtual, microbatches, table, mail, arrivals)
    _address(schedule)
    for array in (table, mail, arrivals):
        array.flags.writeable = False
    return schedule


# ---- the order of work -----------------------------------------------------------------------------------------------

Row = list[Operation | None]


def _rows(recipe: Recipe, stages: int, virtual: int, microbatches: int) -> list[Row]:
    """Each stage runs the first ready operation of its queues; only the next row may build on what a row finished."""
    work = [_Stage(recipe, s, stages, virtual, microbatches) for s in range(stages)]
    done: set[Operation] = set()
    rows: list[Row] = []
    while any(stage.left(recipe.kinds[-1]) for stage in work):
        for turn in recipe.turns:
            if recipe.flush and turn == (BACKWARD,) and any(stage.left(FORWARD) for stage in work):
                continue
            row = [stage.take(turn, done) for stage in work]
            done.update(operation for operation in row if operation)
            if any(row):
                rows.append(row)
    return rows


class _Stage:
    """A stage's work that is left, and how far its forwards are ahead.

    On a ring, work goes in rounds of at most `stages` microbatches: a round passes one virtual stage before it takes the
    next. Nothing can wait in a circle, whatever the counts: all stages share one order, and its k-th backward needs no
    forward beyond position k + (virtual - 1) * stages, so the limit makes a forward wait only for what needs earlier
    forwards. On a zigzag the chunk that is nearest to the end goes first, in backward the one nearest to the beginning:
    what returns is never held up by what sets out.
    """

    def __init__(self, recipe: Recipe, s: int, stages: int, virtual: int, microbatches: int):
        self.last = stages * virtual - 1
        self.limit = recipe.limit(stages, virtual, s)
        self.kinds, self.ahead = recipe.kinds, 0
        chunks = [c for c in range(stages * virtual) if stage_of(c, stages, recipe.placement) == s]
        self.queues: dict[int, list[list[tuple[int, int]]]] = {}
        for kind in recipe.kinds:
            order = chunks if kind == FORWARD else chunks[::-1]
            if recipe.placement == "ring":
                starts = range(0, microbatches, stages)
                of_round = lambda a: range(a, min(a + stages, microbatches))
                self.queues[kind] = [[(c, m) for a in starts for c in order for m in of_round(a)][::-1]]
            else:
                self.queues[kind] = [[(c, m) for m in reversed(range(microbatches))] for c in order[::-1]]

    def left(self, kind: int) -> bool:
        return any(self.queues[kind])

    def take(self, kinds: tuple[int, ...], done: set[Operation]) -> Operation | None:
        """The next operation of the first of these kinds that has one ready."""
        for kind in kinds:
            if kind == FORWARD and self.ahead >= self.limit:
                continue
            for queue in self.queues[kind]:
                if queue and self._ready(kind, *queue[-1], done):
                    self.ahead += (kind == FORWARD) - (kind == self.kinds[-1])
                    return (kind, *queue.pop())
        return None

    def _ready(self, kind: int, chunk: int, m: int, done: set[Operation]) -> bool:
        if kind == FORWARD:
            return chunk == 0 or (FORWARD, chunk - 1, m) in done
        if kind == BACKWARD:
            return (FORWARD, chunk, m) in done and (chunk == self.last or (BACKWARD, chunk + 1, m) in done)
        return (BACKWARD, chunk, m) in done


# ---- addresses -------------------------------------------------------------------------------------------------------


def _address(schedule: Schedule) -> None:
    """Fills in the slots of messages and of what forwards store, each the lowest that is free during its life."""
    last, ticks = schedule.chunks - 1, schedule.ticks
    stored = assign(schedule.lives(FORWARD, schedule.kinds[-1]), schedule.stages)
    sent: dict[Operation, tuple[int, int]] = {}  # reader of a message -> tick and route of its arrival
    for (kind, chunk, m), tick in ticks.items():
        if kind == FORWARD and chunk == last and BACKWARD in schedule.kinds:
            sent[BACKWARD, chunk, m] = tick + 1, STAY
        elif (onward := {FORWARD: chunk + 1, BACKWARD: chunk - 1}.get(kind, -1)) in range(last + 1):
            here, there = schedule.stage_of(chunk), schedule.stage_of(onward)
            sent[kind, onward, m] = tick + 1, route(here, there, schedule.stages)
    readers = [key for key in ticks if key[0] in (FORWARD, BACKWARD)]
    lives = [Life(schedule.stage_of(k[1]), sent[k][0] if k in sent else ticks[k], ticks[k], k) for k in readers]
    slots = assign(lives, schedule.stages)
    for key, tick in ticks.items():
        stage = schedule.stage_of(key[1])
        schedule.table[tick, stage, 3] = stored[key[1:]]
        if key in slots:
            schedule.mail[tick, stage] = slots[key]
        if key in sent:
            arrival, way = sent[key]
            schedule.arrivals[arrival, stage, way] = slots[key]
