"""Operations that make a named value, counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from k3jax.activations.flops import flops, flops_by_name

pytestmark = pytest.mark.quick

X, W = jnp.zeros((3, 5)), jnp.zeros((5, 5))
ONCE = 2 * 3 * 5 * 5  # of X @ W


def counted(function, *args):
    return flops_by_name(jax.make_jaxpr(function)(*args).jaxpr)


def test_a_value_is_made_from_the_named_ones_before_it():
    def function(x, w):
        a = checkpoint_name(x @ w @ w, "a")
        b = checkpoint_name(jnp.sin(a) @ w, "b")
        return checkpoint_name(b + a, "c")

    assert counted(function, X, W) == {"a": 2 * ONCE, "b": ONCE, "c": 0}


def test_loops_count_their_rounds_and_branches_the_dearest():
    def body(x, w):
        return checkpoint_name(x @ w, "in_loop"), None

    def branch(x, w):
        return lax.cond(x.sum() > 0, lambda: checkpoint_name(x @ w, "in_branch") @ w, lambda: x @ w @ w @ w)

    def function(x, w):
        x, _ = lax.scan(body, x, jnp.stack([w] * 4))
        x = checkpoint_name(branch(x, w), "after")
        total, _ = lax.scan(lambda c, w: (c @ w, None), x, jnp.stack([w] * 6))
        return checkpoint_name(total, "carried")

    assert counted(function, X, W) == {"in_loop": 4 * ONCE, "in_branch": ONCE, "after": 3 * ONCE, "carried": 6 * ONCE}


def test_only_what_is_needed_is_counted():
    def pair(x, w):
        return x @ w, x @ w @ w

    def function(x, w):
        first, second = jax.jit(pair)(x, w)
        return checkpoint_name(first, "first"), jax.checkpoint(lambda y: checkpoint_name(y @ w, "inside"))(second)

    assert counted(function, X, W) == {"first": ONCE, "inside": ONCE}


def test_grouped_products_and_custom_rules_are_seen():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (product(x, w), w), lambda w, d: (d @ w.T, None))

    def function(x, w):
        a = checkpoint_name(product(x, w), "a")
        sizes = jnp.array([1, 2])
        return checkpoint_name(lax.ragged_dot(a, jnp.stack([w, w]), sizes), "b")

    assert counted(function, X, W) == {"a": ONCE, "b": ONCE}


def test_outputs_cost_all_that_they_are_made_of():
    """Names end nothing here, and what an output does not need is not counted."""

    def function(x, w):
        a = checkpoint_name(x @ w, "a")
        return a @ w, jnp.sin(a), a @ w @ w

    closed = jax.make_jaxpr(function)(X, W)
    assert [flops(closed.jaxpr, outputs) for outputs in ([0], [1], [0, 2])] == [2 * ONCE, ONCE, 4 * ONCE]
