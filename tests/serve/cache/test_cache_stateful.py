"""Any order of operations: after each one the books agree, and every request reads the content of its own tokens.

The engine is without a model, the pool small. What may be found is compared with a plain model: a dict of token tuples.
"""

import itertools

import jaxtyping
import pytest
from cache_engine import Engine, toy
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from k3jax.serve.cache import Interval, Lineage, Lru, PoolExhausted


class InjectedError(RuntimeError):
    """A failure that the test asked for."""


@pytest.fixture(autouse=True)
def without_type_checks():
    """They cost more than the cache; other tests have them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


GEOMETRIES = {
    "a page a state": toy(),
    "two pages a group": toy(head_bytes=32),
    "pages of one unit": toy(page_tokens=2, head_bytes=8),
    "long pages": toy(page_tokens=8, hash_unit=2, head_bytes=64, record_token_bytes=4),
}

BUDGETS = st.sampled_from([0, 2, 6, 100])
TURNS = st.lists(st.integers(1, 20), max_size=2)
RARELY = st.sampled_from([False] * 9 + [True])


class Serving(RuleBasedStateMachine):
    """What an engine may do to a cache, in any order."""

    @initialize(
        geometry=st.sampled_from(sorted(GEOMETRIES)),
        policy=st.sampled_from([Lru(), Lineage(), Interval(4)]),
        pages=st.integers(12, 60),
        seed=st.integers(0, 99),
    )
    def start(self, geometry, policy, pages, seed):
        self.fail_in = 0
        self.engine = Engine(pages, GEOMETRIES[geometry], seed, policy=policy, fault=self.fault)
        self.cache = self.engine.cache
        self.ids = map(str, itertools.count())
        self.computed: set[tuple] = set()  # (revision, tokens) of every prefix that was ever computed
        self.revisions = itertools.count(2)

    def fault(self, n):
        self.fail_in -= 1
        if not self.fail_in:
            raise InjectedError

    def attempt(self, operation, *arguments, **options):
        """Runs it; a refusal for want of room, or an injected failure, must have changed nothing."""
        before = self.picture()
        try:
            return operation(*arguments, **options)
        except (PoolExhausted, InjectedError):
            assert self.picture() == before
            return None

    def picture(self):
        """Everything that a refused operation must leave as it was; evictions aside."""
        requests = {id: (r.computed, r.reserved, tuple(r.table), r.state) for id, r in self.cache.requests.items()}
        return requests, sorted(self.cache.copies.open)

    def pick(self, data):
        usable = [id for id, r in self.cache.requests.items() if not r.broken]
        return data.draw(st.sampled_from(sorted(usable)))

    usable = precondition(lambda self: any(not r.broken for r in self.cache.requests.values()))

    def admit(self, data, budget, turns):
        """A request that begins as an earlier one did, or not."""
        known = [()] + sorted(tokens for _, tokens in self.computed)
        prefix = data.draw(st.sampled_from(known))
        tokens = [*prefix, *data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=9))]
        id = next(self.ids)
        plan = self.attempt(self.engine.begin, id, tokens, replay_budget=budget, turns=turns)
        if plan is None:
            return None
        revision = self.cache.key.revision
        assert plan.start <= plan.boundary <= plan.kv < len(tokens)
        for boundary in (plan.start, plan.kv):
            assert not boundary or (revision, tuple(tokens[:boundary])) in self.computed
        return id

    @rule(data=st.data(), budget=BUDGETS, turns=TURNS)
    def insert(self, data, budget, turns):
        self.admit(data, budget, turns)

    @rule(data=st.data(), budget=BUDGETS, turns=TURNS, records=st.booleans(), decode=st.integers(0, 6))
    def whole_request(self, data, budget, turns, records, decode):
        """All of its prompt and some decoding; released, or left at a length that any other may continue from."""
        id, ran = self.admit(data, budget, turns), True
        while ran and id and not self.cache.requests[id].broken and (self.cache.requests[id].left or decode):
            decode -= not self.cache.requests[id].left
            ran = self.step(data, id, 20, records)
        if id and data.draw(st.booleans()):
            self.engine.end(id)

    @usable
    @rule(data=st.data(), count=st.integers(1, 6), records=st.booleans())
    def extend(self, data, count, records):
        self.step(data, self.pick(data), count, records)

    def step(self, data, id, count, records):
        """A forward over known tokens, or over one that was just chosen, with drafts after it; whether it ran."""
        request = self.cache.requests[id]
        if not request.left:
            token = data.draw(st.integers(0, 2))
            self.cache.append(id, [token])
            self.engine.tokens[id].append(token)
        stops = [stop - request.computed for stop in self.cache.stops(id)]
        accept = min([request.left, count, *stops])
        return self.attempt_forward(id, accept + data.draw(st.integers(0, 2)), accept, records)

    def attempt_forward(self, id, count, accept, records):
        request = self.cache.requests[id]
        before, revision, picture = request.computed, request.chain.key.revision, self.picture()
        try:
            self.engine.forward(id, count, accept=accept, records=records)
        except (PoolExhausted, InjectedError):
            assert self.picture() == picture
        tokens = self.engine.tokens[id]
        self.computed |= {(revision, tuple(tokens[:n])) for n in range(before, request.computed + 1)}
        return request.computed > before

    @usable
    @rule(data=st.data())
    def fork(self, data):
        self.engine.do_copies()
        id, new = self.pick(data), next(self.ids)
        if self.attempt(lambda: (self.cache.fork(id, new), True)):
            self.engine.tokens[new] = list(self.engine.tokens[id])
            self.engine.records_since[new] = self.cache.requests[new].computed

    @precondition(lambda self: self.cache.requests)
    @rule(data=st.data(), how=st.sampled_from(["release", "abort"]))
    def end(self, data, how):
        self.engine.end(data.draw(st.sampled_from(sorted(self.cache.requests))), how)

    @rule(data=st.data())
    def some_copies_fail(self, data):
        copies = self.cache.take_copies()
        good = [copy for copy in copies if data.draw(st.booleans())]
        for copy in good:
            self.engine.do_copy(copy)
        self.cache.failed(set(copies) - set(good))
        self.cache.landed(good)

    @rule(data=st.data())
    def evict(self, data):
        pages = self.cache.pool.free + data.draw(st.integers(1, 12))
        before = len(self.cache.index.nodes), len(self.cache.index.checkpoints)
        if self.attempt(lambda: (self.cache.evict(pages), True)):
            assert self.cache.pool.free >= pages
        else:
            assert before == (len(self.cache.index.nodes), len(self.cache.index.checkpoints))

    @rule(data=st.data(), really=RARELY)
    def lose(self, data, really):
        if really:
            self.engine.lose([data.draw(st.integers(1, self.cache.pool.pages - 1))])

    @rule(really=RARELY)
    def bump(self, really):
        if really:
            self.cache.bump(f"r{next(self.revisions)}")

    @rule(fail_in=st.integers(1, 4))
    def an_allocation_fails(self, fail_in):
        self.fail_in = fail_in

    @rule(data=st.data())
    def match(self, data):
        """A lookup finds nothing that was not computed under this revision, and what it finds is that."""
        known = sorted(tokens for _, tokens in self.computed)
        tokens = data.draw(st.sampled_from(known)) if known else (0, 1)
        chain = self.cache.chain(tokens)
        found = self.cache.match(chain, limit=len(tokens))
        assert found.state <= found.kv <= len(tokens)
        for boundary in (found.kv, found.state):
            assert not boundary or (self.cache.key.revision, tuple(tokens[:boundary])) in self.computed
        self.engine.check_index(tokens)

    @invariant()
    def books_agree(self):
        if hasattr(self, "cache"):
            self.cache.check()

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        self.fail_in = 0
        self.cache.failed(self.cache.take_copies())
        for id in sorted(self.cache.requests):
            self.engine.end(id, "abort")
        self.engine.check_empty()


def test_any_order_of_operations_keeps_the_books_and_the_contents():
    run_state_machine_as_test(Serving, settings=settings(max_examples=50, stateful_step_count=20, deadline=None))


@pytest.mark.slow
def test_any_order_of_operations_at_length():
    run_state_machine_as_test(Serving, settings=settings(max_examples=500, stateful_step_count=30, deadline=None))
