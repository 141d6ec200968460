"""The ledger of activations: every leaf is there once, lives until its last reader, and bytes equal a plain replay."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.activations.policy import KEEP, POLICIES, Policy
from k3jax.activations.records import Leaf, names_table, records, timeline
from k3jax.activations.residency import MOMENTS, resident
from k3jax.parallel.schedules import BACKWARD, FORWARD, RECIPES, build

pytestmark = pytest.mark.quick


@st.composite
def ledgers(draw):
    """A schedule's name and counts, and leaves of any spans and policies; names repeat."""
    name = draw(st.sampled_from(sorted(RECIPES)))
    kinds, virtual = RECIPES[name].kinds, RECIPES[name].virtual or draw(st.integers(1, 3))
    leaves = []
    for _ in range(draw(st.integers(0, 4))):
        policy = draw(st.sampled_from(POLICIES))
        size = 0 if policy.storage == "recompute" else draw(st.integers(0, 10**12))
        producer = draw(st.sampled_from(kinds[:-1]))
        consumer = draw(st.sampled_from([None, *kinds[kinds.index(producer) + 1 :]]))
        leaves.append(Leaf(draw(st.sampled_from("abc")), size, policy, producer, consumer))
    counts = dict(stages=draw(st.integers(1, 5)), virtual=virtual, microbatches=draw(st.integers(1, 6)))
    return name, counts, leaves


def built(name, counts, leaves):
    return build(name, **counts), leaves


@given(ledgers())
def test_every_leaf_of_every_chunk_and_microbatch_has_one_record(ledger):
    schedule, leaves = built(*ledger)
    made = records(schedule, leaves)
    assert [r.id for r in made] == list(range(len(leaves) * schedule.chunks * schedule.microbatches))
    seen = [(r.producer.chunk, r.producer.microbatch, r.id % len(leaves)) for r in made]
    assert len(set(seen)) == len(made)
    assert sum(r.bytes for r in made) == sum(leaf.bytes for leaf in leaves) * schedule.chunks * schedule.microbatches


@given(ledgers())
def test_a_record_lives_from_its_maker_to_its_last_reader(ledger):
    schedule, leaves = built(*ledger)
    entries = {tuple(operation[:5]) for operation in schedule.operations()}
    for record in records(schedule, leaves):
        assert {tuple(record.producer), tuple(record.consumer)} <= entries
        assert record.producer[1] == record.consumer[1] and record.producer[3:] == record.consumer[3:]
        assert record.ready == record.producer.tick < record.consumer.tick == record.release
        if record.policy.storage == "recompute":
            assert record.stays == () and record.location == "nowhere"
        else:
            assert (record.stays[0].ticks[0], record.stays[-1].ticks[1]) == (record.ready, record.release)


@given(ledgers())
def test_bytes_are_the_sum_of_what_the_stores_hold(ledger):
    schedule, leaves = built(*ledger)
    expected = np.zeros((3, MOMENTS * schedule.num_ticks, schedule.stages), np.int64)
    for leaf in leaves:
        span = leaf.producer, leaf.consumer or schedule.kinds[-1]
        expected += leaf.bytes * np.stack(resident(schedule, *span, leaf.policy.storage))
    found = timeline(schedule, records(schedule, leaves))
    np.testing.assert_array_equal(np.stack(found), expected)
    np.testing.assert_array_equal(found.peak, (expected[0] + expected[1]).max(axis=0))


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 8))
def test_a_byte_a_chunk_counts_what_is_in_flight(stages, virtual, microbatches):
    schedule = build("interleaved_1f1b", stages=stages, virtual=virtual, microbatches=microbatches)
    found = timeline(schedule, records(schedule, [Leaf("x", 1, KEEP)]))
    np.testing.assert_array_equal(found.peak, schedule.in_flight())


def test_parking_evens_out_the_pipeline():
    """What is needed last lies with late ranks for the middle of its life; during a move both ends hold it."""
    schedule = build("1f1b", stages=4, microbatches=16)
    keep, parked = (
        timeline(schedule, records(schedule, [Leaf("a", 4, Policy(s))])) for s in ("keep", "remote-offload")
    )
    assert keep.peak.tolist() == [28, 20, 12, 4]
    assert max(parked.peak) < 28 and parked.own[:, 3].max() == 4 and parked.parked[:, 3].max() > 0


def test_records_say_what_brings_a_value_back():
    schedule = build("1f1b", stages=4, microbatches=8)
    said = {
        "keep": {"device: none"},
        "recompute": {"nowhere: recompute"},
        "quantize": {"device: decode"},
        "local-offload": {"host: fetch from host", "device: none"},
        "quantize+local-offload": {"host: fetch from host and decode", "device: decode"},
        "remote-offload": {f"rank {r}: fetch from rank {r}" for r in (2, 3)} | {"device: none"},
        "quantize+remote-offload": {f"rank {r}: fetch from rank {r} and decode" for r in (2, 3)} | {"device: decode"},
    }
    for text, expected in said.items():
        found = records(schedule, [Leaf("x", 0, Policy.parse(text))])
        assert {f"{r.location}: {r.restoration}" for r in found} == expected
        away = {(r.producer.stage, r.location) for r in found if r.location.startswith("rank")}
        assert away <= {(0, "rank 3"), (1, "rank 2")}


def test_names_are_summed_up():
    schedule = build("1f1b", stages=2, microbatches=1)  # stage 0: forward in the first tick, backward in the fourth
    leaves = [Leaf("b", 5, KEEP), Leaf("a", 2, Policy.parse("quantize")), Leaf("b", 7, KEEP)]
    assert names_table(records(schedule, leaves)) == [
        ("a", Policy.parse("quantize"), 2, 4, 2, ("device",), ("decode",)),
        ("b", KEEP, 12, 4, 4, ("device",), ("none",)),
    ]
    assert names_table([]) == []


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (Leaf("x", -1, KEEP), "x: -1 bytes under keep"),
        (Leaf("x", 8, Policy("recompute")), "x: 8 bytes under recompute: must be at least 0, and 0 if recomputed"),
        (Leaf("x", 8, KEEP, producer=BACKWARD, consumer=FORWARD), "in order"),
        (Leaf("x", 8, KEEP, consumer=FORWARD), "in order"),
        (Leaf("x", 8, KEEP, consumer=7), "read last by kind 7"),
    ],
)
def test_leaves_that_do_not_fit_the_schedule_are_refused(leaf, message):
    with pytest.raises(ValueError, match=message):
        records(build("1f1b", stages=2, microbatches=1), [leaf])
