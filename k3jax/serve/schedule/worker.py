"""A worker that computes nothing: its queue, batch and pages are real, its forward is a duration.

The model of its cache: a page is a hash unit of tokens, and each whole page is also a place to restart from. Pages that no
running request holds are evicted oldest first, the end of a prefix before its beginning.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from k3jax.serve.schedule.batch import Batch, Limits, Lookup, Step, advance, plan, without
from k3jax.serve.schedule.batch import Waiting as Queued
from k3jax.serve.schedule.budgets import ClassBudget, ClassQueues, Refusal
from k3jax.serve.schedule.promises import Event


@dataclass(frozen=True)
class Rates:
    """Seconds that a step takes: for itself, for each prefill token, for each row that decodes."""

    step: float = 0.01
    token: float = 0.0005
    row: float = 0.0005


@dataclass
class Job:
    """A request: the names of its prefixes with its whole answer, tokens of prompt and answer, tokens generated so far."""

    request: str
    names: Sequence[bytes]
    prompt: int
    output: int
    generated: int = 0

    @property
    def known(self) -> int:
        return self.prompt + self.generated


class PrefixModel:
    """Pages by the name of the prefix that they end. Implements `Pool`."""

    def __init__(self, limits: Limits, jobs: Mapping[str, Job]):
        self.limits, self._jobs = limits, jobs
        self.cached: OrderedDict[bytes, None] = OrderedDict()  # the one to evict next comes first
        self.stored: list[bytes] = []  # since the last event
        self.removed: list[bytes] = []
        self._pins: Counter[bytes] = Counter()
        self._held: dict[str, list[bytes]] = {}  # named pages of running requests
        self._private: dict[str, int] = {}  # and how many they have that are not named yet, or hold states

    def available(self) -> int:
        return self.limits.pool - len(self._pins) - sum(self._private.values())

    def lookup(self, request: str) -> Lookup:
        hit = self._hit(request)
        shared = sum(name in self._pins for name in hit)
        return Lookup(len(hit) * self.limits.page, 0, self.limits.pages(self._jobs[request].known) - shared)

    def owned(self, request: str) -> int:
        return self._private[request] + sum(self._pins[name] == 1 for name in self._held[request])

    def admit(self, request: str) -> None:
        hit = self._hit(request)
        self._pins.update(hit)
        self._held[request] = hit
        self._private[request] = 0
        self.grow(request, self.limits.pages(self._jobs[request].known) - len(hit))

    def grow(self, request: str, pages: int = 1) -> None:
        """New pages for a request; what is cached and held by nobody makes room."""
        self._private[request] += pages
        assert self.available() >= 0, f"{request} took pages that are not there"
        evictable = (name for name in list(self.cached) if name not in self._pins)
        while len(self.cached) + sum(self._private.values()) > self.limits.pool:
            name = next(evictable)
            del self.cached[name]
            self.removed.append(name)

    def computed(self, request: str, done: int) -> None:
        """Whole pages among a request's first `done` tokens get their names; a copy of what is cached is given back."""
        held = self._held[request]
        for name in self._jobs[request].names[len(held) : done // self.limits.page]:
            if name not in self.cached:
                self.cached[name] = None
                self.stored.append(name)
            self._private[request] -= 1
            self._pins[name] += 1
            held.append(name)

    def release(self, request: str) -> None:
        for name in reversed(self._held.pop(request)):  # the beginning is used last, so evicted last
            self.cached.move_to_end(name)
            self._pins[name] -= 1
            if not self._pins[name]:
                del self._pins[name]
        del self._private[request]

    def _hit(self, request: str) -> list[bytes]:
        job, hit = self._jobs[request], []
        for name in job.names[: (job.known - 1) // self.limits.page]:
            if name not in self.cached:
                break
            hit.append(name)
        return hit


@dataclass(frozen=True)
class Begun:
    """A step that runs for some seconds. `hits`: of requests that started, the tokens that they hit."""

    seconds: float
    hits: dict[str, int]
    preempted: int


class Worker:
    """Queue, batch and pages of one worker, stepped by its owner: `begin`, wait, `end`."""

    def __init__(self, name: str, limits: Limits, budgets: Mapping[str, ClassBudget], rates: Rates):
        self.name, self.rates = name, rates
        self.jobs: dict[str, Job] = {}
        self.queues = ClassQueues(budgets)
        self.batch = Batch(limits)
        self.pages = PrefixModel(limits, self.jobs)
        self.events = 0
        self._step: Step | None = None

    @property
    def stepping(self) -> bool:
        return self._step is not None

    def submit(self, job: Job, kind: str) -> Refusal | None:
        self.jobs[job.request] = job
        refusal = self.queues.offer(job.request, kind, self.pages.lookup(job.request).cost(job.known))
        if refusal is not None:
            del self.jobs[job.request]
        return refusal

    def begin(self) -> Begun | None:
        """Plans the next step and takes its pages; None if there is nothing to do."""
        new = (Queued(ticket.request, self.jobs[ticket.request].known) for ticket in self.queues.order())
        step = plan(self.batch, new, self.pages)
        if not step.tokens:
            assert not self.jobs, f"{self.name} stands still with {len(self.jobs)} requests"
            return None
        for request in step.preempted:
            self.pages.release(request)
        for _ in range(step.taken):
            self.queues.take()
        for one in step.admitted:
            self.pages.admit(one.request)
        for request in step.grown:
            self.pages.grow(request)
        hits = {one.request: one.found.hit for one in step.admitted if one.age >= self.batch.ages}
        self._step = step
        prefill = step.tokens - len(step.decode)
        seconds = self.rates.step + self.rates.token * prefill + self.rates.row * len(step.decode)
        return Begun(seconds, hits, len(step.preempted))

    def end(self) -> tuple[list[str], list[str]]:
        """The step is over: requests that got a token, and among them those that are finished."""
        assert self._step is not None
        step, self._step = self._step, None
        self.batch = advance(self.batch, step)
        for row in self.batch.running:
            self.pages.computed(row.request, row.done)
        said = [*step.decode, *(chunk.request for chunk in step.prefill if chunk.last)]
        finished = []
        for request in said:
            self.jobs[request].generated += 1
            if self.jobs[request].generated == self.jobs[request].output:
                finished.append(request)
                self.pages.release(request)
                del self.jobs[request]
        self.batch = without(self.batch, finished)
        return said, finished

    def event(self) -> Event | None:
        """What changed in the cache since the last event, if anything did."""
        pages = self.pages
        if not pages.stored and not pages.removed:
            return None
        self.events += 1
        kept = tuple(name for name in dict.fromkeys(pages.stored) if name in pages.cached)
        gone = tuple(name for name in dict.fromkeys(pages.removed) if name not in pages.cached)
        pages.stored, pages.removed = [], []
        return Event(self.events, kept, gone)
