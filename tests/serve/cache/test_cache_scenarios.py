"""What goes wrong in hybrid prefix caches elsewhere, and the right answer here. One test a scenario."""

import dataclasses

import pytest
from cache_engine import KEY, Engine, hit, toy

from k3jax.serve.cache import (
    CacheKey,
    Chain,
    Grid,
    Interval,
    Kind,
    Miss,
    PoolExhausted,
    Way,
)

R = range


@pytest.mark.quick
def test_an_unaligned_hit_is_found_at_the_last_hash_and_the_cached_state_survives_its_reader():
    engine, r0 = Engine(), [0, 0, 1, 1, 2, 2]
    engine.run("R0", r0)
    cached = engine.cache.index.path(engine.cache.chain(r0), 6)[-1]
    before = [engine.memory[page] for page in cached.pages]
    plan = engine.begin("R1", [*r0, 3, 3])
    assert (plan.way, plan.start) == (Way.EXACT, 6)
    engine.prefill("R1")
    assert not set(engine.cache.requests["R1"].state) & set(cached.pages)
    assert [engine.memory[page] for page in cached.pages] == before
    engine.end("R1")
    assert hit(engine, [*r0, 3, 3]) == (8, 8)


@pytest.mark.quick
def test_a_request_that_goes_on_keeps_its_state_and_the_index_moves_to_a_copy():
    engine, r0 = Engine(), [0, 0, 1, 1, 2, 2]
    engine.begin("R0", r0)
    engine.prefill("R0")
    own = engine.cache.requests["R0"].state
    cached = engine.cache.index.path(engine.cache.chain(r0), 6)[-1]
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
    assert hit(engine, [1, 2, 3, 4, 9, 9]) == (6, 6) and hit(engine, [1, 2, 8, 8]) == (4, 2)
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
    counts = {page: engine.cache.pool.counts[page] for page in other}
    shared = set(engine.cache.requests[ids[0]].pages)
    engine.end(ids[0], "abort")
    assert {page: engine.cache.pool.counts[page] for page in other} == {p: n - (p in shared) for p, n in counts.items()}
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


@pytest.mark.quick
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


@pytest.mark.parametrize("budget", [0, 12])
def test_kv_alone_is_no_state(budget):
    engine = Engine(geometry=toy(hash_unit=4, chunk_size=4, page_tokens=16), policy=Interval(8))
    prompt = list(R(20))
    longer = [*prompt, *R(100, 124)]
    engine.run("R", prompt)
    at_16 = engine.cache.index.path(Chain(KEY, 4, prompt), 16)[-1]
    engine.lose(at_16.pages)
    assert hit(engine, prompt) == (20, 8)
    plan = engine.begin("longer", longer, replay_budget=budget)
    assert (plan.start, plan.boundary) == ((8, 20) if budget else (8, 8))
    assert plan.misses[-1].code is Miss.STATE_ABSENT
    assert engine.begin("again", prompt, replay_budget=budget).start == 8
    for id in ("longer", "again"):
        engine.prefill(id)
        engine.end(id)
    assert hit(engine, prompt) == (20, 16) and hit(engine, longer) == (44, 40)


@pytest.mark.parametrize("unit", [16, 64])
@pytest.mark.parametrize("length", [127, 128, 129, 130])
def test_the_final_state_is_filed_under_its_own_boundary_only(length, unit):
    sizes = toy(hash_unit=unit, chunk_size=unit, page_tokens=64)
    engine, tokens, boundary = Engine(geometry=sizes), list(R(length)), length // unit * unit
    engine.run("R", tokens)  # the forward is split where the state is kept
    assert hit(engine, tokens) == (boundary, boundary)
    engine.check_index(tokens)
    hasty = Engine(geometry=sizes)
    hasty.begin("R", tokens)
    hasty.forward("R", length)  # in one go: S(boundary) was never there, unless it is the last
    hasty.end("R")
    assert hit(hasty, tokens) == (boundary, boundary if boundary == length else 0)
    assert hasty.cache.metrics["stops.missed"] == (boundary != length)


def test_each_kind_counts_in_columns_of_its_own():
    # Resumed at 11520 in a table of 228 columns: 16-token columns would lead to column 719.
    assert Grid("state", 1152, 228).column(11520) == 9
    with pytest.raises(ValueError, match="boundary 11520 lies outside the KV page table: 228 columns of 16 tokens"):
        Grid("KV page", 16, 228).column(11520)
    states = Interval(32).grid(width=3)
    assert [states.complete(hit) for hit in (36, 64, 96)] == [1, 2, 3]
    assert [states.column(32 * states.complete(hit)) for hit in (36, 64, 96)] == [0, 1, 2]
    for outside in (0, 97):
        with pytest.raises(ValueError, match=f"boundary {outside} lies outside"):
            states.column(outside)
    engine, tokens = Engine(geometry=toy(hash_unit=4, chunk_size=4, page_tokens=16), policy=Interval(32)), list(R(96))
    engine.run("R", tokens)
    assert [hit(engine, tokens[:n])[1] for n in (36, 64, 96)] == [32, 64, 96]
    plan = engine.begin("again", tokens[:36] + [500], replay_budget=4)
    assert (plan.start, plan.replay) == (32, range(32, 36))
    engine.prefill("again")
    engine.end("again")
    with pytest.raises(ValueError, match="lies outside the KV page table"):
        engine.begin("long", [1])
        engine.cache.extend("long", 16 * 63 + 1)


