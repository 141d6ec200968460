"""Experts and sequences spread over devices: logits and pages of one device, whoever holds them."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from serving_problem import BLOCK, CONFIG, Holder, assert_close, prompt, serving

from k3jax.serve.model import Sampler, Weights
from k3jax.serve.model.serving import weight_specs
from meshes import MeshSpec

POOL = 16
RANKS = 4


def spread(given: Weights, mesh) -> Weights:
    specs = Weights(weight_specs(CONFIG), jax.tree.map(lambda _: PartitionSpec(), given.bias))
    return jax.tree.map(lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)), given, specs)


@pytest.mark.parametrize(
    "lengths", [(0, 0, 0), pytest.param((33, 20, 32), marks=pytest.mark.slow)], ids=["", "prefill too"]
)
def test_ranks_compute_what_one_device_does(model, weights, lengths):
    """Sequences on ranks 2, 0 and 3; rank 1 has nothing to do but its experts' work."""
    mesh = MeshSpec.parse("data=2,expert=2").build(jax.devices()[:RANKS])
    ranked = serving(spread(weights, mesh), mesh=mesh)
    gates = ranked.weights.params["chunks"]["0"]["moe"]["expert_gate"]
    assert gates.addressable_shards[0].data.shape[3] == CONFIG.num_experts // 2
    tokens = [prompt(n + 3, seed=n) for n in lengths]
    held = [Holder(POOL, seed=rank).sequence(n + 3, rank=rank) for n, rank in zip(lengths, (2, 0, 3), strict=True)]
    alone_held = [Holder(POOL, seed=rank).sequence(n + 3) for n, rank in zip(lengths, (2, 0, 3), strict=True)]
    pool, alone_pools = ranked.empty_pool(POOL), [model.empty_pool(POOL) for _ in lengths]
    assert pool.addressable_shards[0].data.shape[1] == POOL

    def both(run, spans):
        """One call on the mesh, and one for each sequence alone."""
        nonlocal pool
        which = [i for i, span in enumerate(spans) if span[0] < span[1]]
        step, pool = run(ranked)(pool, [held[i].row(tokens[i], *spans[i]) for i in which])
        wants = []
        for i in which:
            want, alone_pools[i] = run(model)(alone_pools[i], [alone_held[i].row(tokens[i], *spans[i])])
            wants.append(np.asarray(want.logits)[want.at[0]])
        assert_close(np.asarray(step.logits)[step.at], np.stack(wants), 1e-6)
        return step, which

    for start in range(0, max(lengths), BLOCK):
        both(lambda m: m.prefill, [(start, min(start + BLOCK, n)) for n in lengths])
    for at in range(3):
        step, which = both(lambda m: m.decode, [(n + at, n + at + 1) for n in lengths])
    chosen, _ = ranked.choose(step, [Sampler()] * 3, [n + 3 for n in lengths])
    np.testing.assert_array_equal(chosen, np.asarray(step.logits)[step.at].argmax(-1))
    parts = np.split(np.asarray(pool).view(np.float32), RANKS, 1)
    for rank, alone in zip((2, 0, 3), alone_pools, strict=True):
        assert_close(parts[rank], np.asarray(alone).view(np.float32), 1e-5)
    assert not parts[1].any()


def test_meshes_that_split_something_else_are_refused(weights):
    for axis in ("pipe", "context"):
        mesh = MeshSpec.parse(f"{axis}=2").build(jax.devices()[:2])
        with pytest.raises(ValueError, match=f"{axis} must be 1"):
            serving(weights, mesh=mesh)
    with pytest.raises(ValueError, match="num_experts=8 does not divide by expert=3"):
        serving(weights, mesh=MeshSpec.parse("expert=3").build(jax.devices()[:3]))
