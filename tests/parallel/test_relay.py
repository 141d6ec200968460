"""What the relay's plan says equals a simulation of who has which rows and which gradients; counts equal closed forms."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.parallel.relay import Relay, windows
from k3jax.parallel.schedules import BACKWARD, FORWARD, UP, build, forward_only, route, stage_of

NAMES = {"1f1b": (1,), "interleaved_1f1b": (1, 2, 3), "zb1p": (1,), "zbv": (2,), "gpipe": (1, 2)}


def relay_of(name, stages, microbatches, forward, data):
    virtual = data.draw(st.sampled_from(NAMES[name]))
    schedule = build(name, stages=stages, virtual=virtual, microbatches=microbatches)
    schedule = forward_only(schedule) if forward else schedule
    chunks = schedule.chunks
    return Relay(schedule, tuple(data.draw(st.lists(st.integers(0, 3), min_size=chunks, max_size=chunks))))


def begun(relay: Relay, chunk: int) -> range:
    """The rows that a chunk appends."""
    return range(sum(relay.appended[:chunk]), sum(relay.appended[: chunk + 1]))


@pytest.mark.quick
@settings(max_examples=40)
@given(st.sampled_from(sorted(NAMES)), st.integers(1, 5), st.integers(1, 7), st.booleans(), st.data())
def test_every_operation_finds_its_rows_and_every_gradient_is_summed_once(name, stages, microbatches, forward, data):
    """Replays the columns with names for arrays: a row is (microbatch, row), its gradient the set of chunks that read it."""
    relay = relay_of(name, stages, microbatches, forward, data)
    schedule, columns, last = relay.schedule, relay.columns, relay.schedule.chunks - 1
    slots = {(stage, slot): {} for stage in range(schedule.stages) for slot in range(relay.num_slots)}
    travelled = 0
    waiting = {}  # (kind, chunk, microbatch) -> rows of the message
    for tick, stage, kind, chunk, m, _ in sorted(schedule.operations()):
        column = {name: columns[name][tick, stage].tolist() for name in ("values", "result", "entering", "leaving")}
        existing = range(begun(relay, chunk).start)
        values = slots[stage, column["values"]]
        if kind not in (FORWARD, BACKWARD):
            assert all(values[row] == (m, row) for row in range(begun(relay, chunk).stop))
            continue
        fresh = columns["fresh"][tick, stage]
        result = {} if fresh else slots[stage, column["result"]]
        arrived = waiting.pop((kind, chunk, m), [])
        for row, place in enumerate(column["entering"]):
            if place >= 0 and kind == FORWARD:
                assert row not in result, "it has not come before"
                result[row] = arrived[place]
            elif place >= 0:
                assert not arrived[place] & result.get(row, set()), "summed twice"
                result[row] = result.get(row, set()) | arrived[place]
        if kind == FORWARD:
            assert all(result[row] == (m, row) for row in existing)
            result |= {row: (m, row) for row in begun(relay, chunk)}
            to = FORWARD, chunk + 1, m
        else:
            assert all(values[row] == (m, row) for row in range(begun(relay, chunk).stop))
            for row in begun(relay, chunk):  # complete where it is needed: of all later chunks, and of the head
                assert result[row] == {(m, c) for c in range(chunk + 1, last + 2)}
            result |= {row: result.get(row, set()) | {(m, chunk)} for row in existing}
            to = BACKWARD, chunk - 1, m
        slots[stage, column["result"]] = result
        leaving = [row for row in column["leaving"] if row >= 0]
        waiting[to] = [result[row] for row in leaving]
        assert column["leaving"][: len(leaving)] == leaving, (
            "the first places are used, so that the others need not travel"
        )
        if leaving:
            way = route(stage, schedule.stage_of(to[1]), schedule.stages)
            assert relay.loads[way][columns["travelling"][tick + 1, way]][stage] == len(leaving)
            travelled += len(leaving)
        if kind == FORWARD and chunk == last and BACKWARD in schedule.kinds:
            assert columns["deposit"][tick] != column["values"]
            slots[stage, int(columns["deposit"][tick])] = {row: {(m, last + 1)} for row in range(relay.num_rows)}
    assert not any(waiting.values())
    assert relay.traffic(1).moved == travelled, "nothing else is sent"


@pytest.mark.quick
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 3))
def test_rows_on_a_ring_are_as_many_as_the_papers_count(stages, virtual, rows):
    """P(P − 1)/2 + (V − 1) P (P − 1) chunks' rows with a cache, C(C − 1)/2 without. arXiv:2603.15031."""
    schedule = build("interleaved_1f1b", stages=stages, virtual=virtual, microbatches=stages)
    chunks = stages * virtual
    traffic = Relay(schedule, (rows,) * chunks).traffic(row_bytes=10)
    times = 2 * stages * rows * 10  # there and back, for each microbatch
    first, later = stages * (stages - 1) // 2, (virtual - 1) * stages * (stages - 1)
    assert traffic.moved == times * (first + later)
    assert traffic.naive == (times * chunks * (chunks - 1) // 2 if stages > 1 else 0)


@pytest.mark.quick
def test_a_zigzag_turns_without_sending():
    """At a turn the chunks share a stage; behind it, a stage lacks what was made since it last ran."""
    stages = [stage_of(c, 3, "zigzag") for c in range(6)]
    assert stages == [0, 1, 2, 2, 1, 0]
    assert [list(rows) for rows in windows(stages, [1] * 6)] == [[], [0], [0, 1], [], [2, 3], [1, 2, 3, 4]]


@pytest.mark.quick
def test_a_table_needs_a_number_for_each_chunk():
    schedule = build("1f1b", stages=2, microbatches=2)
    with pytest.raises(ValueError, match=r"appended=\(1, 1, 1\): .* 2 chunks"):
        Relay(schedule, (1, 1, 1))
    with pytest.raises(ValueError, match=r"appended=\(1, -1\)"):
        Relay(schedule, (1, -1))


@pytest.mark.quick
def test_slots_hold_what_is_in_flight_and_few_sums():
    """Microbatches, not chunks: of K3 on 8 stages with 3 chunks each a stage keeps 16, and sums of 8."""
    schedule = build("interleaved_1f1b", stages=8, virtual=3, microbatches=32)
    relay = Relay(schedule, (1, 0, 0) * 8)
    assert (relay.num_rows, relay.room) == (8, 3)
    assert relay.num_values == 16 and relay.num_slots == 24
    alive = np.zeros(schedule.mail.shape, int)
    for stage, m in relay.values:
        mine = [t for (_, c, of), t in schedule.ticks.items() if of == m and schedule.stage_of(c) == stage]
        alive[min(mine) : max(mine) + 1, stage] += 1
    assert alive.max() == relay.num_values and (alive <= relay.alive).all() and relay.alive.max() <= relay.num_slots
    assert relay.loads[UP].max() == 3
