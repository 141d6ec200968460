"""Residual blocks over the pipeline: begun in some chunks, read in all later ones, kept by stages; nothing is lost or copied."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_step_rules as rules
import tiny

from k3jax import model as lm
from k3jax.parallel.layout import StackLayout
from k3jax.parallel.relay import Relay

# Five experts: no array of theirs has the shape of a slot.
MODEL = dataclasses.replace(tiny.MODEL, num_layers=8, dense_layers=0, num_experts=5, attn_res_block=3)
STEP = dataclasses.replace(tiny.STEP, model=MODEL, seq_len=8, global_batch=4, microbatches=4)
CASES = [("pipe=2", 3, "interleaved_1f1b", (1, 1, 0, 1, 0, 0))]
MORE = [
    ("pipe=2", 2, "interleaved_1f1b", (1, 1, 0, 1)),
    ("pipe=4", 1, "1f1b", (1, 1, 0, 1)),
    ("pipe=4", 2, "zbv", (1, 1, 0, 1, 0, 0, 0, 0)),
]


@functools.cache
def plain():
    layout = StackLayout(MODEL)
    params = jax.jit(lambda: lm.init(MODEL, layout, STEP.seed))()
    balance = tiny.skewed_balance(MODEL, layout)
    batch = jax.tree.map(jnp.asarray, tiny.batch(STEP))
    loss, grads = jax.jit(jax.value_and_grad(lambda p: lm.plain_loss(MODEL, p, balance, batch)[0]))(params)
    return float(loss), tiny.by_layer(MODEL, layout, grads)


def check_against_plain(mesh, virtual, schedule, begun):
    step = tiny.train_step(mesh, STEP, virtual=virtual, schedule=schedule)
    assert step.layout.blocks_begun == begun
    state = step.init()
    balance = jax.tree.map(
        lambda a, like: jax.device_put(a, like.sharding), tiny.skewed_balance(MODEL, step.layout), state.balance
    )
    batch = step.place(tiny.batch(STEP))
    compiled = step.gradients.lower(state.params, balance, batch).compile()
    out = compiled(state.params, balance, batch)
    want_loss, want = plain()
    assert int(out.misplaced) == 0 and float(out.loss) == pytest.approx(want_loss, rel=1e-6)
    got = tiny.by_layer(MODEL, step.layout, out.grads)
    for name, right in want.items():  # float32 sums of another order: 5e-6 seen
        assert np.linalg.norm(got[name] - right) <= 1e-4 * np.linalg.norm(right), name
    return step, state._replace(balance=balance), batch, compiled.as_text() or "", want_loss


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "virtual", "schedule", "begun"), CASES)
def test_gradients_equal_plain_autodiff_and_no_slot_is_copied(mesh, virtual, schedule, begun):
    step, *_, hlo, _ = check_against_plain(mesh, virtual, schedule, begun)
    slots = Relay(step.resolved.schedule, begun).num_slots
    shape = MODEL.num_blocks, 1, STEP.seq_len, MODEL.hidden_size
    assert f"f32[{slots},{','.join(map(str, shape))}]" in hlo, "the slots are found by their shape"
    copies = rules.loop_copies(hlo)
    assert not [c for c in copies if c in ((slots, *shape), (slots * shape[0], *shape[1:]))], copies
    rules.check_that_the_loop_copies_no_store_and_no_sum(step, hlo)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "virtual", "schedule", "begun"), MORE)
def test_every_placement_of_blocks_gives_plain_gradients_and_evaluates(mesh, virtual, schedule, begun):
    step, state, batch, _, want_loss = check_against_plain(mesh, virtual, schedule, begun)
    total, targets = step.evaluate(state, batch)
    assert float(total) / float(targets) == pytest.approx(want_loss, rel=1e-6)
