"""The door to the Hopper kernels: same function and gradients as the others, on the target that they are for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_problems import NAMES, cotangents_of, error, evaluate_definition, problem

from k3jax.ops.kda import kda, mosaic

OPTIONS = (("scale", 64**-0.5), ("gate_lower_bound", -5.0))


def inputs(T, K=64, V=64, documents=()):
    p = problem([-0.05, -5.0], 0.5, T=T, H=1, K=K, V=V, documents=documents)
    return p, [*(jnp.asarray(x, jnp.bfloat16) for x in p[:3]), *map(jnp.asarray, p[3:])]


def test_kernels_behind_the_door_are_kda_with_its_gradients():
    p, arrays = inputs(70, documents=(30,))
    do, d_final = cotangents_of(p)
    do = jnp.asarray(do, jnp.bfloat16)
    run = lambda *a: mosaic.evaluate((*OPTIONS, ("interpret", True)), *a, arrays[6])
    (o, final), pullback = jax.vjp(run, *arrays[:6])
    got = o, final, *pullback((do, jnp.asarray(d_final)))
    assert [x.dtype for x in got[2:]] == [x.dtype for x in arrays[:6]]
    wide = p._replace(**{name: np.asarray(x, np.float32) for name, x in zip("qkv", arrays[:3], strict=True)})
    right = evaluate_definition(wide, (np.asarray(do, np.float32), d_final))
    for name, a, b in zip(NAMES, got, right, strict=True):
        # Products of bfloat16 operands.
        assert error(np.asarray(a, np.float32), b) <= 1e-2, name


@pytest.mark.quick
def test_forward_and_backward_lower_for_a_gpu_without_one():
    _, arrays = inputs(70)

    def loss(q, k, v, g, beta):
        o, state = kda(q, k, v, g, beta, gate_lower_bound=-5.0, implementation="mosaic_gpu")
        return o.astype(jnp.float32).sum() + state.sum()

    traced = jax.jit(jax.grad(loss, argnums=range(5))).trace(*arrays[:5])
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    # prepare and recurrence twice, reverse, and two kernels of gradients.
    assert program.count("custom_call @mosaic_gpu") >= 5


@pytest.mark.parametrize(
    "change, options, said",
    [
        ({}, {"gate_lower_bound": None}, "gate_lower_bound=None"),
        ({}, {"chunk_size": 32}, "chunk_size=32"),
        ({}, {"segments": 2}, "segments=2"),
        ({"K": 48}, {}, "K = 48"),
        ({"dtype": jnp.float32}, {}, "q is float32"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused(change, options, said):
    _, arrays = inputs(16, K=change.get("K", 64))
    arrays[:3] = [x.astype(change.get("dtype", x.dtype)) for x in arrays[:3]]
    with pytest.raises(ValueError, match=said):
        kda(*arrays[:5], **({"gate_lower_bound": -5.0, "implementation": "mosaic_gpu"} | options))
