"""Muon's update: optax's to rounding, each matrix alone, free of scale, and no work for matrices of zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

from k3jax.optim import Group, muon, muon_with_adamw, orthogonalize, parameter_groups, scale_by_muon
from meshes import MeshSpec

SHAPES = {"one": (8, 12), "heads": (3, 12, 8), "square": (2, 2, 6, 6), "embed": (16, 8), "bias": (5,)}


def normal(seed, shapes=SHAPES, dtype=jnp.float32):
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(tree, [jax.random.normal(k, s, dtype) for k, s in zip(keys, leaves, strict=True)])


def after_steps(optimizer, params, grads):
    """Parameters after a step for each gradient."""
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for g in grads:
        params, state = step(params, state, g)
    return params


def updates_of(optimizer, *grads):
    """The last of several updates of parameters that are zero, so that they are seen unrounded."""
    state = jax.jit(optimizer.init)(jax.tree.map(jnp.zeros_like, grads[0]))
    update = jax.jit(optimizer.update)
    for g in grads:
        updates, state = update(g, state, jax.tree.map(jnp.zeros_like, g))
    return updates


# ---- the oracle ------------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("dtype, nesterov", [(jnp.float32, True), (jnp.float32, False), (jnp.float64, True)])
def test_ten_steps_equal_those_of_optax(dtype, nesterov):
    with jax.enable_x64(dtype == jnp.float64):
        params = normal(0, dtype=dtype)
        grads = [normal(seed, dtype=dtype) for seed in range(1, 11)]
        dims = lambda *axes: optax.contrib.MuonDimensionNumbers(*axes)
        axes = {"one": dims(0, 1), "heads": dims(1, 2), "square": dims(2, 3), "embed": None, "bias": None}
        decays = {name: name != "bias" for name in SHAPES}
        theirs = optax.contrib.muon(
            0.02,
            nesterov=nesterov,
            consistent_rms=0.2,
            weight_decay=0.1,
            weight_decay_mask=decays,
            muon_weight_dimension_numbers=axes,
        )
        want = after_steps(theirs, params, grads)
        adamw = optax.adamw(0.02, b2=0.95, weight_decay=0.1, mask=decays)  # optax's Muon takes Nesterov's Adam
        want |= {name: w for name, w in after_steps(adamw, params, grads).items() if axes[name] is None}
        got = after_steps(muon(0.02, nesterov=nesterov, weight_decay=0.1), params, grads)
        # Weights up to 3 are rounded by 1.2e-7 a step. In float64 only the 1e-8 differs that optax adds to norms.
        tolerance = 1e-6 if dtype == jnp.float32 else 1e-8
        for name in SHAPES:
            np.testing.assert_allclose(got[name], want[name], rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.quick
def test_heads_equal_a_loop_over_heads():
    """Also where the matrices lie in other axes than the last two, and groups say so."""
    grads = [normal(seed, {"w": (8, 3, 12)}) for seed in range(3)]
    groups = parameter_groups(grads[0], {"w": Group("muon", matrix_axes=(0, 2))})
    assert groups["w"].batch_axes == (-2,)
    for optimizer in (muon(1.0, groups=groups), optax.chain(scale_by_muon(groups=groups), optax.scale(-1.0))):
        together = updates_of(optimizer, *grads)["w"]
        for head in range(3):
            alone = updates_of(muon(1.0), *[{"w": g["w"][:, head]} for g in grads])["w"]
            np.testing.assert_allclose(together[:, head], alone, atol=1e-5)  # batched products round otherwise


# ---- scale -----------------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("nesterov", [True, False])
def test_updates_do_not_depend_on_the_scale_of_gradients(nesterov):
    """An expert that is rarely chosen has small gradients; it must not stop learning unnoticed."""
    grads = [normal(seed, {"w": (16, 24)}) for seed in range(3)]
    optimizer = muon(1.0, nesterov=nesterov)
    update = jax.jit(optimizer.update)

    def last(scale):
        state = optimizer.init(grads[0])
        for g in grads:
            updates, state = update({"w": g["w"] * scale}, state, grads[0])
        return updates["w"]

    for scale in (1e-30, 1e-20, 1e-8, 1e20, 1e37):
        # The rounding of scaled gradients, times 485 for the smallest singular values.
        np.testing.assert_allclose(last(scale), last(1.0), atol=2e-5, err_msg=str(scale))


@pytest.mark.quick
@pytest.mark.parametrize("first, later", [(1e-20, 1e20), (1e-30, 1.0), (1.0, 1e37), (0.0, 1e-20)])
def test_a_scale_that_jumps_leaves_the_direction_of_the_larger_gradients(first, later):
    small, large = normal(0, {"w": (6, 10)}), normal(1, {"w": (6, 10)})
    got = updates_of(muon(1.0), {"w": small["w"] * first}, {"w": large["w"] * later})["w"]
    want = updates_of(muon(1.0), {"w": small["w"] * 0}, large)["w"]
    np.testing.assert_allclose(got, want, atol=2e-5)


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("make", [muon, scale_by_muon])
@pytest.mark.parametrize(
    "setting",
    [dict(momentum=1.0), dict(momentum=-0.1), dict(consistent_rms=-0.2), dict(consistent_rms=float("nan"))]
    + [dict(ns_steps=0)],
)
def test_settings_that_mean_nothing_are_refused(make, setting):
    """A negative scale would climb."""
    rate = (0.1,) if make is muon else ()
    with pytest.raises(ValueError, match=rf"{next(iter(setting))}=.*: must be"):
        make(*rate, **setting)


@pytest.mark.quick
def test_a_leaf_that_is_no_matrix_is_named():
    with pytest.raises(ValueError, match=r"layer.b is \(5,\), no matrix: take `muon`"):
        scale_by_muon().init({"layer": {"w": jnp.ones((3, 4)), "b": jnp.ones(5)}})
    optax.masked(scale_by_muon(), {"w": True, "b": False}).init({"w": jnp.ones((3, 4)), "b": jnp.ones(5)})


# ---- zeros, and where it runs ----------------------------------------------------------------------------------------


def primitives(jaxpr):
    return {str(equation.primitive) for equation in jaxpr.eqns}


@pytest.mark.quick
def test_matrices_of_zeros_cost_nothing():
    """An owner's padding is zeros: all products stand in one branch of a conditional, and the other one is empty."""
    jaxpr = jax.make_jaxpr(orthogonalize)(jnp.ones((2, 4, 6))).jaxpr
    assert not primitives(jaxpr) & {"dot_general", "while", "scan"}
    (cond,) = (equation for equation in jaxpr.eqns if str(equation.primitive) == "cond")
    branches = [branch.jaxpr for branch in cond.params["branches"]]
    assert sorted(len(branch.eqns) > 0 for branch in branches) == [False, True]
    assert primitives(branches[1]) & {"while", "scan"}


