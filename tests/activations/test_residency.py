"""Where things wait equals what the executor's stores do: their columns replayed, slot by slot."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.activations.hosting import host
from k3jax.activations.parking import park
from k3jax.activations.policy import STORAGES
from k3jax.activations.residency import reserved, resident, stays, transfers
from k3jax.activations.stores import HostStore, make_store
from k3jax.parallel.schedules import RECIPES, WEIGHT, build


@st.composite
def spans(draw, storages=STORAGES):
    """A schedule's name and counts, two of its kinds in order, and a storage."""
    name = draw(st.sampled_from(sorted(RECIPES)))
    recipe = RECIPES[name]
    virtual = recipe.virtual or draw(st.integers(1, 3))
    made = draw(st.sampled_from(recipe.kinds[:-1]))
    read = draw(st.sampled_from(recipe.kinds[recipe.kinds.index(made) + 1 :]))
    counts = dict(stages=draw(st.integers(1, 5)), virtual=virtual, microbatches=draw(st.integers(1, 9)))
    return name, counts, made, read, draw(st.sampled_from(storages))


def built(name, counts, made, read, storage):
    return build(name, **counts), made, read, storage


def replayed(shape, writes, reads):
    """Contents alive, from columns [tick, stage] of slots: from a write to the last read before the slot is written again."""
    alive = np.zeros(shape, int)
    for stage in range(shape[1]):
        written, last = {}, {}
        for tick in range(shape[0]):
            for slot in (column[tick, stage] for column in reads):
                if slot >= 0:
                    assert slot in written, "reads what was never written"
                    alive[last[slot] + 1 : tick + 1, stage] += 1
                    last[slot] = tick
            for slot in (column[tick, stage] for column in writes):
                if slot >= 0:
                    alive[tick, stage] += 1
                    written[slot] = last[slot] = tick
    return alive


def columns_of(store, schedule, made, read):
    """((writes, reads) on the device, (writes, reads) in host memory) of a store."""
    kinds, columns = schedule.table[:, :, 0], store.columns
    if isinstance(store, HostStore):
        fetch = columns["fetch"]
        device = [columns["land"], fetch[:, :, 1]], [columns["slot"]]
        return device, ([columns["write"]], [fetch[:, :, 0]])
    reads = [np.where((kinds > made) & (kinds <= read), columns["slot"], -1)]
    writes = [columns["write"]]
    for (sender, receiver), moves in zip(store.pairs, columns["moves"], strict=True):
        leaves, arrives = np.full((2, *schedule.mail.shape), -1)
        leaves[:, sender], arrives[:, receiver] = moves[:, 0], moves[:, 1]
        reads, writes = [*reads, leaves], [*writes, arrives]
    return (writes, reads), ([], [])


@given(spans([s for s in STORAGES if s != "recompute"]))
@settings(max_examples=150)
def test_what_is_alive_is_what_the_columns_of_the_store_say(case):
    schedule, made, read, storage = case = built(*case)
    store = make_store(schedule, (made, read), storage)
    found = resident(*case)
    device, away = columns_of(store, schedule, made, read)
    np.testing.assert_array_equal(found.device, replayed(schedule.mail.shape, *device))
    np.testing.assert_array_equal(found.host, replayed(schedule.mail.shape, *away))
    assert found.device.max() <= reserved(*case).device and found.host.max() <= reserved(*case).host


@given(spans())
@settings(max_examples=100)
def test_stays_follow_each_other_from_the_first_reader_to_the_last(case):
    schedule, made, read, storage = case = built(*case)
    first_reader = schedule.kinds[schedule.kinds.index(made) + 1]
    found = stays(*case)
    assert found.keys() == {key[1:] for key in schedule.ticks}
    for key, of_key in found.items():
        home = schedule.stage_of(key[0])
        if storage == "recompute":
            assert not of_key
            continue
        assert (of_key[0].first, of_key[-1].last) == (schedule.ticks[made, *key], schedule.ticks[read, *key])
        assert all(here.last == there.first for here, there in zip(of_key, of_key[1:], strict=False))
        assert of_key[-1][:2] == ("device", home) and of_key[-1].first <= schedule.ticks[first_reader, *key]
    away = [stay for of_key in found.values() for stay in of_key[:-1]]
    moved = {"local-offload": 2 * len(away), "remote-offload": len(away)}.get(storage, 0)
    assert transfers(*case) == moved and (moved == 0 or storage in ("local-offload", "remote-offload"))


@given(spans(["remote-offload"]))
@settings(max_examples=60)
def test_parked_things_are_those_of_the_parking_plan(case):
    schedule, made, read, _ = case = built(*case)
    plan, found = park(schedule, made, read), resident(*case)
    np.testing.assert_array_equal(found.device, plan.resident)
    assert found.parked.any() == bool(plan.moves) and transfers(*case) == len(plan.moves)
    assert reserved(*case) == (plan.num_slots + bool(plan.moves), 0)
    assert plan.num_slots <= resident(schedule, made, read, "keep").peak.max()


@given(spans(["local-offload"]))
@settings(max_examples=60)
def test_hosted_things_are_those_of_the_hosting_plan(case):
    schedule, made, read, _ = case = built(*case)
    plan, found = host(schedule, made, read), resident(*case)
    assert found.host.max() == plan.write.max() + 1 and found.peak.max() == plan.num_slots
    assert (plan.fetch[:, :, 0] >= 0).sum() * 2 == transfers(*case)


def test_hosting_leaves_little_on_the_device_and_parking_levels_it():
    """1F1B in rows of one kind on 4 stages: 7, 5, 3, 1 contents when they stay where they are."""
    schedule = build("1f1b", stages=4, microbatches=16)
    peaks = {s: resident(schedule, *schedule.kinds, s).peak.tolist() for s in STORAGES}
    assert peaks["keep"] == [7, 5, 3, 1] and peaks["recompute"] == [0] * 4
    assert max(peaks["remote-offload"]) < 7 and max(peaks["local-offload"]) <= 2


def test_weight_gradients_of_their_own_have_spans_of_their_own():
    schedule = build("zb1p", stages=4, microbatches=8)
    forward, backward, weight = schedule.kinds
    assert weight == WEIGHT
    short, whole = (resident(schedule, forward, last, "keep").own.sum() for last in (backward, weight))
    assert short < whole
