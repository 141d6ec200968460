"""KDA's forward kernels, in Mosaic's interpreter, against the definition in float64."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from kernel_problems import BOUND, CLOSE, distance, kernel_inputs, problem, right_answers

from pallas_kernels.kda import forward
from pallas_kernels.kda.api import check
from pallas_kernels.kda.prepare import Chunks, prepare
from pallas_kernels.kda.prepare import reference as prepare_reference
from pallas_kernels.kda.recurrence import recurrence
from pallas_kernels.kda.recurrence import reference as recurrence_reference


def run(p, interpret=True, **options):
    q, k, v, g, beta, state, ids = kernel_inputs(p)
    options = {"scale": q.shape[-1] ** -0.5, "gate_lower_bound": BOUND, "interpret": interpret} | options
    return forward(q, k, v, g, beta, initial_state=state, segment_ids=ids, **options)[:2]


def uniform_gates(T, K, H=2):
    return BOUND * np.random.default_rng(3).random((T, H, K))


# A saturated gate, one that hardly forgets, and both mixed; lengths that fill no chunk; K != V both ways.
CASES = {
    "saturated": partial(problem, [BOUND], 0.9, T=70, K=128, V=64),
    "documents": partial(
        problem, [-0.01, uniform_gates(130, 64)], 0.9, T=130, K=64, V=128, documents=(20, 40, 64, 129)
    ),
    "one short chunk": partial(problem, [-0.1], T=13, K=64, V=64),
}
BORDERS = (1, 15, 16, 128, 190)
SWEEP = {
    f"{gate}, cosine {cosine}, documents {documents}": partial(
        problem, [gate], cosine, T=197, K=128, V=128, documents=documents
    )
    for gate, cosine, documents in (
        (-0.001, 0.99, None),
        (-0.001, 0.9, BORDERS),
        (-0.5, 0.0, None),
        (-0.5, 0.9, BORDERS),
        (-1.4, 0.99, None),
        (-3.0, 0.9, BORDERS),
        (-5.0, 0.99, None),
    )
}


@pytest.mark.parametrize("make", [*CASES.values(), *(pytest.param(x, marks=pytest.mark.slow) for x in SWEEP.values())],
                         ids=[*CASES, *SWEEP])  # fmt: skip
def test_outputs_and_final_state_are_the_recurrences(make):
    p = make()
    for got, right in zip(run(p), right_answers(p), strict=True):
        assert distance(got, right) <= CLOSE


@pytest.mark.quick
def test_what_each_kernel_hands_on_is_what_its_plain_function_says():
    p = problem([uniform_gates(128, 64)], 0.9, T=128, K=64, V=64)
    q, k, v, g, beta, state, _ = kernel_inputs(p)
    first = jnp.asarray(np.where(np.arange(128) < 64, np.arange(128) // 20 * 20 - (np.arange(128) < 20), -1))[None]
    arrays = q, k, v, g, beta.swapaxes(1, 2), first.astype(jnp.int32)
    chunks = prepare(*arrays, scale=0.1, gate_lower_bound=BOUND, keep_inverse=True, interpret=True)
    passed = recurrence(chunks, state, keep=True, interpret=True)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays[:5]]
        right = prepare_reference(*wide, jnp.asarray(np.asarray(first)), scale=0.1)
        for name, a, b in zip(Chunks._fields, chunks, right, strict=True):
            assert distance(a, b) <= CLOSE, name
        given = Chunks(*(jnp.asarray(np.asarray(x, np.float64)) for x in chunks))
        right = recurrence_reference(given, jnp.asarray(np.asarray(state, np.float64)))
    for name, a, b in zip(passed._fields, passed, right, strict=True):
        assert distance(a, b) <= CLOSE, name


def test_a_small_correction_of_a_large_state_is_not_rounded_away():
    # The state predicts 4098·k for a value of 4096·k: in 8 bits they are equal and nothing would be written.
    one = np.zeros((1, 1, 1, 64))
    one[..., 0] = 1
    q = k = jnp.asarray(one, jnp.bfloat16)
    state = jnp.zeros((1, 1, 64, 64)).at[..., 0, 0].set(4098)
    g, beta = jnp.zeros((1, 1, 1, 64)), jnp.full((1, 1, 1), 0.5)
    how = {"segment_ids": None, "scale": 1.0, "gate_lower_bound": BOUND, "interpret": True}
    _, final, _ = forward(q, k, 4096 * q, g, beta, initial_state=state, **how)
    assert final[0, 0, 0, 0] == 4097


def test_a_token_depends_on_no_later_one_not_even_through_rounding():
    p = problem([uniform_gates(100, 64, 1)], 0.9, T=100, K=64, V=64, H=1)
    changed = p._replace(
        **{x: np.concatenate([getattr(p, x)[:, :61], getattr(p, x)[:, 61:][:, ::-1]], 1) for x in "kvg"}
    )
    o, other = (run(x)[0] for x in (p, changed))
    assert (o[:, :61] == other[:, :61]).all() and not (o[:, 61:] == other[:, 61:]).all()


@pytest.mark.quick
def test_kernels_lower_for_cuda_also_inside_shard_map():
    p = problem([-1.0] * 2, T=70, K=128, V=128, documents=(9,))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def step(q, k, v, g, beta, ids):
        how = {"scale": 0.1, "gate_lower_bound": BOUND}
        return forward(q, k, v, g, beta, initial_state=None, segment_ids=ids, **how)[:2]

    q, k, v, g, beta, _, ids = kernel_inputs(p)
    sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data")))
    text = sharded.trace(q, k, v, g, beta, ids).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 2 and "kda_prepare" in text and "kda_recurrence" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gate_lower_bound": None}, "gate_lower_bound=None"),
        ({"gate_lower_bound": -6.0}, "gate_lower_bound=-6.0"),
        ({"K": 60}, "K = 60"),
        ({"V": 100}, "V = 100"),
        ({"k": (1, 8, 3, 64)}, "k is bfloat16[1, 8, 3, 64]"),
        ({"beta": (1, 7, 2)}, "beta is float32[1, 7, 2]"),
    ],
)
def test_other_shapes_and_gates_are_refused_by_name(change, words):
    K, V = change.pop("K", 64), change.pop("V", 64)
    bound = change.pop("gate_lower_bound", BOUND)
    shapes = {"q": (1, 8, 2, K), "k": (1, 8, 2, K), "v": (1, 8, 2, V), "g": (1, 8, 2, K), "beta": (1, 8, 2)} | change
    arrays = {name: jnp.zeros(s, jnp.bfloat16 if name in "qkv" else jnp.float32) for name, s in shapes.items()}
    with pytest.raises(ValueError, match=re.escape(words)):
        check(**arrays, initial_state=None, segment_ids=None, gate_lower_bound=bound)


def test_inputs_in_another_precision_are_refused():
    x = jnp.zeros((1, 8, 2, 64))
    with pytest.raises(ValueError, match=r"q is float32.* must be bfloat16"):
        forward(x, x, x, x, x[..., 0], initial_state=None, segment_ids=None, scale=1.0, gate_lower_bound=BOUND)
