"""Schedules and activation policies change when and where things are, not what comes out."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny

from k3jax.parallel.schedules import NAMES, RECIPES

# A KDA and an MLA layer in every group, experts, residual blocks that begin in different chunks; quick to compile.
MODEL = dataclasses.replace(tiny.MODEL, num_layers=8, dense_layers=1, attn_res_block=3)
STEP = dataclasses.replace(tiny.STEP, model=MODEL, seq_len=16, global_batch=8, microbatches=4)
EVERYWHERE = "kda.*=recompute,moe.dispatch_in=local-offload,attn.out=remote-offload,*=keep"


@functools.cache
def gradients(mesh: str, schedule: str, virtual: int, policy: str, dtype: str):
    step = tiny.train_step(mesh, STEP, schedule=schedule, virtual=virtual, activations=policy, dtype=dtype)
    state = step.init()
    balance = jax.tree.map(
        lambda a, like: jax.device_put(a, like.sharding), tiny.skewed_balance(MODEL, step.layout), state.balance
    )
    out = step.gradients(state.params, balance, step.place(tiny.batch(STEP)))
    assert int(out.misplaced) == 0
    return float(out.loss), tiny.by_layer(MODEL, step.layout, out.grads)


CASES = [
    *(("pipe=4,context=2", schedule, RECIPES[schedule].virtual or 1) for schedule in NAMES),
    ("pipe=2,expert=2", "interleaved_1f1b", 3),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_schedule_with_every_storage_gives_the_gradients_of_1f1b_that_keeps_all(case, double_precision):
    """In float32, XLA's functions round otherwise where it fuses otherwise: 2.1e-6 of a_log's gradient, 1e-9 of the whole."""
    loss, got = gradients(*case, EVERYWHERE, "float64")
    want_loss, want = gradients(case[0], "1f1b", 1, "*=keep", "float64")
    assert loss == pytest.approx(want_loss, rel=1e-14)
    assert got.keys() == want.keys()
    for name, right in want.items():
        assert got[name].dtype == np.float64
        assert np.linalg.norm(got[name] - right) <= 1e-13 * np.linalg.norm(right), name


def errors(got, want):
    """{parameter, of all layers together: norm of the difference}, the same of what is wanted, and that of everything."""
    norm = lambda arrays: np.sqrt(sum(np.square(a).sum() for a in arrays))
    of_parameter = lambda name: name.partition(".")[2] if name[0].isdigit() else name
    names = {parameter: [n for n in want if of_parameter(n) == parameter] for parameter in map(of_parameter, want)}
    off = {parameter: norm([got[n] - want[n] for n in of]) for parameter, of in names.items()}
    return off, {parameter: norm([want[n] for n in of]) for parameter, of in names.items()}, norm(want.values())


@pytest.mark.slow
def test_quantized_leaves_change_no_loss_and_gradients_within_the_bound():
    """docs/notes/activations.md: a stored value is off by 1/16 at most, the whole gradient by 1/16, a parameter's by 1/8."""
    mesh = "pipe=2,expert=2"
    (loss, got), (exact, want) = (
        gradients(mesh, "1f1b", 1, f"*={policy}", "float32") for policy in ("quantize", "keep")
    )
    assert loss == exact
    off, sizes, whole = errors(got, want)
    assert 1e-3 * whole < np.linalg.norm(list(off.values())) <= whole / 16
    assert all(error <= sizes[parameter] / 8 for parameter, error in off.items()), off
