"""The door to KDA's Hopper kernels: their forward and backward as one operation with a gradient."""

from __future__ import annotations

import functools

import jax

from pallas_kernels import kda as kernels


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def evaluate(options: tuple, q, k, v, g, beta, initial_state, segment_ids):
    """(o bfloat16, final state float32); options: pairs of (name, value) for `pallas_kernels.kda.forward`.

    Raises ValueError for what the kernels do not take, naming it.
    """
    return _forward(options, q, k, v, g, beta, initial_state, segment_ids)[0]


def _forward(options, q, k, v, g, beta, initial_state, segment_ids):
    o, final, residuals = kernels.forward(
        q, k, v, g, beta, initial_state=initial_state, segment_ids=segment_ids, **dict(options)
    )
    return (o, final), residuals


def _backward(options, residuals, cotangents):
    return *kernels.backward(residuals, *cotangents), None


evaluate.defvjp(_forward, _backward)
