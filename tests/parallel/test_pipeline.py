"""The executor equals a plain loop over chunks, for any table, and its loop is as lean as promised."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from k3jax.activations import stores
from k3jax.activations.hosting import host
from k3jax.activations.parking import park
from k3jax.activations.policy import ActivationPolicy
from k3jax.activations.residency import reserved
from k3jax.parallel import pipeline
from k3jax.parallel.reports import Report
from k3jax.parallel.schedules import BACKWARD, FORWARD, NAMES, RECIPES, UP, build, forward_only
from meshes import AXES, MeshSpec

T, D, N = 4, 8, 16  # tokens of a rank, model width, vocabulary
TOY_NAMES = ("toy.pre", "toy.out")


def toy_chunk(weights, x, extras):
    """Normalises without an epsilon: zeros or leftovers in a bubble would make nan."""
    w, skip = weights["chunk"], weights["dense"]
    unit = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    h = checkpoint_name(unit @ w["a"], "toy.pre")
    y = checkpoint_name(jnp.tanh(h) @ w["b"] + unit @ skip["c"], "toy.out")
    report = Report({"seen": jnp.ones((), jnp.int32) * extras}, {"largest": lax.stop_gradient(y).max() - 100})
    return x + jnp.sin(y), report


def toy_embed(params, ids, axis):
    rows = params["table"].shape[0]
    local = ids - (lax.axis_index(axis) * rows if axis else 0)
    mine = (local >= 0) & (local < rows)
    x = jnp.where(mine[:, None], params["table"][jnp.clip(local, 0, rows - 1)], 0)
    return lax.psum(x, axis) if axis else x


def toy_head(params, x, ids):
    logits = (x @ params["w"]).astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, None], 1).sum()


def toy_params(chunks):
    keys = iter(jax.random.split(jax.random.key(0), 5))
    draw = lambda *shape: jax.random.normal(next(keys), shape) * 0.4
    return {
        "embed": {"table": draw(N, D)},
        "chunks": {"a": draw(chunks, D, D), "b": draw(chunks, D, D)},
        "dense": {"c": draw(D, D)},
        "head": {"w": draw(D, N)},
    }


def plain(params, ids, targets):
    """Sum of losses, and the largest that each chunk reports."""
    total, largest = 0.0, []
    for m in range(ids.shape[0]):
        for rank in range(ids.shape[1] // T):
            part = slice(rank * T, rank * T + T)
            x = toy_embed(params["embed"], ids[m, part], None)
            for c in range(params["chunks"]["a"].shape[0]):
                chunk = jax.tree.map(lambda a, c=c: a[c], params["chunks"])
                x, report = toy_chunk({"chunk": chunk, "dense": params["dense"]}, x, 1)
                largest.append(report.maxima["largest"])
            total += toy_head(params["head"], x, targets[m, part])
    return total, jnp.stack(largest).reshape(-1, params["chunks"]["a"].shape[0]).max(0)


def executed(spec, schedule, policy="*=keep"):
    """(params, ids, targets) -> Outcome with chunks in global order and whole gradients, and the function itself."""
    mesh, stages, virtual = spec.build(), schedule.stages, schedule.virtual
    place = np.array([(schedule.stage_of(c), c // stages) for c in range(schedule.chunks)]).T
    chunk_at = np.empty((stages, virtual), int)
    chunk_at[tuple(place)] = np.arange(schedule.chunks)
    by_stage = lambda a: a[chunk_at]
    by_chunk = lambda a: a[tuple(place)]
    specs = {"embed": P("pipe"), "chunks": P("pipe"), "dense": P(), "head": P()}
    tokens = P(None, ("data", "expert", "context"))

    def local(params, ids, targets):
        checkpoint = lambda f: ActivationPolicy.parse(policy).checkpoint(f, TOY_NAMES)
        program = pipeline.Program(
            embed=lambda p, m: toy_embed(p, ids[m], "pipe"),
            chunk=checkpoint(toy_chunk),
            extras=lambda v, m: jnp.int32(1),
            head=lambda p, x, m, last: lax.psum(
                jnp.where(last, toy_head(p, jnp.where(last, x, 1.0), targets[m]), 0), "pipe"
            ),
        )
        mine = params | {"chunks": jax.tree.map(lambda a: a[0], params["chunks"])}
        out = pipeline.run(schedule, program, mine, jnp.ones(()), ActivationPolicy.parse(policy))
        over_replicas = lambda tree: jax.tree.map(lambda a: lax.psum(a, pipeline.REPLICAS), tree)
        by_rank = lambda tree: jax.tree.map(lambda a: a[None], tree)
        grads = out.grads
        if grads is not None:
            grads = over_replicas(grads | {"chunks": by_rank(grads["chunks"])})
            grads |= {part: jax.tree.map(lambda a: lax.psum(a, "pipe"), grads[part]) for part in ("dense", "head")}
        traffic = jax.tree.map(lambda a: lax.psum(a, AXES), out.traffic)
        sums, maxima = out.report
        report = Report(over_replicas(sums), jax.tree.map(lambda a: lax.pmax(a, pipeline.REPLICAS), maxima))
        return pipeline.Outcome(over_replicas(out.loss), by_rank(report), grads, out.misplaced, traffic)

    outs = pipeline.Outcome(P(), P("pipe"), specs if BACKWARD in schedule.kinds else None, P(), P())
    sharded = jax.shard_map(local, mesh=mesh, in_specs=(specs, tokens, tokens), out_specs=outs)

    def function(params, ids, targets):
        stacked = params | {"chunks": jax.tree.map(by_stage, params["chunks"])}
        out = sharded(stacked, ids, targets)
        if out.grads is not None:
            out = out._replace(grads=out.grads | {"chunks": jax.tree.map(by_chunk, out.grads["chunks"])})
        return out._replace(report=jax.tree.map(by_chunk, out.report))

    return jax.jit(function)


def toy_tokens(microbatches, ranks, seed=1):
    random = np.random.default_rng(seed)
    shape = (microbatches, ranks * T)
    return jnp.asarray(random.integers(0, N, shape)), jnp.asarray(random.integers(0, N, shape))


CASES = [
    ("data=2,pipe=2,expert=2", "interleaved_1f1b", 2, 4, "*=keep"),
    ("pipe=4", "1f1b", 1, 2, "*=recompute"),
    ("pipe=4", "interleaved_1f1b", 2, 3, "toy.out=recompute,*=keep"),
    ("pipe=2,context=2", "plain_1f1b", 1, 4, "*=keep"),
    ("pipe=4,data=2", "gpipe", 2, 5, "*=keep"),
    ("pipe=4,expert=2", "zb1p", 1, 5, "*=keep"),
    ("pipe=2,data=2,context=2", "zbv", 2, 4, "*=recompute"),
    ("pipe=4", "interleaved_1f1b", 2, 8, "*=remote-offload"),
    ("pipe=2,data=2", "1f1b", 1, 4, "*=local-offload"),
    ("pipe=4", "zb1p", 1, 8, "toy.pre=local-offload,*=remote-offload"),
]
MORE = [
    ("pipe=4,data=2", "interleaved_1f1b", virtual, microbatches, "*=keep")
    for virtual in (1, 2)
    for microbatches in (1, 2, 3, 4, 5, 6, 8)
] + [("pipe=8", "1f1b", 1, 3, "*=keep"), ("context=8", "interleaved_1f1b", 3, 2, "*=recompute")]


def check_against_plain(mesh, name, virtual, microbatches, policy):
    spec = MeshSpec.parse(mesh)
    schedule = build(name, stages=spec.pipe, virtual=virtual, microbatches=microbatches)
    ids, targets = toy_tokens(microbatches, spec.data * spec.expert * spec.context)
    params = toy_params(schedule.chunks)
    out = executed(spec, schedule, policy)(params, ids, targets)
    assert out.misplaced == 0
    (want, largest), want_grads = jax.value_and_grad(plain, has_aux=True)(params, ids, targets)
    np.testing.assert_allclose(out.loss, want, rtol=1e-5)
    jax.tree.map(
        # float32 sums of another order: a few ulp of the largest element
        lambda got, right: np.testing.assert_allclose(got, right, atol=2e-6 * float(jnp.abs(right).max()) + 1e-7),
        out.grads,
        want_grads,
    )
    # A report is of real microbatches only: bubbles and recomputation add nothing.
    assert (out.report.sums["seen"] == microbatches * spec.data * spec.expert * spec.context).all()
    np.testing.assert_allclose(out.report.maxima["largest"], largest, rtol=1e-6)


@pytest.mark.quick
@pytest.mark.parametrize(("mesh", "name", "virtual", "microbatches", "policy"), CASES)
def test_any_table_gives_the_plain_loss_and_gradients(mesh, name, virtual, microbatches, policy):
    check_against_plain(mesh, name, virtual, microbatches, policy)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "name", "virtual", "microbatches", "policy"), MORE)
def test_every_count_of_microbatches_is_exact(mesh, name, virtual, microbatches, policy):
    check_against_plain(mesh, name, virtual, microbatches, policy)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pipe=2,expert=2", "pipe=4,context=2"])
@pytest.mark.parametrize("name", NAMES)
def test_where_a_leaf_waits_changes_no_result(mesh, name):
    """Every schedule with every storage. Stores return the same bits, but XLA fuses what reads them with what comes after."""
    spec = MeshSpec.parse(mesh)
    virtual = RECIPES[name].virtual or (3 if name == "interleaved_1f1b" and spec.pipe == 2 else 1)
    schedule = build(name, stages=spec.pipe, virtual=virtual, microbatches=6)
    ids, targets = toy_tokens(6, 2)
    params = toy_params(schedule.chunks)
    results = {}
    for policy in ("*=keep", "*=recompute", "*=local-offload", "*=remote-offload"):
        out = executed(spec, schedule, policy)(params, ids, targets)
        assert out.misplaced == 0
        results[policy] = jax.tree.leaves((out.loss, out.grads))
    for policy in ("*=recompute", "*=local-offload", "*=remote-offload"):
        for got, want in zip(results[policy], results["*=keep"], strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6 * float(jnp.abs(want).max()))


def test_quantized_leaves_leave_the_forward_as_it_is_and_gradients_close():
    """Each stored value is off by 1/16 of itself at most, so gradients are by no more than a few such shares of theirs."""
    spec, schedule = MeshSpec.parse("pipe=2,data=2"), build("interleaved_1f1b", stages=2, virtual=2, microbatches=4)
    ids, targets = toy_tokens(4, 2)
    params = toy_params(schedule.chunks)
    exact, coarse = (executed(spec, schedule, policy)(params, ids, targets) for policy in ("*=keep", "*=quantize"))
    assert coarse.misplaced == 0 and coarse.loss == exact.loss
    pairs = list(zip(jax.tree.leaves(coarse.grads), jax.tree.leaves(exact.grads), strict=True))
    assert all(jnp.linalg.norm(got - want) <= jnp.linalg.norm(want) / 16 for got, want in pairs)
    assert any((got != want).any() for got, want in pairs)


def stored_bytes(name: str, policy: str) -> int:
    """Of a leaf of the toy chunk on one rank: float32, or a byte a value and a scale a row."""
    return T * D * 4 if "quantize" not in policy else T * (D + 4)


@pytest.mark.parametrize(
    "policy", ["toy.out=remote-offload,*=recompute", "toy.out=quantize+remote-offload,*=recompute"]
)
def test_what_is_sent_to_other_ranks_is_what_the_plan_says(policy):
    spec, schedule = MeshSpec.parse("pipe=4"), build("interleaved_1f1b", stages=4, virtual=2, microbatches=16)
    ids, targets = toy_tokens(16, 1)
    plan = park(schedule, FORWARD, BACKWARD)
    function = executed(spec, schedule, policy)
    moved = function(toy_params(8), ids, targets).traffic
    assert plan.moves and int(moved.remote) == len(plan.moves) * stored_bytes("toy.out", policy)
    text = str(jax.make_jaxpr(function)(toy_params(8), ids, targets))
    assert text.count("ppermute[") >= len(plan.pairs)
    for pair in plan.pairs:
        assert f"perm=({pair}," in text or f"perm=(({pair[0]}, {pair[1]}),)" in text


def permutes(jaxpr, behind: tuple = ()):
    """The permutes of a program, each with the conditionals that it stands in."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "ppermute":
            yield behind
        for value in eqn.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    yield from permutes(inner, (*behind, eqn) if eqn.primitive.name == "cond" else behind)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zbv"])
