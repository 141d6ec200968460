"""Who is who: rank arithmetic against the mesh that jax lays out, and against what its collectives join."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from meshes import AXES, MeshSpec, membership

small = st.integers(min_value=1, max_value=4)
specs = st.builds(MeshSpec, data=small, pipe=small, expert=small, context=small)
GROUPS = {
    "pipeline": ("pipe",),
    "expert_group": ("expert",),
    "context_group": ("context",),
    "dense_replicas": ("data", "expert", "context"),
    "expert_replicas": ("data", "context"),
}


@given(spec=specs)
@settings(max_examples=50)
def test_groups_partition_the_ranks(spec):
    everyone = [membership(spec, rank) for rank in range(spec.num_devices)]
    for group, along in GROUPS.items():
        groups = {getattr(who, group) for who in everyone}
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(spec.num_devices))
        assert {len(ranks) for ranks in groups} == {int(np.prod([spec.sizes[axis] for axis in along]))}
        assert all(who.rank in getattr(who, group) for who in everyone)


@given(spec=specs, virtual=small, data=st.data())
@settings(max_examples=100)
def test_one_rank_agrees_with_a_grid_of_ranks(spec, virtual, data):
    grid = np.arange(spec.num_devices).reshape(tuple(spec.sizes.values()))
    rank = data.draw(st.integers(0, spec.num_devices - 1))
    who = membership(spec, rank, virtual)
    assert grid[who.coordinates] == rank
    assert (who.stage, who.context_shard) == (who.coordinates[1], who.coordinates[3])
    for group, along in GROUPS.items():
        line = tuple(slice(None) if axis in along else at for axis, at in zip(AXES, who.coordinates, strict=True))
        assert list(getattr(who, group)) == grid[line].ravel().tolist()


@given(spec=specs, virtual=small)
@settings(max_examples=50)
def test_every_pipeline_holds_every_chunk_once_and_hands_it_to_the_holder_of_the_next(spec, virtual):
    everyone = [membership(spec, rank, virtual) for rank in range(spec.num_devices)]
    for pipeline in {who.pipeline for who in everyone}:
        holder = {chunk: everyone[rank] for rank in pipeline for chunk in everyone[rank].chunks}
        assert sorted(holder) == list(range(spec.pipe * virtual))
        assert sum(len(everyone[rank].chunks) for rank in pipeline) == spec.pipe * virtual
        for chunk in range(spec.pipe * virtual - 1):
            if spec.pipe > 1:
                assert holder[chunk].next_stage == holder[chunk + 1].rank
                assert holder[chunk + 1].previous_stage == holder[chunk].rank


@pytest.mark.quick
def test_a_pipeline_has_ends_unless_virtual_stages_close_the_ring():
    spec = MeshSpec(data=2, pipe=3, expert=2)
    first, last = membership(spec, 1), membership(spec, 5)
    assert (first.previous_stage, first.next_stage) == (None, 3)
    assert (last.previous_stage, last.next_stage) == (3, None)
    first, last = membership(spec, 1, virtual=2), membership(spec, 5, virtual=2)
    assert (first.chunks, first.previous_stage) == ((0, 3), 5)
    assert (last.chunks, last.next_stage) == ((2, 5), 1)
    alone = membership(MeshSpec(data=2), 1, virtual=3)
    assert (alone.chunks, alone.previous_stage, alone.next_stage) == ((0, 1, 2), None, None)


def test_context_neighbours_are_in_sequence_order_and_do_not_wrap():
    spec = MeshSpec(data=2, context=3)
    neighbours = [(membership(spec, rank).previous_context, membership(spec, rank).next_context) for rank in range(6)]
    assert neighbours == [(None, 1), (0, 2), (1, None), (None, 4), (3, 5), (4, None)]


@pytest.mark.quick
def test_groups_are_the_ranks_that_collectives_join():
    """all_gather of rank numbers over the axes of each group, on the mesh that build() makes."""
    spec = MeshSpec.parse("data=2,expert=2,context=2")
    mesh = spec.build()
    every_axis = P(AXES)

    def gather(rank_1):
        return tuple(jax.lax.all_gather(rank_1, along, tiled=True)[None] for along in GROUPS.values())

    ranks = np.arange(spec.num_devices, dtype=np.int32)
    gathered = jax.jit(jax.shard_map(gather, mesh=mesh, in_specs=every_axis, out_specs=every_axis))(ranks)
    for group, rows in zip(GROUPS, gathered, strict=True):
        assert [tuple(row) for row in np.asarray(rows).tolist()] == [
            getattr(membership(spec, rank), group) for rank in range(spec.num_devices)
        ]


@pytest.mark.parametrize("rank", [-1, 8])
def test_rank_outside_the_mesh_is_refused(rank):
    with pytest.raises(ValueError, match=f"rank {rank} is not in mesh data=8,.*0 to 7"):
        membership(MeshSpec(data=8), rank)


@pytest.mark.parametrize("virtual", [0, -1])
def test_a_stage_without_chunks_is_refused(virtual):
    with pytest.raises(ValueError, match=f"virtual={virtual}"):
        membership(MeshSpec(), 0, virtual)
