"""The executor: one loop that runs any schedule table, forward and backward, inside one `shard_map`.

Each tick receives messages by `ppermute` over the pipe axis, runs the rank's own operation of the table in a branch,
and files what it made. A forward's message is the stream, a backward's its gradient: of one shape, so one mailbox holds
both. Forward runs `jax.vjp` of the chunk and stores the leaves of its pullback; backward takes them out again: no
automatic differentiation goes through the schedule.

Chunks may also append rows to a history that all later chunks and the head read. It does not travel: each stage keeps its
own, and messages carry the rows that their receiver lacks, or gradients of them (`relay.py`).

Rules that keep it right and fast (docs/step.md):
- a rank-dependent branch may hold grouped collectives over data, expert and context, never a `ppermute`;
- what communicates over pipe (messages, embedding, head) stands in branches on tick-wide columns, the same on all ranks;
- a branch returns the values of one operation; store and gradient sums are updated outside of it, or XLA would copy
  them whole in every tick.

Named scopes ("pipeline.operation/forward", ...) say in programs and profiles which part of a tick something is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.activations.policy import ActivationPolicy
from k3jax.activations.stores import Stores, Traffic
from k3jax.parallel.boxes import empty, post, take, vary
from k3jax.parallel.gradient_sums import ShardedSums, WholeSums
from k3jax.parallel.histories import Histories
from k3jax.parallel.pullback import Args, Pullback
from k3jax.parallel.reports import Report, combine_at, nothing
from k3jax.parallel.schedules import BACKWARD, DOWN, FORWARD, STAY, UP, WEIGHT, Schedule
from meshes import AXES

Tree = Any
REPLICAS = ("data", "expert", "context")


class Program(NamedTuple):
    """What the executor runs; it knows no model. Microbatch m, virtual chunk v and `is_last` are traced."""

    embed: Callable[[Tree, jax.Array], Tree]
    """(params["embed"], m) -> stream. May communicate over pipe."""
    chunk: Callable[[Tree, Tree, Tree], tuple[Tree, Report]]
    """(weights, stream, extras) -> (stream, report)."""
    extras: Callable[[jax.Array, jax.Array], Tree]
    """(v, m) -> inputs of the chunk that have no gradient."""
    head: Callable[[Tree, Tree, jax.Array, jax.Array], jax.Array]
    """(params["head"], stream, m, is_last) -> this rank's sum of losses. May communicate over pipe."""
    appended: tuple[int, ...] = ()
    """Rows, each like the stream, that every chunk appends to the history; () if there is none. If there is, chunk and head
    take (stream, rows) as stream, and chunk returns it: all rows of the model, those to come with any finite values, on which
    nothing may depend. A chunk fills in its own."""
    pullbacks: dict[bool, Pullback] | None = None
    """Of this chunk, traced before, by whether weight gradients are an operation of their own; None: not kept."""


KEEP_ALL = ActivationPolicy.parse("*=keep")


class Outcome(NamedTuple):
    """Of all microbatches, of this rank's tokens; loss and gradients are sums."""

    loss: jax.Array
    report: Report
    """Of the rank's own chunks, [V, ...]."""
    grads: Tree
    """float32 gradients like params, those of chunks as `run` is told; None from a forward-only table."""
    misplaced: jax.Array
    """How often an operation found, in its slot, something of another (chunk, microbatch). Anything but 0 is a wrong table."""
    traffic: Traffic
    """Bytes that this rank put into its stores, by place."""


class Made(NamedTuple):
    """What one operation made; zeros where its kind makes no such thing."""

    message: Tree
    """The stream, or its gradient."""
    leaving: Tree
    """Rows of the history, or gradients of them, that go with the message."""
    history: Tree
    """What the slot of the operation's result holds from now on."""
    stored: Tree
    """As `Stores.encode` makes it."""
    report: Report
    d_weights: Tree
    misplaced: jax.Array