@pytest.mark.quick
def test_recycled_pages_are_out_of_reach_and_pins_and_counts_hold():
    # Room for one request of 8 tokens: 2 KV pages and 3 state pages, and as much again for its copies.
    engine, a, b = Engine(pages=1 + 10), list(R(8)), list(R(100, 108))
    engine.run("A", a)
    engine.run("B", b)
    engine.cache.evict(10)
    assert hit(engine, a) == hit(engine, b) == (0, 0)
    engine.run("A", a)
    assert hit(engine, a) == (8, 8)
    engine.begin("A", [*a, 1])
    with pytest.raises(PoolExhausted, match="needs 10 pages, but"):
        engine.cache.evict(10)
    assert hit(engine, a) == (8, 8)  # a failed eviction evicts nothing
    engine.do_copies()
    engine.check_request("A")
    with pytest.raises(PoolExhausted):
        engine.begin("B", [*b, 1])
        engine.prefill("B")
    for id in list(engine.cache.requests):
        engine.end(id, "abort")
    with pytest.raises(ValueError, match="freed twice"):
        engine.cache.pool.drop([next(p for p in R(1, 11) if not engine.cache.pool.counts[p])])
    with pytest.raises(ValueError, match="page 0 is the canary"):
        engine.cache.pool.hold([0])
    with pytest.raises(ValueError, match="not running"):
        engine.cache.release("A")
    engine.check_empty()


def test_a_failed_copy_out_loses_neither_the_state_nor_the_books():
    engine, tokens = Engine(), list(R(6))
    engine.begin("R", tokens)
    engine.prefill("R")
    engine.cache.append("R", [7])
    engine.tokens["R"].append(7)
    engine.cache.extend("R", 1)
    engine.cache.failed(engine.cache.take_copies())
    engine.cache.check()
    assert hit(engine, tokens) == (6, 6)
    engine.check_index(tokens)
    with pytest.raises(ValueError, match="cannot advance"):
        engine.cache.advance("R", 1)
    engine.forward("R", 1)  # tries again
    engine.check_index(tokens)
    engine.end("R")
    engine.check_empty()


def test_a_request_whose_restore_failed_cannot_go_on():
    engine, tokens = Engine(), list(R(6))
    engine.run("R", tokens)
    engine.begin("S", [*tokens, 1])
    engine.cache.failed(engine.cache.take_copies())
    with pytest.raises(ValueError, match="'S' cannot go on, its (state|kv) copy failed"):
        engine.cache.extend("S", 1)
    engine.end("S")
    assert hit(engine, tokens) == (6, 6)
    engine.check_empty()


def test_pages_taken_away_are_not_found_even_if_the_pool_reuses_them():
    engine, a = Engine(pages=1 + 5), list(R(8))
    engine.run("A", a)
    (node,) = [n for n in engine.cache.index.nodes.values() if n.start == 4]
    engine.cache.evict(5)
    engine.begin("B", list(R(100, 108)))
    engine.prefill("B")
    assert node.page in engine.cache.requests["B"].pages and hit(engine, a) == (0, 0)
    engine.end("B")


@pytest.mark.quick
def test_new_weights_find_nothing_and_old_requests_leave_nothing():
    engine, tokens = Engine(), list(R(12))
    engine.run("before", tokens)
    engine.begin("across", tokens[:8] + [1] * 6)
    engine.do_copies()
    engine.forward("across", 2)
    engine.cache.bump("r2")
    engine.cache.check()
    assert hit(engine, tokens) == (0, 0) and not engine.cache.index.nodes
    engine.prefill("across")  # began under r1, ends under r1
    engine.end("across")
    assert not engine.cache.index.nodes and not engine.cache.index.checkpoints
    assert engine.begin("after", tokens).way is Way.COLD
    engine.prefill("after")
    engine.end("after")
    assert hit(engine, tokens) == (12, 12)
    with pytest.raises(ValueError, match="request 'late' has a key of revision='r1' and hash unit 2: serving"):
        engine.cache.begin("late", Chain(KEY, 2, tokens))
    with pytest.raises(ValueError, match="'r2' is being served already"):
        engine.cache.bump("r2")


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(CacheKey)])
def test_a_change_of_any_key_field_misses_and_says_which(field):
    engine, tokens = Engine(), list(R(8))
    engine.run("R", tokens)
    other = dataclasses.replace(KEY, **{field: "rotary"})
    match = engine.cache.match(Chain(other, 2, tokens))
    assert (match.kv, match.state) == (0, 0)
    assert [(r.code, r.detail) for r in match.misses] == [(Miss.KEY, field)]
    if field == "salt":  # tenants share pages of the pool, and no prefix
        assert engine.begin("other", tokens, salt="rotary").way is Way.COLD
        engine.prefill("other")
        engine.end("other")
        assert engine.cache.match(engine.cache.chain(tokens, salt="rotary"), limit=8).state == 8
    else:
        with pytest.raises(ValueError, match=f"has a key of {field}='rotary' and hash unit 2"):
            engine.cache.begin("other", Chain(other, 2, tokens))
    (reason,) = engine.cache.match(Chain(KEY, 2, [9] * 8)).misses
    assert (reason.code, reason.detail) == (Miss.KV_ABSENT, "")


