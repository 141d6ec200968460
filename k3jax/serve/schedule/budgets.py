"""Budgets of request classes, in uncached tokens: weighted deficit round robin, bounded queues, refusals with a reason.

What a request costs is what its prefill has to compute (`Lookup.cost`), measured once, when it is queued: a request whose
prefix is cached takes little of its class's budget, and later changes of the cache do not reorder the queue.
Shreedhar and Varghese 1995 (deficit round robin); K3 report, section 5.2 (separate budgets per class).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ClassBudget:
    """quantum: uncached tokens a round. largest: uncached tokens that one request may cost. depth: requests that wait."""

    quantum: int
    largest: int
    depth: int

    def __post_init__(self) -> None:
        if min(self.quantum, self.largest, self.depth) < 1:
            raise ValueError(f"{self}: each must be at least 1.")


@dataclass(frozen=True)
class Ticket:
    """A queued request. `cost`: uncached tokens when it was queued."""

    request: str
    cost: int


@dataclass(frozen=True)
class Refusal:
    """Why a request was not queued: "cost" is over what its class allows one request, or the "queue" is full.

    `cost` is what its prefill would take now: a cost that is too high falls when a nearer checkpoint exists.
    """

    reason: str
    cost: int
    allowed: int


@dataclass(frozen=True)
class Round:
    """Where the round robin stands: whose turn it is, whether that turn's quantum was given, what each class has left."""

    turn: int
    given: bool
    deficits: tuple[int, ...]


def serve(quanta: Sequence[int], heads: Sequence[int | None], at: Round) -> tuple[int, Round]:
    """Which class is served next, and where the round robin then stands. `heads`: cost of each class's first request.

    A class in turn gets its quantum and is served while its first request costs no more than it has. An empty class keeps
    nothing. Rounds in which nobody can be served are skipped in one go.
    """
    if all(head is None for head in heads):
        raise ValueError("No class has a request that waits.")
    has = [0 if head is None else deficit for head, deficit in zip(heads, at.deficits, strict=True)]
    turn, given = at.turn, at.given
    visits = 0
    while True:
        head = heads[turn]
        if head is not None:
            if not given:
                has[turn] += quanta[turn]
            if head <= has[turn]:
                has[turn] -= head
                return turn, Round(turn, True, tuple(has))
        turn, given, visits = (turn + 1) % len(heads), False, visits + 1
        if visits == len(heads):
            rounds = min(-(-(h - d) // q) for h, d, q in zip(heads, has, quanta, strict=True) if h is not None)
            has = [d + q * (rounds - 1) if h is not None else 0 for h, d, q in zip(heads, has, quanta, strict=True)]


class ClassQueues:
    """A bounded queue for each class; together they give one order of admission."""

    def __init__(self, budgets: Mapping[str, ClassBudget]):
        if not budgets:
            raise ValueError("At least one class must have a budget.")
        self.budgets = dict(budgets)
        self._names = tuple(self.budgets)
        self._quanta = tuple(budget.quantum for budget in self.budgets.values())
        self._queues: tuple[deque[Ticket], ...] = tuple(deque() for _ in self.budgets)
        self._at = Round(0, False, (0,) * len(self.budgets))

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def offer(self, request: str, kind: str, cost: int) -> Refusal | None:
        """Queues a request of a class that costs so many uncached tokens, or says why not."""
        if kind not in self.budgets:
            raise ValueError(f"Class {kind!r} has no budget; there are {', '.join(self._names)}.")
        if cost < 1:
            raise ValueError(f"cost={cost}: a prefill computes at least one token.")
        budget, queue = self.budgets[kind], self._queues[self._names.index(kind)]
        if cost > budget.largest:
            return Refusal("cost", cost, budget.largest)
        if len(queue) >= budget.depth:
            return Refusal("queue", cost, budget.depth)
        queue.append(Ticket(request, cost))
        return None

    def order(self) -> Iterator[Ticket]:
        """The requests in the order in which `take` hands them out, without taking them."""
        at, queues = self._at, [deque(queue) for queue in self._queues]
        while any(queues):
            at, ticket = self._next(at, queues)
            yield ticket

    def take(self) -> Ticket:
        """The next request; it leaves its queue."""
        self._at, ticket = self._next(self._at, self._queues)
        return ticket

    def drop(self, request: str) -> bool:
        """Takes an aborted request out of its queue, if it still waits."""
        for index, queue in enumerate(self._queues):
            for ticket in queue:
                if ticket.request == request:
                    queue.remove(ticket)
                    if not queue:
                        self._at = _emptied(self._at, index)
                    return True
        return False

    def _next(self, at: Round, queues: Sequence[deque[Ticket]]) -> tuple[Round, Ticket]:
        served, at = serve(self._quanta, [queue[0].cost if queue else None for queue in queues], at)
        ticket = queues[served].popleft()
        return (at if queues[served] else _emptied(at, served)), ticket


def _emptied(at: Round, index: int) -> Round:
    """A class that has nothing to do saves nothing for later."""
    return replace(at, deficits=tuple(0 if i == index else d for i, d in enumerate(at.deficits)))
