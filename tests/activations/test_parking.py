"""Plans of offloading: nothing is lost or overwritten, ranks hold equally much, and moves keep to their rules."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.activations.hosting import host
from k3jax.activations.parking import park
from k3jax.parallel.schedules import BACKWARD, FORWARD, NAMES, RECIPES, WEIGHT, build

ANY = given(
    name=st.sampled_from(NAMES), virtual=st.integers(1, 3), stages=st.integers(1, 6), microbatches=st.integers(1, 12)
)


def some_schedule(name, virtual, **counts):
    return build(name, virtual=RECIPES[name].virtual or virtual, **counts)


def spans(schedule):
    """Everything that a table stores: made by one kind, read last by another."""
    return [(a, b) for a in schedule.kinds for b in schedule.kinds if a < b]


def check_parking(schedule, span):
    """Replay with names for contents: operations read, then slots are written, then what leaves next is read."""
    made, read = span
    plan = park(schedule, made, read)
    slots = [[None] * plan.num_slots for _ in range(schedule.stages)]
    leaving: dict[tuple[int, int], tuple[int, int] | None] = {}
    arrivals = Counter((move.tick, move.pair[1]) for move in plan.moves)
    assert max(arrivals.values(), default=0) <= 1, "a rank receives one content a tick"
    for tick in range(schedule.num_ticks):
        for move in plan.moves:
            if move.tick == tick:
                assert leaving[move.pair] == move.key
        for stage, (kind, chunk, m, _) in enumerate(schedule.table[tick].tolist()):
            if made < kind <= read:
                assert slots[stage][plan.slots[tick, stage]] == (chunk, m)
        for stage, (kind, chunk, m, _) in enumerate(schedule.table[tick].tolist()):
            if kind == made:
                slots[stage][plan.slots[tick, stage]] = (chunk, m)
        for move in plan.moves:
            if move.tick == tick:
                slots[move.pair[1]][move.slots[1]] = move.key
        leaving = {move.pair: slots[move.pair[0]][move.slots[0]] for move in plan.moves if move.tick == tick + 1}
    for move in plan.moves:
        assert sum(move.pair) == schedule.stages - 1  # partners only
    for pair in plan.pairs:
        assert (plan.column(pair)[:, 0] >= 0).sum() == sum(move.pair == pair for move in plan.moves)
    assert plan.num_slots <= schedule.alive(made, read).max()


@ANY
@settings(max_examples=40)
def test_parked_contents_are_where_they_are_read(**counts):
    schedule = some_schedule(**counts)
    for span in spans(schedule):
        check_parking(schedule, span)


@ANY
@settings(max_examples=40)
def test_hosted_contents_are_where_they_are_read(**counts):
    schedule = some_schedule(**counts)
    for made, read in spans(schedule):
        plan = host(schedule, made, read)
        on_host = [[None] * plan.num_host_slots for _ in range(schedule.stages)]
        device = [[None] * plan.num_slots for _ in range(schedule.stages)]
        pending = {}
        for tick in range(schedule.num_ticks):
            for stage, (slot, key) in pending.items():
                on_host[stage][slot] = key
            pending, fetched = {}, {}
            for stage, (kind, chunk, m, _) in enumerate(schedule.table[tick].tolist()):
                source, landing = plan.fetch[tick, stage]
                if source >= 0:
                    fetched[stage] = landing, on_host[stage][source]
                if made < kind <= read:
                    assert device[stage][plan.slots[tick, stage]] == (chunk, m)
                if kind == made:
                    assert (plan.write[tick, stage] >= 0) != (plan.land[tick, stage] >= 0)
                    if plan.write[tick, stage] >= 0:
                        pending[stage] = int(plan.write[tick, stage]), (chunk, m)
                    else:
                        device[stage][plan.land[tick, stage]] = (chunk, m)
                else:
                    assert plan.write[tick, stage] == plan.land[tick, stage] == -1
            for stage, (landing, key) in fetched.items():
                device[stage][landing] = key


@pytest.mark.quick
@pytest.mark.parametrize(("stages", "virtual", "microbatches"), [(4, 2, 16), (4, 1, 16), (8, 3, 32), (2, 2, 8)])
def test_parking_makes_ranks_hold_equally_much(stages, virtual, microbatches):
    """Interleaved 1F1B: the first rank holds up to 1.75 times the mean; parked, all hold the mean, and one buffer more."""
    schedule = build("interleaved_1f1b", stages=stages, virtual=virtual, microbatches=microbatches)
    alone = schedule.in_flight()
    plan = park(schedule, FORWARD, BACKWARD)
    assert alone.max() / alone.mean() >= 1.25
    assert (plan.resident.max(axis=0) == alone.mean()).all()
    with_buffer = plan.resident.max(axis=0) + 1
    assert with_buffer.max() / with_buffer.mean() <= 1.15
    if (stages, virtual, microbatches) == (4, 2, 16):
        assert with_buffer.max() <= 0.85 * alone.max()


def test_what_is_the_same_on_all_ranks_is_not_parked():
    schedule = build("zb1p", stages=4, microbatches=16)
    assert not park(schedule, FORWARD, WEIGHT).moves
    assert park(schedule, FORWARD, BACKWARD).moves


def test_little_waits_on_the_device_where_contents_wait_in_host_memory():
    schedule = build("interleaved_1f1b", stages=4, virtual=2, microbatches=16)
    plan = host(schedule, FORWARD, BACKWARD)
    assert plan.num_slots <= 3 and plan.num_host_slots >= schedule.num_slots - 2
    assert int((plan.write >= 0).sum()) >= 0.8 * schedule.chunks * schedule.microbatches
    np.testing.assert_array_equal((plan.fetch >= 0).any(-1).sum(), (plan.write >= 0).sum())
