"""Weights of a checkpoint, whatever mesh trained it, and of a Hugging Face directory serve as the model they are of."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hf_directories import FUSED, K3, write

from k3jax import model as lm
from k3jax.interop.huggingface import open_directory
from k3jax.parallel.layout import StackLayout
from k3jax.serve.model.weights import assemble, from_checkpoint, from_huggingface, targets_of
from k3jax.sharding import param_specs
from k3jax.train.checkpoint import Checkpoints
from meshes import MeshSpec

SMALL = dataclasses.replace(tiny.STEP, global_batch=4, seq_len=16, microbatches=2)


def named(config, weights):
    """Every array by the name that a checkpoint gives it."""
    found = targets_of(config)
    leaves = jax.tree.leaves(weights)
    return {name: np.asarray(leaves[leaf][index]) for name, (leaf, index) in found.of_name.items()}


@pytest.mark.parametrize(
    "mesh, changes",
    [
        ("pipe=2,expert=2", {}),
        pytest.param("data=2", dict(zero=1, dtype="bfloat16"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_checkpoint_of_any_mesh_gives_the_weights_that_were_saved(tmp_path, mesh, changes):
    """Without a step run: a state is made, given other values, and saved in the run's own form."""
    step = tiny.train_step(mesh, SMALL, **changes)
    checkpoints = Checkpoints(tmp_path, step, weights_only=True)
    random, values = np.random.default_rng(0), {}

    def read(name, index):
        if name not in values:
            values[name] = random.normal(size=checkpoints.form.index[name].shape).astype(np.float32)
        return values[name][index]

    checkpoints.save_records(7, checkpoints.form.records_of(read), {})
    checkpoints.wait()
    config, weights = from_checkpoint(tmp_path, dtype="bfloat16")
    assert config == SMALL.model
    got, fp32 = named(config, weights), set()
    for name, array in got.items():
        np.testing.assert_array_equal(array, values[name].astype(array.dtype), err_msg=name)
        if array.dtype == np.float32:
            fp32.add(name.split("/")[-1])
    assert got.keys() == values.keys() and got["params/layers/2/attn/q_proj"].dtype == jnp.bfloat16
    assert {"router", "bias", "query", "weight", "gate_bias", "q_conv"} <= fp32
    with pytest.raises(OSError, match="no such step"):
        from_checkpoint(tmp_path, 3)
    with pytest.raises(FileNotFoundError, match="no whole checkpoint"):
        from_checkpoint(tmp_path / "none")


def test_a_hugging_face_directory_gives_its_tensors(tmp_path):
    style = dataclasses.replace(FUSED, a_log_shape=(2,))
    write(tmp_path / "there", K3, style)
    config, weights = from_huggingface(tmp_path / "there")
    assert config == dataclasses.replace(K3, name="there")
    source = open_directory(tmp_path / "there")
    for name, array in named(config, weights).items():
        np.testing.assert_array_equal(array, source.read(name, tuple(slice(0, n) for n in array.shape)), err_msg=name)


def test_on_a_mesh_experts_are_split_and_each_array_is_needed_once():
    mesh = MeshSpec.parse("data=2,expert=2").build(jax.devices()[:4])
    config = tiny.MODEL
    found = targets_of(config)
    arrays = {
        name: np.full(found.leaves[leaf].shape[len(index) :], number, np.float32)
        for number, (name, (leaf, index)) in enumerate(found.of_name.items())
    }
    weights = assemble(config, arrays.items(), mesh=mesh)
    for name, array in named(config, weights).items():
        np.testing.assert_array_equal(array, arrays[name], err_msg=name)
    up = weights.params["chunks"]["1"]["moe"]["expert_up"]
    assert up.addressable_shards[0].data.shape[3] == config.num_experts // 2
    assert jax.tree.structure(param_specs(config)) == jax.tree.structure(weights.params)
    abstract = jax.eval_shape(lambda: lm.init(config, StackLayout(config), 0))
    assert jax.tree.map(lambda a: a.shape, abstract) == jax.tree.map(lambda a: a.shape, weights.params)
    some = dict(list(arrays.items())[2:])
    with pytest.raises(ValueError, match="2 arrays of tiny are missing: params/"):
        assemble(config, some.items())
    wrong = arrays | {"params/head/weight": np.zeros((2, 2))}
    with pytest.raises(ValueError, match=r"params/head/weight is \[2, 2\]; tiny has \[16, 32\]"):
        assemble(config, wrong.items())
