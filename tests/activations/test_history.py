"""A loop over steps that append and read: its gradients are those of a plain loop, and it keeps its history once."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.ad_checkpoint import checkpoint_name

from k3jax import model as lm
from k3jax.activations.history import history_name, scan_history
from k3jax.activations.leaves import leaf_origins, tagged_names
from k3jax.activations.policy import ActivationPolicy
from k3jax.layers.common import Axes
from k3jax.parallel.layout import StackLayout
from k3jax.parallel.pullback import Pullback
from k3jax.parallel.schedules import BACKWARD, FORWARD, WEIGHT

N, J, D = 3, 5, 4  # rows, steps, width


def step(stream, history, weights, flags, shared, bias):
    """Mixes over the rows that exist, appends the stream where flags say so."""

    def run(stream, history, weights, flags, shared, bias):
        starts, count = flags
        scores = jnp.where(jnp.arange(N) < count, jnp.sin(history * shared).sum((1, 2)), -1e30)
        mixed = jnp.einsum("n,nbd->bd", jax.nn.softmax(scores), history)
        history = jnp.where((jnp.arange(N) == count)[:, None, None] & (starts > 0), stream, history)
        return checkpoint_name(jnp.tanh((stream + mixed) @ weights), "toy.out") * shared + bias, history, count

    keep = ActivationPolicy.parse("*=keep").checkpoint(run, ["toy.out"])
    return keep(checkpoint_name(stream, "group.in"), history, weights, flags, shared, bias)


@functools.cache
def problem():
    keys = jax.random.split(jax.random.key(0), 4)
    draw = lambda i, *shape: jax.random.normal(keys[i], shape)
    flags = jnp.array([0, 1, 0, 1, 0]), jnp.array([1, 1, 2, 2, 3])
    return (draw(0, 2, D), jnp.zeros((N, 2, D)).at[0].set(1.0), draw(1, J, D, D), draw(2, D)), (flags, draw(3, D))


def with_history(stream, history, weights, shared):
    _, (flags, bias) = problem()
    return scan_history(step, stream, history, weights=weights, inputs=flags, shared_weights=shared, shared_inputs=bias)


def with_scan(stream, history, weights, shared):
    _, (flags, bias) = problem()

    def body(carry, of_step):
        stream, history, count = step(*carry, *of_step, shared, bias)
        return (stream, history), count

    (stream, history), counts = jax.lax.scan(body, (stream, history), (weights, flags))
    return stream, history, counts


def gradients(function, args):
    def loss(*args):
        stream, history, _ = function(*args)
        return (stream**2).sum() + jnp.cos(history * 2).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*args)


@pytest.mark.quick
def test_outputs_and_gradients_are_those_of_a_plain_loop():
    args, _ = problem()
    for got, want in zip(with_history(*args), with_scan(*args), strict=True):
        np.testing.assert_array_equal(got, want)
    for got, want in zip(gradients(with_history, args), gradients(with_scan, args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)  # the same sums, fused otherwise


def leaves(function, args):
    return jax.tree.leaves(jax.vjp(lambda *args: function(*args)[:2], *args)[1])


@pytest.mark.quick
def test_the_history_is_kept_once_and_by_name():
    args, _ = problem()
    shapes = lambda function: [leaf.shape for leaf in leaves(function, args)]
    assert (J, N, 2, D) in shapes(with_scan), "what is saved here"
    assert (J, N, 2, D) not in shapes(with_history) and shapes(with_history).count((N, 2, D)) == 1
    names = {name for origin in leaf_origins(lambda *args: leaves(with_history, args), *args) for name in origin.names}
    assert names == {"toy.out", "group.in", history_name(0)}


def stored(config, policy: str, separate_weights: bool) -> dict[str, int]:
    """Bytes of what a chunk of the model stores, by name."""
    layout = StackLayout(config)
    like = lambda tree: jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[2:], a.dtype), tree)
    params = jax.eval_shape(lambda: lm.init(config, layout, 0))
    weights = {"chunk": like(params["chunks"]), "dense": params["dense"]}
    bias = like(jax.eval_shape(lambda: lm.init_balance(config, layout)["chunks"]))
    flags = {name: jax.ShapeDtypeStruct(table.shape[2:], jnp.int32) for name, table in layout.flag_tables.items()}
    batch = lm.Batch._make([jax.ShapeDtypeStruct((1, 8), jnp.int32)] * 3)
    stream = jax.ShapeDtypeStruct((1, 8, config.hidden_size), jnp.float32)
    blocks = jax.ShapeDtypeStruct((config.num_blocks, *stream.shape), jnp.float32) if config.num_blocks else None

    def chunk(weights, stream, extras, checkpoint=lambda f: f):
        return lm.chunk(config, layout, weights, stream, *extras, axes=Axes(), checkpoint=checkpoint)

    example = weights, lm.Stream(stream, blocks), (bias, flags, batch)
    parsed = ActivationPolicy.parse(policy)
    checkpoint = lambda f: parsed.checkpoint(f, tagged_names(chunk, *example))
    pullback = Pullback(
        lambda *args: chunk(*args, checkpoint),
        example,
        num_history=int(blocks is not None),
        separate_weights=separate_weights,
    )
    found: dict[str, int] = {}
    for span in ((FORWARD, BACKWARD), (FORWARD, WEIGHT)):
        for shape, names in zip(pullback.shapes.get(span, []), pullback.names.get(span, []), strict=True):
            name = "+".join(sorted(names))
            found[name] = found.get(name, 0) + math.prod(shape.shape) * shape.dtype.itemsize
    return found


@pytest.mark.parametrize(
    ("policy", "separate"),
    [
        ("*=keep", False),
        pytest.param("*=recompute", False, marks=pytest.mark.slow),
        pytest.param("attn.out=recompute,*=keep", True, marks=pytest.mark.slow),
    ],
)
def test_a_chunk_stores_what_it_does_with_plain_residuals(policy, separate):
    """Nothing of a mix, and no block, whatever the policy: K3 report, attention residuals. Eight groups, eight blocks."""
    with_blocks = dataclasses.replace(tiny.MODEL, num_layers=16, attn_res_block=2, dense_layers=0)
    plain = dataclasses.replace(with_blocks, attn_res_block=None)
    assert with_blocks.num_blocks == StackLayout(with_blocks).groups_per_chunk == 8
    assert stored(with_blocks, policy, separate) == stored(plain, policy, separate)
