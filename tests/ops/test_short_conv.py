"""The short convolution is causal, depthwise, and stays inside documents.

B batch, T tokens, C channels, W width.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops.short_conv import short_conv


def definition(x, w, ids):
    y = np.zeros(x.shape)
    W = len(w)
    for b, t, i in np.ndindex(x.shape[0], x.shape[1], W):
        s = t - (W - 1) + i
        if s >= 0 and ids[b, s] == ids[b, t]:
            y[b, t] += w[i].astype(np.float64) * x[b, s]
    return y


def inputs(T, W, channels=(3, 2)):
    rng = np.random.default_rng(0)
    ids = np.stack([np.searchsorted([2, 3], np.arange(T), "right"), np.zeros(T, int)]).astype(np.int32)
    x, w = (rng.normal(size=(*lead, *channels)).astype(np.float32) for lead in ((2, T), (W,)))
    return x, w, ids


@pytest.mark.quick
@pytest.mark.parametrize("T, W", [(7, 4), (2, 4), (1, 4), (5, 1), (3, 8)])
def test_each_token_sees_the_last_tokens_of_its_document(T, W):
    x, w, ids = inputs(T, W)
    # float32 sums of W terms.
    np.testing.assert_allclose(short_conv(*map(jnp.asarray, (x, w, ids))), definition(x, w, ids), atol=1e-6)
    np.testing.assert_allclose(
        short_conv(jnp.asarray(x), jnp.asarray(w)), definition(x, w, np.zeros_like(ids)), atol=1e-6
    )


@pytest.mark.parametrize("split", [1, 2, 3, 5])
def test_halo_continues_a_sequence(split):
    x, w, ids = inputs(7, 4)
    before = np.concatenate([np.zeros((2, 3, 3, 2), np.float32), x[:, :split]], 1)[:, -3:]
    ids_before = np.concatenate([np.full((2, 3), -1, np.int32), ids[:, :split]], 1)[:, -3:]
    y = short_conv(
        *map(jnp.asarray, (x[:, split:], w, ids[:, split:])),
        halo=jnp.asarray(before),
        halo_segment_ids=jnp.asarray(ids_before),
    )
    np.testing.assert_allclose(y, definition(x, w, ids)[:, split:], atol=1e-6)


def test_channel_dims_may_be_one_or_none():
    for channels in ((5,), ()):
        x, w, ids = inputs(6, 3, channels)
        np.testing.assert_allclose(short_conv(*map(jnp.asarray, (x, w, ids))), definition(x, w, ids), atol=1e-6)


def test_bfloat16_rows_are_summed_in_float32():
    # 256 + 1 is lost in bfloat16; summed in float32, 256 + 1 − 256 = 1 is not.
    x = jnp.array([256.0, 1.0, -256.0], jnp.bfloat16).reshape(1, 3, 1)
    y = short_conv(x, jnp.ones((3, 1)))
    assert y.dtype == jnp.bfloat16 and y[0, 2, 0] == 1


def test_halo_of_the_wrong_length_or_without_documents_is_refused():
    x, w, ids = map(jnp.asarray, inputs(7, 4))
    with pytest.raises(ValueError, match="2 rows.*width 4 needs the 3 rows"):
        short_conv(x, w, halo=x[:, :2])
    with pytest.raises(ValueError, match="go together"):
        short_conv(x, w, ids, halo=x[:, :3])
