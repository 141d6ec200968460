"""A plan of a whole step: its times follow from its figures, and what it says of memory from what is stored."""

import dataclasses
import functools

import numpy as np
import pytest
import tiny

from k3jax import configs
from k3jax.parallel.schedules import BACKWARD, FORWARD, build
from k3jax.parameters import count
from k3jax.plan.fit import activation_changes, fit, smallest_change, state_changes
from k3jax.plan.links import Seconds
from k3jax.plan.roofline import Roofline, Work, roofline
from k3jax.plan.step_plan import plan_step, told
from k3jax.plan.step_time import model_flops, step_time
from k3jax.plan.traffic import Traffic
from k3jax.train.devices import abstract_mesh
from k3jax.train.step import TrainStep
from k3jax.train.stored import hosted_bytes
from meshes import MeshSpec
from meshes.targets import Target

H200 = Target.load("h200")
NOTHING = Seconds(0.0, 0.0)


def small(memory: float) -> Target:
    """A device with little memory."""
    return dataclasses.replace(H200, memory=dataclasses.replace(H200.memory, bytes=int(memory)))


@functools.cache
def step(mesh: str = "pipe=2,expert=2", **changes) -> TrainStep:
    config = dataclasses.replace(tiny.STEP, schedule="1f1b", dtype="bfloat16", **changes)
    return TrainStep(config, abstract_mesh(MeshSpec.parse(mesh)), "cuda")


@functools.cache
def plan():
    return plan_step(step(), H200)


# ---- time ----------------------------------------------------------------------------------------------------------------


def test_a_part_lasts_as_long_as_what_it_waits_for():
    """989e12 operations of bfloat16 take a second at the full rate, and 70 to 45 % of it is reached."""
    sent = (Traffic("forward", ("expert",), "all-to-all", 450e9, 1.0),)
    work = Work("forward", {"bfloat16": 989e12, "float32": 494e12}, 4.8e12, sent, 64e9)
    one = roofline(work, MeshSpec(expert=8), H200)
    np.testing.assert_allclose(one.products, [2 / 0.7, 2 / 0.45])
    np.testing.assert_allclose(one.memory, [1 / 0.9, 1 / 0.7])
    np.testing.assert_allclose(one.links, [1 / 0.85, 1 / 0.6], rtol=1e-4)
    np.testing.assert_allclose(one.host, [1 / 0.85, 1 / 0.6])
    assert one.bound == "products"
    np.testing.assert_allclose(one.seconds, [2 / 0.7, 2 / 0.45 + 2 / 0.6], rtol=1e-4)


@pytest.mark.parametrize(("name", "virtual", "bubble"), [("1f1b", 1, 3 / 11), ("interleaved_1f1b", 2, 3 / 19)])
def test_ticks_last_as_long_as_their_longest_operation(name, virtual, bubble):
    schedule = build(name, stages=4, virtual=virtual, microbatches=8)
    runs = virtual * 8
    of = lambda part, seconds: Roofline(
        Work(part, {}, 0.0, ()), Seconds(seconds, 2 * seconds), NOTHING, NOTHING, NOTHING
    )
    time = step_time([of("forward", 1.0 * runs), of("backward", 2.0 * runs), of("optimizer", 5.0)], schedule)
    assert time.operations == {FORWARD: Seconds(1.0, 2.0), BACKWARD: Seconds(2.0, 4.0)}
    assert time.bubble.best == pytest.approx(bubble) == time.bubble.worst
    assert time.pipeline.best == pytest.approx(3 * runs / (1 - bubble)) and time.rest == Seconds(5.0, 10.0)
    assert time.total.worst == pytest.approx(2 * time.total.best)


