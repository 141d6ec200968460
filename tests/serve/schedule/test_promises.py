"""What the router believes of a cache is what the cache's events said, in their order, whatever was lost on the way."""

from hypothesis import given
from hypothesis import strategies as st

from k3jax.serve.schedule import Event, Promises

A, B, C = b"a", b"ab", b"abc"


def joined(*workers):
    promises = Promises()
    for worker in workers:
        promises.join(worker)
    return promises


def test_A8_a_gap_asks_for_a_resync_that_brings_the_truth():
    promises = joined("w")
    assert promises.observe("w", Event(1, stored=(A, B)))
    # Event 2, removed=(B,), is lost.
    assert not promises.observe("w", Event(3, stored=(C,)))
    assert promises.stale("w")
    assert promises.depths([A, B]) == {"w": 2}, "the old belief stays until the answer is there"
    assert not promises.observe("w", Event(4, removed=(C,)))
    assert not promises.resync("w", 1, [A, B]), "an answer from before the gap does not close it"
    assert promises.resync("w", 3, [A, C])
    assert not promises.stale("w")
    assert promises.depths([A, B, C]) == {"w": 1}, "event 4 waited and came after the answer"


def test_events_out_of_order_wait_and_old_ones_are_ignored():
    promises = joined("w")
    assert not promises.observe("w", Event(2, removed=(A,)))
    assert promises.observe("w", Event(1, stored=(A, B)))
    assert promises.depths([A]) == {} and promises.depths([A, B]) == {"w": 2}
    assert promises.observe("w", Event(1, stored=(A,)))
    assert promises.depths([A]) == {}
    assert promises.resync("w", 1, [A, B]), "nothing is missing, and this is older than event 2"
    assert promises.depths([A]) == {}


def test_a_state_is_a_point_so_the_longest_name_counts_alone():
    promises = joined("v", "w")
    promises.observe("v", Event(1, stored=(C,)))
    promises.observe("w", Event(1, stored=(A, B)))
    assert promises.depths([A, B, C]) == {"v": 3, "w": 2}
    assert promises.depths([A, B]) == {"w": 2}


def test_a_worker_that_leaves_is_forgotten_with_its_names():
    promises = joined("v", "w")
    promises.observe("v", Event(1, stored=(A,)))
    promises.observe("w", Event(1, stored=(A, B)))
    promises.read([A, B], "s", 2)
    promises.leave("w")
    assert promises.depths([A, B]) == {"v": 1}
    assert set(promises._holders) == set(promises._readers) == {A}
    promises.join("w", number=7)
    assert promises.observe("w", Event(8, stored=(B,)))
    assert promises.depths([A, B]) == {"w": 2, "v": 1}


def test_shared_counts_sessions_not_requests():
    promises = joined("w")
    promises.observe("w", Event(1, stored=(A, B)))
    for _ in range(5):
        promises.read([A, B], "one", 2)
    assert promises.shared([A, B], 2) == 0
    promises.read([A], "two", 2)
    assert promises.shared([A, B], 2) == 1


names = st.sets(st.sampled_from([bytes([i]) for i in range(8)]), max_size=4)


@given(st.lists(st.tuples(names, names, st.sampled_from(["arrives", "late", "lost"]), st.booleans()), max_size=30))
def test_after_every_loss_the_belief_returns_to_the_truth(changes):
    promises, held, late = joined("w"), set(), []
    for number, (stored, removed, fate, answer) in enumerate(changes, start=1):
        held = held - removed | stored
        event = Event(number, tuple(stored), tuple(removed))
        if fate == "late":
            late.append(event)
        if fate == "arrives":
            whole = promises.observe("w", event)
            assert whole != promises.stale("w")
            if not whole and answer:
                assert promises.resync("w", number, held)
            if whole or answer:
                assert {name for name in promises._holders if promises.depths([name])} == held
    for event in late:
        promises.observe("w", event)
    promises.resync("w", len(changes), held)
    assert not promises.stale("w")
    assert set(promises._holders) == held
