"""Pipeline ZeRO-2: no gradient is lost between two buffers and the owners' shards, and the device holds no more than them."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import loop_copies
from hypothesis import given
from hypothesis import strategies as st
from zero_toy import LEAVES, Toy

from k3jax import compat
from k3jax.parallel.boxes import vary
from k3jax.parallel.gradient_sums import ShardedSums
from k3jax.parallel.schedules import NAMES, RECIPES, build, forward_only
from k3jax.parallel.zero import buffering, bytes_per_parameter

# ---- the plan --------------------------------------------------------------------------------------------------------


@pytest.mark.quick
@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 5), st.integers(1, 14))
def test_two_buffers_serve_any_table(name, stages, virtual, microbatches):
    """Every gradient reaches its shard once, no buffer is written while it is flushed or before, first flushes store."""
    schedule = build(name, stages=stages, virtual=RECIPES[name].virtual or virtual, microbatches=microbatches)
    plan = buffering(schedule)
    plan.validate(schedule)
    assert plan.num_buffers == min(2, schedule.virtual)
    early = (plan.flush[..., 0] >= 0).sum(axis=0)
    if schedule.virtual <= 2:
        assert (early == 0).all(), "buffers are enough for all chunks"
    else:  # a ring runs its chunks in turn, each for a round of as many microbatches as there are stages
        rounds = math.ceil(schedule.microbatches / schedule.stages)
        assert (early + 2 == schedule.virtual * rounds).all()


FAULTS = {
    "a flush is left out": ("flush", lambda a, at: -1),
    "a flush is of the other buffer": ("flush", lambda a, at: (1 - a[at][0], *a[at][1:])),
    "a flush goes to another chunk": ("flush", lambda a, at: (a[at][0], (a[at][1] + 1) % 3, a[at][2])),
    "a flush adds to memory that nobody wrote, or resets a shard": ("flush", lambda a, at: (*a[at][:2], 1 - a[at][2])),
    "the last flush goes to another chunk": ("rest", lambda a, at: ((a[at][0] + 1) % 3, a[at][1])),
    "the last flush resets a shard": ("rest", lambda a, at: (a[at][0], 1 - a[at][1])),
    "a gradient is dropped": ("buffer", lambda a, at: -1),
    "a gradient goes to the other buffer": ("buffer", lambda a, at: 1 - a[at]),
    "a buffer is reset between microbatches, or goes on with another chunk": ("starts", lambda a, at: not a[at]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_plan_is_refused_wherever_it_is_wrong(fault):
    schedule = build("interleaved_1f1b", stages=2, virtual=3, microbatches=4)
    plan = buffering(schedule)
    column, change = FAULTS[fault]
    right = getattr(plan, column)
    used = {"flush": plan.flush[..., 0] >= 0, "rest": plan.rest[..., 0] >= 0}.get(column, plan.buffer >= 0)
    places = np.argwhere(used)
    assert len(places) >= 4
    for at in map(tuple, places):
        wrong = right.copy()
        wrong[at] = change(right, at)
        with pytest.raises(ValueError, match="gradient buffers of interleaved_1f1b, stage"):
            dataclasses.replace(plan, **{column: wrong}).validate(schedule)


def test_a_buffer_is_not_used_before_its_flush_has_finished():
    """Flushes moved a few ticks later than planned meet the run that fills the buffer again."""
    schedule = build("interleaved_1f1b", stages=2, virtual=3, microbatches=4)
    plan = buffering(schedule)
    ends = np.flatnonzero(plan.flush[:, 0, 0] >= 0)
    buffer = plan.flush[ends[0], 0, 0]
    again = next(t for t in range(ends[0], schedule.num_ticks) if plan.buffer[t, 0] == buffer)
    late = plan.flush.copy()
    late[again, 0], late[ends[0], 0] = late[ends[0], 0], -1
    with pytest.raises(ValueError, match=f"tick {again} writes buffer {buffer} while it is flushed"):
        dataclasses.replace(plan, flush=late).validate(schedule)


def test_a_table_without_backwards_has_nothing_to_buffer():
    with pytest.raises(ValueError, match="makes no gradients"):
        buffering(forward_only(build("1f1b", stages=2, microbatches=2)))


# ---- the sums --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 2])
def test_gradients_of_microbatches_add_up(zero):
    """1, 2 and 4 are 7: of three chunks on a stage each is flushed twice, and neither flush may take the other's place."""
    toy = Toy("data=2,pipe=2", "interleaved_1f1b", 3, 3, zero)
    params, inputs, _ = toy.problem()
    ones = lambda tree, value: jax.tree.map(lambda a: jnp.full_like(a, value), tree)
    params |= {"embed": ones(params["embed"], 1), "chunks": ones(params["chunks"], 0), "head": ones(params["head"], 1)}
    grads = toy.gradients(params, jnp.ones_like(inputs), jnp.asarray([1.0, 2.0, 4.0]))
    for grad in jax.tree.leaves(grads):
        np.testing.assert_array_equal(grad, 2 * 7)  # both replicas of data see the same


