"""Pipeline tables: an executor that follows them computes the right thing, and their figures are the closed forms."""

import itertools
from dataclasses import replace

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.parallel.schedules import (
    BACKWARD,
    DOWN,
    FORWARD,
    IDLE,
    NAMES,
    RECIPES,
    STAY,
    UP,
    WEIGHT,
    Schedule,
    build,
    forward_only,
)

COUNTS = (1, 2, 3, 4, 5, 7, 8, 11, 16)
ROUNDING = 1e-9  # relative; the figures are ratios of a few thousand added floats


def cases(stages: int):
    """(name, virtual, microbatches) of every table the sweeps build."""
    return [(n, v, m) for n in NAMES for v in virtuals(n, 3) for m in COUNTS]


def virtuals(name: str, most: int):
    """Numbers of virtual stages that a schedule takes."""
    return (RECIPES[name].virtual,) if RECIPES[name].virtual else tuple(range(1, most + 1))


@st.composite
def arguments(draw, names=NAMES, microbatches=24):
    name = draw(st.sampled_from(names))
    virtual = draw(st.sampled_from(virtuals(name, 4)))
    counts = {"stages": draw(st.integers(1, 8)), "microbatches": draw(st.integers(1, microbatches))}
    return {"name": name, "virtual": virtual} | counts


def run(schedule: Schedule) -> None:
    """The plainest executor, with the names of values in place of arrays: boxes are overwritten without asking.

    A read must find exactly the value that the operation is about. The values: ("x", c, m) is the input of chunk c,
    ("dy", c, m) the cotangent of its output, (made, read, c, m) what one kind stores and another is the last to read.
    """
    stages, last, kinds = schedule.stages, schedule.chunks - 1, schedule.kinds
    stores = [(a, b) for a, b in itertools.combinations(kinds, 2)] or [(FORWARD, FORWARD)]
    slots = {store: schedule.slots(*store) for store in stores}
    stored = {store: [[None] * (slots[store].max() + 1) for _ in range(stages)] for store in stores}
    mail = [[None] * schedule.num_mail_slots for _ in range(stages)]
    sent = [None] * stages
    ran = []
    for tick in range(schedule.num_ticks):
        for s in range(stages):
            for way, step in ((UP, -1), (DOWN, 1), (STAY, 0)):
                if schedule.arrivals[tick, s, way] >= 0:
                    assert schedule.moves[tick, way]
                    mail[s][schedule.arrivals[tick, s, way]] = sent[(s + step) % stages]
        if schedule.embed_forward[tick] >= 0:
            first = schedule.stage_of(0)
            mail[first][schedule.mail[tick, first]] = ("x", 0, schedule.embed_forward[tick])
        sent = [None] * stages
        for s, (kind, c, m, _) in enumerate(schedule.table[tick].tolist()):
            if kind == IDLE:
                continue
            assert schedule.stage_of(c) == s
            if kind == FORWARD:
                assert mail[s][schedule.mail[tick, s]] == ("x", c, m)
                sent[s] = ("x", c + 1, m)
            elif kind == BACKWARD:
                assert mail[s][schedule.mail[tick, s]] == ("dy", c, m)
                sent[s] = ("dy", c - 1, m)
            for made, read in stores:
                if kind == made:
                    stored[made, read][s][slots[made, read][tick, s]] = (made, read, c, m)
                elif made < kind <= read:
                    assert stored[made, read][s][slots[made, read][tick, s]] == (made, read, c, m)
            ran.append((kind, c, m))
        if schedule.head[tick] >= 0:
            m = schedule.head[tick]
            assert sent[schedule.last_stage] == ("x", last + 1, m)
            sent[schedule.last_stage] = ("dy", last, m)
        if schedule.embed_backward[tick] >= 0:
            assert sent[schedule.stage_of(0)] == ("dy", -1, schedule.embed_backward[tick])
    everything = [(k, c, m) for k in kinds for c in range(last + 1) for m in range(schedule.microbatches)]
    assert sorted(ran) == sorted(everything)
    for column, wanted in (("embed_forward", True), ("head", True), ("embed_backward", BACKWARD in kinds)):
        seen = getattr(schedule, column)
        assert sorted(seen[seen >= 0].tolist()) == (list(range(schedule.microbatches)) if wanted else [])