def test_records_stand_in_for_a_state_where_they_take_less_room():
    sizes = toy(hash_unit=2, page_tokens=16, head_bytes=64)  # two heads: 128 bytes in a slot of 128, so a page a group
    assert (sizes.state_pages, sizes.record_pages(2)) == (3, 3)
    sizes = toy(hash_unit=2, page_tokens=8, head_bytes=64)  # a page a head: 2 pages a group
    assert (sizes.state_pages, sizes.record_pages(2), sizes.record_pages(8), sizes.record_pages(10)) == (6, 3, 3, 6)
    engine, tokens = Engine(geometry=sizes, pages=100), list(R(20))
    engine.begin("R", tokens[:12])
    engine.prefill("R", records=True)  # the first state has no other to start from
    engine.decode("R", tokens[12:16], records=True)
    engine.do_copies()
    tail = engine.cache.index.path(Chain(KEY, 2, tokens), 16)[-1]
    assert tail.base and (tail.base.boundary, tail.boundary, len(tail.pages)) == (12, 16, 3)
    engine.end("R")
    plan = engine.begin("S", tokens)
    assert (plan.way, plan.start) == (Way.RECORDS, 16)
    engine.prefill("S")
    engine.end("S")
    engine.lose([tail.base.pages[0]])  # records without the state that they start from are nothing
    engine.cache.check()
    assert not engine.cache.index.live(tail)
    engine.check_empty()


def test_refused_drafts_leave_no_trace():
    engine, tokens = Engine(), list(R(5))
    engine.begin("R", tokens)
    engine.prefill("R")
    for accepted in (1, 2, 3):
        new = [50 + accepted] * accepted
        engine.cache.append("R", new)
        engine.tokens["R"] += new
        engine.forward("R", 4, accept=accepted)
    engine.check_request("R")
    engine.end("R")
    engine.check_empty()


def test_a_fork_shares_whole_pages_and_goes_its_own_way():
    engine, tokens = Engine(), list(R(7))
    engine.begin("R", tokens)
    engine.prefill("R")
    for child in ("a", "b"):
        engine.cache.fork("R", child)
        engine.tokens[child] = list(engine.tokens["R"])
    engine.cache.check()
    assert engine.cache.requests["a"].table[0] == engine.cache.requests["R"].table[0]
    for i, id in enumerate(("R", "a", "b")):
        engine.decode(id, [i] * 4)
    for id in ("a", "R", "b"):
        engine.check_request(id)
        engine.end(id)
    assert [hit(engine, [*tokens, i, i, i]) for i in R(3)] == [(10, 10)] * 3
    engine.check_empty()


def test_a_state_is_recycled_when_the_last_request_that_it_is_the_newest_of_goes_on():
    engine, tokens = Engine(), list(R(6))
    for id in ("a", "b"):
        engine.begin(id, tokens)
    for id in ("a", "b"):  # neither found the other's
        engine.prefill(id)
    engine.decode("a", [7, 7])
    assert hit(engine, tokens) == (6, 6)
    engine.decode("b", [8, 8])
    assert hit(engine, tokens) == (6, 0) and engine.cache.metrics["checkpoints.recycled"] == 1
    assert hit(engine, [*tokens, 7, 7]) == hit(engine, [*tokens, 8, 8]) == (8, 8)


def test_a_state_is_not_moved_to_a_page_that_was_lost_under_its_copy():
    engine, tokens = Engine(), list(R(6))
    engine.begin("R", tokens)
    engine.prefill("R")
    engine.cache.append("R", [7])
    engine.cache.extend("R", 1)
    (copy,) = engine.cache.take_copies()
    engine.lose(copy.destination[:1])
    engine.cache.landed([copy])
    assert hit(engine, tokens) == (6, 0)
    engine.end("R", "abort")
    engine.check_empty()