TABLES = [
    ("data=4", "interleaved_1f1b", 1, 3),
    ("data=4,pipe=2", "interleaved_1f1b", 3, 5),
    ("data=2,pipe=2,expert=2", "1f1b", 1, 4),
    ("data=2,pipe=2,context=2", "zbv", 2, 4),
    ("data=2,pipe=4", "zb1p", 1, 6),
    ("pipe=2,expert=2,context=2", "gpipe", 4, 3),
    ("pipe=8", "plain_1f1b", 1, 2),
]


@pytest.mark.parametrize(("mesh", "name", "virtual", "microbatches"), TABLES)
def test_leaves_that_do_not_divide_by_their_replicas_get_the_same_gradients(mesh, name, virtual, microbatches):
    """Leaves of 5, 7 and 1 elements."""
    toys = [Toy(mesh, name, virtual, microbatches, zero) for zero in (0, 2)]
    want, got = (toy.gradients(*toy.problem()) for toy in toys)
    for leaf in LEAVES:
        assert got[leaf].shape == want[leaf].shape and got[leaf].dtype == want[leaf].dtype == jnp.float32
        # float32 sums in another order: replicas before microbatches
        np.testing.assert_allclose(got[leaf], want[leaf], atol=1e-6 * float(jnp.abs(want[leaf]).max()))


def test_no_sum_depends_on_memory_that_nobody_wrote(monkeypatch):
    """Host memory that is made in the step holds anything on a GPU; on CPU it would be zeros, and hide it."""
    made = ShardedSums.empty

    def unwritten(self, chunks):
        sums = made(self, chunks)
        anything = vary(jax.tree.map(lambda a: jnp.full(a.shape, jnp.nan, a.dtype), sums["shards"]))
        return sums | {"shards": jax.device_put(anything, jax.memory.Space.Host)}

    toy = Toy("data=2,pipe=2", "interleaved_1f1b", 3, 3, 2)
    want = toy.gradients(*toy.problem())
    monkeypatch.setattr(ShardedSums, "empty", unwritten)
    again = dataclasses.replace(toy)
    jax.tree.map(np.testing.assert_array_equal, again.gradients(*again.problem()), want)


# ---- what the device holds -------------------------------------------------------------------------------------------


def carry_bytes(mesh: str, virtual: int, zero: int) -> tuple[int, int]:
    """Bytes of the executor's loop on the device and in host memory."""
    toy = Toy(mesh, "interleaved_1f1b", virtual, 8, zero)
    jaxpr = jax.make_jaxpr(toy.gradients)(*toy.problem()).jaxpr
    (loop,) = (e for e in equations(jaxpr) if e.primitive.name == "scan")
    carried = loop.params["jaxpr"].out_avals[: compat.scan_arity(loop)[1]]
    on_host = [a.memory_space == jax.memory.Space.Host for a in carried]
    size = lambda host: sum(a.size * a.dtype.itemsize for a, h in zip(carried, on_host, strict=True) if h == host)
    return size(False), size(True)


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(item, "jaxpr") or hasattr(item, "eqns"):
                    yield from equations(getattr(item, "jaxpr", item))


def test_flushes_talk_only_to_members_of_their_stage():
    """Members of a group over data, expert and context take the same branch; over pipe they would not."""
    toy = Toy("data=2,pipe=2,expert=2", "interleaved_1f1b", 3, 4, 2)
    found = []
    for eqn in equations(jax.make_jaxpr(toy.gradients)(*toy.problem()).jaxpr):
        if eqn.primitive.name == "cond" and "pipe" in eqn.invars[0].aval.mat.varying:
            inside = [e for branch in eqn.params["branches"] for e in equations(branch.jaxpr)]
            assert not any(e.primitive.name == "ppermute" for e in inside)
            found += [e.params["axis_name"] for e in inside if e.primitive.name == "reduce_scatter"]
    assert found == [("data", "expert", "context")] * len(LEAVES)


