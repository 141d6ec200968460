"""A call changes the pool where it is: it is never copied, neither whole nor layer by layer."""

import numpy as np
import pytest
from compiled import loop_copies
from serving_problem import POOL, Holder, prompt

from k3jax.serve.model.rows import arrange


@pytest.mark.slow
def test_no_copy_of_the_pool_and_its_buffer_is_given_back(model):
    held = Holder().sequence()
    rows, _ = arrange(model.pages, [held.row(prompt(1), 0, 1)], T=1, per_rank=1, ranks=1, width=10, pool_pages=POOL)
    pool = model.empty_pool(POOL)
    compiled = model._programs[False].lower(model.weights, pool, rows).compile()
    of_pool = [shape for shape in loop_copies(compiled.as_text()) if np.prod(shape) >= pool[0].size]
    assert of_pool == []
    assert compiled.memory_analysis().alias_size_in_bytes >= pool.nbytes
