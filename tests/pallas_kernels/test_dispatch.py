"""Rows that are written to peers' memory land where the plan says; the kernel's own loop in the interpreter; lowering."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from k3jax.parallel.experts import plan
from meshes import MeshSpec
from pallas_kernels.dispatch import addresses, first_copies, send_rows


def routing(R, S, k, E, hot, padding, seed):
    """Distinct experts of each token, the first few liked most if `hot`; some tokens are padding."""
    rng = np.random.default_rng(seed)
    favour = -4.0 * hot * np.log1p(np.arange(E))
    ids = np.argsort(-(favour + rng.gumbel(size=(R, S, E))), -1)[..., : min(k, E)].astype(np.int32)
    ids[rng.random((R, S)) < padding] = -1
    return ids, E


# (R, S, k, E); few, for each is compiled.
SHAPES = [(1, 5, 2, 7), (2, 1, 1, 3), (3, 7, 4, 10), (4, 16, 3, 8), (8, 24, 8, 40)]
routings = st.builds(
    lambda shape, *rest: routing(*shape, *rest),
    st.sampled_from(SHAPES),
    st.booleans(),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(0, 2**32 - 1),
)


def copies(destination, rows):
    """The first row of the same token on the same rank, for each assignment [R, S, k]: said by loops."""
    result = np.full_like(destination, -1)
    for at, to in np.ndenumerate(destination):
        if to >= 0:
            same = [other for other in destination[at[:2]] if other >= 0 and other // rows == to // rows]
            result[at] = min(same) % rows
    return result


@settings(max_examples=60)
@given(routings, st.sampled_from([1, 3, 30]))
def test_every_token_is_written_once_to_each_rank_that_wants_it_where_the_plan_says(case, programs):
    ids, E = case
    R, S, k = ids.shape
    rows, destination = S * k, plan(ids, num_experts=E).destination
    copy_of = copies(destination, rows)
    shares = np.asarray(addresses.share(np.arange(programs, dtype=np.int32), S, programs))
    buffers = {}
    for source in range(R):
        targets = first_copies(destination[source], copy_of[source], rows=rows)
        assert targets.dtype == np.int32
        rank, row = map(np.asarray, addresses.address(targets, rows))
        for program in range(programs):
            for token in program + programs * np.arange(shares[program]):
                for j in np.flatnonzero(targets[token] >= 0):
                    assert (rank[token, j], row[token, j]) not in buffers, "a row is written twice"
                    buffers[rank[token, j], row[token, j]] = (source, token)
    # What each assignment's row is filled with, from the row that holds its token there, is its token.
    for (source, token, j), to in np.ndenumerate(destination):
        if to >= 0:
            assert buffers[to // rows, copy_of[source, token, j]] == (source, token)
    wanted = {(to // rows, source, token) for (source, token, _), to in np.ndenumerate(destination) if to >= 0}
    assert len(buffers) == len(wanted), "a token is sent twice to a rank"


@pytest.mark.quick
@pytest.mark.parametrize(("dtype", "D"), [(jnp.bfloat16, 256), (jnp.bfloat16, 1536), (jnp.float32, 512)])
def test_the_kernel_writes_its_tokens_to_their_targets_and_nothing_else(dtype, D):
    """In the interpreter, as one rank that has the tokens and the buffers of all ranks, one after the other."""
    ids, E = routing(3, 7, 4, 10, hot=True, padding=0.3, seed=0)
    destination, rows = plan(ids, num_experts=E).destination, 7 * 4
    targets = first_copies(destination, copies(destination, rows), rows=rows).reshape(-1, 4)
    x = jax.random.normal(jax.random.key(0), (len(targets), D), dtype)
    got = np.asarray(send_rows(x, jnp.asarray(targets), rows=3 * rows, axis_name=None, interpret=True))
    token, j = np.nonzero(targets >= 0)
    assert 0 < len(token) < (destination >= 0).sum()
    np.testing.assert_array_equal(got[targets[token, j]], np.asarray(x)[token])
    # The interpreter's fresh memory is not a number.
    untouched = np.delete(got, targets[token, j], 0).astype(np.float32)
    assert len(untouched) == 3 * rows - len(token) and np.isnan(untouched).all()


def lowered(spec, x, targets, rows):
    """The kernel in a shard_map over all axes of a mesh, lowered for GPUs."""
    mesh = MeshSpec.parse(spec).build()
    tokens = P(("data", "expert"))
    send = lambda x, targets: send_rows(x, targets, rows=rows, axis_name="expert")
    sharded = jax.shard_map(send, mesh=mesh, in_specs=(tokens, tokens), out_specs=tokens)
    return jax.jit(sharded).trace(x, targets).lower(lowering_platforms=("cuda",)).as_text()


X, TARGETS = jax.ShapeDtypeStruct((64, 512), jnp.bfloat16), jax.ShapeDtypeStruct((64, 2), jnp.int32)


@pytest.mark.parametrize("spec", ["data=1,pipe=1,expert=8,context=1", "data=2,pipe=2,expert=2,context=1"])
def test_it_lowers_for_gpus_with_a_peer_that_is_data(spec):
    text = lowered(spec, X, TARGETS, rows=16)
    assert text.count("mosaic_gpu_v2") == 1 and "uses_xla_collective_metadata = true" in text
    # All devices of the mesh exchange addresses and wait for each other, not only those of the axis.
    assert 'xla_replica_ids = "0,1,2,3,4,5,6,7"' in text


def test_a_rank_alone_lowers_without_peers():
    text = lowered("data=8,pipe=1,expert=1,context=1", X, TARGETS, rows=16)
    assert text.count("mosaic_gpu_v2") == 1 and "uses_xla_collective_metadata = false" in text


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"x": jnp.zeros((4, 100), jnp.bfloat16)}, "whole 512 bytes"),
        ({"x": jnp.zeros((4, 256), jnp.complex64)}, "at most 32 bits"),
        ({"rows": 0}, "rows=0"),
    ],
)
def test_what_it_does_not_take_is_refused_in_words(changed, said):
    arguments: dict = {"x": jnp.zeros((4, 256), jnp.bfloat16), "targets": jnp.zeros((4, 2), jnp.int32), "rows": 8}
    with pytest.raises(ValueError, match=said):
        send_rows(**arguments | changed, axis_name=None, interpret=True)


def test_ranks_in_the_interpreter_are_refused():
    mesh = MeshSpec.parse("expert=2").build(jax.devices()[:2])
    tokens = P("expert")
    send = lambda x, targets: send_rows(x, targets, rows=16, axis_name="expert", interpret=True)
    with pytest.raises(ValueError, match="knows no peers"):
        jax.eval_shape(jax.shard_map(send, mesh=mesh, in_specs=(tokens, tokens), out_specs=tokens), X, TARGETS)
