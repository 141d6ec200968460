"""Where things wait equals what the executor's stores do: their columns replayed, slot by slot."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.activations.hosting import host
from k3jax.activations.parking import park
from k3jax.activations.policy import STORAGES
from k3jax.activations.residency import MOMENTS, by_tick, reserved, resident, stays, transfers
from k3jax.activations.stores import make_store
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


def replayed(writes, reads):
    """Contents alive, from columns [time, stage] of slots: from a write to the last read before the slot is written again."""
    alive = np.zeros(writes[0].shape, int)
    for stage in range(alive.shape[1]):
        last = {}
        for time in range(len(alive)):
            for slot in (column[time, stage] for column in reads):
                if slot >= 0:
                    alive[last[slot] + 1 : time + 1, stage] += 1
                    last[slot] = time
            for slot in (column[time, stage] for column in writes):
                if slot >= 0:
                    alive[time, stage] += 1
                    last[slot] = time
    return alive


def moment(column, number):
    """A column of ticks as one of moments."""
    spread = np.full((MOMENTS * len(column), column.shape[1]), -1)
    spread[number::MOMENTS] = column
    return spread


def reading(schedule, made, read, slots):
    kinds = schedule.table[:, :, 0]
    return np.where((kinds > made) & (kinds <= read), slots, -1)


@given(spans(["keep"]))
@settings(max_examples=50)
def test_what_is_kept_is_what_the_columns_of_its_store_say(case):
    schedule, made, read, _ = case = built(*case)
    store = make_store(schedule, (made, read), "keep")
    alive = replayed([store.columns["write"]], [reading(schedule, made, read, store.columns["slot"])])
    np.testing.assert_array_equal(by_tick(resident(*case).device), alive)
    assert alive.max() == reserved(*case).device and not resident(*case).host.any()


@given(spans(["remote-offload"]))
@settings(max_examples=100)
def test_what_is_parked_is_what_the_columns_of_its_store_say(case):
    """In moments: operations read, then both writes, then what leaves in the next tick is read."""
    schedule, made, read, _ = case = built(*case)
    store, found = make_store(schedule, (made, read), "remote-offload"), resident(*case)
    writes = [moment(store.columns["write"], 1)]
    reads = [moment(reading(schedule, made, read, store.columns["slot"]), 0)]
    for way, (sender, receiver) in (("there", (0, 1)), ("back", (1, 0))):
        for pair, moves in store.columns[way].items():
            arrives, leaves = np.full((2, *schedule.mail.shape), -1)
            arrives[:, pair[receiver]] = moves[:, 1]
            leaves[:, pair[sender]] = store.columns["next"][way][pair]
            writes.append(moment(arrives, 1))
            reads.append(moment(leaves, 2))
    np.testing.assert_array_equal(found.device, replayed(writes, reads))
    plan = park(schedule, made, read)
    np.testing.assert_array_equal(by_tick(found.device), plan.resident)
    assert found.parked.any() == bool(plan.moves) and transfers(*case) == len(plan.moves)
    assert reserved(*case) == (plan.num_slots + bool(plan.moves), 0)
    assert plan.num_slots <= resident(schedule, made, read, "keep").peak.max()


@given(spans(["local-offload"]))
@settings(max_examples=60)
def test_what_is_hosted_is_what_the_columns_of_its_store_say(case):
    schedule, made, read, _ = case = built(*case)
    store, found = make_store(schedule, (made, read), "local-offload"), resident(*case)
    columns, plan = store.columns, host(schedule, made, read)
    fetched, landed = columns["fetch"][:, :, 0], columns["fetch"][:, :, 1]
    device = replayed([columns["land"], landed], [reading(schedule, made, read, columns["slot"])])
    np.testing.assert_array_equal(by_tick(found.device), device)
    np.testing.assert_array_equal(by_tick(found.host), replayed([columns["write"]], [fetched]))
    assert found.host.max() == plan.write.max() + 1 and found.peak.max() == plan.num_slots
    assert reserved(*case).device > plan.num_slots and reserved(*case).host > plan.num_host_slots - 1
    assert (fetched >= 0).sum() * 2 == transfers(*case)


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
        assert of_key[0].ticks[0] == schedule.ticks[made, *key] and of_key[-1].ticks[1] == schedule.ticks[read, *key]
        for here, there in zip(of_key, of_key[1:], strict=False):
            assert here.place == "host" and here.ticks[1] == there.ticks[0] or here.ticks[1] + 1 == there.ticks[0]
        assert of_key[-1][:2] == ("device", home) and of_key[-1].ticks[0] <= schedule.ticks[first_reader, *key]
    away = [stay for of_key in found.values() for stay in of_key[:-1]]
    moved = {"local-offload": 2 * len(away), "remote-offload": len(away)}.get(storage, 0)
    assert transfers(*case) == moved and (moved == 0 or storage in ("local-offload", "remote-offload"))


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
