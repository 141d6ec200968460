"""Which leaf is on what, matrices as if alone, decay by group, and a clip that counts every element once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.optim import muon, parameter_groups
from k3jax.optim.optimizers import adamw
from k3jax.train.step import clip_by_norm, global_norm
from meshes import MeshSpec


def updates_of(optimizer, params, grads):
    updates, _ = jax.jit(optimizer.update)(grads, jax.jit(optimizer.init)(params), params)
    return updates


@pytest.mark.quick
@pytest.mark.parametrize("shape", [(8, 8), (3, 8, 8), (2, 3, 4, 4), (2, 8, 32), (2, 32, 8)])
def test_every_trailing_matrix_is_orthogonalised_as_if_alone(shape):
    """Stacked layers, heads and experts are batch axes: flattened or left to Adam they would be silently wrong."""
    grads = {"w": jax.random.normal(jax.random.key(0), shape)}
    params = jax.tree.map(jnp.zeros_like, grads)
    got = updates_of(muon(1.0), params, grads)["w"].reshape(-1, *shape[-2:])
    alone = optax.contrib.muon(1.0, consistent_rms=0.2)
    for matrix, grad in zip(got, grads["w"].reshape(-1, *shape[-2:]), strict=True):
        want = updates_of(alone, {"w": jnp.zeros_like(grad)}, {"w": grad})["w"]
        np.testing.assert_allclose(matrix, want, atol=1e-5)


@pytest.mark.quick
def test_update_scale_does_not_depend_on_orientation():
    """0.2 sqrt(max(rows, columns)): in and out swapped give the same, and the update's size is about 0.2."""
    grad = jax.random.normal(jax.random.key(1), (8, 32))
    wide = updates_of(muon(1.0), {"w": grad * 0}, {"w": grad})["w"]
    tall = updates_of(muon(1.0), {"w": grad.T * 0}, {"w": grad.T})["w"]
    np.testing.assert_allclose(wide, tall.T, atol=1e-5)
    assert 0.1 < float(jnp.sqrt((wide**2).mean())) < 0.25
    singular = jnp.linalg.svd(wide, compute_uv=False) / (0.2 * 32**0.5)
    assert 0.6 < float(singular.min()) and float(singular.max()) < 1.2


@pytest.mark.quick
def test_known_names_go_to_adamw_and_the_listing_says_so():
    shapes = {
        "chunks": {
            "attn": {"q_proj": (3, 8, 8), "k_conv": (4, 16), "a_log": (2,), "gate_bias": (2, 8), "beta_proj": (8, 2)},
            "moe": {"expert_up": (2, 3, 4, 4), "router": (8, 4), "latent_norm": {"weight": (8,)}},
            "attn_mix": {"query": (8,), "norm": {"weight": (8,)}},
        },
        "embed": {"table": (16, 8)},
        "head": {"weight": (8, 16), "norm": {"weight": (8,)}},
    }
    params = jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))
    groups = parameter_groups(params)
    label = lambda *path: functools_reduce(groups, path).label
    assert label("chunks", "attn", "q_proj") == label("chunks", "moe", "router") == "muon"
    assert groups["chunks"]["moe"]["expert_up"].matrix_axes == (2, 3)
    assert groups["chunks"]["moe"]["expert_up"].batch_axes == (0, 1)
    assert label("embed", "table") == label("head", "weight") == label("chunks", "attn", "beta_proj") == "adamw"
    for path in (
        ("chunks", "attn", "k_conv"),
        ("chunks", "attn", "a_log"),
        ("chunks", "attn", "gate_bias"),
        ("chunks", "moe", "latent_norm", "weight"),
        ("chunks", "attn_mix", "query"),
        ("head", "norm", "weight"),
    ):
        assert label(*path) == "adamw_no_decay", path


def functools_reduce(tree, path):
    for key in path:
        tree = tree[key]
    return tree


@pytest.mark.quick
def test_stacked_norms_of_the_model_are_never_matrices():
    """In a stack a norm's weight has four dims; by shape alone Muon would take it."""
    step = tiny.train_step("data=1")
    groups = parameter_groups(step.state_shapes.params)
    slot = groups["chunks"]["0"]
    assert slot["attn_norm"]["weight"].label == slot["attn"]["q_conv"].label == "adamw_no_decay"
    assert slot["attn"]["q_proj"].label == slot["moe"]["expert_gate"].label == groups["dense"]["gate"].label == "muon"
    assert groups["embed"]["table"].label == groups["head"]["weight"].label == "adamw"


@pytest.mark.quick
@pytest.mark.parametrize("optimizer", [muon, adamw])
def test_decay_is_by_group(optimizer):
    params = {"proj": jnp.ones((4, 4)), "embed": jnp.ones((4, 4)), "norm": jnp.ones(4), "a_log": jnp.ones(4)}
    still = jax.tree.map(jnp.zeros_like, params)
    updates = updates_of(optimizer(0.5, weight_decay=0.1), params, still)
    np.testing.assert_allclose(updates["proj"], -0.05, rtol=1e-6)
    np.testing.assert_allclose(updates["embed"], -0.05, rtol=1e-6)
    assert not np.asarray(updates["norm"]).any() and not np.asarray(updates["a_log"]).any()


@pytest.mark.quick
def test_clipping_counts_every_element_once():
    """Sixteen ones on four shards: norm 4, clipped to 1 each element is 1/4 (a clip inside the shards gives 1/2)."""
    mesh = MeshSpec.parse("data=2,expert=2").build()
    grads = {"w": jax.device_put(jnp.ones(16), NamedSharding(mesh, P(("data", "expert"))))}
    norm = jax.jit(global_norm)(grads)
    assert float(norm) == 4.0
    clipped = jax.jit(clip_by_norm, static_argnums=2)(grads, norm, 1.0)
    np.testing.assert_allclose(clipped["w"], 0.25, rtol=1e-6)
    untouched = jax.jit(clip_by_norm, static_argnums=2)(grads, norm, 10.0)
    np.testing.assert_array_equal(untouched["w"], grads["w"])


@pytest.mark.quick
def test_muon_equals_optax_over_ten_steps():
    shapes = {"a": (8, 12), "b": (3, 12, 8)}
    params = jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))
    dims = optax.contrib.MuonDimensionNumbers
    theirs = optax.contrib.muon(
        0.1, consistent_rms=0.2, muon_weight_dimension_numbers={"a": dims(0, 1), "b": dims(1, 2)}
    )
    run = lambda optimizer: run_steps(optimizer, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), run(muon(0.1)), run(theirs))


def run_steps(optimizer, params):
    state = jax.jit(optimizer.init)(params)
    update = jax.jit(optimizer.update)
    for step in range(10):
        keys = jax.random.split(jax.random.key(step), len(params))
        grads = {name: jax.random.normal(key, params[name].shape) for name, key in zip(params, keys, strict=True)}
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.quick
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-8, 1e15, 1e20])
def test_updates_do_not_depend_on_the_scale_of_a_gradient(scale):
    """An expert that is rarely chosen has small gradients; it must not stop learning unnoticed."""
    grad = jax.random.normal(jax.random.key(2), (16, 24))
    update = lambda g: updates_of(muon(1.0), {"w": g * 0}, {"w": g})["w"]
    np.testing.assert_allclose(update(grad * scale), update(grad), atol=1e-5)
    assert not np.asarray(update(grad * 0)).any()