@pytest.mark.parametrize(
    "stages", [1, 2, 3, pytest.param(4, marks=pytest.mark.quick), 5, pytest.param(8, marks=pytest.mark.slow)]
)
def test_every_table_is_valid_and_executes(stages):
    for name, virtual, microbatches in cases(stages):
        schedule = build(name, stages=stages, virtual=virtual, microbatches=microbatches)
        for table in (schedule, forward_only(schedule)):
            table.validate()
            run(table)
            assert table.num_slots == table.in_flight().max()
            assert table.table.dtype == table.arrivals.dtype == table.mail.dtype == np.int32


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
    np.testing.assert_array_equal(plain.mail, interleaved.mail)


# ---- figures ---------------------------------------------------------------------------------------------------------


def closed_form(name: str, p: int, m: int, v: int) -> float:
    """Free-running, with a backward of twice a forward, half of it weight gradients. zbv: ours, chunks are half as large."""
    busy = {"zb1p": 3 * m, "zbv": 3 * 2 * m}.get(name, v * m)
    return (p - 1) / (busy + p - 1)


FIGURES = [(name, v) for name in NAMES for v in (1, 2, 4) if v in virtuals(name, 4)] + [
    ("forward", v) for v in (1, 2, 4)
]


@pytest.mark.quick
@pytest.mark.parametrize(("name", "virtual"), FIGURES)
@pytest.mark.parametrize("rounds", [1, 2, 4, 8])
@pytest.mark.parametrize("stages", [2, 4, 8, 16])
def test_bubble_is_the_closed_form_in_both_clocks(name, stages, rounds, virtual):
    microbatches = rounds * stages
    made_of = "interleaved_1f1b" if name == "forward" else name
    schedule = build(made_of, stages=stages, virtual=virtual, microbatches=microbatches)
    schedule = forward_only(schedule) if name == "forward" else schedule
    expected = closed_form(name, stages, microbatches, virtual)
    assert schedule.bubble_fraction() == pytest.approx(expected, rel=ROUNDING)
    if name == "plain_1f1b":  # rows of both kinds cost the longer one: the price of holding less
        assert schedule.bubble_fraction(lockstep=True) > expected
        return
    assert schedule.bubble_fraction(lockstep=True) == pytest.approx(expected, rel=ROUNDING)
    if WEIGHT not in schedule.kinds:  # there the closed form does not depend on the times
        for lockstep in (False, True):
            other = schedule.bubble_fraction(forward=2.0, backward=5.0, lockstep=lockstep)
            assert other == pytest.approx(expected, rel=ROUNDING)


@given(stages=st.integers(1, 10), microbatches=st.integers(1, 40), lockstep=st.booleans())
def test_plain_1f1b_has_the_closed_form_bubble_for_any_count(stages, microbatches, lockstep):
    bubble = build("1f1b", stages=stages, microbatches=microbatches).bubble_fraction(lockstep=lockstep)
    assert bubble == pytest.approx((stages - 1) / (microbatches + stages - 1), rel=ROUNDING, abs=ROUNDING)


@pytest.mark.parametrize(("virtual", "bubble"), [(1, 0.179), (2, 0.099), (4, 0.052)])
def test_published_bubbles_of_eight_stages(virtual, bubble):
    schedule = build("interleaved_1f1b", stages=8, virtual=virtual, microbatches=32)
    for lockstep in (False, True):
        assert schedule.bubble_fraction(lockstep=lockstep) == pytest.approx(bubble, abs=5e-4)  # printed to three digits


def test_published_bubbles_of_zero_bubble_and_plain_tables():
    figure = lambda name, lockstep, **more: build(name, stages=8, microbatches=32, **more).bubble_fraction(
        lockstep=lockstep
    )
    assert figure("zb1p", False) == pytest.approx(0.068, abs=5e-4)
    assert figure("zb1p", True) == pytest.approx(0.068, abs=5e-4)
    assert figure("plain_1f1b", False) == pytest.approx(0.179, abs=5e-4)
    assert figure("plain_1f1b", True) == pytest.approx(0.351, abs=5e-4)


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
    nothing = np.full((3, 2, 3), -1, np.int32)
    schedule = Schedule("hand-made", "ring", (FORWARD, BACKWARD), 2, 1, 1, table, nothing[..., 0], nothing)
    assert schedule.bubble_fraction(lockstep=True) == pytest.approx(1 - 3 / 5)