@pytest.mark.quick
def test_zero_matrices_stay_zero_beside_others():
    x = normal(0, {"x": (5, 4, 6)})["x"].at[1].set(0)
    want = jnp.stack([orthogonalize(m) for m in x])
    assert not np.asarray(want[1]).any()
    np.testing.assert_allclose(jax.jit(orthogonalize)(x), want, atol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.vmap(orthogonalize))(x), want, atol=1e-5)
    assert np.isnan(orthogonalize(x.at[2, 0, 0].set(jnp.nan))[2]).any()  # not taken for zero


@pytest.mark.quick
def test_owners_of_whole_matrices_take_the_steps_of_one_device():
    """Seven heads dealt to four ranks, two slots each, one of them empty; five AdamW elements, padded to eight. The
    trees' paths and the groups are the parameters', their dims are not."""
    params, grads = ([normal(seed, {"q": (7, 8, 6), "norm": (5,)}) for seed in seeds] for seeds in ([9], range(4)))
    groups = parameter_groups(params[0])
    optimizer = muon_with_adamw(0.05, adamw_learning_rate=0.01, weight_decay=0.1, groups=groups)
    want = after_steps(optimizer, params[0], grads)

    def dealt(tree):
        q = jnp.concatenate([tree["q"], jnp.zeros((1, 8, 6))]).reshape(4, 2, 8, 6)
        return {"q": q, "norm": jnp.concatenate([tree["norm"], jnp.zeros(3)]).reshape(4, 2)}

    mesh = MeshSpec.parse("data=4").build(jax.devices()[:4])
    spec = P("data")
    specs = jax.tree.map(
        lambda leaf: spec if leaf.ndim else P(), jax.eval_shape(optimizer.init, jax.eval_shape(dealt, params[0]))
    )
    run = lambda f, ins, outs: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=True))
    owned, state = dealt(params[0]), run(optimizer.init, spec, specs)(dealt(params[0]))
    update = run(optimizer.update, (spec, specs, spec), (spec, specs))
    for g in grads:
        updates, state = update(dealt(g), state, owned)
        owned = optax.apply_updates(owned, updates)
    np.testing.assert_allclose(owned["q"].reshape(8, 8, 6)[:7], want["q"], atol=1e-6)
    np.testing.assert_allclose(owned["norm"].reshape(8)[:5], want["norm"], atol=1e-6)
    assert not np.asarray(owned["q"][3, 1]).any() and not np.asarray(owned["norm"].reshape(8)[5:]).any()


