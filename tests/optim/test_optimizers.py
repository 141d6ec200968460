"""Matrices as if alone, decay by group, and a clip that counts every element once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.optim import adamw, muon
from k3jax.train.step import clip_by_norm, global_norm
from meshes import MeshSpec


def updates_of(optimizer, params, grads):
    updates, _ = jax.jit(optimizer.update)(grads, jax.jit(optimizer.init)(params), params)
    return updates


@pytest.mark.quick
@pytest.mark.parametrize("shape", [(8, 8), (3, 8, 8), (2, 3, 4, 4), (2, 8, 32), (2, 32, 8)])
def test_every_trailing_matrix_is_orthogonalised_as_if_alone(shape):
    """Stacked layers, heads and experts are batch axes: flattened or left to Adam they would be silently wrong.

    In float64: in float32 the iteration makes 1e-5 of the rounding of products, which differs from machine to machine.
    """
    with jax.enable_x64(True):
        grads = {"w": jax.random.normal(jax.random.key(0), shape, jnp.float64)}
        params = jax.tree.map(jnp.zeros_like, grads)
        got = updates_of(muon(1.0), params, grads)["w"].reshape(-1, *shape[-2:])
        alone = optax.contrib.muon(1.0, consistent_rms=0.2)
        for matrix, grad in zip(got, grads["w"].reshape(-1, *shape[-2:]), strict=True):
            want = updates_of(alone, {"w": jnp.zeros_like(grad)}, {"w": grad})["w"]
            np.testing.assert_allclose(matrix, want, atol=1e-8)


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
def test_an_expert_without_tokens_goes_on_along_its_momentum_and_decays():
    """Its gradient is zero in this step; its momentum and weight decay are not."""
    params = {"expert_up": jnp.ones((2, 4, 3))}
    optimizer = muon(0.1, weight_decay=0.5)
    seen = {"expert_up": jax.random.normal(jax.random.key(0), (2, 4, 3))}
    empty = {"expert_up": seen["expert_up"].at[1].set(0)}
    _, state = optimizer.update(seen, optimizer.init(params), params)
    updates, _ = optimizer.update(empty, state, params)
    (first,), (again,) = (
        jax.tree.leaves(optimizer.update(g, optimizer.init(params), params)[0]) for g in (seen, empty)
    )
    assert (again[1] == -0.05).all(), "never chosen: only decay"
    direction = lambda update: update["expert_up"][1] + 0.05
    np.testing.assert_allclose(
        direction(updates), first[1] + 0.05, atol=1e-5
    )  # a momentum of one gradient: its direction
