"""Rules of the step that parity alone does not show: one denominator, one bias update, lean loops."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny
from compiled import loop_copies

from k3jax.model import Batch
from k3jax.parallel.layout import StackLayout

# One KDA and one MLA layer with experts: what a rule of the step needs, and quick to compile.
SMALL = dataclasses.replace(tiny.MODEL, num_layers=2, attn_res_block=None, dense_layers=0, num_experts=4)
STEP = dataclasses.replace(tiny.STEP, model=SMALL, seq_len=8, global_batch=4)


def rare_targets_batch(last: int) -> Batch:
    """One real target, at place 5 of the first sequence, and `last` of them in the last sequence."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 32, (4, 8)).astype(np.int32)
    targets = np.full((4, 8), -1, np.int32)
    targets[0, 5] = 3
    targets[3, :last] = tokens[3, 1 : 1 + last]
    return Batch(tokens, targets, np.zeros((4, 8), np.int32))


@functools.cache
def prepared(mesh: str):
    step = tiny.train_step(mesh, dataclasses.replace(STEP, microbatches=1))
    return step, step.init()


def rare_targets(mesh: str, last: int) -> tuple[float, dict[str, np.ndarray]]:
    step, state = prepared(mesh)
    out = step.gradients(state.params, state.balance, step.place(rare_targets_batch(last)))
    return float(out.loss), tiny.by_layer(SMALL, step.layout, out.grads)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "last"), [("context=4", 0), ("context=4", 7), ("context=2", 0), ("data=2", 7)])
def test_loss_and_gradients_divide_by_the_global_count_of_targets(mesh, last):
    """Shards that divide by their own count give a half of the gradient, or a quarter, where targets are rare."""
    want_loss, want = rare_targets("data=1", last)
    loss, grads = rare_targets(mesh, last)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert np.log(32) / 2 < loss < 2 * np.log(32)  # a mean over targets, not over tokens
    for name, right in want.items():
        # float32 rounding of tiny gradients; a wrong denominator is off by a factor
        assert np.linalg.norm(grads[name] - right) <= 3e-4 * np.linalg.norm(right), name


@pytest.mark.slow
def test_balancing_moves_once_a_step_also_under_recomputation_and_never_in_evaluation():
    """Counts doubled by recomputation, or a bias that moves per microbatch or in evaluation, would show here."""
    after = {}
    for policy in ("*=keep", "*=recompute"):
        step = tiny.train_step("data=2", STEP, activations=policy)
        batch = step.place(tiny.batch(STEP))
        state = step.init()
        before = jax.tree.map(np.asarray, state.balance)
        step.evaluate(state, batch)
        jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, state.balance))
        counts = step.gradients(state.params, state.balance, batch).histograms
        real = int((tiny.batch(STEP).tokens >= 0).sum())
        assert all((np.asarray(c).sum(-1) == real).all() for c in counts.values())
        state, _ = step.step(state, batch)
        after[policy] = jax.tree.map(np.asarray, state.balance)
    jax.tree.map(np.testing.assert_array_equal, after["*=keep"], after["*=recompute"])
    biases = np.concatenate([b.reshape(-1, 4) for b in jax.tree.leaves(after["*=keep"])])
    assert np.abs(biases.mean(-1)).max() < 1e-6 and np.abs(biases).max() > 1e-3


@pytest.mark.slow
def test_a_step_whose_operations_find_what_is_not_theirs_changes_nothing():
    """A table in which a slot is used again too early: losses and gradients look fine, but are of another microbatch."""
    model = dataclasses.replace(tiny.MODEL, pattern="K", num_layers=2, attn_res_block=None, dense_layers=0)
    config = dataclasses.replace(tiny.STEP, model=model, seq_len=16, schedule="1f1b", microbatches=4)
    step = tiny.train_step("pipe=2", config)
    table = step.resolved.schedule.table.copy()
    of_first, others = ((table[:, 0, 2] == 0), (table[:, 0, 2] == 1))
    table[others, 0, 3] = table[of_first, 0, 3][0]
    step.resolved = dataclasses.replace(
        step.resolved, schedule=dataclasses.replace(step.resolved.schedule, table=table)
    )
    state = step.init()
    before = jax.device_get((state.params, state.opt_state, state.balance))
    after, metrics = step.step(state, step.place(tiny.batch(config)))
    assert int(metrics["misplaced"]) > 0 and bool(metrics["finite"]) and int(after.skipped) == 1
    jax.tree.map(np.testing.assert_array_equal, (after.params, after.opt_state, after.balance), before)


def test_a_store_updated_inside_a_branch_would_be_noticed():
    """The mistake that the next test looks for: XLA copies the whole store in the branches and in the loop."""

    def tick(carry, kind):
        put = lambda store, x: (store.at[kind].set(x), x + 1)
        take = lambda store, x: (store, x + store[kind])
        return jax.lax.switch(kind % 2, [put, take], *carry), None

    loop = jax.jit(lambda store, x, kinds: jax.lax.scan(tick, (store, x), kinds)[0])
    hlo = loop.lower(np.zeros((5, 7, 11)), np.zeros((7, 11)), np.arange(4)).compile().as_text()
    assert loop_copies(hlo).count((5, 7, 11)) >= 3


def check_that_the_loop_copies_no_store_and_no_sum(step, hlo: str):
    """A store or a gradient sum that XLA copies whole in every tick triples the time of a step."""
    slots = step.resolved.schedule.num_slots
    # With as many experts as a store has slots, copies of experts' weights would look like a store's.
    assert step.config.model.num_experts not in (slots, slots + 1)
    gradient_sums = {a.shape[1:] for a in jax.tree.leaves(step.state_shapes.params["chunks"])}
    copies = loop_copies(hlo)
    assert not [shape for shape in copies if shape in gradient_sums]
    assert not [shape for shape in copies if len(shape) > 2 and shape[0] in (slots, slots + 1)], copies


def test_the_loop_copies_no_store_and_no_sum_of_gradients():
    """With one chunk a stage; test_residual_blocks.py has several."""
    model = dataclasses.replace(SMALL, num_layers=4, num_experts=7)
    step = tiny.train_step("pipe=2", dataclasses.replace(STEP, model=model, microbatches=4))
    state, batch = step.state_shapes, step.place(tiny.batch(step.config))
    hlo = step.gradients.lower(state.params, state.balance, batch).compile().as_text()
    check_that_the_loop_copies_no_store_and_no_sum(step, hlo)
    kinds = (f"operation/cond/branch_{i}_fun/{kind}" for i, kind in enumerate(("idle", "forward", "backward")))
    scopes = ("send", "embed", *kinds, "head", "embed_backward", "stores", "sums")
    assert [scope for scope in scopes if f"pipeline.{scope}/" not in hlo] == []


def test_layout_of_small_model_has_no_idle_slots():
    """The rules above are tested on real layers only."""
    assert StackLayout(SMALL).num_inactive == 0
