"""Pages hold what was put in, bit by bit, and nothing reaches a page that was not named."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving_problem import CONFIG, NOT_A_NUMBER, PAGES

from k3jax.configs import get
from k3jax.serve.model import PageLayout
from k3jax.serve.model.pages import copy_pages, from_words, to_words

LAYOUTS = {
    "a head a page": PAGES,
    "a state a page": PageLayout(CONFIG, tokens=32),
    "bfloat16": PageLayout(CONFIG, tokens=40, dtype="bfloat16"),
    "heads that do not fill the last page": PageLayout(dataclasses.replace(CONFIG, num_heads=3), tokens=25),
}


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(4,), (5,), (3, 5)])
def test_words_are_the_bits(dtype, shape):
    bits = np.random.default_rng(0).integers(0, 1 << 16, (2, *shape)).astype(np.uint16)
    x = jax.lax.bitcast_convert_type(bits, jnp.bfloat16).astype(dtype)  # also what is no number, and zeros with a sign
    words = to_words(x.reshape(2, -1))
    assert words.dtype == jnp.uint32 and words.size * 4 < x.nbytes + 8
    back = from_words(words, dtype, shape)
    same = np.dtype(f"uint{8 * x.dtype.itemsize}")
    np.testing.assert_array_equal(np.asarray(back).view(same), np.asarray(x).view(same))


@pytest.mark.quick
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_states_and_latents_come_back_and_leave_other_pages_alone(layout):
    c, random, B = layout.config, np.random.default_rng(1), 3
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), layout.dtype)
    state = draw(B, c.num_heads, c.kda_key_dim, c.kda_value_dim).astype(jnp.float32)
    tail = draw(B, c.conv_width - 1, c.num_heads, 2 * c.kda_key_dim + c.kda_value_dim)
    pool = jnp.full((layout.parts, 12, layout.words), NOT_A_NUMBER)
    pages = np.arange(B * layout.pages_per_state, dtype=np.int32).reshape(B, -1) + 1
    pages[1] = -1
    part = jnp.int32(2)
    write, read = jax.jit(layout.write_state), jax.jit(layout.read_state)
    written = write(pool, part, pages, state, tail)
    for got, want in zip(read(written, part, pages), (state, tail), strict=True):
        np.testing.assert_array_equal(got, np.where(np.arange(B).reshape(-1, 1, 1, 1) == 1, 0, want))
    touched = np.zeros(pool.shape[:2], bool)
    touched[2, pages[pages >= 0]] = True
    assert ((np.asarray(written) != NOT_A_NUMBER).any(-1) == touched).all()
    assert (write(pool, jnp.int32(-1), pages, state, tail) == NOT_A_NUMBER).all()

    latents = draw(B, 2, layout.latent_size)
    at, places = np.array([[4, 5], [-1, -1], [7, 7]]), np.array([[layout.tokens - 1, 0], [0, 0], [2, 1]])
    written = jax.jit(layout.write_latents)(pool, part, at, places, latents)
    for (b, t), page in np.ndenumerate(at):
        if page >= 0:
            got = jax.jit(layout.read_latents)(written, part, np.array([page]))[0, places[b, t]]
            np.testing.assert_array_equal(got, latents[b, t])
    assert (np.asarray(written) != NOT_A_NUMBER).sum() == 4 * layout.latent_words


@pytest.mark.quick
def test_copies_read_before_they_write():
    pool = jnp.arange(2 * 5 * 3, dtype=jnp.uint32).reshape(2, 5, 3)
    got = np.asarray(copy_pages(pool, jnp.array([0, 1, -1, 2]), jnp.array([1, 0, 4, -1])))
    np.testing.assert_array_equal(got[:, [1, 0, 2, 3]], np.asarray(pool)[:, [0, 1, 2, 3]])
    assert not got[:, 4].any()


@pytest.mark.quick
def test_pages_of_k3_are_of_one_size_and_small_ones_are_refused():
    """24 layers of MLA and 69 of KDA: three groups; a page of 6144 tokens holds a state with its tails."""
    layout = PageLayout(get("k3"), tokens=6144, dtype="bfloat16")
    assert (layout.parts, layout.groups, layout.pages_per_state) == (24, 3, 1)
    assert layout.page_bytes == 24 * 6144 * 576 * 2
    assert PageLayout(get("k3"), tokens=1024, dtype="bfloat16").pages_per_state == 6
    with pytest.raises(ValueError, match="a page must have room for a head's state, which is that of 59 tokens"):
        PageLayout(get("k3"), tokens=32, dtype="bfloat16")
    with pytest.raises(ValueError, match="dtype='int8'"):
        PageLayout(CONFIG, tokens=64, dtype="int8")
    for layer, kind in enumerate(CONFIG.layer_kinds):
        at = np.argwhere(PAGES.tables["part"] == CONFIG.layer_kinds[:layer].count(kind))
        assert any(CONFIG.pattern[p] == kind for _, p in at)
