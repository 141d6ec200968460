"""KDA is that of flash-linear-attention's naive references, outputs and gradients.

B batch, T tokens, H heads, K key dim, V value dim.
"""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops.kda import kda

torch = pytest.importorskip("torch", reason="the peers are not installed: tests/peers/run")
pytest.importorskip("einops", reason="the peers are not installed: tests/peers/run")
found = importlib.util.find_spec("fla")
if found is None:
    pytest.skip("the peers are not installed: tests/peers/run", allow_module_level=True)

# Both compute in float32.
VALUES, GRADIENTS = 1e-5, 1e-4


def references():
    """Their file by itself: the package around it needs Triton."""
    where = Path(next(iter(found.submodule_search_locations))) / "ops" / "kda" / "naive.py"
    spec = importlib.util.spec_from_file_location("fla_naive_kda", where)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {"recurrence": module.naive_recurrent_kda, "chunks": module.naive_chunk_kda}


def problem(T, K, V, strength, B=2, H=3):
    """(q, k, v, g, beta, initial state) and cotangents of (o, final state)."""
    random = np.random.default_rng(T + K)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    q, k = (unit(random.normal(size=(B, T, H, K))) for _ in "qk")
    g = -strength * random.random((B, T, H, K))
    inputs = q, k, random.normal(size=(B, T, H, V)), g, random.random((B, T, H)), random.normal(size=(B, H, K, V))
    cotangents = random.normal(size=(B, T, H, V)), random.normal(size=(B, H, K, V))
    return tuple([x.astype(np.float32) for x in arrays] for arrays in (inputs, cotangents))


@pytest.mark.parametrize("implementation", ["chunked", "recurrent"])
@pytest.mark.parametrize(("T", "K", "V", "strength"), [(64, 16, 16, 0.1), (128, 16, 24, 0.5), (192, 12, 8, 1.0)])
@pytest.mark.parametrize("reference", ["recurrence", "chunks"])
def test_outputs_and_gradients_are_those_of_the_naive_forms(reference, T, K, V, strength, implementation):
    inputs, cotangents = problem(T, K, V, strength)
    theirs = [torch.from_numpy(x).requires_grad_() for x in inputs]
    o, state = references()[reference](*theirs[:5], initial_state=theirs[5], output_final_state=True)
    torch.autograd.backward([o, state], [torch.from_numpy(x) for x in cotangents])

    def run(q, k, v, g, beta, initial):
        return kda(q, k, v, g, beta, initial_state=initial, implementation=implementation)

    values, pullback = jax.vjp(jax.jit(run), *map(jnp.asarray, inputs))
    grads = pullback(tuple(map(jnp.asarray, cotangents)))
    names = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dinitial")
    expected = [o.detach(), state.detach(), *(x.grad for x in theirs)]
    for name, mine, other in zip(names, [*values, *grads], expected, strict=True):
        distance = np.linalg.norm(mine - other.numpy()) / np.linalg.norm(other)
        print(name, f"{distance:.1e}")
        assert distance < (GRADIENTS if name.startswith("d") else VALUES), name
