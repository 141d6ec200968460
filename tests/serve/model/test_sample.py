"""Tokens are drawn from the distribution that was asked for, and by seed, request and position alone."""

import jax
import numpy as np
import pytest

from k3jax.serve.model.sample import Sampler, draws, sample

pytestmark = pytest.mark.quick
W, N = 11, 2048
LOGITS = (2 * np.random.default_rng(0).normal(size=W)).astype(np.float32)
SHARES = np.exp(LOGITS.astype(np.float64)) / np.exp(LOGITS.astype(np.float64)).sum()


def tokens_of(samplers, positions, logits=LOGITS):
    return np.asarray(sample(np.broadcast_to(logits, (len(positions), W)), draws(samplers, positions))[0])


def test_temperature_and_top_p_give_their_distributions():
    at = range(N)
    for temperature, top_p in ((1.0, 1.0), (0.5, 1.0), (2.0, 0.7), (1.0, 1e-6)):
        want = SHARES ** (1 / temperature)
        want /= want.sum()
        order = np.argsort(-want)
        kept = order[: int(np.searchsorted(np.cumsum(want[order]), top_p - 1e-9)) + 1]
        want = np.where(np.isin(np.arange(W), kept), want, 0) / want[kept].sum()
        counts = np.bincount(tokens_of([Sampler(temperature, top_p, seed=5)] * N, at), minlength=W)
        assert not counts[want == 0].any()
        deviation = np.abs(counts / N - want) / np.sqrt(np.maximum(want * (1 - want) / N, 1e-12))
        assert deviation.max() < 4.5, (temperature, top_p)  # standard errors


def test_zero_temperature_takes_the_first_of_the_most_likely():
    tied = LOGITS.copy()
    tied[[7, 3]] = tied.max() + 1
    assert (tokens_of([Sampler(seed=n) for n in range(N)], range(N), tied) == 3).all()


def test_a_draw_depends_on_seed_request_and_position_and_on_nothing_else():
    one = Sampler(1.0, seed=1, request=2)
    base = tokens_of([one] * N, range(N))
    others = {
        "seed": tokens_of([Sampler(1.0, seed=3, request=2)] * N, range(N)),
        "high word of the seed": tokens_of([Sampler(1.0, seed=1 + 2**32, request=2)] * N, range(N)),
        "request": tokens_of([Sampler(1.0, seed=1, request=4)] * N, range(N)),
        "high word of the request": tokens_of([Sampler(1.0, seed=1, request=2 + 2**40)] * N, range(N)),
        "seed and request exchanged": tokens_of([Sampler(1.0, seed=2, request=1)] * N, range(N)),
        "position": tokens_of([one] * N, range(1, N + 1)),
    }
    by_chance = (SHARES**2).sum()
    for name, tokens in others.items():
        assert abs((tokens == base).mean() - by_chance) < 5 * (by_chance / N) ** 0.5, name
    order = np.random.default_rng(1).permutation(N)
    np.testing.assert_array_equal(tokens_of([one] * N, order.tolist()), base[order])
    np.testing.assert_array_equal(tokens_of([one] * 3, [5, 6, 7]), base[5:8])


def test_log_probabilities_are_those_of_the_model():
    given = [Sampler(0.3, 0.9, seed=n) for n in range(64)] + [Sampler()] * 64
    tokens, got = sample(np.broadcast_to(LOGITS, (128, W)), draws(given, range(128)))
    np.testing.assert_allclose(got, np.log(SHARES)[np.asarray(tokens)], atol=1e-5)
    assert jax.numpy.issubdtype(tokens.dtype, jax.numpy.integer)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(temperature=-1.0),
        dict(temperature=float("nan")),
        dict(top_p=0.0),
        dict(top_p=1.1),
        dict(seed=-1),
        dict(request=2**64),
    ],
    ids=str,
)
def test_what_lies_outside_is_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        Sampler(**wrong)
