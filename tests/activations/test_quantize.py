"""Block-wise fp8: the promised bound, exact rounding, and what must survive it: zeros, signs, nan, every finite number."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import meshes
from k3jax.activations.quantize import decode, encode, nbytes, quantizable

# One compiled program for all drawn values: three whole blocks of eight and a short one.
BLOCK, SHAPE = 8, (4, 27)
PROGRAMS = {
    dtype: jax.jit(lambda x, dtype=dtype: decode(*encode(x, block=BLOCK), dtype, block=BLOCK))
    for dtype in (jnp.float32, jnp.bfloat16)
}
TINY = 2.0**-126  # least normal float32


def largest_in_block(x):
    blocks = [np.abs(x[:, i : i + BLOCK]).max(axis=1, keepdims=True) for i in range(0, x.shape[1], BLOCK)]
    return np.repeat(np.concatenate(blocks, axis=1), BLOCK, axis=1)[:, : x.shape[1]]


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_stay_within_the_bound(dtype):
    """From subnormals to the largest numbers, blocks of equal and of very unequal magnitudes."""

    @settings(max_examples=200)
    @given(st.integers(0, 2**32 - 1), st.integers(-149, 127), st.integers(0, 60))
    def check(seed, exponent, spread):
        rng = np.random.default_rng(seed)
        magnitudes = 2.0 ** np.clip(exponent - rng.uniform(0, spread, SHAPE), -149, 128)
        signed = np.where(rng.random(SHAPE) < 0.1, 0, rng.choice([-1, 1], SHAPE) * magnitudes)
        most = float(jnp.finfo(dtype).max)
        x = jnp.asarray(np.clip(signed, -most, most).astype(dtype))
        exact, got = np.asarray(x, np.float64), np.asarray(PROGRAMS[dtype](x), np.float64)
        # The documented bound, as it stands: no slack is needed.
        bound = np.maximum(np.abs(exact) / 2**4, largest_in_block(exact) / 2**18) + TINY
        assert np.all(np.abs(got - exact) <= bound)
        assert np.all(got[exact == 0] == 0) and np.all(got * exact >= 0)

    check()


def test_bound_is_not_idle():
    """Halfway between two e4m3 numbers the error is the 1/17 that the bound grows from."""
    x = jnp.full(SHAPE, 448.0).at[:, 1].set(1 + 1 / 16)
    assert abs(float(PROGRAMS[jnp.float32](x)[0, 1]) / (1 + 1 / 16) - 1) > 0.99 / 17


@pytest.mark.quick
def test_rounds_to_nearest_even_as_the_format_says():
    """All midpoints of neighbouring e4m3 numbers, and their float32 neighbours, which a second rounding would lose."""
    numbers = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middle = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([numbers, middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))])
    bits, scales = encode(jnp.asarray(np.concatenate([x, -x, [448.0]], dtype=np.float32)), block=len(x) * 2 + 1)
    expected = np.concatenate([x, -x, [448.0]]).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(scales, [1.0])
    np.testing.assert_array_equal(bits, expected)


@pytest.mark.quick
def test_every_finite_number_stays_finite_and_the_largest_of_a_block_almost_exact():
    for largest in (3.4028235e38, 1.0, 1e-30, TINY):
        x = jnp.full(SHAPE, largest, jnp.float32).at[:, ::3].multiply(-0.5)
        got = np.asarray(PROGRAMS[jnp.float32](x))
        np.testing.assert_allclose(got, x, rtol=2e-7)  # the largest is 448 scales, half of it 224: both exact numbers


@pytest.mark.quick
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_turns_its_block_into_nan_and_no_other(bad):
    got = np.asarray(PROGRAMS[jnp.float32](jnp.ones(SHAPE).at[2, 9].set(bad)))
    assert np.isnan(got[2, 8:16]).all()
    assert np.isnan(got).sum() == 8


@pytest.mark.quick
@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (0,), (3, 0), (0, 5), (2, 129), (2, 3, 256), (5, 300)])
def test_any_shape_keeps_it_and_bytes_are_as_announced(shape):
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.bfloat16)
    bits, scales = encode(x)
    assert bits.shape == shape and bits.dtype == jnp.uint8 and scales.dtype == jnp.float32
    assert nbytes(shape) == bits.nbytes + scales.nbytes
    back = decode(bits, scales, x.dtype)
    assert back.shape == shape and back.dtype == x.dtype
    np.testing.assert_allclose(back.astype(np.float32), x.astype(np.float32), rtol=1 / 16, atol=1e-4)  # amax / 2^18
    assert quantizable(x) == (nbytes(shape) < math.prod(shape) * 2)


def test_works_inside_a_sharded_step():
    """Each rank encodes its own shard; nothing is exchanged, and types of varying values agree."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 16)), jnp.float32)
    codec = lambda x: decode(*encode(x, block=BLOCK), x.dtype, block=BLOCK)
    mesh = meshes.MeshSpec.parse("data=2").build()
    sharded = jax.jit(jax.shard_map(codec, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=True))
    np.testing.assert_array_equal(sharded(x), jax.jit(codec)(x))


@pytest.mark.quick
def test_only_floats_that_get_smaller_are_quantizable():
    array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype)
    assert quantizable(array((3, 256), jnp.bfloat16)) and quantizable(array((2,), jnp.float32))
    assert not quantizable(array((), jnp.float32))
    assert not quantizable(array((7, 4), jnp.bfloat16))  # 4 bytes and a scale of 4, instead of 8
    for dtype in (jnp.int32, jnp.uint8, jnp.bool_, jnp.float16, jnp.float8_e4m3fn):
        assert not quantizable(array((256, 256), dtype))


@pytest.mark.quick
def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="cannot quantize float16 .* needs bfloat16 or float32"):
        encode(jnp.ones(4, jnp.float16))
    with pytest.raises(ValueError, match="blocks of 0"):
        encode(jnp.ones(4), block=0)
    bits, scales = encode(jnp.ones((2, 20)), block=8)
    with pytest.raises(ValueError, match=r"scales \(2, 1\), got \(2, 3\)"):
        decode(bits, scales, jnp.float32)
