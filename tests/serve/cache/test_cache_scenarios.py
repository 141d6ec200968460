"""What goes wrong in hybrid prefix caches elsewhere, and the right answer here. One test a scenario."""

import pytest
from cache_engine import Engine, toy

from k3jax.serve.cache import Chain, Kind, Miss, Way

R = range


def hit(engine, tokens, **options):
    """(KV boundary, state boundary) of a prefix, with all its tokens usable."""
    chain = Chain(engine.cache.key, engine.cache.geometry.hash_unit, tokens)
    match = engine.cache.match(chain, **({"limit": len(tokens)} | options))
    return match.kv, match.state


def test_an_unaligned_hit_is_found_at_the_last_hash_and_the_cached_state_survives_its_reader():
    engine, r0 = Engine(), [0, 0, 1, 1, 2, 2]
    engine.run("R0", r0)
    cached = engine.cache.index.path(Chain(engine.cache.key, 2, r0), 6)[-1]
    before = [engine.memory[page] for page in cached.pages]
    plan = engine.begin("R1", [*r0, 3, 3])
    assert (plan.way, plan.start) == (Way.EXACT, 6)
    engine.prefill("R1")
    assert not set(engine.cache.requests["R1"].state) & set(cached.pages)
    assert [engine.memory[page] for page in cached.pages] == before
    engine.end("R1")
    assert hit(engine, [*r0, 3, 3]) == (8, 8)


def test_a_request_that_goes_on_keeps_its_state_and_the_index_moves_to_a_copy():
    engine, r0 = Engine(), [0, 0, 1, 1, 2, 2]
    engine.begin("R0", r0)
    engine.prefill("R0")
    own = engine.cache.requests["R0"].state
    cached = engine.cache.index.path(Chain(engine.cache.key, 2, r0), 6)[-1]
    assert cached.pages == own and hit(engine, r0) == (6, 6)  # no copy until somebody writes
    engine.cache.append("R0", [7])
    engine.tokens["R0"].append(7)
    engine.cache.extend("R0", 1)
    assert hit(engine, r0) == (6, 0)  # not while the copy is under way
    (copy,) = engine.do_copies()
    assert copy.kind is Kind.KEEP and engine.cache.requests["R0"].state == own and cached.pages == copy.destination
    engine.forward("R0", 1)
    assert hit(engine, r0) == (6, 6)
    engine.check_index(r0)


def test_a_page_seen_from_two_ends_is_freed_once():
    engine = Engine(geometry=toy(hash_unit=64, chunk_size=64, page_tokens=512), pages=16)
    engine.begin("R", list(R(576)))
    engine.do_copies()
    engine.forward("R", 576, accept=None)
    engine.cache.extend("R", 64)  # [576, 640) reserved in the page that holds [512, 576)
    assert len(engine.cache.requests["R"].table) == 2
    engine.do_copies()
    engine.end("R")
    engine.check_empty()


def test_a_state_past_the_limit_is_not_used_and_not_split():
    engine, abc = Engine(geometry=toy(hash_unit=1, chunk_size=1, page_tokens=4)), [1, 2, 3]
    engine.run("R", abc)
    first = engine.begin("same", abc)
    assert (first.start, first.boundary, first.kv) == (0, 0, 2)
    assert [(r.code, r.boundary) for r in first.misses] == [(Miss.LIMIT, 3), (Miss.STATE_ABSENT, 2)]
    engine.end("same", "abort")
    assert engine.begin("longer", [*abc, 4]).start == 3


def test_branches_inside_a_page_leave_a_sound_index_down_to_the_last_leaf():
    engine = Engine()
    engine.run("R0", [1, 2, 3, 4, 5, 6, 7, 8])
    engine.run("R1", [1, 2, 3, 4, 9, 9])
    engine.run("R2", [1, 2, 8, 8, 9, 9])
    assert hit(engine, [1, 2, 3, 4, 9, 9]) == (6, 6) and hit(engine, [1, 2, 8, 8]) == (4, 0)
    while engine.cache.index.nodes:
        engine.cache.evict(engine.cache.pool.free + 1)
        engine.cache.check()
    engine.check_empty()