def test_ticks_in_which_nobody_sends_run_no_permute(name):
    """Each stands behind a flag of the tick, the same on all ranks, and another branch of that has none."""
    spec, schedule = MeshSpec.parse("pipe=4"), build(name, stages=4, virtual=2, microbatches=8)
    function = executed(spec, schedule, "toy.out=remote-offload,*=recompute")
    found = list(permutes(jax.make_jaxpr(function)(toy_params(8), *toy_tokens(8, 1)).jaxpr))
    assert found and all(found)
    for cond, *_ in found:
        assert "pipe" not in cond.invars[0].aval.mat.varying
        assert min(sum(1 for _ in permutes(branch.jaxpr)) for branch in cond.params["branches"]) == 0


def test_what_waits_in_host_memory_is_what_the_plan_says():
    spec, schedule = MeshSpec.parse("pipe=2"), build("interleaved_1f1b", stages=2, virtual=2, microbatches=4)
    ids, targets = toy_tokens(4, 1)
    plan = host(schedule, FORWARD, BACKWARD)
    moved = executed(spec, schedule, "toy.out=local-offload,*=recompute")(toy_params(4), ids, targets).traffic
    away, near = int((plan.write >= 0).sum()), int((plan.land >= 0).sum())
    assert away > 0 and away + near == schedule.chunks * schedule.microbatches
    assert int(moved.host) == away * stored_bytes("toy.out", "") and int(moved.device) >= near * stored_bytes(
        "toy.out", ""
    )


