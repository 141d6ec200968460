"""Block-wise fp8: an activation as one byte a value and one float32 scale a block, half or a quarter of its size.

K3 stores most of what backward needs this way (K3 report, unified activation manager). The bytes are e4m3 numbers, 4 bits
of exponent and 3 of mantissa, stored as uint8: on CPU, XLA would keep an fp8 buffer as a copy in fp16.

Bound, for finite x, with amax the largest magnitude of its block; it holds in float32 and in bfloat16:

    |decode(encode(x)) - x| <= max(|x| / 2^4, amax / 2^18) + 2^-126

A normal e4m3 number has 4 significant bits: rounding to nearest moves it by 1/17 at most. What float32 adds (a division
and a product, 2^-22) and the last rounding to bfloat16 (2^-9 * 18/17) fit into 1/16 - 1/17 = 1/272. Below 2^-6 scales
numbers are 2^-9 scales apart, and half of that is amax / (448 * 2^10) < amax / 2^18.8. 2^-126 is the least normal float32,
below which XLA may flush to zero: scales stop there, so that they are never zero themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, UInt8

BLOCK = 128
"""Values that share a scale, along the last dim."""
LARGEST = 448.0
"""Largest finite e4m3 number."""
LEAST_SCALE = 2.0**-126
DTYPES = ("bfloat16", "float32")


def encode(
    x: Float[Array, "*dims"], *, block: int = BLOCK
) -> tuple[UInt8[Array, "*dims"], Float32[Array, "*leading blocks"]]:
    """Bits and scales of an array: blocks of the last dim (the last block may be short) are divided by amax / 448.

    Rounds to nearest, ties to even. Zeros stay zeros, signs too. A block with an inf or a nan is nan throughout, so that
    a step that went wrong still shows. A scalar is a block of its own. Raises ValueError for other dtypes than float32
    and bfloat16, and for a block below 1.
    """
    if str(x.dtype) not in DTYPES or block < 1:
        raise ValueError(
            f"cannot quantize {x.dtype} in blocks of {block}: needs {' or '.join(DTYPES)}, blocks of 1 or more"
        )
    blocks = _split(x.astype(jnp.float32), block)
    scales = jnp.maximum(jnp.max(jnp.abs(blocks), axis=-1) / LARGEST, LEAST_SCALE)
    bits = lax.bitcast_convert_type((blocks / scales[..., None]).astype(jnp.float8_e4m3fn), jnp.uint8)
    return _join(bits, x.shape), scales


def decode(
    bits: UInt8[Array, "*dims"], scales: Float32[Array, "*leading blocks"], dtype: DTypeLike, *, block: int = BLOCK
) -> Float[Array, "*dims"]:
    """The array that `encode` was given, within the bound above, in float32 or bfloat16; finite where it was.

    Raises ValueError for scales that are not those of such bits in blocks of this size.
    """
    if scales.shape != _scales_shape(bits.shape, block):
        raise ValueError(
            f"bits {bits.shape} in blocks of {block} have scales {_scales_shape(bits.shape, block)}, got {scales.shape}: "
            "pass what encode returned, and its block"
        )
    values = lax.bitcast_convert_type(_split(bits, block), jnp.float8_e4m3fn).astype(jnp.float32)
    most = float(jnp.finfo(jnp.float32).max)  # 448 (amax / 448) may round beyond the largest float32
    return _join(jnp.clip(values * scales[..., None], -most, most), bits.shape).astype(dtype)


def nbytes(shape: Sequence[int], *, block: int = BLOCK) -> int:
    """Bytes of an encoded array, whatever its dtype was: one a value, four a block."""
    return math.prod(shape) + 4 * math.prod(_scales_shape(tuple(shape), block))


def quantizable(aval: jax.Array | jax.ShapeDtypeStruct, *, block: int = BLOCK) -> bool:
    """Whether an array can be encoded and gets smaller: float32 or bfloat16, and not a few values a block."""
    if str(aval.dtype) not in DTYPES:
        return False
    return nbytes(aval.shape, block=block) < math.prod(aval.shape) * aval.dtype.itemsize


def _scales_shape(shape: tuple[int, ...], block: int) -> tuple[int, ...]:
    return (*shape[:-1], -(-shape[-1] // block)) if shape else (1,)


def _split(x: Array, block: int) -> Array:
    """[..., n] to [..., blocks, block], filled up with zeros; a scalar is [1]."""
    x = x.reshape(x.shape or (1,))
    width = min(block, max(x.shape[-1], 1))  # a lone short block need not be filled up
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % width)])
    return x.reshape(*x.shape[:-1], x.shape[-1] // width, width)


def _join(blocks: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `_split`."""
    *leading, count, width = blocks.shape
    return blocks.reshape(*leading, count * width)[..., : shape[-1] if shape else 1].reshape(shape)