@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 5, 8])
@pytest.mark.parametrize("rounds", [2, 3.4])
def test_in_flight_is_the_lockstep_formula(stages, virtual, rounds):
    microbatches = int(np.ceil(rounds * stages))
    schedule = build("interleaved_1f1b", stages=stages, virtual=virtual, microbatches=microbatches)
    expected = [2 * (stages - s) - 1 + (virtual - 1) * stages for s in range(stages)]
    np.testing.assert_array_equal(schedule.in_flight(), expected)
    assert schedule.num_slots == max(expected)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_in_flight_of_the_other_tables_is_their_formula(stages):
    in_flight = lambda name, virtual=1: build(name, stages=stages, virtual=virtual, microbatches=4 * stages).in_flight()
    assert in_flight("plain_1f1b").tolist() == [stages - s for s in range(stages)]
    assert in_flight("zb1p").tolist() == [2 * stages - 1] * stages
    assert (
        in_flight("zbv", 2).tolist() == [2 * stages] * stages
    )  # of half the size: as many layers as 1F1B's worst stage
    assert in_flight("gpipe").tolist() == [4 * stages] * stages


@given(of=arguments(names=("zb1p",)))
def test_weight_gradients_are_never_far_behind_their_forwards(of):
    """What W needs waits no longer than this many forwards of its stage."""
    schedule = build(**of)
    for stage in range(schedule.stages):
        kinds = schedule.table[:, stage, 0]
        assert (np.cumsum(kinds == FORWARD) - np.cumsum(kinds == WEIGHT)).max() <= 2 * schedule.stages - 1


def test_few_messages_wait():
    """Messages are read soon: a mailbox is small, whatever the number of microbatches."""
    for name in ("1f1b", "plain_1f1b", "zb1p"):
        assert build(name, stages=8, microbatches=64).num_mail_slots == 2
    assert build("interleaved_1f1b", stages=8, virtual=3, microbatches=64).num_mail_slots <= 2
    assert build("zbv", stages=8, virtual=2, microbatches=64).num_mail_slots <= 4


def test_evaluation_keeps_one_chunk_a_stage():
    schedule = forward_only(build("interleaved_1f1b", stages=4, virtual=2, microbatches=8))
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


def corrupted(schedule: Schedule) -> tuple[Schedule, np.ndarray, np.ndarray, np.ndarray]:
    """A copy that can be changed: table, mail, arrivals."""
    table, mail, arrivals = schedule.table.copy(), schedule.mail.copy(), schedule.arrivals.copy()
    return replace(schedule, table=table, mail=mail, arrivals=arrivals), table, mail, arrivals


IDLE_CELL = (IDLE, -1, -1, -1)


@pytest.fixture
def good() -> Schedule:
    return build("interleaved_1f1b", stages=2, virtual=2, microbatches=4)


@pytest.mark.parametrize(("chunk", "why"), [(0, "runs a second time"), (2, "does not find its message")])
def test_an_operation_that_runs_twice_is_found(good, chunk, why):
    schedule, table, mail, _ = corrupted(good)
    first, stage = cell(good, FORWARD, chunk, 0)
    free = (table[:, stage, 0] == IDLE) & (table[:, 1 - stage, 0] == FORWARD)
    again = np.flatnonzero(free[first:])[0] + first
    table[again, stage], mail[again, stage] = table[first, stage], mail[first, stage]
    with pytest.raises(ValueError, match=why):
        schedule.validate()


def test_an_operation_that_never_runs_is_found(good):
    schedule, table, mail, _ = corrupted(good)
    table[cell(good, BACKWARD, 0, 3)], mail[cell(good, BACKWARD, 0, 3)] = IDLE_CELL, -1
    with pytest.raises(ValueError, match="message .* overwrites|finishes 15 of 16"):
        schedule.validate()


def test_a_slot_reused_while_it_is_live_is_found(good):
    schedule, table, _, _ = corrupted(good)
    slot = table[(*cell(good, FORWARD, 0, 0), 3)]
    for kind in (FORWARD, BACKWARD):
        table[(*cell(good, kind, 0, 1), 3)] = slot
    with pytest.raises(ValueError, match="overwrites a live slot"):
        schedule.validate()

    good = build("gpipe", stages=2, microbatches=3)  # there cotangents wait for long
    schedule, _, mail, arrivals = corrupted(good)
    for m in (0, 1):
        tick, stage = cell(good, FORWARD, 1, m)
        arrivals[tick + 1, stage, STAY] = mail[cell(good, BACKWARD, 1, m)] = 2
    with pytest.raises(ValueError, match="overwrites live slot"):
        schedule.validate()


