"""Grouped products group by group, in the dtype of their inputs (float64 too).

C rows, G groups, D and F widths. Results are 0 in rows after the last group.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from k3jax.ops.glu import gated_activation


def masks(x: jax.Array, group_sizes: jax.Array) -> list[jax.Array]:
    """Which rows are each group's."""
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(len(x))[:, None]
    return [(row >= end - size) & (row < end) for size, end in zip(group_sizes, ends, strict=True)]


def grouped_gemm(x, w, group_sizes):
    y = jnp.zeros((len(x), w.shape[2]), x.dtype)
    for rows, matrix in zip(masks(x, group_sizes), w, strict=True):
        y = jnp.where(rows, x @ matrix, y)
    return y


def input_gradient(dy, w, group_sizes):
    return grouped_gemm(dy, w.mT, group_sizes)


def weight_gradient(x, dy, group_sizes):
    return jnp.stack([jnp.where(rows, x, 0).T @ jnp.where(rows, dy, 0) for rows in masks(x, group_sizes)])


def expert_hidden(x, gate, up, group_sizes, *, beta, linear_beta):
    products = [grouped_gemm(x, w, group_sizes) for w in (gate, up)]
    return gated_activation(*products, beta=beta, linear_beta=linear_beta)


def weighted_gemm(x, w, row_weights, group_sizes):
    return row_weights[:, None] * grouped_gemm(x, w, group_sizes)


def expert_hidden_gradients(x, gate, up, da, row_weights, group_sizes, *, beta, linear_beta):
    products = [grouped_gemm(x, w, group_sizes) for w in (gate, up)]
    da, p = jnp.where(sum(masks(x, group_sizes)), da, 0), row_weights[:, None]
    a, pullback = jax.vjp(lambda g, u: gated_activation(g, u, beta=beta, linear_beta=linear_beta), *products)
    return p * a, *pullback(p * da), (da * a).sum(-1)


def expert_input_gradient(d_gate, d_up, gate, up, group_sizes):
    return sum(input_gradient(dy, w, group_sizes) for dy, w in ((d_gate, gate), (d_up, up)))
