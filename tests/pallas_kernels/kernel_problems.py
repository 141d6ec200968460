"""KDA problems for kernels that take bfloat16; the right answers are those of the other tests of KDA.

B batch, T tokens, H heads, K key dim, V value dim.
"""

import jax.numpy as jnp
import kda_problems
import numpy as np
from kda_problems import Problem, error

BOUND = -5.0
# Operands of products are rounded to bfloat16 (2^-9 each); what is left of it in the norm of a whole result.
CLOSE = 1e-2


def problem(gates, cosine=0.0, *, documents=None, **shape) -> Problem:
    """`kda_problems.problem` with q, k and v rounded to what the kernels are given; documents None: no segment ids."""
    p = kda_problems.problem(gates, cosine, documents=documents or (), **shape)
    rounded = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) for x in p[:3]]
    return Problem(*rounded, *p[3:6], None if documents is None else p.segment_ids)


def kernel_inputs(p: Problem):
    """(q, k, v, g, beta, initial state, segment ids) as the kernels take them."""
    dtypes = [jnp.bfloat16] * 3 + [jnp.float32] * 3
    arrays = [jnp.asarray(x, dtype) for x, dtype in zip(p[:6], dtypes, strict=True)]
    return *arrays, None if p.segment_ids is None else jnp.asarray(p.segment_ids)


def right_answers(p: Problem, cotangents=None):
    """(o, final state) of a problem in float64; with cotangents of both also the gradients of its six arrays."""
    ids = np.zeros(p.q.shape[:2], np.int32) if p.segment_ids is None else p.segment_ids
    given = (p.v, p.state) if cotangents is None else cotangents
    answers = kda_problems.evaluate_definition(p._replace(segment_ids=ids), given)
    return answers[:2] if cotangents is None else answers


def distance(got, right):
    return error(np.asarray(got, np.float64), right)
