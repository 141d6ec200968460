"""A run of tokens changes the state by an affine map S_out = M S_in + S; such maps compose.

B batch, H heads, K key dim, V value dim, N maps in order of time (leading dim).
The decays of many tokens multiply in M, so maps are float32 or wider and their products use full precision.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

AffineMap = tuple[Float[Array, "*batch K K"], Float[Array, "*batch K V"]]


def contract(letters: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Batched product of the last two dims, as in contract("ck,jk->cj", a, b), in full precision.

    A GPU would otherwise round float32 factors to TF32. Letters instead of transposes: those would be copied.
    """
    left, right, out = letters.replace("->", ",").split(",")
    return jnp.einsum(f"...{left},...{right}->...{out}", a, b, precision=lax.Precision.HIGHEST)


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return contract("ik,kj->ij", a, b)


def compose(later: AffineMap, earlier: AffineMap) -> AffineMap:
    """The map of two consecutive runs: associative, not commutative. K3 report, section 5.1.2.

    M [..., K, K] and S [..., K, V], float32 or float64. Raises ValueError if the four do not fit together.
    """
    (M_later, S_later), (M_earlier, S_earlier) = later, earlier
    square = (*S_later.shape[:-1], *S_later.shape[-2:-1])
    needed = {
        "later M": (M_later, square),
        "earlier M": (M_earlier, square),
        "earlier S": (S_earlier, S_later.shape),
    }
    for name, (array, shape) in needed.items():
        if array.shape != shape:
            raise ValueError(
                f"{name} has shape {array.shape}; with later S [..., K, V] = {S_later.shape} it must be {shape}"
            )
    return matmul(M_later, M_earlier), matmul(M_later, S_earlier) + S_later
