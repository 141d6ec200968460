"""KDA's implementations against the definition in float64, where gates, keys, lengths and documents are awkward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from kda_problems import (
    FORWARD,
    GRADIENT,
    NAMES,
    Problem,
    assert_close,
    cotangents_of,
    definition,
    error,
    evaluate,
    evaluate_definition,
    joined,
    problem,
    slow,
    strong_gates,
)

from k3jax.ops.kda import kda, kda_step, layout

BOUND = -5.0
CONSTANT_GATES = (-0.001, -0.5, -1.0, -1.5, -2.5, -3.0, -5.0)
T = 130


def run(p: Problem, **options):
    """(o, final state), compiled: one operation at a time would take seconds."""
    return jax.jit(lambda *a: kda(*a[:5], initial_state=a[5], segment_ids=a[6], **options))(*map(jnp.asarray, p))


@pytest.fixture(scope="module")
def hard() -> Problem:
    """All gates, key cosines 0, 0.9 and 1, without and with documents: one shape, so that it compiles once."""
    random = -5 * np.random.default_rng(3).random((T, 2, 16))
    gates = [*CONSTANT_GATES, random, *strong_gates(T)]
    layouts = ((), (1, 2, 40, 64, 113))
    return joined([problem(gates, cosine, T=T, documents=d) for cosine in (0.0, 0.9, 1.0) for d in layouts])


@pytest.fixture(scope="module")
def bounded(hard) -> Problem:
    """The same, with gates that keep K3's bound."""
    return hard._replace(g=np.maximum(hard.g, BOUND))


@pytest.fixture(scope="module")
def right(hard):
    return evaluate_definition(hard, cotangents_of(hard))


@pytest.fixture(scope="module")
def right_bounded(bounded):
    return evaluate_definition(bounded, cotangents_of(bounded))


def test_recurrent_implementation_is_the_definition(hard, right):
    o, states = definition(hard)
    # Two float64 programs.
    assert error(right[0], o) < 1e-12
    assert error(right[1], states[-1]) < 1e-12


@pytest.mark.quick
def test_chunked_is_right_for_any_gate_and_any_keys(hard, right):
    assert_close(evaluate(hard, cotangents_of(hard)), right)


def test_chunked_is_right_with_the_cheap_tiles_of_a_bounded_gate(bounded, right_bounded):
    assert_close(evaluate(bounded, cotangents_of(bounded), gate_lower_bound=BOUND), right_bounded)


@pytest.mark.parametrize("bound", [pytest.param(None, marks=pytest.mark.slow), BOUND])
def test_wide_heads_at_every_gate_strength_lose_no_row(bound):
    p = problem([*CONSTANT_GATES, BOUND * np.random.default_rng(0).random((128, 2, 128))], 0.9, T=128, K=128, V=128)
    p = p._replace(beta=np.full_like(p.beta, 0.5))
    options = {} if bound is None else {"gate_lower_bound": bound}
    assert_close(evaluate(p, cotangents_of(p), **options), evaluate_definition(p, cotangents_of(p)))


def test_promised_bound_too_wide_for_cheap_tiles_is_still_right():
    p = problem([-6.0, -40.0], T=20, documents=(7,))
    assert error(run(p, gate_lower_bound=-40.0)[0], definition(p)[0]) <= FORWARD


@pytest.mark.parametrize("bound", [None, BOUND])
def test_gradients_survive_large_cotangents(bounded, right_bounded, bound):
    # Loss scaling by 2^16: linear in the cotangents, and nothing overflows.
    got = evaluate(bounded, cotangents_of(bounded, 2.0**16), **({} if bound is None else {"gate_lower_bound": bound}))
    for a, b in zip(got[2:], right_bounded[2:], strict=True):
        assert error(a / 2.0**16, b) <= GRADIENT


@pytest.mark.parametrize("bound", [None, BOUND])
def test_a_prefix_knows_nothing_of_its_future_to_the_last_bit(bound):
    # Row P - 1 of the batch is cut at P, for every P in 1..67: outputs before the cut and the gradients that they give
    # stay the same bits when everything behind it is replaced, and nothing behind it gets a gradient.
    P = np.arange(1, 68)
    rng = np.random.default_rng(5)
    gates = BOUND * rng.random((len(P), 70, 1, 8))
    gates[::3] = rng.choice([0, BOUND], gates[::3].shape)
    base = problem(gates, 0.5, T=70, H=1, K=8, V=4)
    past = np.arange(70) < P[:, None]
    other = problem(np.where(past[..., None, None], gates, BOUND - gates), 0.9, T=70, H=1, K=8, V=4, seed=1)
    mixed = base._replace(
        **{
            name: np.where(past.reshape(*past.shape, *(1,) * (a.ndim - 2)), a, b)
            for name, a, b in zip(base._fields[:5], base[:5], other[:5], strict=True)
        }
    )
    do, d_final = cotangents_of(base)
    cotangents = np.where(past[..., None, None], do, 0), 0 * d_final
    options = {} if bound is None else {"gate_lower_bound": bound}
    a, b = (evaluate(p, cotangents, **options) for p in (base, mixed))
    for name, x, y in zip(NAMES, a, b, strict=True):
        if name == "dinitial_state":
            assert np.array_equal(x, y)
        elif name != "final_state":
            assert np.array_equal(x[past], y[past]), name
            if name != "o":
                assert not x[~past].any() and not y[~past].any(), name
    assert not np.array_equal(a[0], b[0])


