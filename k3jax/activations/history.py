"""A loop over steps that append to a history and read it: what backward needs of it is kept once, not once a step.

The history has room for all rows, a leading dim; a step writes some, and reads rows written before it alone: what it makes
must not depend on others. So backward may be given the history as it is in the end, and no other: `lax.scan`, which cannot
know that, would store what it was at each step. The last history's leaves have names, for who has it elsewhere already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from k3jax.activations.leaves import Origin, output_origins
from k3jax.compat import vary_like

Tree = Any
Step = Callable[..., tuple[Tree, Tree, Tree]]


def history_name(leaf: int) -> str:
    """Name of a leaf of the history that backward reads."""
    return f"history.{leaf}"


def scan_history(
    step: Step, stream: Tree, history: Tree, *, weights: Tree, inputs: Tree, shared_weights: Tree, shared_inputs: Tree
) -> tuple[Tree, Tree, Tree]:
    """Runs step(stream, history, weights, inputs, shared_weights, shared_inputs) -> (stream, history, report) in a loop.

    weights, inputs: of each step, a leading dim of steps; shared ones are the same for all. Returns the last stream and
    history, and the reports of all steps. Gradients, in reverse mode, are of stream, history and both weights; of what a
    step's pullback holds, all that is not an input of the loop is kept, a leading dim of steps.
    """
    run = _loop(step)
    return run(stream, history, weights, shared_weights, inputs, shared_inputs)


def _loop(step: Step) -> Callable:
    pullback = {}  # structure and origins of the step's pullback, which backward puts together again

    @jax.custom_vjp
    def run(stream, history, weights, shared_weights, inputs, shared_inputs):
        def body(carry, of_step):
            stream, history, report = step(*carry, *of_step, shared_weights, shared_inputs)
            return (stream, history), report

        (stream, history), report = lax.scan(body, (stream, history), (weights, inputs))
        return stream, history, report

    def vjp(stream, history, weights, shared_weights, inputs, shared_inputs):
        def function(stream, history, weights, shared_weights):
            stream, history, report = step(stream, history, weights, inputs, shared_weights, shared_inputs)
            return (stream, history), report

        return jax.vjp(function, stream, history, weights, shared_weights, has_aux=True)

    def forward(stream, history, weights, shared_weights, inputs, shared_inputs):
        def body(carry, of_step):
            args = (*carry, of_step[0], shared_weights, of_step[1], shared_inputs)
            closed, shapes = jax.make_jaxpr(vjp, return_shape=True)(*args)
            made, vjp_shape, report = shapes
            leaves, pullback["tree"] = jax.tree.flatten(vjp_shape)
            first = len(jax.tree.leaves(made))
            origins = output_origins(closed)[first : first + len(leaves)]
            pullback["handed_in"] = [_handed_in(origin, len(jax.tree.leaves(stream))) for origin in origins]
            values = core.jaxpr_as_fun(closed)(*jax.tree.leaves(args))
            made, vjp_leaves, report = jax.tree.unflatten(jax.tree.structure((made, leaves, report)), values)
            kept = [x for x, at in zip(vjp_leaves, pullback["handed_in"], strict=True) if at is None]
            return made, (report, kept)

        made, (report, kept) = lax.scan(body, (stream, history), (weights, inputs))
        rows, structure = jax.tree.flatten(made[1])
        history = structure.unflatten([checkpoint_name(a, history_name(i)) for i, a in enumerate(rows)])
        residuals = history, kept, weights, shared_weights, inputs, shared_inputs
        return (made[0], history, report), residuals

    def backward(residuals, cotangents):
        history, kept, weights, shared_weights, inputs, shared_inputs = residuals
        d_stream, d_history, _ = cotangents

        def body(carry, of_step):
            d_stream, d_history, d_shared = carry
            kept, weights, inputs = of_step
            no_stream = [None] * len(jax.tree.leaves(d_stream))
            given = [*no_stream, *jax.tree.leaves((history, weights, shared_weights, inputs, shared_inputs))]
            rest = iter(kept)
            leaves = [next(rest) if at is None else at(given) for at in pullback["handed_in"]]
            function = jax.tree.unflatten(pullback["tree"], leaves)
            d_stream, d_history, d_weights, d_more = function((d_stream, d_history))
            return (d_stream, d_history, jax.tree.map(jnp.add, d_shared, d_more)), d_weights

        no_gradient = jax.tree.map(lambda a: vary_like(jnp.zeros(a.shape, a.dtype), a), shared_weights)
        start = d_stream, d_history, no_gradient
        (d_stream, d_history, d_shared), d_weights = lax.scan(body, start, (kept, weights, inputs), reverse=True)
        return d_stream, d_history, d_weights, d_shared, None, None

    run.defvjp(forward, backward)
    return run


def _handed_in(origin: Any, num_stream: int) -> Callable[[list], Any] | None:
    """How backward finds a leaf among the step's inputs, or as a constant; None if it has to be kept."""
    if not isinstance(origin, Origin):
        return None
    if origin.constant is not None:
        return lambda given: origin.constant
    if (index := origin.input) is not None and index >= num_stream:
        return lambda given: given[index]
    return None
