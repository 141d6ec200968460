"""Schedules and activation policies change when and where things are, not what comes out."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny

# A KDA and an MLA layer in every group, experts, residual blocks that begin in different chunks; quick to compile.
MODEL = dataclasses.replace(tiny.MODEL, num_layers=8, dense_layers=1, attn_res_block=3)
STEP = dataclasses.replace(tiny.STEP, model=MODEL, seq_len=16, global_batch=8, microbatches=4)
MIXED = "kda.*=recompute,moe.dispatch_in=local-offload,attn.out=remote-offload,*=keep"


@functools.cache
def gradients(mesh: str, schedule: str, virtual: int, policy: str):
    step = tiny.train_step(mesh, STEP, schedule=schedule, virtual=virtual, activations=policy)
    state = step.init()
    balance = jax.tree.map(
        lambda a, like: jax.device_put(a, like.sharding), tiny.skewed_balance(MODEL, step.layout), state.balance
    )
    out = step.gradients(state.params, balance, step.place(tiny.batch(STEP)))
    assert int(out.misplaced) == 0
    return float(out.loss), tiny.by_layer(MODEL, step.layout, out.grads)


def check_equal(case, reference):
    (loss, got), (want_loss, want) = gradients(*case), gradients(*reference)
    assert got.keys() == want.keys()
    # Another program: XLA fuses otherwise, and stages add up chunks and microbatches in another order. Where a gradient is a
    # small difference of large sums (a_log, gate_bias) that shows: some 2e-6 of it, 1e-9 of the whole gradient.
    assert loss == pytest.approx(want_loss, rel=1e-6)
    norm = lambda arrays: np.sqrt(sum(np.square(a).sum() for a in arrays))
    of_parameter = lambda name: name.partition(".")[2] if name[0].isdigit() else name
    whole = norm(want.values())
    for parameter in {of_parameter(name) for name in want}:
        names = [name for name in want if of_parameter(name) == parameter]
        error, size = norm([got[name] - want[name] for name in names]), norm([want[name] for name in names])
        assert error <= 1e-6 * size + 2e-9 * whole, (parameter, error / size, error / whole)


CASES = [
    pytest.param(("pipe=2,expert=2", "interleaved_1f1b", 2, MIXED), marks=pytest.mark.slow),
    ("pipe=2,expert=2", "zb1p", 1, "*=keep"),
    pytest.param(("pipe=2,context=2", "zbv", 2, MIXED), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_schedule_with_a_policy_gives_the_gradients_of_1f1b_that_keeps_all(case):
    check_equal(case, (case[0], "1f1b", 1, "*=keep"))
