"""The door to the Hopper kernels: same function and gradients as the others, on the target that they are for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_problems import assert_kernels_close, cotangents_of, evaluate_definition, interpreted, problem

from k3jax.ops.kda import kda, mosaic


def inputs(T, K=64, V=64, H=1, documents=()):
    """Rows that hardly forget and rows that forget at once; with several heads, one row with one of each."""
    gates = np.zeros((T, H, K)) + np.resize([-0.05, -5.0], (H, 1))
    p = problem([gates] if H > 1 else [-0.05, -5.0], 0.5, T=T, H=H, K=K, V=V, documents=documents)
    return p, [*(jnp.asarray(x, jnp.bfloat16) for x in p[:3]), *map(jnp.asarray, p[3:])]


# Documents that go on over borders of chunks and segments, and start at them.
CASES = {
    "one segment": ({"T": 70, "documents": (30,)}, 1),
}
SWEEP = {
    "three, two heads": ({"T": 150, "H": 2, "documents": (20, 128, 140)}, 3),
    "two of one chunk": ({"T": 70, "documents": (30, 64)}, 2),
    "one document": ({"T": 250}, 2),
    "the last segment is empty": ({"T": 250, "documents": (63, 64, 65, 192)}, 3),
    "K < V": ({"T": 129, "V": 128, "documents": (128,)}, 2),
    "K > V": ({"T": 100, "K": 128, "documents": (40, 90)}, 2),
}


@pytest.mark.parametrize(
    ("shape", "segments"), [*CASES.values(), *(pytest.param(*x, marks=pytest.mark.slow) for x in SWEEP.values())],
    ids=[*CASES, *SWEEP],
)  # fmt: skip
def test_kernels_behind_the_door_are_kda_with_its_gradients(shape, segments):
    p, arrays = inputs(**shape)
    do, d_final = cotangents_of(p)
    do = jnp.asarray(do, jnp.bfloat16)
    run = lambda *a: interpreted(*a[:5], initial_state=a[5], segment_ids=arrays[6], segments=segments)
    (o, final), pullback = jax.vjp(run, *arrays[:6])
    got = o, final, *pullback((do, jnp.asarray(d_final)))
    assert [x.dtype for x in got[2:]] == [x.dtype for x in arrays[:6]]
    wide = p._replace(**{name: np.asarray(x, np.float32) for name, x in zip("qkv", arrays[:3], strict=True)})
    right = evaluate_definition(wide, (np.asarray(do, np.float32), d_final))
    assert_kernels_close(got, right)


STAGES = ("kda_prepare", "kda_recurrence", "kda_reverse", "kda_chunk_gradients", "kda_pair_gradients")
BETWEEN = ("kda_segment_maps", "kda_entering_cotangents")


@pytest.mark.quick
@pytest.mark.parametrize("segments", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_forward_and_backward_lower_for_a_gpu_without_one(segments):
    _, arrays = inputs(130)

    def loss(q, k, v, g, beta):
        o, state = kda(q, k, v, g, beta, gate_lower_bound=-5.0, implementation="mosaic_gpu", segments=segments)
        return o.astype(jnp.float32).sum() + state.sum()

    traced = jax.jit(jax.grad(loss, argnums=range(5))).trace(*arrays[:5])
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert all(name in program for name in STAGES)
    assert all((name in program) == (segments == 2) for name in BETWEEN)


def test_backward_keeps_inputs_and_the_states_that_enter_segments():
    _, arrays = inputs(256)

    def kept(segments):
        how = {"initial_state": arrays[5], "segment_ids": arrays[6], "segments": segments}
        pullback = jax.eval_shape(lambda *a: jax.vjp(lambda *a: interpreted(*a, **how), *a)[1], *arrays[:5])
        return sorted(x.shape for x in jax.tree.leaves(pullback))

    given = [x.shape for x in arrays]
    states = lambda segments: (segments, *arrays[5].shape)
    assert kept(1) == sorted([*given, states(1)])
    # And the maps, for the exchange.
    assert kept(2) == sorted([*given, states(2), states(2)])


@pytest.mark.quick
def test_long_sequences_of_few_heads_are_split_without_being_asked():
    assert mosaic.planned_segments((1, 2**16, 1, 128), 128) == 8
    assert mosaic.planned_segments((1, 2**16, 32, 128), 128) == 1


@pytest.mark.parametrize(
    "change, options, said",
    [
        ({}, {"gate_lower_bound": None}, "gate_lower_bound=None"),
        ({}, {"chunk_size": 32}, "chunk_size=32"),
        ({}, {"save_states": False}, "save_states=False"),
        ({"K": 48}, {}, "K = 48"),
        ({"dtype": jnp.float32}, {}, "q is float32"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused(change, options, said):
    _, arrays = inputs(16, K=change.get("K", 64))
    arrays[:3] = [x.astype(change.get("dtype", x.dtype)) for x in arrays[:3]]
    with pytest.raises(ValueError, match=said):
        kda(*arrays[:5], **({"gate_lower_bound": -5.0, "implementation": "mosaic_gpu"} | options))
