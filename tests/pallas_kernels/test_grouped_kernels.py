"""Kernels of grouped products in Mosaic's interpreter: what the shared tests of the operation leave open.

C rows, G groups, D and F widths.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops.grouped_gemm import reference
from pallas_kernels import mosaic
from pallas_kernels.grouped_gemm import gated_gradients, gated_product, grouped_product, persistent, weight_gradient

# The results are not rounded to bfloat16.
CLOSE = 1e-6
# Each program gets several items, and the ring goes round several times; one tile is clamped to the end.
SIZES, C = [9, 0, 150, 12], 184


def arrays(D, F):
    rng = np.random.default_rng(0)
    half = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    return half(C, D), half(len(SIZES), D, F), half(C, F), jnp.asarray(SIZES, jnp.int32)


def assert_close(got, right):
    got, right = (np.asarray(x, np.float64) for x in (got, right))
    assert np.abs(got - right).max() <= CLOSE * np.abs(right).max()


def in_float64(function, *given):
    with jax.enable_x64(True):
        return function(*(jnp.asarray(np.asarray(x, np.float64 if x.ndim > 1 else np.int32)) for x in given))


@pytest.mark.quick
@pytest.mark.parametrize(("transposed", "programs"), [(False, 2), pytest.param(True, 3, marks=pytest.mark.slow)])
def test_programs_with_two_accumulators_share_the_items(transposed, programs, monkeypatch):
    monkeypatch.setattr(persistent, "INTERPRETED_PROGRAMS", programs)
    x, w, _, sizes = arrays(D=192, F=256)
    given = w.mT if transposed else w
    y = grouped_product(x, given, sizes, transposed=transposed, dtype=jnp.float32, interpret=True)
    assert_close(y[: sum(SIZES)], in_float64(reference.grouped_gemm, x, w, sizes)[: sum(SIZES)])


def test_weight_gradients_of_wide_matrices_cut_rows_of_others_off():
    x, _, dy, sizes = arrays(D=128, F=256)
    dw = weight_gradient(x, dy, sizes, dtype=jnp.float32, interpret=True)
    assert_close(dw, in_float64(reference.weight_gradient, x, dy, sizes))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_groups(seed):
    rng = np.random.default_rng(seed)
    C, D, F = int(rng.integers(1, 600)), int(64 * rng.integers(1, 5)), int(128 * rng.integers(1, 4))
    borders = np.sort(rng.integers(0, C + 1, rng.integers(1, 9)))
    sizes = jnp.asarray(np.diff(borders, prepend=0), jnp.int32)
    used = int(borders[-1])
    half = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    x, w, dy = half(C, D), half(len(sizes), D, F), half(C, F)
    x, dy = (a.at[used:].set(jnp.nan) for a in (x, dy))
    y = grouped_product(x, w, sizes, dtype=jnp.float32, interpret=True)
    if used:
        assert_close(y[:used], in_float64(reference.grouped_gemm, x, w, sizes)[:used])
    if D % 128 == 0:
        dw = weight_gradient(x, dy, sizes, dtype=jnp.float32, interpret=True)
        assert_close(dw, in_float64(reference.weight_gradient, x, dy, sizes))


@pytest.mark.slow
def test_no_two_accesses_of_shared_memory_race(monkeypatch):
    # The detector raises at the first race; loads, products and stores of all kernels pass by it.
    monkeypatch.setattr(mosaic, "InterpretParams", partial(mosaic.InterpretParams, detect_races=True))
    x, w, dy, sizes = arrays(D=384, F=128)
    jax.block_until_ready(grouped_product(x, w, sizes, interpret=True))
    jax.block_until_ready(gated_product(x, w, w, sizes, activation=jnp.multiply, interpret=True))
    with_slopes = lambda gate, up: (gate * up, up, gate)
    p = jnp.ones(C, jnp.float32)
    jax.block_until_ready(gated_gradients(x, w, w, dy, p, sizes, with_slopes=with_slopes, interpret=True))
    jax.block_until_ready(weight_gradient(x, dy, sizes, interpret=True))
