"""Chooses a policy for each named activation: the least time lost, within a budget of bytes on every rank at every tick.

A small integer program over a schedule's table, for HiGHS: a binary for each name and policy. All chunks and microbatches
of a name are treated alike; where they are at each tick is what the executor's stores do (residency.py). Costs add up:
recomputing two names costs the sum, and a transfer costs its whole time, though an executor may hide some of it.
K3 report, unified activation manager and balancing over pipeline ranks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64
from scipy.optimize import Bounds, LinearConstraint, milp

from k3jax.activations.plan import ActivationPlan
from k3jax.activations.policy import ALWAYS_KEPT, POLICIES, Policy
from k3jax.activations.records import Leaf, span_of
from k3jax.activations.residency import reserved, resident, transfers
from k3jax.parallel.schedules import FORWARD, Schedule


@dataclass(frozen=True)
class Activation:
    """What is known of a name: bytes and seconds of one chunk and microbatch, on one rank.

    A name that several spans store is given once for each, with its share of bytes and seconds.
    """

    name: str
    bytes: int
    quantized_bytes: int | None = None
    """None: it cannot be quantized."""
    recompute: float | int | None = None
    """Seconds to compute it again; None: it cannot be."""
    codec: float | int = 0.0
    """Seconds to encode and decode it."""
    producer: int = FORWARD
    """Kind of operation that makes it."""
    consumer: int | None = None
    """Kind of operation that reads it last; None: the last kind of the schedule."""

    def __post_init__(self):
        for number in (self.bytes, self.quantized_bytes or 0, self.recompute or 0, self.codec):
            if not 0 <= number < float("inf"):
                raise ValueError(f"{self.name}: {number}: bytes and seconds must be finite and at least 0")

    def leaf(self, policy: Policy) -> Leaf:
        """What is stored of it under a policy."""
        size = self.quantized_bytes if policy.quantized and self.quantized_bytes is not None else self.bytes
        stored = 0 if policy.storage == "recompute" else size
        return Leaf(self.name, stored, policy, self.producer, self.consumer)


class Column(NamedTuple):
    """A binary of the program."""

    name: str
    policy: Policy
    seconds: float
    """In the whole step, summed over ranks."""


Chosen = Bool[np.ndarray, " columns"]


class Planner:
    """Plans for one schedule and its activations.

    Bandwidths in bytes a second, of one rank; what is offloaded crosses twice; None: there is no such storage.
    reserve: bytes are counted as the executor reserves them, slots for the whole step and on every rank alike; else as
    they are alive, which is what one pool for all would hold.
    Raises ValueError for no names, a name twice for one span, and bandwidths not above 0.
    """

    def __init__(
        self,
        schedule: Schedule,
        activations: Sequence[Activation],
        *,
        host_bandwidth: float | int | None = None,
        remote_bandwidth: float | int | None = None,
        reserve: bool = True,
    ):
        self.schedule, self.activations, self.reserve = schedule, tuple(activations), reserve
        given = [(a.name, *self._span(a)) for a in activations]
        if not given or len(set(given)) < len(given):
            names = ", ".join(a.name for a in activations)
            raise ValueError(f"activations {names}: needs one or more, each name once: sum up what it tags")
        for what, bandwidth in (("host", host_bandwidth), ("remote", remote_bandwidth)):
            if bandwidth is not None and not bandwidth > 0:
                raise ValueError(f"{what}_bandwidth={bandwidth}: must be above 0, or None for no such storage")
        self.bandwidth = {"local-offload": host_bandwidth, "remote-offload": remote_bandwidth}
        self.parts: dict[str, list[Activation]] = {}
        for a in activations:
            self.parts.setdefault(a.name, []).append(a)
        self.columns = [
            Column(name, policy, sum(self._seconds(a, policy) for a in parts))
            for name, parts in self.parts.items()
            for policy in POLICIES
            if self._allowed(parts, policy)
        ]
        self.seconds = np.array([column.seconds for column in self.columns])
        every_place = np.stack([sum(self._held(a, c.policy) for a in self.parts[c.name]) for c in self.columns], axis=1)
        self.bytes = every_place[fullest(every_place)]
        """What each column puts onto a rank, at those places (moments of ranks) that can be the fullest."""
        self.freed = self._freed(every_place)
        self.one_each = np.array([[c.name == name for c in self.columns] for name in self.parts], float)

    def _span(self, a: Activation) -> tuple[int, int]:
        return span_of(self.schedule, Leaf(a.name, a.bytes, Policy(), a.producer, a.consumer))

    def _allowed(self, parts: Sequence[Activation], policy: Policy) -> bool:
        exact = parts[0].name in ALWAYS_KEPT
        if policy.storage == "recompute":
            return not exact and all(a.recompute is not None for a in parts)
        if policy.quantized and (exact or all(a.quantized_bytes is None for a in parts)):
            return False
        if policy.storage == "keep":
            return True
        moved = any(transfers(self.schedule, *self._span(a), policy.storage) for a in parts)
        return moved and self.bandwidth[policy.storage] is not None

    def _seconds(self, a: Activation, policy: Policy) -> float:
        """What a policy costs in a step, on all ranks."""
        pieces = self.schedule.chunks * self.schedule.microbatches
        if policy.storage == "recompute":
            return (a.recompute or 0.0) * pieces
        seconds = a.codec * pieces if policy.quantized and a.quantized_bytes is not None else 0.0
        if bandwidth := self.bandwidth.get(policy.storage):
            moved = a.leaf(policy).bytes * transfers(self.schedule, *self._span(a), policy.storage)
            seconds += moved / bandwidth
        return seconds

    def _held(self, a: Activation, policy: Policy) -> Int64[np.ndarray, " places"]:
        """Bytes on the device: at each moment of each rank, or as reserved, which is the same for all."""
        where = (self.schedule, *self._span(a), policy.storage)
        counts = np.array([reserved(*where).device]) if self.reserve else resident(*where).device.reshape(-1)
        return a.leaf(policy).bytes * counts

    def _freed(self, held: Int64[np.ndarray, "places columns"]) -> np.ndarray:
        """Bytes that each column frees against keeping its name, summed over places."""
        total = held.sum(axis=0).astype(float)
        kept = {c.name: total[i] for i, c in enumerate(self.columns) if c.policy == Policy()}
        return np.array([kept[c.name] for c in self.columns]) - total

    def plan(self, budget: int, *, gap: float | int = 1e-4, time_limit: float | int = 8.0) -> ActivationPlan:
        """The cheapest plan with at most `budget` bytes of activations on each rank, its own and those it holds for others.

        gap: the share of its cost that a plan may lie above the optimum. time_limit: seconds for the solver, after which
        its best plan counts. Never costs more than the plan of `greedy`.
        Raises ValueError if no plan fits, with the least budget that would do.
        """
        greedy, chosen = self.greedy(budget), self._cheapest(budget, gap, time_limit)
        found = [plan for plan in (greedy, None if chosen is None else self._plan(chosen, budget)) if plan is not None]
        if not found:
            smallest, proven = self._smallest(time_limit)
            found = [self._plan(smallest, budget)]
            if (needed := int((self.bytes @ smallest).max(initial=0))) > budget:
                least = f"the least budget{'' if proven else ' found'} that works is {needed}"
                raise ValueError(f"activations do not fit into {budget} bytes a rank: {least}")
        return min(found, key=lambda plan: plan.cost)

    def greedy(self, budget: int) -> ActivationPlan | None:
        """Each name by itself takes its policy of most benefit = price x bytes freed - seconds, bytes summed over places.

        Of all prices the lowest whose plan fits; None if none does.
        """
        options = [[i for i, c in enumerate(self.columns) if c.name == name] for name in self.parts]
        freed = self.freed
        pairs = ((a, b) for group in options for a, b in itertools.permutations(group, 2) if freed[a] < freed[b])
        prices = {max((self.seconds[b] - self.seconds[a]) / (freed[b] - freed[a]), 0.0) for a, b in pairs}
        for price in sorted({0.0} | prices):
            benefit = price * (1 + 1e-9) * freed - self.seconds  # just above the price at which two policies are equal
            chosen = np.zeros(len(self.columns), bool)
            chosen[[max(group, key=lambda i: (benefit[i], freed[i])) for group in options]] = True
            if (self.bytes @ chosen).max(initial=0) <= budget:
                return self._plan(chosen, budget)
        return None

    def _plan(self, chosen: Chosen, budget: int) -> ActivationPlan:
        """The columns as leaves; peaks are those of the ledger."""
        policies = {c.name: c.policy for c, is_chosen in zip(self.columns, chosen, strict=True) if is_chosen}
        leaves = tuple(a.leaf(policies[a.name]) for a in self.activations)
        seconds = tuple(float(self._seconds(a, policies[a.name])) for a in self.activations)
        peak, slots = bytes_held(self.schedule, leaves)
        return ActivationPlan(budget, peak, slots, leaves, seconds)

    def _cheapest(self, budget: int, gap: float | int, time_limit: float | int) -> Chosen | None:
        """The columns of least cost within the budget, as far as the solver came; None if there are none."""
        unit = max(budget, 1)
        rules = [LinearConstraint(self.one_each, 1, 1), LinearConstraint(self.bytes / unit, -np.inf, budget / unit)]
        cost = self.seconds * 1e3 / max(self.seconds.max(), 1e-300)  # the solver stops within 1e-6 of the optimum
        deadline = time.monotonic() + time_limit
        while (left := deadline - time.monotonic()) > 0:
            options = {"time_limit": left, "mip_rel_gap": gap}
            found = milp(cost, integrality=np.ones_like(cost), bounds=Bounds(0, 1), constraints=rules, options=options)
            if found.x is None:
                return None
            chosen = found.x > 0.5
            held = self.bytes @ chosen
            if held.max() <= budget:
                return chosen
            # Its tolerance let some bytes too many pass: of what fills this row, something must change.
            fills = (self.bytes[held.argmax()] > 0) & chosen
            rules.append(LinearConstraint(fills.astype(float), -np.inf, fills.sum() - 1))
        return None

    def _smallest(self, time_limit: float | int) -> tuple[Chosen, bool]:
        """The columns of the least peak, one more variable to be minimised, and whether the solver came to its end."""
        unit = max(np.maximum(self.bytes, 0).sum(axis=1).max() / 1e6, 1)  # the solver stops within 1e-6 of the optimum
        peak = np.append(np.zeros(len(self.columns)), 1)
        rules = [
            LinearConstraint(np.pad(self.one_each, ((0, 0), (0, 1))), 1, 1),
            LinearConstraint(np.pad(self.bytes / unit, ((0, 0), (0, 1)), constant_values=-1), -np.inf, 0),
        ]
        most: Any = np.where(peak == 1, np.inf, 1)
        options = {"time_limit": time_limit, "mip_rel_gap": 0}
        found = milp(peak, integrality=1 - peak, bounds=Bounds(0, most), constraints=rules, options=options)
        if found.x is None:
            raise ValueError(f"no plan was found within time_limit={time_limit} seconds: raise it")
        return found.x[:-1] > 0.5, found.status == 0


def bytes_held(schedule: Schedule, leaves: Sequence[Leaf]) -> tuple[tuple[int, ...], int]:
    """The most bytes alive on each rank's device, and the bytes that the executor's stores reserve on every one."""
    at = [(leaf.bytes, (schedule, *span_of(schedule, leaf), leaf.policy.storage)) for leaf in leaves]
    alive = sum((size * resident(*where).device for size, where in at), np.zeros((1, schedule.stages), np.int64))
    return tuple(alive.max(axis=0).tolist()), sum(size * reserved(*where).device for size, where in at)


def fullest(held: Int64[np.ndarray, "places things"]) -> list[int]:
    """Places at which a sum of these, with any weights of 0 or more, can be largest: no other has as many of all."""
    rows, first = np.unique(held, axis=0, return_index=True)
    exceeded = [(rows[i + 1 :] >= row).all(axis=1).any() for i, row in enumerate(rows)]  # unique rows are sorted
    return first[np.logical_not(exceeded)].tolist()
