"""KDA's Hopper kernels with the sequence on several ranks: their numbers in Mosaic's interpreter, their program for CUDA."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from kda_problems import assert_kernels_close, cotangents_of, evaluate_definition, interpreted, problem

from k3jax.parallel.context import RankToRank, kda_context_parallel

TOKENS = P(None, "context")


def inputs(T, documents=((), ())):
    """One row that hardly forgets and one that forgets at once, each with its documents."""
    p = problem([-0.05, -5.0], 0.5, T=T, H=1, K=64, V=64)
    p = p._replace(
        segment_ids=np.stack([np.searchsorted(d, np.arange(T), "right") for d in documents]).astype(np.int32)
    )
    halves = [jnp.asarray(x, jnp.bfloat16) for x in p[:3]]
    wide = p._replace(**{name: np.asarray(x, np.float32) for name, x in zip("qkv", halves, strict=True)})
    return wide, [*halves, *map(jnp.asarray, p[3:])]


class OneDevice(NamedTuple):
    """`RankToRank` where a device plays all ranks, each with its own rows of the batch: Mosaic's interpreter on several
    devices at once is not reliable (it has one memory for all of them)."""

    ranks: int

    def forward(self, M, S, initial_state, segment_ids):
        given = self.apart(M, 1), self.apart(S, 1), self.apart(initial_state), self.apart(segment_ids)
        entering, final, kept = self.every(RankToRank("context").forward)(*given)
        return self.joined(entering, 1), self.joined(final), kept

    def backward(self, kept, d_entering, d_final):
        given = kept, self.apart(d_entering, 1), self.apart(d_final)
        d_leaving, d_initial = self.every(RankToRank("context").backward)(*given)
        return self.joined(d_leaving, 1), self.joined(d_initial)

    def every(self, run):
        return jax.vmap(run, axis_name="context")

    def apart(self, x, axis=0):
        return jnp.moveaxis(x.reshape(*x.shape[:axis], self.ranks, -1, *x.shape[axis + 1 :]), axis, 0)

    def joined(self, x, axis=0):
        x = jnp.moveaxis(x, 0, axis)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


# Documents that go on over borders of ranks and of their segments, and start at them.
@pytest.mark.parametrize(
    ("T", "documents", "R", "segments"),
    [
        pytest.param(100, ((20, 50), (60,)), 2, 1, marks=pytest.mark.slow),
        pytest.param(280, ((64, 140, 150), (204,)), 2, 2, marks=pytest.mark.slow),
        pytest.param(260, ((64, 65, 195), ()), 4, 1, marks=pytest.mark.slow),
    ],
)
def test_kernels_on_the_parts_of_ranks_and_their_exchange_are_kda_on_one(T, documents, R, segments):
    wide, arrays = inputs(T, documents=documents)
    do, d_final = cotangents_of(wide)
    do = jnp.asarray(do, jnp.bfloat16)

    # [B, T, ...] <-> [R B, T / R, ...]: no rank sees the tokens of another.
    cut = lambda x: jnp.moveaxis(x.reshape(len(x), R, T // R, *x.shape[2:]), 1, 0).reshape(-1, T // R, *x.shape[2:])
    joined = lambda x: jnp.moveaxis(x.reshape(R, -1, *x.shape[1:]), 0, 1).reshape(-1, T, *x.shape[2:])

    def run(*a):
        state = jnp.concatenate([a[5]] * R)
        how = {"initial_state": state, "segment_ids": cut(arrays[6]), "segments": segments}
        o, final = interpreted(*map(cut, a[:5]), **how, exchange=OneDevice(R))
        return joined(o), final.reshape(R, -1, *final.shape[1:])

    (o, final), pullback = jax.vjp(run, *arrays[:6])
    # Each rank has the final state; the cotangents of all count.
    share = np.arange(R).reshape(R, 1, 1, 1, 1) / sum(range(R))
    grads = pullback((do, jnp.asarray(share * d_final, jnp.float32)))
    right = evaluate_definition(wide, (np.asarray(do, np.float32), d_final))
    for last in final:
        assert_kernels_close((o, last, *grads), right)


def spread(run, R):
    """`run` of the six arrays and segment ids on R ranks: (o, the final state of each)."""
    mesh = jax.make_mesh((R,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:R])

    def local(*inputs):
        o, final = run(*inputs[:5], initial_state=inputs[5], segment_ids=inputs[6])
        return o, final[None]

    specs = (*(TOKENS,) * 5, P(), TOKENS)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(TOKENS, P("context"))))


@pytest.mark.quick
def test_kernels_lower_for_cuda_with_one_exchange_each_way():
    _, arrays = inputs(140)
    run = spread(partial(kda_context_parallel, gate_lower_bound=-5.0, implementation="mosaic_gpu"), 2)

    @jax.jit
    def step(*a):
        (o, final), pullback = jax.vjp(lambda *x: run(*x, a[6]), *a[:6])
        return pullback((o, final))

    program = step.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    for name in ("kda_segment_maps", "kda_recurrence", "kda_entering_cotangents", "kda_reverse", "kda_pair_gradients"):
        assert name in program
    assert program.count("stablehlo.all_gather") == 2


def test_the_definition_takes_no_part_of_a_sequence():
    _, arrays = inputs(2)
    with pytest.raises(ValueError, match="implementation='recurrent' takes no segments"):
        spread(partial(kda_context_parallel, implementation="recurrent"), 2)(*arrays)