def test_parking_brings_down_what_the_compiled_program_holds(monkeypatch):
    """By the slots that the fullest rank saves, 15 − 9, but for the one content that is in hand when it is sent."""
    monkeypatch.setattr(sys.modules[__name__], "T", 128)
    spec, schedule = MeshSpec.parse("pipe=8"), build("1f1b", stages=8, microbatches=16)
    arguments = toy_params(8), *toy_tokens(16, 1)
    slots, temporaries = {}, {}
    for storage in ("keep", "remote-offload"):
        compiled = executed(spec, schedule, f"*={storage}").lower(*arguments).compile()
        temporaries[storage] = compiled.memory_analysis().temp_size_in_bytes
        slots[storage] = reserved(schedule, FORWARD, BACKWARD, storage).device
    content = 3 * T * D * 4  # the toy chunk's leaves
    fall, saved = (of["keep"] - of["remote-offload"] for of in (temporaries, slots))
    assert saved == 6 and fall == pytest.approx(saved * content, abs=content)


# ---- injected faults -------------------------------------------------------------------------------------------------


def misplaced(schedule, policy="*=keep") -> int:
    ids, targets = toy_tokens(schedule.microbatches, 1)
    spec = MeshSpec.parse(f"pipe={schedule.stages}")
    return int(executed(spec, schedule, policy)(toy_params(schedule.chunks), ids, targets).misplaced)


