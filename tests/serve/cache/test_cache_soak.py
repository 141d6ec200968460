"""Many random requests over a pool far too small, some cancelled, with failing copies and allocations: nothing leaks."""

import random

import jaxtyping
import pytest
from cache_engine import Engine, toy

from k3jax.serve.cache import Interval, Lineage, Lru, PoolExhausted


class Soak(Engine):
    """Sessions of growing conversations under a few system prompts; a handful of requests run at a time."""

    def __init__(self, requests: int, seed: int, **options):
        self.draw = random.Random(seed)
        super().__init__(pages=70, geometry=toy(head_bytes=32), seed=seed, fault=self._fault, **options)
        self.requests = requests
        self.talks = [[100 * system] * 6 for system in range(3) for _ in range(3)]
        self.refused = self.failed = 0

    def _fault(self, n: int) -> None:
        if self.draw.random() < 0.01:
            raise OSError("injected")

    def soak(self) -> None:
        started = 0
        while started < self.requests or self.tokens:
            if started < self.requests and len(self.tokens) < 5:
                self.admit(f"{started}")
                started += 1
            for id in list(self.tokens):
                if self.draw.random() < 0.05 or self.cache.requests[id].broken:
                    self.end(id, "abort")
                elif self.draw.random() < 0.6:
                    self.step(id)
            if self.draw.random() < 0.1:
                self.lose_copies()

    def admit(self, id: str) -> None:
        talk = self.draw.choice(self.talks)
        talk += [self.draw.randrange(50) for _ in range(self.draw.randrange(1, 6))]
        if len(talk) > 40:
            del talk[6:]
        turns, budget = (len(talk) - 1,), self.draw.choice([0, 4, 100])
        try:
            self.begin(id, [*talk, self.draw.randrange(50)], turns=turns, replay_budget=budget)
        except (PoolExhausted, OSError):
            self.refused += 1

    def step(self, id: str) -> None:
        request = self.cache.requests[id]
        if not request.left and self.draw.random() < 0.5:
            return self.end(id)
        if not request.left:
            token = self.draw.randrange(50)
            self.cache.append(id, [token])
            self.tokens[id].append(token)
        end = min([*self.cache.stops(id), request.computed + request.left])
        try:
            self.forward(id, end - request.computed, records=self.draw.random() < 0.3)
        except (PoolExhausted, OSError):
            self.refused += 1
            self.end(id, "abort")  # preempted

    def lose_copies(self) -> None:
        copies = self.cache.take_copies()
        self.failed += len(copies)
        self.cache.failed(copies)
        self.check()


@pytest.fixture(autouse=True)
def without_type_checks():
    """They cost more than the cache; other tests have them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize(
    "policy, requests, care",
    [
        pytest.param(Lineage(), 200, 2, id="lineage"),
        pytest.param(Lru(), 200, 5, id="lru"),
        pytest.param(Interval(4), 200, 5, id="interval"),
        pytest.param(Lineage(), 10_000, 50, id="at length", marks=pytest.mark.slow),
    ],
)
def test_no_request_reads_foreign_content_and_nothing_leaks(policy, requests, care):
    engine = Soak(requests, seed=7, policy=policy)
    engine.care = care
    engine.soak()
    counts = engine.cache.metrics
    # It was the test that it says: pressure, refusals, failures, and every way to start.
    assert counts["evicted.checkpoints"] > requests / 10 and engine.refused > requests / 50 and engine.failed > 0
    assert min(counts[f"way.{way}"] for way in ("cold", "exact", "replay", "step_down")) > 0
    engine.do_copies()
    engine.check_empty()
