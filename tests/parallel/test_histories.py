"""Chunks that append rows and read all earlier ones: the executor, which moves few of them, equals a plain loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_pipeline as toy
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from k3jax.activations.policy import ActivationPolicy
from k3jax.parallel import histories, pipeline
from k3jax.parallel.relay import Relay
from k3jax.parallel.reports import Report
from k3jax.parallel.schedules import BACKWARD, FORWARD, build, forward_only
from meshes import MeshSpec

# Rows, T tokens, D model: of the toy.
MOST = 2  # rows that a chunk appends


def mix(query, x, rows, exist):
    """A mean over rows, weighted by what they have in common with a query; those to come are not seen."""
    scores = jnp.where((jnp.arange(len(rows)) < exist)[:, None], (rows * query).sum(-1), -1e30)
    return x + jnp.einsum("nt,ntd->td", jax.nn.softmax(scores, 0) * (exist > 0), rows)


def chunk(weights, joined, extras):
    """Reads the rows before it, appends its own, and reads those too."""
    (x, rows), (first, count) = joined, extras
    w = weights["chunk"]
    h = checkpoint_name(jnp.tanh(mix(w["q"], x, rows, first) @ w["a"]), "toy.pre")
    for i in range(MOST):
        rows = jnp.where((jnp.arange(len(rows)) == first + i)[:, None, None] & (i < count), x + i * h, rows)
    y = jnp.sin(mix(w["q"], h, rows, first + count) @ w["b"]) @ weights["dense"]["c"]
    return (x + y, rows), Report()


def head(params, joined, targets):
    x, rows = joined
    return toy.toy_head(params, mix(params["w"][:, 0], x, rows, len(rows)), targets)


def toy_params(chunks):
    query = jax.random.normal(jax.random.key(7), (chunks, toy.D))
    params = toy.toy_params(chunks)
    return params | {"chunks": params["chunks"] | {"q": query}}


def plain(params, ids, targets, appended):
    total = 0.0
    for m in range(ids.shape[0]):
        for rank in range(ids.shape[1] // toy.T):
            part = slice(rank * toy.T, rank * toy.T + toy.T)
            x = toy.toy_embed(params["embed"], ids[m, part], None)
            rows, first = jnp.zeros((sum(appended), *x.shape)), 0
            for c, count in enumerate(appended):
                weights = {"chunk": jax.tree.map(lambda a, c=c: a[c], params["chunks"]), "dense": params["dense"]}
                (x, rows), _ = chunk(weights, (x, rows), (first, count))
                first += count
            total += head(params["head"], (x, rows), targets[m, part])
    return total


def executed(schedule, appended, policy="*=keep"):
    """(params, ids, targets) -> loss, misplaced and, unless the table is forward only, gradients in global order."""
    stages, virtual = schedule.stages, schedule.virtual
    place = tuple(np.array([(schedule.stage_of(c), c // stages) for c in range(schedule.chunks)]).T)
    of_stage = lambda a: np.asarray(a)[np.argsort(place[0] * virtual + place[1])].reshape(stages, virtual, *a.shape[1:])
    first = of_stage(np.cumsum([0, *appended[:-1]]))
    count = of_stage(np.array(appended))
    specs = {"embed": P("pipe"), "chunks": P("pipe"), "dense": P(), "head": P()}

    def local(params, ids, targets):
        stage = lax.axis_index("pipe")

        def run_head(p, joined, m, last):
            joined = jax.tree.map(lambda a: jnp.where(last, a, 1.0), joined)
            return lax.psum(jnp.where(last, head(p, joined, targets[m]), 0), "pipe")

        program = pipeline.Program(
            embed=lambda p, m: toy.toy_embed(p, ids[m], "pipe"),
            chunk=ActivationPolicy.parse(policy).checkpoint(chunk, toy.TOY_NAMES),
            extras=lambda v, m: (jnp.asarray(first)[stage, v], jnp.asarray(count)[stage, v]),
            head=run_head,
            appended=appended,
        )
        mine = params | {"chunks": jax.tree.map(lambda a: a[0], params["chunks"])}
        out = pipeline.run(schedule, program, mine, jnp.ones(()), ActivationPolicy.parse(policy))
        loss = lax.psum(out.loss, pipeline.REPLICAS)
        if out.grads is None:
            return loss, out.misplaced
        grads = out.grads | {"chunks": jax.tree.map(lambda a: a[None], out.grads["chunks"])}
        axes = {k: pipeline.REPLICAS + (() if k in ("embed", "chunks") else ("pipe",)) for k in grads}
        summed = {k: jax.tree.map(lambda a, k=k: lax.psum(a, axes[k]), g) for k, g in grads.items()}
        return loss, out.misplaced, summed

    mesh = MeshSpec.parse(f"pipe={stages},data=2").build()
    outs = (P(), P()) + (() if schedule.name == "forward" else (specs,))
    tokens = P(None, "data")
    sharded = jax.shard_map(local, mesh=mesh, in_specs=(specs, tokens, tokens), out_specs=outs)

    def function(params, ids, targets):
        order = np.argsort(place[0] * virtual + place[1])
        stack = lambda a: a[order].reshape(stages, virtual, *a.shape[1:])
        loss, wrong, *grads = sharded(params | {"chunks": jax.tree.map(stack, params["chunks"])}, ids, targets)
        return loss, wrong, *(g | {"chunks": jax.tree.map(lambda a: a[place], g["chunks"])} for g in grads)

    return jax.jit(function)


CASES = [
    ("interleaved_1f1b", 2, 2, (1, 0, 2, 1), 5, "*=keep"),
    ("1f1b", 4, 1, (1, 1, 0, 2), 6, "*=recompute"),
    ("interleaved_1f1b", 4, 2, (1, 0, 1, 0, 2, 0, 0, 1), 6, "*=keep"),
    ("gpipe", 2, 2, (0, 1, 1, 0), 3, "*=keep"),
    ("zb1p", 4, 1, (1, 1, 1, 0), 5, "*=keep"),
    ("zbv", 2, 2, (1, 1, 1, 1), 5, "*=recompute"),
    ("zbv", 4, 2, (1, 0, 2, 1, 0, 1, 1, 0), 5, "*=keep"),
    ("interleaved_1f1b", 1, 3, (1, 2, 1), 2, "*=keep"),
]


@pytest.mark.parametrize(("name", "stages", "virtual", "appended", "microbatches", "policy"), CASES)
def test_any_table_gives_the_plain_loss_and_gradients(name, stages, virtual, appended, microbatches, policy):
    schedule = build(name, stages=stages, virtual=virtual, microbatches=microbatches)
    ids, targets = toy.toy_tokens(microbatches, 2)
    params = toy_params(schedule.chunks)
    loss, wrong, grads = executed(schedule, appended, policy)(params, ids, targets)
    want, want_grads = jax.value_and_grad(functools.partial(plain, appended=appended))(params, ids, targets)
    assert wrong == 0
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    jax.tree.map(
        # float32 sums of another order: a few ulp of the largest element
        lambda got, right: np.testing.assert_allclose(got, right, atol=3e-6 * float(jnp.abs(right).max()) + 1e-7),
        grads,
        want_grads,
    )


def test_a_forward_table_gives_the_loss_alone():
    schedule = forward_only(build("zbv", stages=2, virtual=2, microbatches=3))
    params, (ids, targets) = toy_params(4), toy.toy_tokens(3, 2)
    loss, wrong = executed(schedule, (1, 0, 2, 1))(params, ids, targets)
    assert wrong == 0
    np.testing.assert_allclose(loss, plain(params, ids, targets, (1, 0, 2, 1)), rtol=1e-5)


@pytest.mark.parametrize(
    ("column", "operation"),
    [
        ("values", (BACKWARD, 0, 1)),
        ("result", (FORWARD, 2, 1)),
        ("result", (BACKWARD, 1, 0)),
        ("deposit", (FORWARD, 3, 1)),
    ],
)
def test_a_slot_of_another_microbatch_is_noticed_when_it_runs(monkeypatch, column, operation):
    schedule = build("interleaved_1f1b", stages=2, virtual=2, microbatches=3)
    ids, targets = toy.toy_tokens(3, 2)

    class Wrong(Relay):
        @functools.cached_property
        def columns(self):
            slots = super().columns[column].copy()
            tick, stage = schedule.ticks[operation], schedule.stage_of(operation[1])
            at = (tick,) if column == "deposit" else (tick, stage)
            slots[at] = (slots[at] + 1) % self.num_slots
            return super().columns | {column: slots}

    monkeypatch.setattr(histories, "Relay", Wrong)
    assert executed(schedule, (1, 1, 1, 0))(toy_params(4), ids, targets)[1] > 0


def permuted_rows(jaxpr) -> list[tuple[tuple[int, ...], int]]:
    """Shapes of all permutes' operands, and from how many stages they are sent."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "ppermute":
            found.append((eqn.invars[0].aval.shape, len(eqn.params["perm"])))
        for value in eqn.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(item, "jaxpr", item)
                found += permuted_rows(inner) if hasattr(inner, "eqns") else []
    return found


def test_the_program_moves_as_many_rows_as_the_count_says():
    """A branch for each load, and which of them runs is a column: only what is lacking is sent, by those who send it."""
    schedule, appended = build("interleaved_1f1b", stages=4, virtual=2, microbatches=6), (1, 0, 1, 0, 1, 0, 0, 1)
    ids, targets = toy.toy_tokens(6, 2)
    jaxpr = jax.make_jaxpr(executed(schedule, appended))(toy_params(8), ids, targets).jaxpr
    permuted = [(shape[0], senders) for shape, senders in permuted_rows(jaxpr) if len(shape) == 3]
    relay = Relay(schedule, appended)
    of_load = lambda load: [(1, sum(n > row for n in load)) for row in range(max(load))]
    rows = [pair for loads in relay.loads for load in loads.tolist() for pair in of_load(load)]
    assert sorted(pair for n, senders in permuted for pair in [(1, senders)] * n) == sorted(rows)
    assert sum(n * senders for n, senders in permuted) == sum(loads.sum() for loads in relay.loads)
    assert max(loads.max() for loads in relay.loads) == relay.room < relay.num_rows