@pytest.mark.parametrize("bound", [None, BOUND])
@pytest.mark.parametrize("options", [{"save_states": False}, {"segments": 2}, {"segments": 3, "save_states": False}])
def test_states_computed_again_and_segments_side_by_side_change_nothing(options, bound, bounded, right_bounded):
    few = slice(4, None, 6)  # every sixth problem, so that all gates, cosines and documents appear
    p = Problem(*(x[few] for x in bounded))
    cotangents = [x[few] for x in cotangents_of(bounded)]
    options = options | {"chunk_size": 16} | ({} if bound is None else {"gate_lower_bound": bound})
    assert_close(evaluate(p, cotangents, **options), [x[few] for x in right_bounded])


@pytest.mark.parametrize("options", [{}, {"segments": 3}, {"gate_lower_bound": BOUND, "save_states": False}])
def test_groups_one_after_the_other_change_nothing(options, monkeypatch):
    monkeypatch.setattr(layout, "CACHE_PER_CORE", 1 << 16)
    p = problem([-0.05, -3.0], 0.9, T=197, documents=(20, 64, 100, 165))
    plan = layout.Layout.of(p.q.shape, 8, 16, options.get("segments", 1), 1)
    assert plan.groups > 2 and plan.padded > 197
    cotangents = cotangents_of(p)
    assert_close(evaluate(p, cotangents, chunk_size=16, **options), evaluate_definition(p, cotangents))


def test_forward_keeps_the_states_of_all_chunks_only_if_asked():
    p = problem([-0.1], T=256)

    def residuals(**options):
        run = lambda *a: jax.vjp(lambda *a: kda(*a, **options), *a)[1]
        return [x.shape for x in jax.tree.leaves(jax.eval_shape(run, *map(jnp.asarray, p[:5])))]

    states = (1, 4 * 2, 16, 8)
    assert states in residuals() and states not in residuals(save_states=False)
    assert sum(map(np.prod, residuals(save_states=False))) < sum(map(np.prod, residuals()))


@pytest.mark.parametrize("length", [256, *slow(8192)])
def test_bfloat16_inputs_lose_no_more_than_their_own_rounding(length):
    # One limit for both lengths: the error does not grow with the sequence.
    p = problem([-0.001, -0.05, -5.0], 0.5, T=length, H=1)
    rounded = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) for x in p[:3]]
    o, states = definition(Problem(*rounded, *p[3:]))
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in p[:3])
    got_o, got_state = run(Problem(q, k, v, *p[3:]), gate_lower_bound=BOUND)
    assert got_o.dtype == jnp.bfloat16 and got_state.dtype == jnp.float32
    # The output is rounded to bfloat16 once; the state is float32 throughout.
    assert error(np.asarray(got_o, np.float32), o) <= 4e-3
    assert error(got_state, states[-1]) <= FORWARD


def test_gradients_of_bfloat16_inputs_come_in_their_dtype():
    p = problem([-0.05, -5.0], 0.5, T=100, H=1)
    q, k, v, do = (jnp.asarray(x, jnp.bfloat16) for x in (*p[:3], cotangents_of(p)[0]))
    wide = Problem(*(np.asarray(x, np.float32) for x in (q, k, v)), *p[3:])
    cotangents = np.asarray(do, np.float32), cotangents_of(p)[1]
    right = evaluate_definition(wide, cotangents)
    got = evaluate(Problem(q, k, v, *p[3:]), (do, cotangents[1]))
    assert [x.dtype.name for x in got] == ["bfloat16", "float32", *["bfloat16"] * 3, *["float32"] * 3]
    for name, a, b in zip(NAMES, got, right, strict=True):
        assert error(a.astype(np.float32), b) <= (4e-3 if a.dtype == jnp.bfloat16 else GRADIENT), name