def changed(schedule, **arrays):
    """The schedule with other tables; nothing checks them."""
    return dataclasses.replace(schedule, **arrays)


def test_a_slot_reused_too_early_is_noticed_when_it_runs():
    good = build("1f1b", stages=2, microbatches=4)
    table = good.table.copy()
    for kind in (FORWARD, BACKWARD):
        (at,) = np.argwhere((table[:, :, :3] == (kind, 0, 1)).all(-1))
        table[*at, 3] = table[np.argwhere((table[:, :, :3] == (FORWARD, 0, 0)).all(-1))[0][0], 0, 3]
    assert misplaced(good) == 0
    assert misplaced(changed(good, table=table)) > 0


def test_a_message_in_another_slot_is_noticed_when_it_runs():
    good = build("gpipe", stages=2, microbatches=3)
    mail = good.mail.copy()
    first, second = (np.argwhere((good.table[:, :, :3] == (BACKWARD, 1, m)).all(-1))[0] for m in (0, 1))
    mail[tuple(first)], mail[tuple(second)] = mail[tuple(second)], mail[tuple(first)]
    assert misplaced(changed(good, mail=mail)) > 0


def test_a_message_delayed_by_a_tick_is_noticed_when_it_runs():
    good = build("1f1b", stages=2, microbatches=4)
    arrivals = good.arrivals.copy()
    tick = int(np.flatnonzero(arrivals[:, 1, UP] >= 0)[1])
    arrivals[tick + 1, 1, UP], arrivals[tick, 1, UP] = arrivals[tick, 1, UP], -1
    assert misplaced(changed(good, arrivals=arrivals)) > 0


