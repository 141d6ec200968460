"""What must not be done is refused in one line, and leaves everything as it was. And what plans and policies say alone."""

import subprocess
import sys

import pytest
from cache_engine import KEY, Engine, toy
from hypothesis import given
from hypothesis import strategies as st

from k3jax.serve.cache import (
    Geometry,
    Lineage,
    Match,
    Pool,
    PoolExhausted,
    PrefixCache,
    Way,
    plan_restore,
    policy,
)
from k3jax.serve.cache.index import Checkpoint, Node
from k3jax.serve.cache.retention import Trail, evict


def test_the_package_needs_no_device():
    code = "import k3jax.serve.cache, sys; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "act, message",
    [
        (lambda c: c.begin("R", [1]), "request 'R' is running already"),
        (lambda c: c.begin("S", []), "request 'S' has no tokens"),
        (lambda c: c.begin("S", [1], replay_budget=-1), "replay_budget=-1 must be at least 0"),
        (lambda c: c.fork("R", "R"), "'R' is running already"),
        (lambda c: c.fork("R", "S"), "cannot fork during a forward or before its own copies have landed"),
        (lambda c: c.extend("S", 1), "request 'S' is not running"),
        (lambda c: c.extend("R", 0), "a forward over 0 tokens"),
        (lambda c: c.advance("R", 5), "cannot advance to 5: computed 0, reserved 4 by extend, 6 tokens known"),
        (lambda c: c.advance("R", 0), "cannot advance to 0"),
        (lambda c: c.advance("R", 2), "ran a forward before its copies had landed"),
        (lambda c: c.landed(c.copies.open.values()), r"copies \[0\] are not under way: take each once"),
        (lambda c: c.failed(c.take_copies() * 2), r"copies \[0\] are not under way"),
        (lambda c: c.abort("S"), "request 'S' is not running"),
    ],
)
def test_misuse_is_refused_and_changes_nothing(act, message):
    cache = PrefixCache(toy(), 20, KEY)
    cache.begin("R", range(6))
    cache.extend("R", 4)
    pages = cache.requests["R"].pages
    with pytest.raises(ValueError, match=message):
        act(cache)
    cache.check()
    assert list(cache.requests) == ["R"] and cache.requests["R"].pages == pages and cache.requests["R"].computed == 0


def test_a_state_that_the_index_shares_is_not_written_over():
    engine = Engine()
    engine.begin("R", [1, 2, 3])
    engine.do_copies()
    engine.forward("R", 2)
    engine.cache.extend("R", 1)
    with pytest.raises(ValueError, match="ran a forward before its copies had landed"):
        engine.cache.advance("R", 1)
    copies = engine.do_copies()
    with pytest.raises(ValueError, match=r"copies \[1\] are not under way"):
        engine.cache.landed(copies)
    engine.cache.advance("R", 1)


def test_a_request_that_does_not_fit_says_what_there_is_and_evicts_nothing():
    engine, a = Engine(pages=1 + 11), list(range(8))
    engine.run("A", a)
    engine.begin("B", list(range(100, 108)))
    engine.cache.extend("B", 8)
    with pytest.raises(
        PoolExhausted, match="needs 3 pages, but 1 are free and 0 evictable: wait for a request to end"
    ) as error:
        engine.cache.begin("C", [*a, 9, 9, 9, 9, 9])
    assert (error.value.needed, error.value.free, error.value.evictable) == (3, 1, 0)
    assert engine.cache.match(engine.cache.chain(a), limit=8).state == 8 and engine.cache.room == 1 + 5
    engine.cache.check()


def test_a_request_fits_wherever_the_whole_pool_would_hold_it():
    # 6 pages hold 9 tokens and their state. What is cached of the request must not be in its own way.
    engine, tokens = Engine(pages=1 + 6), list(range(8))
    engine.run("A", tokens)
    assert engine.cache.match(engine.cache.chain(tokens), limit=8).state == 8 and engine.cache.pool.free == 1
    plan = engine.begin("B", [*tokens, 8])
    assert plan.way is Way.COLD
    engine.prefill("B")
    engine.end("B")
    engine.check_empty()


def test_room_is_made_for_more_than_the_need_where_it_can_be_had():
    engine = Engine(pages=64)
    for i in range(8):
        engine.run(f"{i}", [100 * i + t for t in range(5)])
    index, free, sizes = engine.cache.index, engine.cache.pool.free, engine.cache.geometry
    evict(index, Lineage(), free + 1, 9, headroom=6)
    assert free + 7 <= engine.cache.pool.free < free + 7 + sizes.state_pages
    evict(index, Lineage(), engine.cache.pool.free + 1, 9, headroom=1000)
    assert engine.cache.pool.free == 63
    with pytest.raises(PoolExhausted, match="needs 64 pages, but 63 are free and 0 evictable"):
        evict(index, Lineage(), 64, 9)


@pytest.mark.quick
@given(data=st.data())
def test_plans_start_at_a_state_and_share_no_more_than_is_there(data):
    sizes = toy(hash_unit=2, page_tokens=data.draw(st.sampled_from([2, 4, 8])))
    kv = 2 * data.draw(st.integers(0, 20))
    state = 2 * data.draw(st.integers(0, kv // 2))
    tokens, budget = kv + data.draw(st.integers(1, 9)), data.draw(st.integers(0, 50))
    nodes = tuple(Node(1 + i, i * sizes.page_tokens, b"", []) for i in range(sizes.kv_pages(kv)))
    found = Checkpoint(b"", state, (100, 101, 102)) if state else None
    plan = plan_restore(Match(tokens, kv, nodes, found, ()), sizes, tokens=tokens, replay_budget=budget)
    assert plan.start == state and plan.boundary in (state, kv)
    assert len(plan.replay) <= budget and plan.uncached == tokens - state
    assert (plan.boundary == kv) == (kv - state <= budget)
    assert plan.shared == tuple(n.page for n in nodes if n.start + sizes.page_tokens <= plan.boundary)
    assert (plan.partial is None) == (plan.boundary % sizes.page_tokens == 0)
    assert plan.allocate == sizes.state_pages + (plan.partial is not None)
    assert set(plan.pins) == {*plan.shared, *({plan.partial} - {None}), *(found.pages if found else ())}
    way = {(True, True): Way.EXACT, (True, False): Way.REPLAY, (False, False): Way.STEP_DOWN}
    expected = Way.COLD if not kv else way[plan.boundary == kv, state == kv]
    assert plan.way is expected


def test_policies_by_name():
    sizes: Geometry = toy(hash_unit=4, chunk_size=2)
    trail = Trail(computed=5, upto=30, branch=18, turns=(3, 11, 33))
    assert policy("lineage").stops(trail, sizes) == {8: "turn", 16: "branch", 28: "last"}
    assert policy("lru").stops(trail, sizes) == {28: "last"}
    assert policy("interval", interval=8).stops(trail, sizes) == {8: "interval", 16: "interval", 24: "interval"}
    assert policy("lineage").stops(Trail(28, 30, 0, ()), sizes) == {} and policy("lineage") == Lineage()
    for name, interval in (("mru", None), ("lru", 8), ("interval", None)):
        with pytest.raises(ValueError, match=f"retention policy '{name}'"):
            policy(name, interval=interval)
    with pytest.raises(ValueError, match="checkpoint interval 6 is no multiple of hash_unit=4"):
        policy("interval", interval=6).stops(trail, sizes)
    with pytest.raises(ValueError, match="a pool of 1 pages"):
        Pool(1)