def test_operations_that_a_model_needs():
    """nano by hand: two MLA layers of seven see half of all pairs; the others decay, read, correct and read a state."""
    c = configs.get("nano")
    _, active = count(c)
    pairs = 2 * (c.qk_nope_dim + c.qk_rope_dim + c.v_head_dim) * c.num_heads * 64
    state = 6 * c.kda_key_dim * c.kda_value_dim * c.num_heads
    mla = c.layer_kinds.count("M")
    want = 4 * 128 * (6 * active + 3 * (mla * pairs + (c.num_layers - mla) * state))
    assert model_flops(c, 4, 128) == pytest.approx(want)


@pytest.mark.quick
def test_a_plan_adds_up():
    made = plan()
    parts = {one.work.part: one for one in made.parts}
    assert {"forward", "backward", "optimizer", "embedding and head", "between stages"} <= parts.keys()
    flops = {name: sum(one.work.flops.values()) for name, one in parts.items()}
    assert flops["backward"] > 1.5 * flops["forward"] > 0, "the gradients of two factors, and nothing recomputed"
    assert 0 < made.time.total.best < made.time.total.worst and 0 < made.mfu.worst < made.mfu.best < 1
    assert made.fit.holds and made.change is None
    axes = {one.axes: one for one in made.axes}
    assert axes[("expert",)].bytes == pytest.approx(
        sum(sent.bytes for one in made.parts for sent in one.work.sent if sent.axes == ("expert",))
    )
    figures = told(made)
    assert figures["device_bytes"] == sum(m["reserved"] for m in figures["memory"] if m["place"] == "device")
    assert figures["step_seconds"]["worst"] == made.time.total.worst and len(figures["assumptions"]) >= 8


def test_what_waits_in_host_memory_crosses_its_link():
    hosting = step().changed(zero=2, activations="*=local-offload")
    hosted, parts = hosted_bytes(hosting), fit(hosting, H200).parts
    assert hosted["forward"] == hosted["backward"] > 0 and hosted["sums of gradients"] > 0
    in_host = {part.name for part in parts if part.place == "host"}
    assert in_host == {"sums of gradients", "stores: local-offload, away"}
    assert not hosted_bytes(step())


# ---- memory --------------------------------------------------------------------------------------------------------------


def test_the_smallest_change_fits_and_no_smaller_one_does():
    needed = {level: fit(step().changed(zero=level), H200).device for level in (0, 1)}
    assert needed[1] < needed[0]
    target = small(needed[1] / 0.9 + 8)
    change = smallest_change(step(), target)
    assert change and change.changes == {"zero": 1} and str(change) == "--zero=1"
    assert change.fit.holds and change.fit.device == needed[1] and not fit(step(), target).holds
    assert smallest_change(step(), small(1000)) is None


@pytest.mark.slow
def test_activations_are_given_up_where_the_state_is_not_enough():
    least = fit(step().changed(zero=2, activations="*=recompute"), H200)
    change = smallest_change(step(), small(least.device / 0.9 + 8))
    assert change and change.fit.holds and change.changes["activations"] != "*=keep"


def test_changes_come_in_order_of_their_cost():
    states, activations = list(state_changes(tiny.STEP)), list(activation_changes(tiny.STEP))
    assert states[0] == {} == activations[0]
    assert [c.get("zero", 0) for c in states] == sorted(c.get("zero", 0) for c in states)
    assert [c.get("microbatches", 2) for c in activations] == [2] * 5 + [4] * 5 + [8] * 5


@pytest.mark.slow
def test_a_changed_step_is_that_of_its_configuration():
    """Though its chunk is not traced again."""
    first = step(activations="*=recompute")
    fit(first, H200)
    for changes in ({"zero": 1}, {"activations": "group.in=local-offload,*=recompute"}, {"microbatches": 4}):
        config = dataclasses.replace(first.config, **changes)
        anew = TrainStep(config, first.mesh, "cuda")
        got, want = fit(first.changed(**changes), H200), fit(anew, H200)
        assert [(p.name, p.reserved) for p in got.parts] == [(p.name, p.reserved) for p in want.parts]
