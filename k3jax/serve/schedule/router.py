"""Which worker a request goes to: the one where it costs least, among those to which its session belongs.

A session belongs to its primary and its secondary on the ring, and to whoever holds a prefix that draws it. Cost, in tokens:
what the prompt lacks there, what is still to prefill there, and what the rows that decode there are worth. Equal costs go
to whom fewer tokens went so far. Each decision looks at these figures alone: no state of the fleet switches affinity off.

A prefix draws while fewer sessions have read it than there are workers. After that (a system prompt) it counts for nothing:
a copy for every worker costs no more than those sessions would have without a cache, and if it went on drawing, whoever
held it first would get all new sessions of a fleet that is not busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from k3jax.serve.schedule.promises import Promises
from k3jax.serve.schedule.ring import Ring


@dataclass(frozen=True)
class Prompt:
    """tokens: its length. names: chained hashes of its prefixes of unit, 2·unit, … tokens, as the caches name them."""

    session: str
    tokens: int
    names: Sequence[bytes]
    unit: int

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.unit < 1 or len(self.names) > self.tokens // self.unit:
            raise ValueError(f"{len(self.names)} names of {self.unit} tokens each in a prompt of {self.tokens} tokens.")

    @property
    def useful(self) -> Sequence[bytes]:
        """Names that can be hit: the last token is always computed, so the whole prompt's is none."""
        return self.names[: (self.tokens - 1) // self.unit]


@dataclass(frozen=True)
class Choice:
    """A worker for a prompt. Tokens. promised: that it should have. cost: by which it is chosen."""

    worker: str
    promised: int
    cost: int


@dataclass
class Load:
    """What a worker has to do. prefill: tokens. decoding: rows. routed: tokens that were ever sent there to prefill."""

    prefill: int = 0
    decoding: int = 0
    routed: int = 0
    healthy: bool = True


@dataclass
class _Flight:
    """A request on its way: where, for what prompt, what it is charged, what it was promised; prefilled or not."""

    worker: str
    prompt: Prompt
    charged: int
    promised: int
    decoding: bool = False


class Router:
    """Routes requests and keeps account of what each worker has to do.

    `row_tokens`: prefill tokens whose work equals what one decoding row costs those who come after it.
    """

    def __init__(self, workers: Sequence[str] = (), *, row_tokens: int = 256, points: int = 128):
        if row_tokens < 0 or points < 1:
            raise ValueError(f"row_tokens={row_tokens}, points={points}: they must be at least 0 and 1.")
        self.row_tokens = row_tokens
        self.ring = Ring(frozenset(), points)
        self.loads: dict[str, Load] = {}
        self.promises = Promises()
        self._flights: dict[str, _Flight] = {}
        for worker in workers:
            self.join(worker)

    def join(self, worker: str, number: int = 0) -> None:
        """A worker with an empty cache; `number`: of its last cache event. It is owed none of what others did before."""
        self.promises.join(worker, number)
        routed = min((load.routed for load in self.loads.values()), default=0)
        self.ring = self.ring.changed(add=[worker])
        self.loads[worker] = Load(routed=routed)

    def leave(self, worker: str) -> tuple[str, ...]:
        """A worker is gone for good; the requests it had must be routed again, and go to their secondaries."""
        self._known(worker)
        self.promises.leave(worker)
        self.ring = self.ring.changed(remove=[worker])
        del self.loads[worker]
        lost = tuple(request for request, flight in self._flights.items() if flight.worker == worker)
        for request in lost:
            del self._flights[request]
        return lost

    def health(self, worker: str, healthy: bool) -> None:
        """What a health check saw. It decides whether new requests go there, and touches no counter."""
        self._known(worker).healthy = healthy

    def choices(self, prompt: Prompt) -> tuple[Choice, ...]:
        """The workers to which the prompt may go, best first."""
        healthy = (worker for worker in self.ring.owners(prompt.session) if self.loads[worker].healthy)
        owners = list(islice(healthy, 2))
        if not owners:
            raise LookupError(f"None of {len(self.loads)} workers is healthy.")
        depths = self.promises.depths(prompt.useful)
        shared = self.promises.shared(prompt.useful, len(self.loads))
        drawing = {worker: depth * prompt.unit for worker, depth in depths.items() if depth > shared}
        others = sorted(worker for worker in drawing if worker not in owners and self.loads[worker].healthy)

        able = []
        for worker in owners + others:
            load, lacking = self.loads[worker], prompt.tokens - drawing.get(worker, 0)
            cost = lacking + load.prefill + self.row_tokens * load.decoding
            able.append(Choice(worker, depths.get(worker, 0) * prompt.unit, cost))
        # The sort is stable: where all else is equal, the ring's order decides.
        return tuple(sorted(able, key=lambda one: (one.cost, self.loads[one.worker].routed)))

    def route(self, request: str, prompt: Prompt) -> Choice:
        """Sends a request to the best worker and charges it there."""
        best = self.choices(prompt)[0]
        self.send(request, prompt, best.worker, best.promised)
        return best

    def send(self, request: str, prompt: Prompt, worker: str, promised: int = 0) -> None:
        """Charges a worker with a request, whoever chose it."""
        if request in self._flights:
            raise ValueError(f"Request {request!r} is on {self._flights[request].worker!r} already.")
        load, charged = self._known(worker), prompt.tokens - promised
        load.prefill += charged
        load.routed += charged
        self._flights[request] = _Flight(worker, prompt, charged, promised)

    def started(self, request: str, hit: int) -> None:
        """A request was admitted with a hit of so many tokens: the worker is charged with what is really to do.

        If that is less than was promised, the names beyond it are believed no longer.
        """
        flight = self._flight(request)
        if flight.decoding:
            raise ValueError(f"Request {request!r} has its first token already: its hit was told before.")
        load, prompt = self.loads[flight.worker], flight.prompt
        change = prompt.tokens - hit - flight.charged
        load.prefill += change
        load.routed += change
        flight.charged += change
        if hit < flight.promised:
            self.promises.failed(flight.worker, prompt.useful[hit // prompt.unit :])

    def prefilled(self, request: str) -> None:
        """The first token is out: the request is a row that decodes."""
        flight = self._flight(request)
        if not flight.decoding:
            load = self.loads[flight.worker]
            load.prefill -= flight.charged
            load.decoding += 1
            flight.charged, flight.decoding = 0, True
            self.promises.read(flight.prompt.names, flight.prompt.session, len(self.loads))

    def finished(self, request: str) -> None:
        """The request is done, refused by its worker, or aborted."""
        flight = self._flight(request)
        load = self.loads[flight.worker]
        load.prefill -= flight.charged
        load.decoding -= flight.decoding
        del self._flights[request]

    def _known(self, worker: str) -> Load:
        if worker not in self.loads:
            raise ValueError(f"Worker {worker!r} is unknown; there are {', '.join(sorted(self.loads)) or 'none'}.")
        return self.loads[worker]

    def _flight(self, request: str) -> _Flight:
        if request not in self._flights:
            raise ValueError(f"Request {request!r} is on no worker.")
        return self._flights[request]
