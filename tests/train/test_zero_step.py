"""Sharded gradients are the step's gradients: per parameter, whatever is sharded and in whatever schedule."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny

from k3jax.configs import get
from k3jax.parallel.zero import bytes_per_parameter
from k3jax.train.config import StepConfig
from k3jax.train.devices import abstract_mesh
from k3jax.train.step import TrainStep
from meshes import MeshSpec

MODEL = dataclasses.replace(tiny.MODEL, attn_res_block=None, num_experts=4)  # with a layer of dense FFN
STEP = dataclasses.replace(tiny.STEP, model=MODEL, seq_len=16, global_batch=16, microbatches=4)


@functools.cache
def gradients(mesh: str, schedule: str, virtual: int, pattern: str, zero: int):
    """One group of layers a chunk; every microbatch has something to learn from."""
    model = dataclasses.replace(MODEL, pattern=pattern, num_layers=2 * virtual * len(pattern))
    step = tiny.train_step(mesh, STEP, model=model, schedule=schedule, virtual=virtual, zero=zero, dtype="float64")
    state = step.init()
    return step.gradients(state.params, state.balance, step.place(tiny.batch(step.config))).grads


def check_equal(mesh: str, schedule: str, virtual: int, pattern: str):
    want, got = (gradients(mesh, schedule, virtual, pattern, zero) for zero in (0, 2))
    for (path, right), grad in zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True):
        assert grad.shape == right.shape and grad.sharding.is_equivalent_to(right.sharding, right.ndim), path
        assert grad.dtype == np.float64
        right = np.asarray(right)
        # In float32, sums in another order: 1.2e-6 of beta_proj's, 1.9e-6 of a_log's, which cancel; 2.3e-9 of the whole.
        assert np.linalg.norm(np.asarray(grad) - right) <= 1e-13 * np.linalg.norm(right), path


@pytest.mark.slow
def test_gradients_are_the_same_however_they_are_summed(double_precision):
    check_equal("data=2,pipe=2,expert=2", "interleaved_1f1b", 3, "M")  # the kind of layer that compiles faster


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "schedule", "virtual"),
    [
        ("data=2,pipe=2,expert=2", "zb1p", 1),
        ("data=2,pipe=2,context=2", "interleaved_1f1b", 3),
        ("data=2,pipe=2,context=2", "zbv", 2),
    ],
)
def test_gradients_are_the_same_in_every_schedule(mesh, schedule, virtual, double_precision):
    check_equal(mesh, schedule, virtual, "KM")


@pytest.mark.quick
@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_bytes_per_parameter_are_those_of_the_owners(replicas):
    """Gradients of the model's chunks: padding of leaves that do not divide stays within 5 %."""
    config = StepConfig(model=dataclasses.replace(get("nano"), num_layers=12), virtual=3, zero=2)
    step = TrainStep(config, abstract_mesh(MeshSpec.parse(f"data={replicas},pipe=2")))
    said = bytes_per_parameter(2, replicas, virtual=3)
    owners = jax.tree.leaves(step.masters.owners["chunks"])
    parameters = 3 * sum(o.of_chunk(o.elements) for o in owners)
    assert 4 * 3 * sum(o.of_chunk(o.owned) for o in owners) / parameters == pytest.approx(said.host, rel=0.05)
    assert 4 * 2 * sum(o.of_chunk(o.padded) for o in owners) / parameters == pytest.approx(said.gradient, rel=0.05)