def test_a_broken_promise_is_caught_when_checks_are_on():
    p = problem([-6.0], T=20)
    checked = jax.jit(checkify.checkify(lambda *a: kda(*a, gate_lower_bound=BOUND)[0], errors=checkify.user_checks))
    failure, _ = checked(*map(jnp.asarray, p[:5]))
    with pytest.raises(checkify.JaxRuntimeError, match=r"gate_lower_bound=-5.0 was promised, but g reaches -6"):
        failure.throw()
    kept, _ = checked(*map(jnp.asarray, p._replace(g=np.maximum(p.g, BOUND))[:5]))
    kept.throw()


@pytest.mark.parametrize("length", [1, 16, 17, 65, *slow(2, 15, 63, 64, 1000)])
def test_any_length(length):
    gates = [-0.1, -5.0, -40.0]
    p = problem(gates, 0.5, T=length, documents=[d for d in (2, 16, 30) if d < length])
    o, states = definition(p)
    got_o, got_state = run(p)
    assert got_o.shape == o.shape
    assert error(got_o, o) <= FORWARD
    assert error(got_state, states[-1]) <= FORWARD


@pytest.mark.parametrize("length", [1, *slow(15, 16)])
def test_gradient_of_a_single_tile(length):
    p = problem([-0.1, -5.0], 0.5, T=length, H=3, K=5, V=7)
    assert_close(evaluate(p, cotangents_of(p)), evaluate_definition(p, cotangents_of(p)))


@pytest.mark.slow
@pytest.mark.parametrize("bound", [None, BOUND])
@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 130, 200])
def test_gradients_of_any_length_and_chunk_size(length, chunk_size, bound):
    p = problem([-0.1, -5.0], 0.9, T=length, H=1, K=8, V=4, documents=[d for d in (5, 64, 70) if d < length])
    options = {"chunk_size": chunk_size} | ({} if bound is None else {"gate_lower_bound": bound})
    assert_close(evaluate(p, cotangents_of(p), **options), evaluate_definition(p, cotangents_of(p)))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"gate_lower_bound": BOUND}, {"save_states": False}, {"segments": 3}])
def test_gradients_of_a_long_odd_sequence(options):
    # V = 24: in a few of thousands of rows of 4 values everything cancels, and the recurrence itself in float32 reaches
    # the limit of the worst row (1e-4 at a norm of 4e-5, where the median is 0.12).
    p = problem([-0.1, -5.0], 0.9, T=1000, H=1, K=16, V=24, documents=(5, 64, 70))
    assert_close(evaluate(p, cotangents_of(p), **options), evaluate_definition(p, cotangents_of(p)))


@pytest.mark.parametrize("K", [60, *slow(100)])
def test_key_dims_that_are_no_power_of_two_do_not_read_the_next_head(K):
    p = problem([-0.5], T=20, H=3, K=K, V=12)
    p.g[:, :, 1] = -1000
    right_o, states = definition(p)
    o, state = run(p)
    for head in range(3):
        assert error(o[:, :, head], right_o[:, :, head]) <= FORWARD
        assert error(state[:, head], states[-1][:, head]) <= FORWARD


def test_gate_at_the_bound_has_finite_gradients_without_a_promise():
    # exp of the masked half of the pairs would overflow; masked after exp it makes 0 · inf in backward.
    p = problem([-5.0], T=64)
    got = evaluate(p, cotangents_of(p))
    assert all(np.isfinite(x).all() for x in got)
    assert all(np.abs(x).max() > 0 for x in got)


@pytest.mark.parametrize("implementation", ["recurrent", "chunked"])
def test_residual_is_not_formed_in_16_bits(implementation):
    one = jnp.ones((1, 1, 1, 1), jnp.bfloat16)
    state = jnp.full((1, 1, 1, 1), 4098.0)

    @jax.jit
    def once(beta, v):
        return kda(
            one, one, v, jnp.zeros((1, 1, 1, 1)), beta, scale=1.0, initial_state=state, implementation=implementation
        )

    half = jnp.full((1, 1, 1), 0.5)
    # 4098 is no bfloat16: with a 16-bit residual v − kᵀS nothing would be written. All numbers here are exact.
    _, final = once(half, 4096 * one)
    assert final.item() == 4097
    o, slope = jax.value_and_grad(lambda beta: once(beta, jnp.full((1, 1, 1, 1), 4096.0))[0].sum())(half)
    assert o == 4097 and slope.item() == -2


