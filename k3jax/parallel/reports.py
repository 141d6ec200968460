"""What a chunk reports beside its stream, and how reports of many microbatches become one: no gradient passes through."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from k3jax.parallel.boxes import add_at, max_at

Tree = Any


class Report(NamedTuple):
    """Of one chunk and microbatch, or of several."""

    sums: Tree = ()
    """Integers, added up."""
    maxima: Tree = ()
    """Floats of which the largest counts; −inf where there is nothing."""


def nothing(shapes: Report, chunks: int) -> Report:
    """Reports of that many chunks before their first microbatch, a leading dim; shapes: of one report."""
    fill = lambda value: lambda a: jnp.full((chunks, *a.shape), value, a.dtype)
    return Report(jax.tree.map(fill(0), shapes.sums), jax.tree.map(fill(-jnp.inf), shapes.maxima))


def combine_at(total: Report, chunk: jax.Array, report: Report) -> Report:
    """The total with one more microbatch of a chunk, in place."""
    return Report(add_at(total.sums, chunk, report.sums), max_at(total.maxima, chunk, report.maxima))
