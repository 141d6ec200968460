"""Attention residuals in two phases are those in one: blocks mixed ahead for many sites, the live sum merged at each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.layers.residual import BlockMix, DepthMix

D, N, SITES, EPS = 12, 5, 3, 1e-3


@pytest.mark.quick
def test_two_phases_make_one_mix_for_every_number_of_blocks():
    """Also with scores of any size, and with what is not yet a block."""
    random = np.random.default_rng(0)
    prefix, blocks = (jnp.asarray(random.normal(size=(*n, 2, 3, D)), jnp.float32) for n in ((), (N,)))
    sites = []
    for scale in (0.1, 1.0, 30.0):
        site = DepthMix(D, EPS)
        site.query[...] = jnp.asarray(scale * random.normal(size=D), jnp.float32)
        site.norm.weight[...] = jnp.asarray(random.uniform(0.5, 2, D), jnp.float32)
        sites.append(site)
    directions = jnp.stack([site.direction for site in sites])
    in_two = jax.jit(
        lambda count, prefix, blocks: [
            site.merge(BlockMix.of(directions, blocks, count, eps=EPS), jnp.int32(i), prefix)
            for i, site in enumerate(sites)
        ]
    )
    in_one = jax.jit(lambda count, prefix, blocks: [site(prefix, blocks, count) for site in sites])
    for count in range(N + 1):
        # Scores of 30·√12 are rounded to 1e-5 of a nat.
        np.testing.assert_allclose(in_two(count, prefix, blocks), in_one(count, prefix, blocks), atol=5e-5)
        later = blocks.at[count:].set(1e3)
        np.testing.assert_array_equal(in_two(count, prefix, later), in_two(count, prefix, blocks))
    none = BlockMix.of_none(SITES, prefix)
    np.testing.assert_array_equal(sites[2].merge(none, jnp.int32(1), prefix), prefix)