def test_a_move_between_ranks_delayed_by_a_tick_is_noticed_when_it_runs(monkeypatch):
    """What was parked comes back after it was read."""
    good = build("interleaved_1f1b", stages=4, virtual=1, microbatches=8)
    plan = park(good, FORWARD, BACKWARD)
    late = [move._replace(tick=move.tick + 1) if move.pair[0] > move.pair[1] else move for move in plan.moves]
    assert misplaced(good, "*=remote-offload") == 0
    monkeypatch.setattr(stores, "park", lambda *of: dataclasses.replace(plan, moves=tuple(late)))
    assert misplaced(good, "*=remote-offload") > 0


def test_bubbles_reach_nothing_in_half_precision_either():
    """Fewer microbatches than stages: stages run on leftovers, in the stream's own dtype, and nothing of it counts."""
    ids, targets = toy_tokens(2, 1)
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), toy_params(4))
    one = build("interleaved_1f1b", stages=1, virtual=4, microbatches=2)
    want = executed(MeshSpec.parse("pipe=1"), one)(params, ids, targets)
    got = executed(MeshSpec.parse("pipe=4"), build("1f1b", stages=4, microbatches=2))(params, ids, targets)
    assert got.misplaced == 0 and (got.report.sums["seen"] == 2).all()
    for a, b in zip(jax.tree.leaves((got.loss, got.grads)), jax.tree.leaves((want.loss, want.grads)), strict=True):
        # bfloat16 has 8 bits, and XLA keeps more of them where it fuses.
        np.testing.assert_allclose(a, b, rtol=2**-6, atol=2**-6 * float(jnp.abs(b).max()))


def test_a_forward_table_gives_the_loss_alone():
    spec = MeshSpec.parse("pipe=4")
    schedule = forward_only(build("interleaved_1f1b", stages=4, virtual=2, microbatches=3))
    params, (ids, targets) = toy_params(8), toy_tokens(3, 1)
    out = executed(spec, schedule)(params, ids, targets)
    np.testing.assert_allclose(out.loss, plain(params, ids, targets)[0], rtol=1e-5)
    assert out.grads is None and out.misplaced == 0 and (out.report.sums["seen"] == 3).all()


def test_an_unnamed_leaf_is_refused():
    spec = MeshSpec.parse("pipe=2")
    schedule = build("1f1b", stages=2, microbatches=2)
    everything = jax.checkpoint_policies.everything_saveable

    def chunk(weights, x, extras):
        return jax.checkpoint(toy_chunk, policy=everything)(weights, x, extras)

    def local(params, ids):
        program = pipeline.Program(
            embed=lambda p, m: toy_embed(p, ids[m], "pipe"),
            chunk=chunk,
            extras=lambda v, m: jnp.int32(1),
            head=lambda p, x, m, last: lax.psum(x.sum(), "pipe"),
        )
        mine = params | {"chunks": jax.tree.map(lambda a: a[0], params["chunks"])}
        return lax.psum(pipeline.run(schedule, program, mine, jnp.ones(())).loss, pipeline.REPLICAS)

    params = toy_params(2)
    stacked = params | {"chunks": jax.tree.map(lambda a: a[:, None], params["chunks"])}
    specs = {"embed": P("pipe"), "chunks": P("pipe"), "dense": P(), "head": P()}
    function = jax.shard_map(local, mesh=spec.build(), in_specs=(specs, P()), out_specs=P())
    with pytest.raises(ValueError, match="neither an input nor a named value"):
        jax.eval_shape(function, stacked, toy_tokens(2, 1)[0])
