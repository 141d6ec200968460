"""What a step stores, by name: the leaves that the executor's stores are made of."""

import dataclasses
import math

import pytest
import tiny

from k3jax.activations.policy import ALWAYS_KEPT, Policy
from k3jax.parallel.schedules import BACKWARD, FORWARD, WEIGHT
from k3jax.train.devices import abstract_mesh
from k3jax.train.step import TrainStep
from k3jax.train.stored import stored_leaves, summed
from meshes import MeshSpec


def stored(mesh: str = "data=1", **changes):
    return stored_leaves(TrainStep(dataclasses.replace(tiny.STEP, **changes), abstract_mesh(MeshSpec.parse(mesh))))


@pytest.mark.quick
def test_leaves_have_names_spans_shapes_and_bytes_of_one_rank():
    leaves = stored("data=2,pipe=2,context=2")
    assert {leaf.span for leaf in leaves} == {(FORWARD, BACKWARD)}
    assert all(leaf.bytes == math.prod(leaf.shape.shape) * leaf.shape.dtype.itemsize for leaf in leaves)
    assert {leaf.policy for leaf in leaves} == {Policy()}
    streams = [leaf.shape.shape for leaf in leaves if leaf.names == {"group.in"}]
    # Two groups of a chunk, two of eight sequences, half of 64 tokens, width 16.
    assert (2, 2, 32, 16) in streams
    assert sum(leaf.bytes for leaf in summed(leaves)) == sum(leaf.bytes for leaf in leaves)
    assert len({leaf.name for leaf in summed(leaves)}) == len(summed(leaves)) < len(leaves)


def test_policies_change_what_is_stored():
    kept = {leaf.name: leaf.bytes for leaf in summed(stored())}
    recomputed = {leaf.name for leaf in summed(stored(activations="*=recompute"))}
    assert recomputed < kept.keys() and recomputed <= ALWAYS_KEPT
    half = {leaf.name: leaf for leaf in summed(stored(activations="kda.o=quantize+local-offload,mla.*=quantize"))}
    assert half.keys() == kept.keys()
    assert half["kda.o"].policy == Policy("local-offload", True) and half["kda.o"].bytes < kept["kda.o"]
    assert half["moe.experts"].bytes == kept["moe.experts"]


def test_weight_gradients_of_their_own_have_leaves_of_three_spans():
    leaves = summed(stored("pipe=2", schedule="zb1p"))
    spans = {(leaf.producer, leaf.consumer) for leaf in leaves}
    assert spans == {(FORWARD, BACKWARD), (FORWARD, WEIGHT), (BACKWARD, WEIGHT)}
    assert {leaf.name for leaf in leaves if leaf.producer == BACKWARD} == {"backward.held"}
