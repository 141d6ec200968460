"""KDA problems that have broken implementations, and the definition in float64 to compare with.

B batch, T tokens, H heads, K key dim, V value dim.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops.kda import api, kda
from k3jax.ops.kda.segments import evaluate as evaluate_plan

# float32 rounding, relative to the norm of each batch row.
FORWARD, GRADIENT = 1e-5, 1e-4
# The worst token's output against its own norm, which may be small because its terms cancel.
WORST_ROW = 1e-4


class Problem(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray
    state: np.ndarray
    segment_ids: np.ndarray


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def problem(gates, cosine=0.0, *, T, H=2, K=16, V=8, documents=(), seed=0) -> Problem:
    """One batch row per array of gates (broadcast to [T, H, K]); `cosine` between any two keys of a head."""
    rng = np.random.default_rng(seed)
    B = len(gates)
    common, own = (unit(rng.normal(size=(B, t, H, K))) for t in (1, T))
    k = np.sqrt(cosine) * common + np.sqrt(1 - cosine) * own
    beta = rng.random((B, T, H))
    beta[:, ::7], beta[:, 3::11] = 1, 0
    return Problem(
        *(
            x.astype(np.float32)
            for x in (
                unit(rng.normal(size=(B, T, H, K))),
                unit(k),
                rng.normal(size=(B, T, H, V)),
                np.stack([np.broadcast_to(g, (T, H, K)) for g in gates]),
                beta,
                rng.normal(size=(B, H, K, V)),
            )
        ),
        np.broadcast_to(np.searchsorted(documents, np.arange(T), "right"), (B, T)).astype(np.int32),
    )


def joined(problems) -> Problem:
    """Problems of one shape in one batch: compiled once."""
    return Problem(*(np.concatenate(parts) for parts in zip(*problems, strict=True)))


def strong_gates(T, H=2, K=16):
    """Gates that no bound holds: one channel, or all of them, forget in one token."""
    rng = np.random.default_rng(7)
    gates = [-0.3 * rng.random((T, H, K)) for _ in range(5)]
    gates[0][rng.random((T, H)) < 0.2, 3 % K] = -40
    gates[1][rng.random((T, H)) < 0.2, 5 % K] = -1000
    gates[2][rng.random((T, H)) < 0.1] = -1000
    gates[3][:, :, ::2] = -40
    gates[4][T // 2] = -np.inf
    return gates


def definition(p: Problem):
    """(o, states after each token) by a loop over tokens in float64, scale K**-0.5."""
    q, k, v, g, beta, S = (x.astype(np.float64) for x in p[:6])
    o, states = np.empty(v.shape), []
    for t in range(q.shape[1]):
        if t:
            S = np.where((p.segment_ids[:, t] != p.segment_ids[:, t - 1])[:, None, None, None], 0, S)
        S = np.exp(g[:, t])[..., None] * S
        error = v[:, t] - np.einsum("bhkv,bhk->bhv", S, k[:, t])
        S = S + np.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)
        o[:, t] = np.einsum("bhkv,bhk->bhv", S, q[:, t]) * q.shape[-1] ** -0.5
        states.append(S)
    return o, states


@partial(jax.jit, static_argnames=("options",))
def _evaluate(inputs, segment_ids, cotangents, options):
    def run(*inputs):
        return kda(*inputs[:5], initial_state=inputs[5], segment_ids=segment_ids, **dict(options))

    (o, state), pullback = jax.vjp(run, *inputs)
    return o, state, *pullback(cotangents)


def slow(*values):
    """Parameters of a test that only the longer sweeps run: each of them compiles anew."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


NAMES = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state")


def cotangents_of(p: Problem, scale=1.0):
    rng = np.random.default_rng(1)
    return tuple((scale * rng.normal(size=x.shape)).astype(np.float32) for x in (p.v, p.state))


def evaluate(p: Problem, cotangents, **options):
    """(o, final state, gradients of q, k, v, g, beta and the state), in the dtype of the problem."""
    arrays = tuple(map(jnp.asarray, p[:6]))
    out = _evaluate(arrays, jnp.asarray(p.segment_ids), tuple(map(jnp.asarray, cotangents)), tuple(options.items()))
    return [np.asarray(x) for x in out]


def evaluate_definition(p: Problem, cotangents):
    """`evaluate` by the token-by-token implementation in float64."""
    with jax.enable_x64(True):
        wide = Problem(*(x.astype(np.float64) for x in p[:6]), p.segment_ids)
        return evaluate(wide, [x.astype(np.float64) for x in cotangents], implementation="recurrent")


def interpreted(*inputs, initial_state, segment_ids, bound=-5.0, **options):
    """`kda` by the Hopper kernels, planned as always, but in Mosaic's interpreter; options as of `api.plan`."""
    arrays = api.alike(*inputs, initial_state, segment_ids, bound)
    plan = api.plan(arrays, "mosaic_gpu", inputs[0].shape[-1] ** -0.5, bound, **options)
    return evaluate_plan(plan._replace(stages=plan.stages._replace(interpret=True)), *arrays)


def error(got, right):
    """Largest relative error of a batch row."""
    got, right = (np.asarray(x, np.float64).reshape(len(x), -1) for x in (got, right))
    assert np.isfinite(got).all()
    norm = np.linalg.norm(right, axis=-1)
    # A gradient may be 0 (nothing reaches the initial state through −1000): then it must be 0 up to rounding of 1.
    return float((np.linalg.norm(got - right, axis=-1) / np.where(norm > 1e-12, norm, 1)).max())


def assert_kernels_close(got, right):
    """Values and gradients of the Hopper kernels, whose products have bfloat16 operands."""
    for name, a, b in zip(NAMES, got, right, strict=True):
        assert error(np.asarray(a, np.float32), b) <= 1e-2, name


def assert_close(got, right):
    """Values and gradients of `evaluate` at the tolerances above."""
    for name, a, b in zip(NAMES, got, right, strict=True):
        assert error(a, b) <= (FORWARD if name in NAMES[:2] else GRADIENT), name
    tokens = (-1, *got[0].shape[2:])
    assert error(got[0].reshape(tokens), right[0].reshape(tokens)) <= WORST_ROW