# ---- half precision --------------------------------------------------------------------------------------------------


def dots(jaxpr):
    for equation in jaxpr.eqns:
        if str(equation.primitive) == "dot_general":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from dots(inner)


@pytest.mark.quick
def test_half_precision_matrices_are_summed_in_float32():
    x = normal(0, {"x": (3, 32, 48)})["x"].astype(jnp.bfloat16)
    products = list(dots(jax.make_jaxpr(orthogonalize)(x).jaxpr))
    assert len(products) == 3
    for equation in products:
        assert {v.aval.dtype for v in equation.invars} == {jnp.dtype(jnp.bfloat16)}
        assert equation.outvars[0].aval.dtype == jnp.float32
    got, want = orthogonalize(x), orthogonalize(x.astype(jnp.float32))
    assert got.dtype == jnp.bfloat16
    error = jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want)
    assert float(error) < 0.03  # five steps of operands rounded by 2^-9


@pytest.mark.quick
def test_half_precision_momentum_is_as_near_as_documented():
    exact, halved = muon(1.0), muon_with_adamw(1.0, scale_by_muon(mu_dtype=jnp.bfloat16), mu_dtype=jnp.bfloat16)
    shapes = {"w": (4, 24, 32), "b": (32,)}
    params = jax.tree.map(jnp.zeros_like, normal(0, shapes))
    updates = [jax.jit(optimizer.update) for optimizer in (exact, halved)]
    momentum = lambda state, name: state[0].inner_states[name].inner_state.mu
    distance = lambda x, y: float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y))

    def run(gradients):
        states = [jax.jit(optimizer.init)(params) for optimizer in (exact, halved)]
        for grads in gradients:
            (a, states[0]), (b, states[1]) = (
                update(grads, state, params) for update, state in zip(updates, states, strict=True)
            )
        muon, adamw = momentum(states[1], "muon")["w"], momentum(states[1], "adamw")["b"]
        assert muon.dtype == adamw.dtype == jnp.bfloat16 and b["w"].dtype == jnp.float32
        return a["w"], b["w"], momentum(states[0], "muon")["w"], muon.astype(jnp.float32)

    a, b, exact_mu, mu = run(normal(seed, shapes) for seed in range(60))
    assert 0.001 < distance(mu, exact_mu) < 0.007
    assert 0.001 < distance(b, a) < 0.015
    *_, exact_mu, mu = run([normal(0, shapes)] * 200)
    assert 0.01 < float(jnp.abs(mu / exact_mu - 1).max()) < 2**-8 / (1 - 0.95)


# ---- the general form ------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_adamw_has_settings_of_its_own():
    params, grads = normal(0), [normal(seed) for seed in range(1, 4)]
    settings = dict(b1=0.8, b2=0.9, eps=1e-3)
    mixed = muon_with_adamw(0.02, adamw_learning_rate=optax.linear_schedule(0.1, 0.2, 3), **settings)
    got = after_steps(mixed, params, grads)
    adam = after_steps(optax.adam(optax.linear_schedule(0.1, 0.2, 3), **settings), params, grads)
    matrices = after_steps(muon(0.02), params, grads)
    for name in SHAPES:
        want = adam if name in ("embed", "bias") else matrices
        np.testing.assert_allclose(got[name], want[name], atol=1e-6)
