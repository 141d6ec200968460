"""What a step is said to send is what its compiled program sends: over each axis, by each kind of collective."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax import lax
from jax.sharding import PartitionSpec as P

from k3jax.plan import hlo
from k3jax.plan.compiled import compile_step
from k3jax.plan.cost import Item, received, total, walk
from k3jax.plan.links import link_seconds
from k3jax.plan.traffic import ONCE, PARTS, by_part
from k3jax.train.devices import abstract_mesh
from k3jax.train.memory import state_parts
from k3jax.train.step import TrainStep
from meshes import AXES, MeshSpec
from meshes.targets import Target


def toy(mesh):
    """A loop over a table like the pipeline's: who does what in a tick depends on tick and stage."""
    table = np.array([[0, 2], [1, 0], [1, 1], [2, 0], [0, 1]], np.int32)  # [ticks, stages]
    sends = np.array([1, 0, 1, 0, 0], bool)

    def operation(x, w):
        with jax.named_scope("inner"):
            return lax.psum(x @ w, "expert")

    def local(x, w):
        stage = lax.axis_index("pipe")
        branches = [lambda x: x, lambda x: operation(x, w), lambda x: jnp.tanh(operation(operation(x, w), w))]
        vary = lambda x: lax.pcast(x, tuple(set(AXES) - jax.typeof(x).mat.varying), to="varying")

        def tick(x, row):
            kinds, goes = row
            with jax.named_scope("operation"):
                x = lax.switch(kinds[stage], [lambda x, b=b: vary(b(x)) for b in branches], x)
            with jax.named_scope("send"):
                x = lax.cond(goes, lambda: lax.ppermute(x, "pipe", [(0, 1)]), lambda: x)
            return x, None

        x, _ = lax.scan(tick, vary(x), (jnp.asarray(table), jnp.asarray(sends)))
        dead = lax.all_gather(x, "data")  # nobody reads it
        del dead
        return lax.psum_scatter(x, ("data", "expert"), tiled=True), lax.all_gather(w, "pipe")

    specs = P(("data", "expert")), P(None, None)
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(AXES), P(AXES))))
    return run.trace(jax.ShapeDtypeStruct((16, 8), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32))


@pytest.mark.quick
def test_branches_count_as_often_as_the_table_takes_them():
    spec = MeshSpec.parse("data=2,pipe=2,expert=2")
    traced = toy(spec.build())
    costs, branches = walk(traced.jaxpr, spec.sizes)
    # Stage 0 runs operations 0 1 1 2 0, stage 1 runs 2 0 1 0 1: four products each; x is 4 x 8, of float32.
    product = 2 * 4 * 8 * 8
    np.testing.assert_array_equal(total(costs, "flops", "operation"), [4 * product] * 2)
    np.testing.assert_array_equal(costs[Item("operation/inner", "all-reduce", ("expert",))], [4 * 128] * 2)
    assert costs[Item("send", "collective-permute", ("pipe",))].tolist() == [2 * 64] * 2, "half of the ranks receive"
    assert [shares.tolist() for shares in branches["send"]] == [[3 / 5, 2 / 5]]
    np.testing.assert_allclose(branches["operation"], [[0.4, 0.4, 0.2]])
    found = hlo.received(hlo.collectives(traced.lower().compile().as_text(), spec.sizes, hlo.taken_as(branches)))
    assert found == pytest.approx(received(costs))
    assert {kind for _, kind in found} == {"all-reduce", "collective-permute", "reduce-scatter", "all-gather"}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "axes", "bytes_received"),
    [
        ("f32[8]{0} all-gather(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}", ("expert",), 16),
        ("f32[8]{0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add", ("pipe", "expert"), 48),
        ("f32[8]{0} all-to-all(%x), replica_groups=[4,2]<=[2,2,2]T(2,1,0), dimensions={0}", ("data",), 16),
        ("bf16[8]{0} reduce-scatter(%x), replica_groups=mesh['data'=2,'pipe'=2,'expert'=2] {'data','expert'}",
         ("data", "expert"), 48),
        ("f32[8]{0} all-reduce(%x), channel_id=1, to_apply=%add", ("data", "pipe", "expert"), 56),
        ("(f32[4]{0}, f32[8]{0}) all-gather-start(%x), replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("data",), 16),
        ("(f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,2},{4,6}}",
         ("pipe",), 8),
    ],
)  # fmt: skip
def test_groups_are_read_in_all_forms(text, axes, bytes_received):
    program = f"HloModule m, num_partitions=8\n\nENTRY %main (x: f32[8]) -> f32[8] {{\n  %y = {text}\n}}\n"
    (one,) = hlo.collectives(program, {"data": 2, "pipe": 2, "expert": 2})
    assert (one.axes, one.received) == (axes, bytes_received)


