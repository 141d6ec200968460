"""The ledger of activations: every leaf is there once, lives until its last reader, and bytes equal a plain replay."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.activations.policy import KEEP, POLICIES, Policy
from k3jax.activations.records import Leaf, mirrored, names_table, records, timeline
from k3jax.parallel.schedules import BACKWARD, FORWARD, build

pytestmark = pytest.mark.quick


@st.composite
def ledgers(draw):
    """Stages, virtual stages, microbatches, and leaves of any policies; names repeat, holders are any ranks."""
    stages, virtual, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    leaves = []
    for _ in range(draw(st.integers(0, 4))):
        policy = draw(st.sampled_from(POLICIES))
        size = 0 if policy.storage == "recompute" else draw(st.integers(0, 10**12))
        holders = draw(st.none() | st.tuples(*[st.integers(0, stages - 1)] * stages))
        consumer = draw(st.sampled_from([None, FORWARD, BACKWARD]))
        leaves.append(Leaf(draw(st.sampled_from("abc")), size, policy, consumer=consumer, holders=holders))
    return (stages, virtual, microbatches), leaves


def interleaved(stages, virtual, microbatches):
    return build("interleaved_1f1b", stages=stages, virtual=virtual, microbatches=microbatches)


@given(ledgers())
def test_every_leaf_of_every_chunk_and_microbatch_has_one_record(ledger):
    counts, leaves = ledger
    schedule = interleaved(*counts)
    made = records(schedule, leaves)
    assert [r.id for r in made] == list(range(len(leaves) * schedule.chunks * schedule.microbatches))
    seen = [(r.producer.chunk, r.producer.microbatch, r.id % len(leaves)) for r in made]
    assert len(set(seen)) == len(made)
    assert sum(r.bytes for r in made) == sum(leaf.bytes for leaf in leaves) * schedule.chunks * schedule.microbatches


@given(ledgers())
def test_a_record_lives_from_its_maker_to_its_last_reader(ledger):
    counts, leaves = ledger
    schedule = interleaved(*counts)
    entries = {tuple(operation[:5]) for operation in schedule.operations()}
    for record in records(schedule, leaves):
        assert {tuple(record.producer), tuple(record.consumer)} <= entries
        assert record.producer[1] == record.consumer[1] and record.producer[3:] == record.consumer[3:]
        assert record.ready == record.producer.tick <= record.consumer.tick == record.release


@given(ledgers())
def test_bytes_equal_a_replay_of_the_table(ledger):
    """Operation by operation: put away after a forward, counted, thrown away after the last reader."""
    counts, leaves = ledger
    schedule = interleaved(*counts)
    stages = schedule.stages
    expected = np.zeros((3, schedule.num_ticks, stages), np.int64)
    held: dict[tuple, tuple[int, int, int]] = {}
    for tick in range(schedule.num_ticks):
        now = [operation for operation in schedule.operations() if operation[0] == tick]
        for _, stage, kind, chunk, microbatch, _ in now:
            for i, leaf in enumerate(leaves):
                if kind == FORWARD:
                    holder = (
                        (leaf.holders or mirrored(stages))[stage] if leaf.policy.storage == "remote-offload" else stage
                    )
                    place = 2 if leaf.policy.storage == "local-offload" else int(holder != stage)
                    held[i, chunk, microbatch] = place, holder, leaf.bytes
        for place, rank, size in held.values():
            expected[place, tick, rank] += size
        for _, _, kind, chunk, microbatch, _ in now:
            for i, leaf in enumerate(leaves):
                if kind == (leaf.consumer or schedule.kinds[-1]):
                    del held[i, chunk, microbatch]
    assert not held
    found = timeline(records(schedule, leaves), schedule.num_ticks, stages)
    np.testing.assert_array_equal(np.stack(found), expected)
    np.testing.assert_array_equal(found.peak, (expected[0] + expected[1]).max(axis=0))


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 8))
def test_a_byte_a_chunk_counts_what_is_in_flight(stages, virtual, microbatches):
    schedule = interleaved(stages, virtual, microbatches)
    found = timeline(records(schedule, [Leaf("x", 1, KEEP)]), schedule.num_ticks, stages)
    np.testing.assert_array_equal(found.peak, schedule.in_flight())


def test_parking_at_the_mirrored_rank_evens_out_the_pipeline():
    """A quarter of what early ranks hold, parked with late ones, takes a quarter off the peak."""
    schedule = build("1f1b", stages=4, microbatches=16)
    plain = timeline(records(schedule, [Leaf("a", 4, KEEP)]), schedule.num_ticks, 4)
    leaves = [Leaf("a", 3, KEEP), Leaf("b", 1, Policy("remote-offload"))]
    balanced = timeline(records(schedule, leaves), schedule.num_ticks, 4)
    assert mirrored(4) == (3, 2, 2, 3) and mirrored(3) == (2, 1, 2)
    assert plain.peak.tolist() == [28, 20, 12, 4]
    assert balanced.peak.tolist() == [21, 15, 17, 11]


def test_records_say_what_brings_a_value_back():
    schedule = build("1f1b", stages=2, microbatches=1)
    said = {
        "keep": ["device: none", "device: none"],
        "recompute": ["device: recompute", "device: recompute"],
        "quantize": ["device: decode", "device: decode"],
        "local-offload": ["host: fetch from host", "host: fetch from host"],
        "quantize+local-offload": ["host: fetch from host and decode"] * 2,
        "remote-offload": ["rank 1: fetch from rank 1", "device: none"],
        "quantize+remote-offload": ["rank 1: fetch from rank 1 and decode", "device: decode"],
    }
    for text, expected in said.items():
        found = records(schedule, [Leaf("x", 0, Policy.parse(text))])
        assert [f"{r.location}: {r.restoration}" for r in found] == expected


def test_names_are_summed_up():
    schedule = build("1f1b", stages=2, microbatches=1)  # stage 0: forward in the first tick, backward in the fourth
    leaves = [Leaf("b", 5, KEEP), Leaf("a", 2, Policy.parse("quantize")), Leaf("b", 7, KEEP)]
    assert names_table(records(schedule, leaves)) == [
        ("a", Policy.parse("quantize"), 2, 4, 2),
        ("b", KEEP, 12, 4, 4),
    ]
    assert names_table([]) == []


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (Leaf("x", -1, KEEP), "x: -1 bytes under keep"),
        (Leaf("x", 8, Policy("recompute")), "x: 8 bytes under recompute: must be at least 0, and 0 if recomputed"),
        (Leaf("x", 8, KEEP, producer=BACKWARD, consumer=FORWARD), "in this order"),
        (Leaf("x", 8, KEEP, consumer=7), "read last by kind 7"),
        (Leaf("x", 8, KEEP, holders=(0,)), r"holders \(0,\): must be 2 ranks of 0 to 1"),
        (Leaf("x", 8, KEEP, holders=(0, 2)), "must be 2 ranks"),
    ],
)
def test_leaves_that_do_not_fit_the_schedule_are_refused(leaf, message):
    with pytest.raises(ValueError, match=message):
        records(build("1f1b", stages=2, microbatches=1), [leaf])
