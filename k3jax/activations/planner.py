"""Chooses a policy for each named activation: the least time lost, within a budget of bytes on every rank at every tick.

A small integer program over a schedule's table, for HiGHS: a binary for each name and policy, and one for each rank that
may park a name's values in its holder's memory. All chunks and microbatches of a name are treated alike. Costs add up:
recomputing two names costs the sum, and a transfer costs its whole time, though an executor may hide some of it.
K3 report, unified activation manager and balancing over pipeline ranks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64
from scipy.optimize import Bounds, LinearConstraint, milp

from k3jax.activations.plan import ActivationPlan
from k3jax.activations.policy import ALWAYS_KEPT, KEEP, RECOMPUTE, Policy
from k3jax.activations.records import Leaf, mirrored, records, timeline
from k3jax.parallel.schedules import FORWARD, Schedule

OFFLOAD = "local-offload"


@dataclass(frozen=True)
class Activation:
    """What is known of a name: bytes and seconds of one chunk and microbatch, on one rank."""

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


class Column(NamedTuple):
    """A binary of the program: a name under a policy, or what one rank parks of it, which adds to the former."""

    name: int
    policy: Policy
    parks: int | None
    stored: int
    """Bytes of one chunk and microbatch, wherever they are."""
    seconds: float
    """In the whole step, summed over ranks."""

    @property
    def device(self) -> int:
        """Stored bytes that lie in the memory of a rank."""
        return 0 if self.policy.storage == OFFLOAD else self.stored


Chosen = Bool[np.ndarray, " columns"]


class Planner:
    """Plans for one schedule and its activations.

    Bandwidths in bytes a second; what is offloaded crosses twice; None: there is no such storage. holders: the rank that
    takes what each rank parks (itself: it parks nothing); None: `mirrored`.
    Raises ValueError for no names or names that repeat, bandwidths not above 0, and holders that are not a rank for each stage.
    """

    def __init__(
        self,
        schedule: Schedule,
        activations: Sequence[Activation],
        *,
        host_bandwidth: float | int | None = None,
        remote_bandwidth: float | int | None = None,
        holders: tuple[int, ...] | None = None,
    ):
        self.schedule, self.activations = schedule, tuple(activations)
        self.holders = mirrored(schedule.stages) if holders is None else holders
        names = [a.name for a in activations]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"activations {', '.join(names)}: needs one or more, each name once: sum up what it tags")
        for what, bandwidth in (("host", host_bandwidth), ("remote", remote_bandwidth)):
            if bandwidth is not None and not bandwidth > 0:
                raise ValueError(f"{what}_bandwidth={bandwidth}: must be above 0, or None for no such storage")
        self.columns = list(self._columns(host_bandwidth, remote_bandwidth))
        self.seconds = np.array([column.seconds for column in self.columns])
        self.live = np.zeros((len(names), schedule.num_ticks, schedule.stages), np.int64)
        for index, a in enumerate(self.activations):
            unit = [Leaf(a.name, 1, KEEP, a.producer, a.consumer, self.holders)]
            self.live[index] = timeline(records(schedule, unit), schedule.num_ticks, schedule.stages).own
        self.bytes, self.rules = self._bytes(), self._rules()

    def _columns(self, host_bandwidth: float | int | None, remote_bandwidth: float | int | None) -> Iterator[Column]:
        per_rank = self.schedule.virtual * self.schedule.microbatches
        step = per_rank * self.schedule.stages
        for index, a in enumerate(self.activations):
            exact = a.name in ALWAYS_KEPT
            if a.recompute is not None and not exact:
                yield Column(index, RECOMPUTE, None, 0, a.recompute * step)
            for quantized, size in enumerate((a.bytes, None if exact else a.quantized_bytes)):
                if size is None:
                    continue
                codec = a.codec * quantized
                yield Column(index, Policy("keep", bool(quantized)), None, size, codec * step)
                if host_bandwidth is not None:
                    seconds = (codec + 2 * size / host_bandwidth) * step
                    yield Column(index, Policy(OFFLOAD, bool(quantized)), None, size, seconds)
                if remote_bandwidth is not None:
                    for rank in (rank for rank, holder in enumerate(self.holders) if holder != rank):
                        seconds = 2 * size / remote_bandwidth * per_rank
                        yield Column(index, Policy("keep", bool(quantized)), rank, size, seconds)

    def _bytes(self) -> Int64[np.ndarray, "places columns"]:
        """What each column puts onto a rank, at the ticks of each rank that can be its fullest."""
        rows = []
        for rank in range(self.schedule.stages):
            senders = [s for s, holder in enumerate(self.holders) if holder == rank != s]
            for tick in fullest(
                self.live[:, :, [rank, *senders]].transpose(1, 0, 2).reshape(self.schedule.num_ticks, -1)
            ):
                row = np.zeros(len(self.columns), np.int64)
                for i, column in enumerate(self.columns):
                    live = self.live[column.name, tick]
                    if column.parks is None:
                        row[i] = column.device * live[rank]
                    elif column.parks in (rank, *senders):
                        row[i] = column.device * live[column.parks] * (-1 if column.parks == rank else 1)
                rows.append(row)
        return np.array(rows)

    def plan(self, budget: int, *, gap: float | int = 1e-4, time_limit: float | int = 8.0) -> ActivationPlan:
        """The cheapest plan with at most `budget` bytes of activations on each rank, own and parked ones.

        gap: the share of its cost that a plan may lie above the optimum. time_limit: seconds for the solver, after which
        its best plan counts. Never costs more than the plan of `greedy`.
        Raises ValueError if no plan fits, with the least budget that would do.
        """
        greedy, chosen = self.greedy(budget), self._cheapest(budget, gap, time_limit)
        found = [plan for plan in (greedy, None if chosen is None else self._plan(chosen, budget)) if plan is not None]
        if not found:
            smallest, proven = self._smallest(time_limit)
            found = [self._plan(smallest, budget)]
            if (peak := max(found[0].peak)) > budget:
                least = f"the least budget{'' if proven else ' found'} that works is {peak}"
                raise ValueError(f"activations do not fit into {budget} bytes a rank: {least}")
        return min(found, key=lambda plan: plan.cost)

    def greedy(self, budget: int) -> ActivationPlan | None:
        """Each name by itself takes its policy of most benefit = price x bytes freed x wait - seconds.

        Wait: the ticks in which they are held. Of all prices the lowest whose plan fits; None if none does. It parks
        nothing with other ranks, which frees no bytes in the sum.
        """
        options: list[list[int]] = [[] for _ in self.activations]
        for i, column in enumerate(self.columns):
            if column.parks is None:
                options[column.name].append(i)
        waits = self.live.sum(axis=(1, 2))
        freed = np.array([(self.activations[c.name].bytes - c.device) * float(waits[c.name]) for c in self.columns])
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
        leaves, seconds = [], []
        for index, a in enumerate(self.activations):
            columns = [c for c, is_chosen in zip(self.columns, chosen, strict=True) if is_chosen and c.name == index]
            base = next(c for c in columns if c.parks is None)
            parks = {c.parks for c in columns} - {None}
            policy = Policy("remote-offload", base.policy.quantized) if parks else base.policy
            holders = tuple(h if rank in parks else rank for rank, h in enumerate(self.holders)) if parks else None
            leaves.append(Leaf(a.name, base.stored, policy, a.producer, a.consumer, holders))
            seconds.append(float(sum(c.seconds for c in columns)))
        found = timeline(records(self.schedule, leaves), self.schedule.num_ticks, self.schedule.stages)
        return ActivationPlan(budget, tuple(found.peak.tolist()), tuple(leaves), tuple(seconds))

    def _rules(self) -> tuple[Any, Any, Any]:
        """rows, least, most: one policy a name; a rank parks only what its name's policy keeps on devices."""
        base = {(c.name, c.policy): i for i, c in enumerate(self.columns) if c.parks is None}
        rows = np.zeros((len(self.activations) + len(self.columns) - len(base), len(self.columns)))
        for (name, _), i in base.items():
            rows[name, i] = 1
        parking = (i for i, c in enumerate(self.columns) if c.parks is not None)
        for row, i in zip(rows[len(self.activations) :], parking, strict=True):
            row[i], row[base[self.columns[i].name, self.columns[i].policy]] = 1, -1
        is_name = np.arange(len(rows)) < len(self.activations)
        return rows, np.where(is_name, 1, -np.inf), np.where(is_name, 1, 0)

    def _cheapest(self, budget: int, gap: float | int, time_limit: float | int) -> Chosen | None:
        """The columns of least cost within the budget, as far as the solver came; None if there are none."""
        unit = max(budget, 1)
        rules = [LinearConstraint(*self.rules), LinearConstraint(self.bytes / unit, -np.inf, budget / unit)]
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
            full = self.bytes[held.argmax()]
            fills, relieves = (full > 0) & chosen, (full < 0) & ~chosen
            rules.append(LinearConstraint(fills.astype(float) - relieves, -np.inf, fills.sum() - 1))
        return None

    def _smallest(self, time_limit: float | int) -> tuple[Chosen, bool]:
        """The columns of the least peak, one more variable to be minimised, and whether the solver came to its end."""
        rows, *sides = self.rules
        unit = max(np.maximum(self.bytes, 0).sum(axis=1).max() / 1e6, 1)  # the solver stops within 1e-6 of the optimum
        peak = np.append(np.zeros(len(self.columns)), 1)
        rules = [
            LinearConstraint(np.pad(rows, ((0, 0), (0, 1))), *sides),
            LinearConstraint(np.pad(self.bytes / unit, ((0, 0), (0, 1)), constant_values=-1), -np.inf, 0),
        ]
        most: Any = np.where(peak == 1, np.inf, 1)
        options = {"time_limit": time_limit, "mip_rel_gap": 0}
        found = milp(peak, integrality=1 - peak, bounds=Bounds(0, most), constraints=rules, options=options)
        if found.x is None:
            raise ValueError(f"no plan was found within time_limit={time_limit} seconds: raise it")
        return found.x[:-1] > 0.5, found.status == 0


def fullest(held: Int64[np.ndarray, "ticks things"]) -> list[int]:
    """Ticks at which a sum of these counts, with any weights of 0 or more, can be largest: no other tick has as many of all."""
    ticks = np.unique(held, axis=0, return_index=True)[1].tolist()
    return [t for t in ticks if not any(t != other and (held[other] >= held[t]).all() for other in ticks)]
