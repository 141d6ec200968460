"""Sessions find their caches, work spreads, counters mean what is in flight, and a lost worker moves only its own."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.serve.schedule import Event, Prompt, Ring, Router
from k3jax.serve.schedule.ring import position

UNIT = 16
WORKERS = [f"w{i}" for i in range(5)]


def chain(text, units):
    """Names of the first units of a conversation, which `text` stands for."""
    return tuple(f"{text}:{i}".encode() for i in range(units))


def prompt(session, tokens=200, names=None):
    return Prompt(session, tokens, chain(session, tokens // UNIT) if names is None else names, UNIT)


def store(router, worker, names):
    number = router.promises._feeds[worker].last + 1
    assert router.promises.observe(worker, Event(number, stored=tuple(names)))


def primaries(ring, keys):
    return {key: next(ring.owners(key)) for key in keys}


def test_places_on_the_ring_are_the_same_in_every_process():
    assert position("key", "session") == 8212141614152479868
    assert position("key", "a", "bc") != position("key", "ab", "c")


@settings(max_examples=20)
@given(n=st.integers(2, 8), seed=st.integers(0, 1000))
def test_a_new_worker_takes_its_share_and_nothing_else_moves(n, seed):
    keys = [f"{seed}-{i}" for i in range(400)]
    small = Ring(frozenset(f"{seed}w{i}" for i in range(n)))
    large = small.changed(add=["new"])
    before, after = primaries(small, keys), primaries(large, keys)
    moved = [key for key in keys if before[key] != after[key]]
    assert all(after[key] == "new" for key in moved)
    assert 0.4 * len(keys) / (n + 1) < len(moved) < 1.8 * len(keys) / (n + 1)


@settings(max_examples=20)
@given(n=st.integers(2, 8), seed=st.integers(0, 1000))
def test_a_lost_workers_keys_go_to_their_secondaries_and_no_other_key_moves(n, seed):
    ring = Ring(frozenset(f"{seed}w{i}" for i in range(n)))
    lost = f"{seed}w0"
    left = ring.changed(remove=[lost])
    for key in (f"{seed}-{i}" for i in range(200)):
        owners = list(ring.owners(key))
        assert sorted(owners) == sorted(ring.workers)
        assert list(left.owners(key)) == [worker for worker in owners if worker != lost]


def test_A1_one_hot_worker_does_not_switch_affinity_off():
    router = Router(["w0", "w1", "w2"])
    for i in range(100):
        router.send(f"hot{i}", prompt(f"hot{i}"), "w0")
        router.prefilled(f"hot{i}")
    assert [router.loads[w].decoding for w in ("w0", "w1", "w2")] == [100, 0, 0]
    sessions = [prompt(f"s{i}") for i in range(20)]
    for each in sessions:
        store(router, "w2", each.names)
    assert {router.choices(each)[0].worker for each in sessions} == {"w2"}, "also where it is not an owner"


def test_A3_health_checks_touch_no_counter():
    router = Router(WORKERS)
    for i in range(20):
        router.route(f"{i}", prompt(f"{i}"))
        if i % 2:
            router.prefilled(f"{i}")
    before = {worker: (load.prefill, load.decoding, load.routed) for worker, load in router.loads.items()}
    for check in range(10):
        for worker in WORKERS:
            router.health(worker, healthy=check % 3 != 1)
    assert {worker: (load.prefill, load.decoding, load.routed) for worker, load in router.loads.items()} == before


@pytest.mark.quick
@pytest.mark.parametrize("at_once", [1, 256])
@pytest.mark.parametrize("workers", [WORKERS, ["tokyo", "lima", "oslo", "cairo", "quito"]])
def test_A5_unique_prompts_use_every_worker_evenly(workers, at_once):
    router, routed = Router(workers), Counter()
    for i in range(256):
        routed[router.route(f"{i}", prompt(f"unique-{i}")).worker] += 1
        if at_once == 1:
            router.prefilled(f"{i}")
            router.finished(f"{i}")
    assert set(routed) == set(workers)
    assert max(routed.values()) / min(routed.values()) <= 1.5


def test_A8_a_promise_that_fails_is_charged_and_not_trusted_again():
    router = Router(["w0", "w1"])
    first = prompt("s")
    store(router, "w0", first.names)
    choice = router.route("a", first)
    assert (choice.worker, choice.promised, router.loads["w0"].prefill) == ("w0", 192, 8)
    router.started("a", hit=32)
    assert router.loads["w0"].prefill == 168
    router.finished("a")
    assert {one.worker: one.promised for one in router.choices(first)} == {"w0": 32, "w1": 0}
    # The worker's own list may be older than the failure.
    router.promises.resync("w0", 5, first.names)
    assert router.promises.depths(first.useful) == {"w0": 2}
    store(router, "w0", first.names)
    assert router.promises.depths(first.useful) == {"w0": 12}
    router.promises.resync("w0", 6, first.names)
    assert router.promises.depths(first.useful) == {"w0": 12}, "it holds them again, and said so itself"


def test_a_hit_deeper_than_promised_is_credited():
    router = Router(["w0"])
    router.route("a", prompt("s"))
    router.started("a", hit=160)
    assert router.loads["w0"].prefill == 40


def test_a_prompt_asked_again_promises_no_more_than_can_be_hit():
    router = Router(["w0"])
    whole = prompt("s", 160)
    store(router, "w0", whole.names)
    assert router.route("a", whole).promised == 144  # the last token is computed: the tenth name is of no use
    router.started("a", hit=144)
    assert router.promises.depths(whole.names) == {"w0": 10}


def test_sessions_stay_where_their_cache_is_when_workers_come():
    router = Router(WORKERS)
    homes = {}
    for i in range(40):
        each = prompt(f"s{i}")
        homes[i] = router.route(f"{i}", each).worker
        store(router, homes[i], each.names)
        router.prefilled(f"{i}")
        router.finished(f"{i}")
    router.join("new")
    assert all(router.choices(prompt(f"s{i}"))[0].worker == homes[i] for i in range(40))


def test_a_new_worker_does_not_make_up_for_what_others_did_before_it_came():
    router = Router(WORKERS)
    for i in range(50):
        router.route(f"{i}", prompt(f"s{i}"))
    before = min(load.routed for load in router.loads.values())
    assert before > 0
    router.join("new")
    assert router.loads["new"].routed == before


def test_a_lost_workers_requests_go_to_their_secondaries():
    router = Router(WORKERS)
    sessions = {f"{i}": prompt(f"s{i}") for i in range(40)}
    homes = {request: router.route(request, each).worker for request, each in sessions.items()}
    expected = tuple(request for request, worker in homes.items() if worker == "w1")
    assert expected
    lost = router.leave("w1")
    assert lost == expected
    for request in lost:
        left = [worker for worker in Ring(frozenset(WORKERS)).owners(sessions[request].session) if worker != "w1"]
        assert router.route(request, sessions[request]).worker in left[:2]


def test_an_unhealthy_worker_gets_nothing_new_and_keeps_what_it_has():
    router = Router(["w0", "w1", "w2"])
    each = prompt("s")
    home = router.route("a", each).worker
    store(router, home, each.names)
    router.health(home, healthy=False)
    assert all(one.worker != home for one in router.choices(each))
    assert router.loads[home].prefill == 200
    router.finished("a")
    router.health(home, healthy=True)
    assert router.choices(each)[0].worker == home
    for worker in router.loads:
        router.health(worker, healthy=False)
    with pytest.raises(LookupError, match="None of 3 workers"):
        router.choices(each)


def test_a_system_prompt_that_all_share_does_not_draw_all_to_one_worker():
    router, system, homes = Router(WORKERS), chain("system", 100), Counter()
    for i in range(60):  # one after the other: nobody is ever busy
        each = prompt(f"s{i}", 1700, system + chain(f"s{i}", 6))
        worker = router.route(f"{i}", each).worker
        homes[worker] += 1
        store(router, worker, each.names)
        router.started(f"{i}", each.tokens - router._flights[f"{i}"].charged)
        router.prefilled(f"{i}")
        router.finished(f"{i}")
    assert set(homes) == set(WORKERS)
    assert max(homes.values()) / min(homes.values()) <= 1.5
    deep = prompt("s3", 1900, system + chain("s3", 6))
    holders = router.promises.depths(deep.names)
    assert router.choices(deep)[0].promised == max(holders.values()) * UNIT, "what is a session's own still draws it"


operations = st.lists(st.tuples(st.sampled_from("rspfhl"), st.integers(0, 30), st.integers(0, 180)), max_size=60)


@given(operations)
def test_counters_are_the_sums_over_what_is_in_flight(steps):
    router, flying, phase = Router(WORKERS), {}, {}
    for n, (kind, pick, amount) in enumerate(steps):
        target = sorted(flying)[pick % len(flying)] if flying else None
        if kind == "r":
            choice = router.route(f"{n}", prompt(f"s{pick}"))
            flying[f"{n}"], phase[f"{n}"] = choice.worker, 200 - choice.promised
            store(router, choice.worker, prompt(f"s{pick}").names[: amount // UNIT])
        elif kind == "l" and len(router.loads) > 1:
            gone = sorted(router.loads)[pick % len(router.loads)]
            assert set(router.leave(gone)) == {r for r, worker in flying.items() if worker == gone}
            flying = {r: worker for r, worker in flying.items() if worker != gone}
        elif target is None:
            continue
        elif kind == "s" and phase[target] != "decodes":
            router.started(target, amount)
            phase[target] = 200 - amount
        elif kind == "p":
            router.prefilled(target)
            phase[target] = "decodes"
        elif kind == "f":
            router.finished(target)
            del flying[target]
        elif kind == "h":
            router.health(flying[target], healthy=True)
        for worker, load in router.loads.items():
            mine = [phase[r] for r, where in flying.items() if where == worker]
            assert load.decoding == mine.count("decodes")
            assert load.prefill == sum(p for p in mine if p != "decodes")


def test_mistakes_are_named():
    router = Router(["w0"])
    router.route("a", prompt("s"))
    with pytest.raises(ValueError, match="'a' is on 'w0' already"):
        router.route("a", prompt("s"))
    with pytest.raises(ValueError, match="'b' is on no worker"):
        router.finished("b")
    with pytest.raises(ValueError, match="'w9' is unknown; there are w0"):
        router.health("w9", True)
    with pytest.raises(ValueError, match="'w0' is known already"):
        router.join("w0")
    router.prefilled("a")
    with pytest.raises(ValueError, match="first token already"):
        router.started("a", 0)
    with pytest.raises(ValueError, match="13 names of 16 tokens"):
        prompt("s", 200, chain("s", 13))
    with pytest.raises(ValueError, match="row_tokens=-1"):
        Router(["w0"], row_tokens=-1)