@pytest.mark.parametrize("kind", [FORWARD, BACKWARD])
def test_an_operation_before_its_message_is_found(kind):
    good = build("1f1b", stages=4, microbatches=4)
    schedule, table, mail, _ = corrupted(good)
    tick, stage = cell(good, kind, 1, 0)
    before, _ = cell(good, kind, 0 if kind == FORWARD else 2, 0)
    assert table[before, stage, 0] == IDLE
    table[before, stage], table[tick, stage] = table[tick, stage].copy(), IDLE_CELL
    mail[before, stage], mail[tick, stage] = mail[tick, stage], -1
    with pytest.raises(ValueError, match="does not find its message"):
        schedule.validate()


def test_a_message_sent_to_another_slot_is_found(good):
    schedule, _, mail, arrivals = corrupted(good)
    tick, stage = cell(good, BACKWARD, 2, 0)
    sent, _ = cell(good, BACKWARD, 3, 0)
    assert arrivals[sent + 1, stage, UP] == mail[tick, stage]  # of two stages each is above and below the other
    arrivals[sent + 1, stage, UP] += 1
    with pytest.raises(ValueError, match="does not find its message"):
        schedule.validate()


def test_a_message_without_a_receiver_or_a_sender_is_found(good):
    schedule, _, _, arrivals = corrupted(good)
    tick, _ = cell(good, FORWARD, 0, 0)
    arrivals[tick + 1, 1, UP] = -1
    with pytest.raises(ValueError, match="is not received"):
        schedule.validate()
    schedule, _, _, arrivals = corrupted(good)
    arrivals[0, 0, UP] = 0
    with pytest.raises(ValueError, match="nobody sent"):
        schedule.validate()


def test_a_weight_gradient_before_its_input_gradient_is_found():
    good = build("zb1p", stages=2, microbatches=2)
    schedule, table, mail, _ = corrupted(good)
    first, second = cell(good, BACKWARD, 1, 0), cell(good, WEIGHT, 1, 0)
    table[first], table[second] = table[second].copy(), table[first].copy()
    mail[first], mail[second] = mail[second], mail[first]
    with pytest.raises(ValueError, match="does not find its residual"):
        schedule.validate()


@given(of=arguments(names=("gpipe", "1f1b", "interleaved_1f1b")))
def test_a_row_holds_one_kind_where_backward_runs_whole(of):
    """All ranks run one program: a row of both kinds would cost the longer one."""
    rows = build(**of).table[:, :, 0]
    assert all(len(set(row.tolist()) - {IDLE}) == 1 for row in rows)


def test_tables_of_another_shape_are_found(good):
    with pytest.raises(ValueError, match="do not fit 4 stages"):
        replace(good, stages=4).validate()


@given(of=arguments(microbatches=9), data=st.data())
def test_no_number_of_a_training_table_can_change_unnoticed(of, data):
    """But the mailbox slot of chunk 0's forward: it may be any free one, since it is left in the same tick."""
    schedule = build(**of)
    wrong, table, mail, arrivals = corrupted(schedule)
    array = data.draw(st.sampled_from([table, mail, arrivals]))
    index = data.draw(st.integers(0, array.size - 1))
    if array is mail:
        operation = table.reshape(-1, 4)[index]
        hypothesis.assume((operation[:2] != (FORWARD, 0)).any())
    top = max(schedule.num_slots, schedule.stages * schedule.virtual, schedule.microbatches)
    array.flat[index] = data.draw(st.integers(-2, top).filter(lambda value: value != array.flat[index]))
    with pytest.raises(ValueError, match="is not valid"):
        wrong.validate()


def test_a_built_table_cannot_be_changed_in_place(good):
    with pytest.raises(ValueError, match="read-only"):
        good.table[0, 0, 0] = IDLE


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown schedule 'nope': choose one of gpipe, plain_1f1b, 1f1b, .*zbv"):
        build("nope", stages=2, microbatches=2)


def test_plain_1f1b_with_virtual_stages_points_to_interleaving():
    with pytest.raises(ValueError, match=r"microbatches=4, stages \(pipe\)=2, virtual=2: .*interleaved_1f1b"):
        build("1f1b", stages=2, virtual=2, microbatches=4)
    with pytest.raises(ValueError, match="zbv got .*virtual=1: it needs virtual=2"):
        build("zbv", stages=2, microbatches=4)


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
    with pytest.raises(ValueError, match="weight is a part of backward=2.0, above 0 and below it: got 2.0"):
        build("zb1p", stages=2, microbatches=2).bubble_fraction(weight=2.0)
    with pytest.raises(ValueError, match="got forward=0, backward=2.0"):
        good.bubble_fraction(forward=0)
