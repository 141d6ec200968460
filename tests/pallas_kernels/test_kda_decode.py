"""KDA's decode kernel, in Mosaic's interpreter, against the layer's formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_problems import BOUND, CLOSE, distance

from pallas_kernels.kda import decode_token
from pallas_kernels.kda.decode import Token, Weights, check, reference

# Of the state: only what is written to it was rounded to bfloat16.
STATE_CLOSE = 4e-3
# Sums over K in float32 are off by 1e-7; with the state in two bfloat16 pieces instead of three they are by 2.5e-6.
READ_CLOSE = 3e-7


def layer(B=2, H=3, K=64, V=128, W=4, tokens=2, seed=0):
    """(tokens, weights, state, tail) float64, rounded to what the kernel is given."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape)
    half = lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
    D = 2 * K + V
    steps = [Token(half(normal(B, H, D)), normal(B, H, K), normal(B, H), normal(B, H, V)) for _ in range(tokens)]
    weights = Weights(0.5 * normal(W, H, D), 0.3 * normal(H), normal(H, K), 1 + 0.1 * normal(V))
    return steps, weights, normal(B, H, K, V), half(normal(B, W - 1, H, D))


def as_given(token, weights, state, tail):
    full = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
    bf16 = lambda x: jnp.asarray(x, jnp.bfloat16)
    return full(token)._replace(qkv=bf16(token.qkv)), full(weights), full(state), bf16(tail)


def test_a_sequence_of_tokens_goes_through_the_layer_as_its_formulas_say():
    steps, weights, state, tail = layer()
    _, given_weights, S, rows = as_given(steps[0], weights, state, tail)
    how = {"scale": 0.125, "gate_lower_bound": BOUND}
    with jax.enable_x64(True):
        right = []
        for token in steps:
            right.append(jax.tree.map(np.asarray, reference(token, weights, state, tail, **how)))
            _, state, tail = right[-1]
    for token, (y, state, tail) in zip(steps, right, strict=True):
        given = as_given(token, weights, state, tail)[0]
        got, S, rows = decode_token(given, given_weights, S, rows, interpret=True, **how)
        assert distance(got, y) <= CLOSE
        assert distance(S, state) <= STATE_CLOSE
        assert (np.asarray(rows, np.float64) == tail).all()


def test_what_a_key_reads_of_the_state_has_all_bits_of_float32():
    (token,), weights, state, tail = layer(H=2, W=2, tokens=1)
    K = state.shape[2]
    # All is known exactly: no decay, beta 1, values at which silu(x) = x, and the keys, by what they write into zeros.
    weights.filters[:] = [[[0.0]], [[1.0]]]
    token.z[:], token.beta_logit[:] = -1e4, 100

    def after(S, v):
        token.qkv[..., 2 * K :] = v
        given = as_given(token, weights, S, tail)
        out = decode_token(*given, scale=1.0, gate_lower_bound=BOUND, interpret=True)
        return np.asarray(out.state, np.float64)

    state = np.asarray(state, np.float32)
    k = after(np.zeros_like(state), 32)[..., 0] / 32
    written = np.einsum("bhkv,bhk->bhv", after(state, 0) - state, k) / np.sum(k * k, -1)[..., None]
    assert distance(-written, np.einsum("bhkv,bhk->bhv", state, k)) <= READ_CLOSE


def test_decode_lowers_for_cuda():
    steps, *rest = layer(K=128, V=64)
    step = lambda *x: decode_token(*x, scale=0.1, gate_lower_bound=BOUND)
    assert "kda_decode" in jax.jit(step).trace(*as_given(steps[0], *rest)).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("place", "words"), [("K", "K = 60"), ("tail", r"tail is bfloat16\[2, 2, 3, 256\]"), ("state", "state is int32")]
)
def test_what_does_not_fit_is_refused_by_name(place, words):  # fmt: skip
    steps, *rest = layer(K=60 if place == "K" else 64)
    token, weights, state, tail = as_given(steps[0], *rest)
    if place == "tail":
        tail = tail[:, :2]
    if place == "state":
        state = state.astype(jnp.int32)

    with pytest.raises(ValueError, match=words):
        check(token, weights, state, tail)
