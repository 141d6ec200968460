"""Pipeline tables: an executor that follows them computes the right thing, and their figures are the closed forms."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.parallel.schedules import BACKWARD, FORWARD, IDLE, NAMES, Schedule, build

COUNTS = range(1, 21)
ROUNDING = 1e-9  # relative; the figures are ratios of a few thousand added floats


def cases(stages: int):
    """(name, virtual, microbatches) of every table the sweeps build."""
    return [(n, v, m) for n in NAMES for v in ((1,) if n == "1f1b" else (1, 2, 3, 4)) for m in COUNTS]


@st.composite
def arguments(draw, names=NAMES, microbatches=24):
    name = draw(st.sampled_from(names))
    virtual = 1 if name == "1f1b" else draw(st.integers(1, 4))
    counts = {"stages": draw(st.integers(1, 8)), "microbatches": draw(st.integers(1, microbatches))}
    return {"name": name, "virtual": virtual} | counts


def run(schedule: Schedule) -> None:
    """The plainest executor, with the names of values in place of arrays: boxes are overwritten without asking.

    A read must find exactly the value that the operation is about. The values: ("x", c, m) is the input of chunk c,
    ("saved", c, m) what its forward keeps, ("dy", c, m) the cotangent of its output.
    """
    stages, last = schedule.stages, schedule.stages * schedule.virtual - 1
    boxes = {kind: [[None] * schedule.num_slots for _ in range(stages)] for kind in ("x", "saved", "dy")}
    ahead, back = [None] * stages, [None] * stages  # what each stage sends
    ran = []
    for tick in range(schedule.num_ticks):
        for s in range(stages):
            for kind, slot, message in zip(
                ("x", "dy"), schedule.arrivals[tick, s], (ahead[s - 1], back[(s + 1) % stages]), strict=True
            ):
                if slot >= 0:
                    boxes[kind][s][slot] = message
        if schedule.embed_forward[tick] >= 0:
            boxes["x"][0][schedule.table[tick, 0, 3]] = ("x", 0, schedule.embed_forward[tick])
        ahead, back = [None] * stages, [None] * stages
        for s, (kind, c, m, slot) in enumerate(schedule.table[tick]):
            assert kind == IDLE or c % stages == s
            if kind == FORWARD:
                assert boxes["x"][s][slot] == ("x", c, m)
                boxes["saved"][s][slot] = ("saved", c, m)
                ahead[s] = ("x", c + 1, m)
            elif kind == BACKWARD:
                assert boxes["saved"][s][slot] == ("saved", c, m)
                assert boxes["dy"][s][slot] == ("dy", c, m)
                back[s] = ("dy", c - 1, m)
            if kind != IDLE:
                ran.append((int(kind), int(c), int(m)))
        if schedule.head[tick] >= 0:
            m = schedule.head[tick]
            assert ahead[stages - 1] == ("x", last + 1, m)
            boxes["dy"][stages - 1][schedule.table[tick, stages - 1, 3]] = ("dy", last, m)
        if schedule.embed_backward[tick] >= 0:
            assert back[0] == ("dy", -1, schedule.embed_backward[tick])
    everything = [(k, c, m) for k in schedule.kinds for c in range(last + 1) for m in range(schedule.microbatches)]
    assert sorted(ran) == sorted(everything)
    for column, wanted in (("embed_forward", True), ("head", True), ("embed_backward", BACKWARD in schedule.kinds)):
        seen = getattr(schedule, column)
        assert sorted(seen[seen >= 0].tolist()) == (list(range(schedule.microbatches)) if wanted else [])


def most_alive(schedule: Schedule) -> int:
    """Most (chunk, microbatch) that a stage must keep in one tick, from the tables alone."""
    alive = 0
    for s in range(schedule.stages):
        kind, chunk = schedule.table[:, s, 0], schedule.table[:, s, 1]
        born = (schedule.arrivals[:, s, 0] >= 0).astype(int) + ((kind == FORWARD) & (chunk == 0))
        dies = kind == schedule.kinds[-1]
        alive = max(alive, int((np.cumsum(born) - np.cumsum(dies) + dies).max()))
    return alive


@pytest.mark.parametrize("stages", [pytest.param(s, marks=pytest.mark.quick) if s == 4 else s for s in range(1, 9)])
def test_every_table_is_valid_and_executes(stages):
    for name, virtual, microbatches in cases(stages):
        schedule = build(name, stages=stages, virtual=virtual, microbatches=microbatches)
        schedule.validate()
        run(schedule)
        assert schedule.num_slots == most_alive(schedule)
        assert schedule.table.dtype == schedule.arrivals.dtype == np.int32


@pytest.mark.quick
@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5, 6, 8])
def test_any_number_of_microbatches_finishes_on_four_stages(microbatches, virtual):
    """Fewer microbatches than stages, and counts that do not divide, are the classic ways to hang a pipeline."""
    schedule = build("interleaved_1f1b", stages=4, virtual=virtual, microbatches=microbatches)
    schedule.validate()
    run(schedule)
    assert (schedule.table[:, :, 0] == FORWARD).sum() == (schedule.table[:, :, 0] == BACKWARD).sum()
    assert (schedule.table[:, :, 0] == FORWARD).sum() == 4 * virtual * microbatches


def test_one_virtual_stage_interleaves_nothing():
    plain, interleaved = (build(name, stages=4, microbatches=7) for name in ("1f1b", "interleaved_1f1b"))
    np.testing.assert_array_equal(plain.table, interleaved.table)
    np.testing.assert_array_equal(plain.arrivals, interleaved.arrivals)


# ---- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("name", ["interleaved_1f1b", "forward"])
@pytest.mark.parametrize("virtual", [1, 2, 4])
@pytest.mark.parametrize("rounds", [1, 2, 4, 8])
@pytest.mark.parametrize("stages", [2, 4, 8, 16])
def test_bubble_is_the_closed_form_in_both_clocks(name, stages, rounds, virtual):
    microbatches = rounds * stages
    schedule = build(name, stages=stages, virtual=virtual, microbatches=microbatches)
    expected = (stages - 1) / (virtual * microbatches + stages - 1)
    for lockstep in (False, True):
        assert schedule.bubble_fraction(lockstep=lockstep) == pytest.approx(expected, rel=ROUNDING)
        other = schedule.bubble_fraction(forward=2.0, backward=5.0, lockstep=lockstep)
        assert other == pytest.approx(expected, rel=ROUNDING)  # the closed form does not depend on the times


@given(stages=st.integers(1, 10), microbatches=st.integers(1, 40), lockstep=st.booleans())
def test_plain_1f1b_has_the_closed_form_bubble_for_any_count(stages, microbatches, lockstep):
    bubble = build("1f1b", stages=stages, microbatches=microbatches).bubble_fraction(lockstep=lockstep)
    assert bubble == pytest.approx((stages - 1) / (microbatches + stages - 1), rel=ROUNDING, abs=ROUNDING)


@pytest.mark.parametrize(("virtual", "bubble"), [(1, 0.179), (2, 0.099), (4, 0.052)])
def test_published_bubbles_of_eight_stages(virtual, bubble):
    schedule = build("interleaved_1f1b", stages=8, virtual=virtual, microbatches=32)
    for lockstep in (False, True):
        assert schedule.bubble_fraction(lockstep=lockstep) == pytest.approx(bubble, abs=5e-4)  # printed to three digits


@given(of=arguments())
def test_lockstep_never_beats_free_running_ranks(of):
    schedule = build(**of)
    free, locked = schedule.bubble_fraction(), schedule.bubble_fraction(lockstep=True)
    assert -ROUNDING <= free <= locked + ROUNDING
    assert locked < 1


def test_a_row_of_mixed_kinds_is_timed_by_its_slowest_stage():
    """Two ranks that never wait for each other: lock-step adds the longer kind of each row, free running does not."""
    table = np.full((3, 2, 4), -1, np.int32)
    table[:, :, 0] = IDLE
    table[0, 0], table[1, 0], table[1, 1], table[2, 1] = (1, 0, 0, 0), (2, 0, 0, 0), (1, 1, 0, 0), (2, 1, 0, 0)
    schedule = Schedule("hand-made", 2, 1, 1, table, np.full((3, 2, 2), -1, np.int32))
    assert schedule.bubble_fraction(lockstep=True) == pytest.approx(1 - 3 / 5)


@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 5, 8])
@pytest.mark.parametrize("rounds", [2, 3.4])
def test_in_flight_is_the_lockstep_formula(stages, virtual, rounds):
    microbatches = int(np.ceil(rounds * stages))
    schedule = build("interleaved_1f1b", stages=stages, virtual=virtual, microbatches=microbatches)
    expected = [2 * (stages - s) - 1 + (virtual - 1) * stages for s in range(stages)]
    np.testing.assert_array_equal(schedule.in_flight(), expected)
    assert max(expected) <= schedule.num_slots <= max(expected) + 1  # at most one input waits beside them


def test_evaluation_keeps_one_chunk_a_stage():
    schedule = build("forward", stages=4, virtual=2, microbatches=8)
    assert schedule.in_flight().tolist() == [1, 1, 1, 1]
    assert schedule.num_slots == 1


def test_gantt_is_a_line_a_stage_and_numbers_many_microbatches():
    text = build("1f1b", stages=2, microbatches=2).gantt()
    assert text.splitlines() == [
        "stage 0 | F0.0 F0.1 .    .    B0.0 B0.1",
        "stage 1 | .    F1.0 B1.0 F1.1 B1.1 .",
    ]
    long = build("interleaved_1f1b", stages=2, virtual=2, microbatches=40).gantt()
    assert "F2.39" in long and "B3.39" in long and len(long.splitlines()) == 2


# ---- what validate protects ------------------------------------------------------------------------------------------


def cell(schedule: Schedule, kind: int, chunk: int, microbatch: int) -> tuple[int, int]:
    """(tick, stage) of an operation."""
    found = np.argwhere((schedule.table[:, :, :3] == (kind, chunk, microbatch)).all(axis=2))
    assert len(found) == 1
    return tuple(found[0].tolist())


def corrupted(schedule: Schedule) -> tuple[Schedule, np.ndarray, np.ndarray]:
    table, arrivals = schedule.table.copy(), schedule.arrivals.copy()
    return replace(schedule, table=table, arrivals=arrivals), table, arrivals


IDLE_CELL = (IDLE, -1, -1, -1)


@pytest.fixture
def good() -> Schedule:
    return build("interleaved_1f1b", stages=2, virtual=2, microbatches=4)


@pytest.mark.parametrize(("chunk", "why"), [(0, "runs a second time"), (2, "does not find its input")])
def test_an_operation_that_runs_twice_is_found(good, chunk, why):
    schedule, table, _ = corrupted(good)
    first, stage = cell(good, FORWARD, chunk, 0)
    free = (table[:, stage, 0] == IDLE) & (table[:, 1 - stage, 0] == FORWARD)
    table[np.flatnonzero(free[first:])[0] + first, stage] = table[first, stage]
    with pytest.raises(ValueError, match=why):
        schedule.validate()


def test_an_operation_that_never_runs_is_found(good):
    schedule, table, _ = corrupted(good)
    table[cell(good, BACKWARD, 0, 3)] = IDLE_CELL
    with pytest.raises(ValueError, match="finishes 15 of 16"):
        schedule.validate()


def test_a_slot_reused_while_it_is_live_is_found(good):
    schedule, table, _ = corrupted(good)
    slot = table[(*cell(good, FORWARD, 0, 0), 3)]
    for kind in (FORWARD, BACKWARD):
        table[(*cell(good, kind, 0, 1), 3)] = slot
    with pytest.raises(ValueError, match="overwrites a live slot"):
        schedule.validate()

    schedule, _, arrivals = corrupted(good)
    first, second = (good.table[(*cell(good, FORWARD, 1, m), 3)] for m in (0, 1))
    tick, _ = cell(good, FORWARD, 0, 1)
    assert arrivals[tick + 1, 1, 0] == second != first
    arrivals[tick + 1, 1, 0] = first
    with pytest.raises(ValueError, match="overwrites live slot"):
        schedule.validate()


def test_an_operation_before_its_input_is_found(good):
    schedule, table, _ = corrupted(good)
    tick, stage = cell(good, FORWARD, 1, 0)
    table[tick - 1, stage], table[tick, stage] = table[tick, stage].copy(), IDLE_CELL
    with pytest.raises(ValueError, match="does not find its input"):
        schedule.validate()


def test_a_backward_before_its_cotangent_is_found():
    good = build("1f1b", stages=4, microbatches=4)
    schedule, table, _ = corrupted(good)
    (tick, stage), (before, _) = cell(good, BACKWARD, 0, 0), cell(good, BACKWARD, 1, 0)
    table[before, stage], table[tick, stage] = table[tick, stage].copy(), IDLE_CELL
    with pytest.raises(ValueError, match="does not find its residual and cotangent"):
        schedule.validate()


def test_a_cotangent_sent_to_another_slot_is_found(good):
    schedule, table, arrivals = corrupted(good)
    tick, stage = cell(good, BACKWARD, 2, 0)
    sent, _ = cell(good, BACKWARD, 3, 0)
    assert arrivals[sent + 1, stage, 1] == table[tick, stage, 3]
    arrivals[sent + 1, stage, 1] = (table[tick, stage, 3] + 1) % good.num_slots
    with pytest.raises(ValueError, match="holds no residual for"):
        schedule.validate()


def test_a_message_without_a_receiver_or_a_sender_is_found(good):
    schedule, _, arrivals = corrupted(good)
    tick, _ = cell(good, FORWARD, 0, 0)
    arrivals[tick + 1, 1, 0] = -1
    with pytest.raises(ValueError, match="is not received"):
        schedule.validate()
    schedule, _, arrivals = corrupted(good)
    arrivals[0, 0, 0] = 0
    with pytest.raises(ValueError, match="nobody sent"):
        schedule.validate()


def test_rows_of_mixed_kinds_are_found():
    """The same work, one row earlier: right for ranks that run freely, but one program pays the longer kind."""
    good = build("1f1b", stages=2, microbatches=4)
    schedule, table, _ = corrupted(good)
    tick, stage = cell(good, FORWARD, 0, 2)
    before = next(t for t in range(tick, 0, -1) if BACKWARD in table[t, :, 0] and table[t, 0, 0] == IDLE)
    table[before, stage], table[tick, stage] = table[tick, stage].copy(), IDLE_CELL
    with pytest.raises(ValueError, match="one kind for all stages"):
        schedule.validate()


def test_tables_of_another_shape_are_found(good):
    with pytest.raises(ValueError, match="do not fit 4 stages"):
        replace(good, stages=4).validate()


@given(of=arguments(names=("1f1b", "interleaved_1f1b"), microbatches=9), data=st.data())
def test_no_number_of_a_training_table_can_change_unnoticed(of, data):
    """Not so for evaluation: there chunk 0 may use any free slot, since it is left in the same tick."""
    schedule = build(**of)
    wrong, table, arrivals = corrupted(schedule)
    array = data.draw(st.sampled_from([table, arrivals]))
    index = data.draw(st.integers(0, array.size - 1))
    top = max(schedule.num_slots, schedule.stages * schedule.virtual, schedule.microbatches)
    array.flat[index] = data.draw(st.integers(-2, top).filter(lambda value: value != array.flat[index]))
    with pytest.raises(ValueError, match="is not valid"):
        wrong.validate()


def test_a_built_table_cannot_be_changed_in_place(good):
    with pytest.raises(ValueError, match="read-only"):
        good.table[0, 0, 0] = IDLE


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown schedule 'nope': choose one of forward, 1f1b, interleaved_1f1b"):
        build("nope", stages=2, microbatches=2)


def test_plain_1f1b_with_virtual_stages_points_to_interleaving():
    with pytest.raises(ValueError, match=r"microbatches=4, stages \(pipe\)=2, virtual=2: .*interleaved_1f1b"):
        build("1f1b", stages=2, virtual=2, microbatches=4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", [{"stages": 0}, {"virtual": 0}, {"microbatches": 0}, {"microbatches": -3}])
def test_counts_below_one_are_refused_by_name(name, wrong):
    counts = {"stages": 2, "virtual": 1, "microbatches": 4} | wrong
    expected = r"microbatches={microbatches}, stages \(pipe\)={stages}, virtual={virtual}: each must be at least 1"
    with pytest.raises(ValueError, match=expected.format(**counts)):
        build(name, **counts)


def test_times_that_mean_nothing_are_refused(good):
    with pytest.raises(ValueError, match="runs backward whole: got weight=1.0, pass weight=None"):
        good.bubble_fraction(weight=1.0)
    with pytest.raises(ValueError, match="got forward=0, backward=2.0"):
        good.bubble_fraction(forward=0)