def test_a_branch_point_gets_a_state_when_it_is_first_met():
    engine = Engine(geometry=toy(hash_unit=4, chunk_size=4, page_tokens=16), pages=100)
    prefix = list(R(120))
    engine.run("R1", prefix + [1000 + i for i in R(80)])
    r2 = engine.begin("R2", prefix + [2000 + i for i in R(80)])
    assert (r2.kv, r2.start) == (120, 0) and Miss.STATE_ABSENT in [r.code for r in r2.misses]
    assert 120 in engine.cache.stops("R2")
    engine.prefill("R2")
    engine.end("R2")
    r3 = engine.begin("R3", prefix + [3000 + i for i in R(80)])
    assert (r3.way, r3.start, r3.boundary) == (Way.EXACT, 120, 120)


def test_a_replay_installs_kv_and_state_at_one_boundary():
    engine = Engine(geometry=toy(hash_unit=4, chunk_size=4, page_tokens=16), pages=100)
    prefix = list(R(40))
    engine.run("R1", prefix[:32])
    engine.run("R2", prefix + [1] * 20)
    shorter = engine.begin("R3", prefix + [2] * 20, replay_budget=7)
    assert (shorter.way, shorter.start, shorter.boundary) == (Way.STEP_DOWN, 32, 32)
    engine.end("R3", "abort")
    plan = engine.begin("R4", prefix + [2] * 20, replay_budget=8)
    assert (plan.way, plan.start, plan.boundary, plan.uncached) == (Way.REPLAY, 32, 40, 28)
    assert engine.cache.requests["R4"].computed == 32  # one visible boundary: the state is S_32, so KV counts up to 32
    engine.prefill("R4")
    assert engine.cache.metrics["tokens.replayed"] == 8
    engine.end("R4")
    assert hit(engine, prefix) == (40, 40)


def test_dropping_the_last_unit_of_a_hit_steps_down_to_a_state_of_that_boundary():
    engine, tokens = Engine(), list(R(16))
    engine.begin("R", tokens, turns=(8,))
    engine.prefill("R")
    engine.end("R")
    assert hit(engine, tokens) == (16, 16)
    assert hit(engine, tokens, limit=14) == (14, 8)


@pytest.mark.parametrize("first", [0, 1])
def test_sessions_that_pin_nested_paths_release_only_their_own(first):
    engine, tokens = Engine(), list(R(16))
    engine.run("seed", tokens[:9])
    engine.run("deep", tokens)
    engine.begin("outer", tokens[:9])
    engine.begin("inner", [*tokens, 99])
    engine.do_copies()
    ids = ["outer", "inner"] if first == 0 else ["inner", "outer"]
    other = list(engine.cache.requests[ids[1]].pages)
    counts = {page: engine.cache.pool.count(page) for page in other}
    shared = set(engine.cache.requests[ids[0]].pages)
    engine.end(ids[0], "abort")
    assert {page: engine.cache.pool.count(page) for page in other} == {p: n - (p in shared) for p, n in counts.items()}
    engine.check_request(ids[1])
    engine.end(ids[1], "abort")
    engine.check_empty()


def test_copies_name_their_request_whatever_row_it_has():
    engine = Engine()
    engine.run("A", list(R(6)))
    engine.run("B", list(R(10, 16)))
    engine.begin("x", [*R(6), 7, 7])
    engine.begin("y", [*R(10, 16), 8, 8])
    copies = engine.cache.take_copies()
    for copy in copies:
        assert not set(copy.destination) - set(engine.cache.requests[copy.request].pages)
    for copy in reversed(copies):
        engine.do_copy(copy)
    engine.cache.landed(sorted(copies, key=lambda copy: copy.request, reverse=True))
    for id in ("y", "x"):
        engine.check_request(id)
        engine.prefill(id)


def test_a_partial_page_of_a_large_block_hits_at_its_last_hash():
    engine = Engine(geometry=toy(hash_unit=512, chunk_size=64, page_tokens=6144), pages=32)
    document = list(R(2800))
    engine.run("R1", document)
    assert hit(engine, document) == (2560, 2560)
    plan = engine.begin("R2", document + [9] * 100)
    assert (plan.way, plan.start, plan.shared) == (Way.EXACT, 2560, ()) and plan.partial is not None
    engine.end("R2", "abort")
    long = list(R(6144 + 1000))
    engine.run("R3", long)  # its first block is another page, whole; a document that shares 2800 tokens still hits 2560
    assert hit(engine, document + [9] * 5000) == (2560, 2560)