def chunk_bytes(replicas: int) -> int:
    """Of one chunk's float32 gradient with the padding that makes it divide."""
    return sum(4 * math.ceil(math.prod(shape) / replicas) * replicas for shape in LEAVES.values())


@pytest.mark.parametrize("virtual", [1, 2, 4, 7])
def test_the_device_holds_two_chunk_buffers_however_many_chunks(virtual):
    mesh, replicas = "data=4,pipe=2", 4
    (whole, nothing), (device, host) = (carry_bytes(mesh, virtual, zero) for zero in (0, 2))
    gradients = device - (whole - virtual * 4 * sum(map(math.prod, LEAVES.values())))
    assert nothing == 0
    assert gradients == min(2, virtual) * chunk_bytes(replicas)
    # Two chunks are flushed after the loop only.
    assert host == (virtual > 2) * virtual * chunk_bytes(replicas) // replicas


def test_a_gpu_holds_no_more_for_more_chunks(absent_gpus):
    """Compiled for GPUs, where host memory is apart: it holds the shards."""

    def memory(virtual: int, zero: int) -> tuple[float, float]:
        """In float32 chunks, on the device and in host memory."""
        toy = Toy(
            "data=4,pipe=2", "interleaved_1f1b", virtual, 4, zero, {"large": (4, 1 << 18), "odd": (3, 5)}, absent_gpus
        )
        norms = lambda *problem: jax.tree.map(lambda g: jnp.square(g).sum(), toy.sharded(*problem))
        compiled = jax.jit(norms).lower(*jax.eval_shape(toy.problem)).compile().memory_analysis()
        sizes = compiled.temp_size_in_bytes, compiled.host_temp_size_in_bytes
        return tuple(size / (4 * toy.elements) for size in sizes)

    (few, few_on_host), (many, many_on_host) = memory(3, 2), memory(6, 2)
    # Two buffers, what a weight gradient makes, and temporary copies: 4.25. With zero=0 it is 6 and 12.
    assert many == pytest.approx(few, rel=0.01)
    assert few_on_host == pytest.approx(3 / 4, rel=0.01) and many_on_host == pytest.approx(6 / 4, rel=0.01)


def test_the_loop_copies_neither_buffers_nor_shards():
    """A flush that reads a buffer, and a sum that is written to it, without an order between them: XLA copies it twice."""
    for virtual in (1, 3):
        toy = Toy("data=4,pipe=2", "interleaved_1f1b", virtual, 5, 2)
        copies = loop_copies(toy.gradients.lower(*toy.problem()).compile().as_text())
        owned = [math.ceil(math.prod(shape) / 4) for shape in LEAVES.values()]
        kept = {(min(2, virtual), 4 * n) for n in owned} | {(virtual, n) for n in owned if (virtual, n) != (1, 1)}
        assert not kept & set(copies), copies


# ---- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_bytes_per_parameter_are_those_of_the_report(replicas):
    """bfloat16 weight, float32 master weight and momentum; gradients of 2 and 4 bytes."""
    at = lambda zero, gradient: bytes_per_parameter(zero, replicas, gradient=gradient)
    assert [at(zero, 2).device for zero in (0, 1, 2)] == [12, 4 + 8 / replicas, 2 + 10 / replicas]
    assert [at(zero, 4).device for zero in (0, 1, 2)] == [14, 6 + 8 / replicas, 2 + 12 / replicas]
    for virtual, buffers in ((1, 1), (2, 2), (3, 2), (8, 2)):
        pipeline_zero = bytes_per_parameter(2, replicas, virtual=virtual)
        assert pipeline_zero.device == pytest.approx(2 + 8 / replicas + 4 * buffers / virtual)
        assert pipeline_zero.host == 4 / replicas
    assert bytes_per_parameter(0, replicas, moments=8).device == 14 + 4


@pytest.mark.parametrize(
    "wrong", [dict(zero=3, replicas=1), dict(zero=0, replicas=0), dict(zero=2, replicas=1, virtual=-1)]
)
def test_bytes_of_what_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="zero is 0, 1 or 2, replicas at least 1"):
        bytes_per_parameter(**wrong)