@pytest.mark.parametrize("implementation", ["recurrent", "chunked"])
def test_gates_stay_float32_when_activations_are_bfloat16(implementation):
    length = 4096
    ones = jnp.ones((1, length, 1, 4), jnp.bfloat16)
    k = ones / 2
    beta = jnp.zeros((1, length, 1)).at[:, 0].set(1.0)
    o, final = jax.jit(lambda *a: kda(*a, scale=1.0, implementation=implementation))(
        ones, k, ones, jnp.full((1, length, 1, 4), -0.001), beta
    )
    # The write at t = 0 is 1/2 in every entry; exp(−0.001) in bfloat16 would be 1. Token by token, the same rounding of
    # exp(−0.001), half a unit in the last place at most, counts 4,095 times; chunks sum the logarithms first.
    rounding = length * 2**-24 if implementation == "recurrent" else 1e-5
    np.testing.assert_allclose(final, 0.5 * np.exp(-4.095), rtol=rounding)
    assert o.dtype == jnp.bfloat16 and final.dtype == jnp.float32
    np.testing.assert_allclose(o[0, -1].astype(np.float32), 2 * np.exp(-4.095), rtol=2**-8)


def test_one_token_at_a_time_equals_the_whole_sequence(hard, right):
    p = hard

    @jax.jit
    def decode(q, k, v, g, beta, state):
        def token(state, inputs):
            o, state = kda_step(state, *inputs)
            return state, o

        state, o = jax.lax.scan(token, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, g, beta)))
        return jnp.moveaxis(o, 0, 1), state

    rows = (p.segment_ids == 0).all(1)
    assert rows.any()
    o, state = decode(*(x[rows] for x in p[:6]))
    assert error(o, right[0][rows]) <= FORWARD
    assert error(state, right[1][rows]) <= FORWARD


def test_without_segment_ids_there_is_one_document():
    p = problem([-0.1, -2.0], T=20)
    arrays = list(map(jnp.asarray, p[:5]))
    zeros = jnp.zeros((2, 20), jnp.int32)
    a, b = jax.jit(lambda *x: (kda(*x), kda(*x, segment_ids=zeros, initial_state=jnp.zeros(p.state.shape))))(*arrays)
    assert error(a[0], b[0]) <= FORWARD and error(a[1], b[1]) <= FORWARD


def test_float64_inputs_are_computed_in_float64():
    p = problem([-0.3, -1000.0], 1.0, T=70, documents=(33,))
    o, states = definition(p)
    with jax.enable_x64(True):
        got_o, got_state = run(Problem(*(x.astype(np.float64) for x in p[:6]), p.segment_ids))
    assert got_o.dtype == got_state.dtype == jnp.float64
    assert error(got_o, o) < 1e-12 and error(got_state, states[-1]) < 1e-12


@pytest.mark.parametrize(
    "options, said",
    [
        ({"implementation": "cuda"}, "'cuda'.*recurrent, chunked"),
        ({"chunk_size": 24}, "chunk_size=24 must be a power of two"),
        ({"chunk_size": 0}, "chunk_size=0 must be a power of two"),
        ({"segments": 0}, "segments=0 must be at least 1"),
        ({"implementation": "recurrent", "segments": 2}, "segments=2.*'recurrent' has none"),
        ({"gate_lower_bound": 0.0}, "gate_lower_bound=0.0 must be negative"),
    ],
)
def test_impossible_options_are_refused_with_what_is_possible(options, said):
    p = problem([-0.1], T=4)
    with pytest.raises(ValueError, match=said):
        kda(*map(jnp.asarray, p[:5]), **options)


def test_shapes_that_do_not_fit_are_refused():
    p = problem([-0.1], T=4)
    arrays = list(map(jnp.asarray, p[:5]))
    with pytest.raises(ValueError, match=r"beta has shape \(1, 3, 2\).*must be \(1, 4, 2\)"):
        kda.__wrapped__(*arrays[:4], arrays[4][:, :3])
    with pytest.raises(ValueError, match="T = 0"):
        kda(*(x[:, :0] for x in arrays))
    with pytest.raises(ValueError, match="V = 0"):
        kda(*arrays[:2], arrays[2][..., :0], *arrays[3:])
    with pytest.raises(ValueError, match="q has shape .* four dims"):
        kda.__wrapped__(arrays[0][0], *arrays[1:])
    with pytest.raises(ValueError, match="segment_ids are float32"):
        kda.__wrapped__(*arrays, segment_ids=jnp.zeros((1, 4)))
    with pytest.raises(ValueError, match="scale is traced"):
        jax.jit(lambda scale: kda.__wrapped__(*arrays, scale=scale))(0.5)
    with pytest.raises(ValueError, match="gate_lower_bound is traced"):
        jax.jit(lambda bound: kda.__wrapped__(*arrays, gate_lower_bound=bound))(-5.0)
    with pytest.raises(ValueError, match="v is int32; it must be a floating-point"):
        kda.__wrapped__(*arrays[:2], arrays[2].astype(jnp.int32), *arrays[3:])  # o, of v's dtype, would be truncated
    one = [x[:, 0] for x in arrays]
    with pytest.raises(ValueError, match=r"^state has shape .*must be \(1, 2, 16, 8\)"):
        kda_step.__wrapped__(jnp.zeros((1, 2, 16, 1)), *one)
