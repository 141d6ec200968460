"""The fastest schedule that fits, and pictures of tables."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.parallel.schedules import NAMES, best, build, candidates
from k3jax.parallel.schedules.picture import draw, starts
from k3jax.parallel.schedules.timing import costs

pytestmark = pytest.mark.quick


def lockstep_time(schedule, forward=1.0, backward=2.0):
    cost = np.array(costs(schedule, forward, backward, None), float)
    return cost[schedule.table[:, :, 0]].max(axis=1).sum()


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 9), st.integers(1, 16))
def test_nothing_that_fits_is_faster(stages, virtual, microbatches, limit):
    """Against all tables: the least time among those within the limit, and an error exactly if there are none."""
    fits = lambda schedule: int(schedule.in_flight().max()) <= limit
    every = candidates(stages, virtual, microbatches)
    fitting = [schedule for schedule in every if fits(schedule)]
    if not fitting:
        with pytest.raises(ValueError, match="no schedule fits: .*in flight"):
            best(every, fits)
        return
    found = best(every, fits)
    assert fits(found) and lockstep_time(found) == pytest.approx(min(map(lockstep_time, fitting)), rel=1e-9)


def test_what_zero_bubble_gains_it_pays_in_memory():
    """8 stages, 32 microbatches: zb1p is fastest; with less room 1F1B in rows of one kind is, and then plain 1F1B."""
    choose = lambda most: (
        best(candidates(8, 1, 32), lambda s: s.alive(s.kinds[0], s.kinds[-1]).sum(axis=1).max() <= most).name
    )
    assert choose(120) == "zb1p" and choose(64) in ("1f1b", "interleaved_1f1b") and choose(40) == "plain_1f1b"
    with pytest.raises(ValueError, match=r"tried zb1p \(15 in flight\)"):
        choose(10)


def test_the_costliest_question_is_asked_last():
    asked = []
    best(candidates(4, 2, 8), lambda s: asked.append(s.name) or s.name != "zbv")
    assert asked[0] == "zbv" and len(asked) == 2


def test_candidates_are_the_tables_made_for_so_many_virtual_stages():
    assert {s.name for s in candidates(2, 1, 4)} == set(NAMES) - {"zbv"}
    assert {s.name for s in candidates(2, 2, 4)} == {"gpipe", "interleaved_1f1b", "zbv"}
    assert {s.name for s in candidates(2, 3, 4)} == {"gpipe", "interleaved_1f1b"}


def test_ticks_begin_when_the_slowest_rank_has_ended():
    schedule = build("zb1p", stages=3, microbatches=5)
    begun = starts(schedule, 1.0, 3.0, 1.0)
    assert begun[-1] == lockstep_time_with(schedule, 1.0, 3.0, 1.0) and len(begun) == schedule.num_ticks + 1


def lockstep_time_with(schedule, forward, backward, weight):
    busy = (forward + backward) * schedule.virtual * schedule.microbatches
    return pytest.approx(busy / (1 - schedule.bubble_fraction(forward, backward, weight, lockstep=True)))


def test_a_picture_has_a_bar_for_every_operation_and_a_curve_for_every_stage():
    pytest.importorskip("matplotlib")
    tables = [build(name, stages=2, virtual=2, microbatches=3) for name in ("interleaved_1f1b", "zbv")]
    figure = draw(tables)
    assert len(figure.axes) == 4
    for schedule, (gantt, memory) in zip(tables, zip(figure.axes[::2], figure.axes[1::2], strict=True), strict=True):
        operations = list(schedule.operations())
        assert len(gantt.patches) == len(gantt.texts) == len(operations)
        ends = starts(schedule, 1.0, 2.0, None)
        left = sorted(round(bar.get_x(), 9) for bar in gantt.patches)
        assert left == sorted(round(ends[tick], 9) for tick, *_ in operations)
        held = np.stack([stairs.get_data().values for stairs in memory.patches], axis=1)
        np.testing.assert_array_equal(held, schedule.alive(schedule.kinds[0], schedule.kinds[-1]))


def test_without_matplotlib_a_picture_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        draw([build("1f1b", stages=1, microbatches=1)])