def run(
    schedule: Schedule,
    program: Program,
    params: Tree,
    cotangent: jax.Array,
    policy: ActivationPolicy = KEEP_ALL,
    owners: Tree | None = None,
) -> Outcome:
    """Runs the table over params = {"embed", "chunks": [V, ...], "dense", "head"} of this rank.

    cotangent: of each token's loss (1 / number of targets). policy: where named activations wait for backward. Gradients are
    this rank's own contributions: reduce them over the axes on which a parameter is replicated. owners: of each leaf
    of the chunks; given, the gradients of chunks are reduced already, each replica has those that it owns ([V, …, owned],
    see `ShardedSums`).
    """
    stages, stage = schedule.stages, lax.axis_index("pipe")
    params = vary(params)
    zeros = lambda tree, dtype=None: vary(jax.tree.map(lambda a: jnp.zeros(a.shape, dtype or a.dtype), tree))
    weights = lambda v: {"chunk": take(params["chunks"], v), "dense": params["dense"]}
    extras = lambda v, m: vary(program.extras(v, m))

    example, histories = example_of(schedule, program, params)
    no_stream, _ = histories.part(example[1], jnp.int32(0))
    no_loss = vary(jnp.zeros(()), REPLICAS)
    split = WEIGHT in schedule.kinds
    pullback = pullback_of(schedule, program, example, histories) if BACKWARD in schedule.kinds else None
    reported = pullback.report if pullback else jax.eval_shape(lambda *args: program.chunk(*args)[1], *example)
    reports = vary(nothing(reported, schedule.virtual))
    no_report = take(reports, jnp.int32(0))
    shapes = pullback.shapes if pullback else {}
    stores = Stores(schedule, pullback.leaves(policy) if pullback else {})
    no_name = vary(jnp.int32(0))
    sums = ShardedSums(schedule, owners) if owners and pullback else WholeSums()
    contents = stores.encode(zeros(shapes), no_name)
    no_weights = zeros(example[0]) if pullback else None
    carry = dict(
        mail=empty((no_name, no_stream, histories.no_rows), schedule.num_mail_slots + 1),
        stores=stores.empty(contents),
        histories=histories.empty(),
        sent=(no_name, no_stream, histories.no_rows),
        misplaced=no_name,
        traffic=vary(Traffic(*[jnp.float32(0)] * 3)),
        reports=reports,
        loss=no_loss,
        grads=zeros(params, jnp.float32) | {"chunks": sums.empty(params["chunks"])} if pullback else None,
    )

    def idle(v, m, name, read, boxes, row, rows):
        return Made(
            no_stream, histories.no_rows, rows.unchanged(), stores.unchanged(boxes), no_report, no_weights, no_name
        )

    def forward(v, m, name, read, boxes, row, rows):
        stream, arrived, misplaced = read()
        history, wrong = rows.extended(arrived)
        args = weights(v), histories.join(stream, history), extras(v, m)
        made, (joined, report) = pullback.forward(args) if pullback else ({}, program.chunk(*args))
        stream, history = histories.part(joined, m)
        stored = stores.unchanged(boxes) | stores.encode(made, name)
        return Made(stream, rows.leaving(history), history, stored, report, no_weights, misplaced + wrong)

    def backward(v, m, name, read, boxes, row, rows):
        assert pullback is not None
        (d_stream, arrived, misplaced), (found, wrong) = (
            read(),
            stores.take(BACKWARD, boxes, row["stores"], stage, name),
        )
        (history, lacking), (d_history, unsummed) = rows.values(), rows.summed(arrived)
        inputs = (weights(v), history[1:], extras(v, m)), found, histories.join(d_stream, d_history)
        made, d_weights = {}, no_weights
        if split:
            made, joined = pullback.backward_input(*inputs)
        else:
            d_weights, joined = pullback.backward(*inputs)
        d_stream, d_history = histories.part(joined, m)
        stored = stores.unchanged(boxes) | stores.encode(made, name)
        misplaced += wrong + lacking + unsummed
        return Made(d_stream, rows.leaving(d_history), d_history, stored, no_report, d_weights, misplaced)

    def weight(v, m, name, read, boxes, row, rows):
        assert pullback is not None
        (found, misplaced), (history, lacking) = (
            stores.take(WEIGHT, boxes, row["stores"], stage, name),
            rows.values(),
        )
        d_weights = pullback.backward_weights((weights(v), history[1:], extras(v, m)), found)
        made = idle(v, m, name, read, boxes, row, rows)
        return made._replace(d_weights=d_weights, misplaced=misplaced + lacking)

    branches = [idle, forward, backward, weight][: 1 + len(schedule.kinds)]
    named = [jax.named_scope(branch.__name__)(branch) for branch in branches]
    of_kind = schedule.chunks * schedule.microbatches

    def tick(carry, row):
        mine = row["table"][stage]
        kind, chunk, m = mine[0], *(jnp.maximum(mine[i], 0) for i in (1, 2))
        v, slot = chunk // stages, row["mail"][stage]
        # Names of what is stored and of messages, by who reads them: an operation checks that it finds its own.
        name = vary(1 + chunk * schedule.microbatches + m)
        with jax.named_scope("pipeline.send"):
            mail = receive(schedule, histories, carry, row, stage)
        with jax.named_scope("pipeline.embed"):
            embedded = lax.cond(
                row["embed_forward"] >= 0,
                lambda: vary(program.embed(params["embed"], row["embed_forward"])),
                lambda: no_stream,
            )
        enters = (row["embed_forward"] >= 0) & (stage == schedule.stage_of(0))
        mail = post(mail, (name + kind * of_kind, embedded, histories.no_rows), jnp.where(enters, slot, -1))
        with jax.named_scope("pipeline.stores"):
            leaving = stores.send(carry["stores"], row["stores"], stage)

        def read():
            found, message, rows = take(mail, jnp.maximum(slot, 0))
            return message, rows, (found != name + kind * of_kind).astype(jnp.int32)

        rows = histories.on(carry["histories"], row["histories"], stage, m)
        operands = v, m, name, read, carry["stores"], row, rows
        with jax.named_scope("pipeline.operation"):
            made: Made = lax.switch(kind, [lambda b=b: vary(b(*operands)) for b in named])
        with jax.named_scope("pipeline.histories"):
            box = histories.put(carry["histories"], row["histories"], stage, made.history)
        with jax.named_scope("pipeline.stores"):
            stored = stores.put(carry["stores"], row["stores"], stage, made.stored, leaving)
        carry |= dict(
            mail=mail,
            histories=box,
            stores=stored,
            reports=combine_at(carry["reports"], v, made.report),
            misplaced=carry["misplaced"] + made.misplaced,
            traffic=jax.tree.map(jnp.add, carry["traffic"], stores.traffic(made.stored, row["stores"], stage)),
        )
        onward = jnp.where(kind == FORWARD, schedule.microbatches, -schedule.microbatches)
        to = name + kind * of_kind + onward
        is_last, leaves_model = stage == schedule.last_stage, row["head"] >= 0
        leaves = histories.join(made.message, made.history)
        if pullback is None:
            with jax.named_scope("pipeline.head"):
                loss = lax.cond(
                    leaves_model,
                    lambda: program.head(params["head"], leaves, row["head"], is_last),
                    lambda: no_loss,
                )
            return carry | dict(sent=(to, made.message, made.leaving), loss=carry["loss"] + loss), None

        def head():
            function = lambda p, stream: program.head(p, stream, row["head"], is_last)
            loss, vjp = jax.vjp(function, params["head"], leaves)
            d_head, d_leaves = vjp(vary(cotangent, REPLICAS))
            d_stream, d_history = histories.part(d_leaves, row["head"])
            # The last chunk's output goes no further: what its stage sends, to itself, is the cotangent.
            sent = jax.tree.map(lambda d, x: jnp.where(is_last, d, x), d_stream, made.message)
            return loss, vary(d_head), vary(sent), vary(jax.tree.map(lambda d: jnp.where(is_last, d, 0), d_history))

        stays = lambda: (no_loss, zeros(params["head"]), made.message, histories.none)
        with jax.named_scope("pipeline.head"):
            loss, d_head, sent, d_history = lax.cond(leaves_model, head, stays)

        def embed_backward():
            on_first = lambda a: jnp.where(stage == schedule.stage_of(0), a, 0)
            d_stream = lax.psum(jax.tree.map(on_first, made.message), "pipe")
            embed = lambda p: vary(program.embed(p, row["embed_backward"]), REPLICAS)
            vjp = jax.vjp(embed, params["embed"])[1]
            return vary(vjp(d_stream)[0])

        with jax.named_scope("pipeline.embed_backward"):
            d_embed = lax.cond(row["embed_backward"] >= 0, embed_backward, lambda: zeros(params["embed"]))
        grads, d_weights = carry["grads"], made.d_weights
        with jax.named_scope("pipeline.histories"):
            box = histories.deposit(box, row["histories"], stage, d_history, made.history)
        with jax.named_scope("pipeline.sums"):
            d_chunks = sums.add(grads["chunks"], row["sums"], stage, v, d_weights["chunk"])
        return carry | dict(
            histories=box,
            sent=(jnp.where(leaves_model & is_last, name + BACKWARD * of_kind, to), sent, made.leaving),
            loss=carry["loss"] + loss,
            grads={
                "embed": jax.tree.map(jnp.add, grads["embed"], d_embed),
                "chunks": d_chunks,
                "dense": jax.tree.map(jnp.add, grads["dense"], d_weights["dense"]),
                "head": jax.tree.map(jnp.add, grads["head"], d_head),
            },
        ), None

    names = ("table", "mail", "arrivals", "moves", "embed_forward", "head", "embed_backward")
    columns = {name: getattr(schedule, name) for name in names}
    columns |= {"stores": stores.columns, "histories": histories.columns, "sums": sums.columns}
    carry, _ = lax.scan(tick, carry, jax.tree.map(jnp.asarray, columns))
    with jax.named_scope("pipeline.sums"):
        grads = carry["grads"] and carry["grads"] | {"chunks": sums.finish(carry["grads"]["chunks"], stage)}
    misplaced = lax.psum(carry["misplaced"], AXES)
    return Outcome(carry["loss"], carry["reports"], grads, misplaced, carry["traffic"])