CASES = [
    ("data=8", dict(zero=1)),
    ("expert=8", dict(zero=0)),
    ("data=2,context=4", dict(zero=2)),
    ("data=4,expert=2", dict(zero=2)),
    ("data=2,pipe=2,expert=2", dict(zero=2, virtual=2, schedule="interleaved_1f1b")),
    ("pipe=2,expert=2,context=2", dict(zero=0)),
    ("data=2,pipe=4", dict(zero=1, schedule="zbv", virtual=2)),
    ("pipe=4,expert=2", dict(zero=1, schedule="zb1p")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "how"), CASES, ids=str)
def test_planned_bytes_are_those_of_the_compiled_step(mesh, how):
    config = dict(schedule="1f1b", microbatches=4, global_batch=32, seq_len=16) | how
    step = tiny.train_step(mesh, **config)
    sizes = step.resolved.mesh.sizes
    walked = walk(step.step.trace(*step.operands()).jaxpr, sizes)
    made = compile_step(step, walked)
    planned, found = received(walked.costs), made.received
    state = sum(part.reserved for part in state_parts(step) if part.name != "gradients" and part.place == "device")
    assert state <= made.arguments <= 1.05 * state + 8192, "the batch and scalars are arguments too"
    assert made.temporaries > 0 and made.messages > 0 and made.compiling > 0
    for key in planned | found:
        # Norms of whole arrays, which XLA sums as it likes, are not planned: some hundred scalars. Equal messages, as of
        # segments' numbers to KDA and to MLA, XLA sends once.
        assert found.get(key, 0) == pytest.approx(planned.get(key, 0), rel=0.006, abs=2048), key
    assert {axis for axes, _ in found for axis in axes} == {axis for axis, size in sizes.items() if size > 1}


@pytest.mark.slow
def test_a_step_for_absent_devices_sends_what_its_exchange_does():
    """On GPUs rows travel by ragged messages; rounds in which most ranks send nothing count once."""
    model = dataclasses.replace(tiny.MODEL, num_layers=2, attn_res_block=None)
    config = dataclasses.replace(tiny.STEP, model=model, global_batch=16, zero=2)
    step = TrainStep(config, abstract_mesh(MeshSpec.parse("data=2,expert=4")), platform="cuda")
    costs = walk(step.step.trace(*step.operands()).jaxpr, step.resolved.mesh.sizes).costs
    found = by_part(costs, rounds=3)
    assert {t.part for t in found} <= set(PARTS)
    assert {t.kind for t in found if t.part in ("forward", "backward")} >= {"ragged-all-to-all"}
    assert not [t for t in found if "pipe" in t.axes or "context" in t.axes]
    rounds = {
        item: cost for item, cost in costs.items() if ONCE in item.scope.split("/") and item.what.startswith("ragged")
    }
    ragged = sum(t.bytes for t in found if t.kind == "ragged-all-to-all")
    every = received(costs)[("expert",), "ragged-all-to-all"]
    assert ragged == pytest.approx(every - 2 / 3 * received(rounds)[("expert",), "ragged-all-to-all"]) and rounds


@pytest.mark.quick
def test_links_that_leave_the_host_are_slower():
    target = dataclasses.replace(
        Target.load("h200"), latency=dataclasses.replace(Target.load("h200").latency, host=0, network=0)
    )
    spec = MeshSpec.parse("data=2,expert=8")
    seconds = functools.partial(link_seconds, 1e9, 1.0, spec=spec, target=target)
    low, high = target.efficiency.links
    assert seconds(("expert",), "all-to-all") == pytest.approx((1e9 / 450e9 / high, 1e9 / 450e9 / low))
    assert seconds(("data",), "all-to-all") == pytest.approx((1e9 / 50e9 / high, 1e9 / 50e9 / low))
    # Half of 15 peers and one are away; at best a byte enters a host once for its eight ranks.
    away, inside = 1e9 * 8 / 15, 1e9 * 7 / 15
    both = seconds(("data", "expert"), "all-gather")
    assert both == pytest.approx((max(away / 8 / 50e9, inside / 450e9) / high, away / 50e9 / low))
    assert seconds(("data",), "collective-permute").best == pytest.approx(1e9 / 50e9 / high)
