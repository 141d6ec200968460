"""A fleet in simulated time: a trace, a routing policy, workers with the real queues and batches; the figures that come out.

Deterministic: the same trace, fleet and seed give the same figures.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from k3jax.serve.schedule.batch import Limits
from k3jax.serve.schedule.budgets import ClassBudget
from k3jax.serve.schedule.router import Prompt, Router
from k3jax.serve.schedule.trace import Request, Trace
from k3jax.serve.schedule.worker import Job, Rates, Worker


@dataclass(frozen=True)
class Failure:
    """A worker is lost at `at` seconds with its cache, and comes back empty at `back`, if ever."""

    worker: str
    at: float
    back: float | None = None


@dataclass(frozen=True)
class Fleet:
    """Equal workers. `lost_events`: share of cache events that never arrive. `kind`: the class of a request."""

    workers: int
    limits: Limits
    budgets: Mapping[str, ClassBudget] = field(
        default_factory=lambda: {"interactive": ClassBudget(quantum=4096, largest=1 << 30, depth=1 << 20)}
    )
    kind: Callable[[Request], str] = lambda request: "interactive"
    rates: Rates = Rates()
    failures: tuple[Failure, ...] = ()
    lost_events: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers={self.workers}: a fleet has at least one.")
        if not 0 <= self.lost_events < 1:
            raise ValueError(f"lost_events={self.lost_events}: it is a share, at least 0 and below 1.")
        for failure in self.failures:
            if failure.worker not in self.names:
                raise ValueError(f"{failure}: the workers are {', '.join(self.names)}.")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"worker-{i}" for i in range(self.workers))


class Percentiles(NamedTuple):
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Figures:
    """hit_rate: share of prompt tokens. ttft: seconds from arrival to the first token. seconds: until all ended.

    requests, busy: by worker, how many it finished and the seconds that it computed. rerouted: lost with a worker and sent
    to another. resyncs: times that a worker was asked for all its names. A refused turn ends its session.
    """

    policy: str
    hit_rate: float
    ttft: Percentiles
    seconds: float
    requests: dict[str, int]
    busy: dict[str, float]
    served: int
    refused: int
    preempted: int
    rerouted: int
    resyncs: int

    @property
    def spread(self) -> float:
        """Seconds that the busiest worker computed, over the mean: 1 is balance."""
        return max(self.busy.values()) * len(self.busy) / sum(self.busy.values())


def _affinity(router: Router, request: str, prompt: Prompt, turn: int) -> str:
    return router.route(request, prompt).worker


def _least_load(router: Router, request: str, prompt: Prompt, turn: int) -> str:
    load = lambda worker: router.loads[worker].prefill + router.row_tokens * router.loads[worker].decoding
    worker = min(sorted(router.loads), key=lambda worker: (load(worker), router.loads[worker].routed))
    router.send(request, prompt, worker)
    return worker


def _round_robin(router: Router, request: str, prompt: Prompt, turn: int) -> str:
    worker = sorted(router.loads)[turn % len(router.loads)]
    router.send(request, prompt, worker)
    return worker


POLICIES = {"affinity": _affinity, "least_load": _least_load, "round_robin": _round_robin}


def prefix_names(tokens: np.ndarray, unit: int) -> tuple[bytes, ...]:
    """Chained hashes of the prefixes of unit, 2·unit, … tokens; here they only have to tell prefixes apart."""
    name, names = b"", []
    for end in range(unit, len(tokens) + 1, unit):
        name = blake3(name + tokens[end - unit : end].tobytes()).digest(length=16)
        names.append(name)
    return tuple(names)


def simulate(trace: Trace, fleet: Fleet, policy: str) -> Figures:
    """Serves a trace. Raises ValueError for a policy that is unknown, or a request that no worker can ever hold."""
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: there are {', '.join(POLICIES)}.")
    for request in trace.requests:
        if why := fleet.limits.unfit(request.prompt, request.output):
            raise ValueError(f"Request {request.name}: {why}.")
    return _Run(trace, fleet, policy).figures()


class _Run:
    """One simulation: a heap of things that happen, and who is told of them."""

    def __init__(self, trace: Trace, fleet: Fleet, policy: str):
        self.trace, self.fleet, self.policy = trace, fleet, policy
        self.router = Router(fleet.names)
        self.workers = {name: self.worker(name) for name in fleet.names}
        self.random = np.random.default_rng(fleet.seed)
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.order, self.turns = count(), count()
        self.now = self.ended = 0.0
        self.requests = {request.name: request for request in trace.requests}
        self.followers: dict[str | None, list[Request]] = {}
        for request in trace.requests:
            self.followers.setdefault(request.after, []).append(request)
        self.arrived: dict[str, float] = {}
        self.ttft: dict[str, float] = {}
        self.hits: dict[str, int] = {}
        self.done = dict.fromkeys(fleet.names, 0)
        self.busy = dict.fromkeys(fleet.names, 0.0)
        self.refused = self.preempted = self.rerouted = self.resyncs = 0

    def worker(self, name: str) -> Worker:
        return Worker(name, self.fleet.limits, self.fleet.budgets, self.fleet.rates)

    def figures(self) -> Figures:
        self.answered(None)
        for failure in self.fleet.failures:
            self.at(failure.at, lambda name=failure.worker: self.lose(name))
            if failure.back is not None:
                self.at(failure.back, lambda name=failure.worker: self.rejoin(name))
        while self.heap:
            self.now, _, happen = heapq.heappop(self.heap)
            happen()
        prompts = sum(self.requests[name].prompt for name in self.hits)
        return Figures(
            policy=self.policy,
            hit_rate=sum(self.hits.values()) / max(prompts, 1),
            ttft=Percentiles(*np.percentile(list(self.ttft.values()) or [0.0], (50, 90, 99)).tolist()),
            seconds=self.ended,
            requests=self.done,
            busy=self.busy,
            served=sum(self.done.values()),
            refused=self.refused,
            preempted=self.preempted,
            rerouted=self.rerouted,
            resyncs=self.resyncs,
        )

    def at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (time, next(self.order), happen))

    def answered(self, request: str | None) -> None:
        """What follows this request comes after its delay; None: what follows nothing."""
        for follower in self.followers.get(request, ()):
            self.at(self.now + follower.delay, lambda follower=follower: self.arrive(follower))

    def arrive(self, request: Request) -> None:
        self.arrived[request.name] = self.now
        tokens = np.concatenate([self.trace.prompt(request), self.trace.answer(request.session, request.turn)])
        self.send(Job(request.name, prefix_names(tokens, self.fleet.limits.page), request.prompt, request.output))

    def send(self, job: Job) -> None:
        request, unit = self.requests[job.request], self.fleet.limits.page
        prompt = Prompt(self.trace.key(request), job.known, job.names[: job.known // unit], unit)
        worker = self.workers[POLICIES[self.policy](self.router, job.request, prompt, next(self.turns))]
        if worker.submit(job, self.fleet.kind(request)) is not None:
            self.refused += 1
            self.router.finished(job.request)
        elif not worker.stepping:
            self.step(worker)

    def step(self, worker: Worker) -> None:
        begun = worker.begin()
        self.tell(worker)
        if begun is None:
            return
        for request, hit in begun.hits.items():
            self.router.started(request, hit)
            self.hits.setdefault(request, hit)
        self.preempted += begun.preempted
        self.busy[worker.name] += begun.seconds
        self.at(self.now + begun.seconds, lambda: self.stepped(worker))

    def stepped(self, worker: Worker) -> None:
        if self.workers.get(worker.name) is not worker:
            return  # it was lost in the meantime
        said, finished = worker.end()
        self.tell(worker)
        self.ended = self.now
        for request in said:
            self.ttft.setdefault(request, self.now - self.arrived[request])
            self.router.prefilled(request)
        for request in finished:
            self.router.finished(request)
            self.done[worker.name] += 1
            self.answered(request)
        self.step(worker)

    def tell(self, worker: Worker) -> None:
        """The router hears what changed in a cache, unless the event is lost; it asks when it notices that one was."""
        event = worker.event()
        if event is None or self.random.random() < self.fleet.lost_events:
            return
        if not self.router.promises.observe(worker.name, event):
            self.resyncs += 1
            self.router.promises.resync(worker.name, worker.events, worker.pages.cached)

    def lose(self, name: str) -> None:
        if (worker := self.workers.pop(name, None)) is None:
            return
        for request in self.router.leave(name):
            self.rerouted += 1
            self.send(worker.jobs[request])

    def rejoin(self, name: str) -> None:
        if name not in self.workers:
            self.router.join(name)
            self.workers[name] = self.worker(name)