def example_of(schedule: Schedule, program: Program, params: Tree) -> tuple[Args, Histories]:
    """What a chunk is called with, for its shapes and varying axes, and what chunks append; params are this rank's."""
    params, first = vary(params), jnp.int32(0)
    shapes = jax.eval_shape(program.embed, params["embed"], first)
    no_stream = vary(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes))
    histories = Histories(schedule, program.appended, no_stream)
    weights = {"chunk": take(params["chunks"], first), "dense": params["dense"]}
    return (weights, histories.join(no_stream, histories.none), vary(program.extras(first, first))), histories


def pullback_of(schedule: Schedule, program: Program, example: Args, histories: Histories) -> Pullback:
    """The pullback whose leaves the schedule's stores hold."""
    made, separate = program.pullbacks if program.pullbacks is not None else {}, WEIGHT in schedule.kinds
    if separate not in made:
        num_history = len(jax.tree.leaves(histories.no_rows))
        made[separate] = Pullback(program.chunk, example, num_history=num_history, separate_weights=separate)
    return made[separate]


def receive(schedule: Schedule, histories: Histories, carry: Tree, row: Tree, stage: jax.Array) -> Tree:
    """The mailbox with what was sent in the tick before; a route that nobody takes in this tick is not travelled."""
    mail, (*sent, rows) = carry["mail"], carry["sent"]
    onward = [(i, (i + 1) % schedule.stages) for i in range(schedule.stages)]
    pairs, names = {UP: onward, DOWN: [(j, i) for i, j in onward]}, {UP: "up", DOWN: "down"}
    for way in (UP, DOWN, STAY):
        if not schedule.moves[:, way].any():
            continue
        arrived, with_it = sent, rows
        if way != STAY:
            travel = lambda way=way: lax.ppermute(sent, "pipe", pairs[way])
            with jax.named_scope(names[way]):
                arrived = lax.cond(row["moves"][way], travel, lambda: sent)
                with jax.named_scope("pipeline.histories"):
                    with_it = histories.travel(rows, way, pairs[way], row["histories"])
        mail = post(mail, (*arrived, with_it), row["arrivals"][stage, way])
    return mail
