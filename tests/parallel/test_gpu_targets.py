"""What leaves the device is compiled for GPUs that are not here: only there are memory spaces checked."""

import re

import jax
import pytest
import test_histories as rows
import test_pipeline as toy

from k3jax.parallel.relay import Relay
from k3jax.parallel.schedules import build
from meshes import MeshSpec

POLICIES = ["*=local-offload", "toy.out=quantize+local-offload,*=remote-offload"]


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zb1p"])
@pytest.mark.parametrize("policy", POLICIES)
def test_offloading_compiles_for_gpus_and_uses_host_memory(absent_gpus, monkeypatch, policy, name):
    monkeypatch.setattr(toy, "T", 128)
    spec = MeshSpec.parse("pipe=4,data=2")
    monkeypatch.setattr(MeshSpec, "build", lambda self, of=None, build=MeshSpec.build: build(self, absent_gpus))
    schedule = build(name, stages=4, virtual=2 if name == "interleaved_1f1b" else 1, microbatches=8)
    arguments = jax.eval_shape(lambda: (toy.toy_params(schedule.chunks), *toy.toy_tokens(8, 2)))
    compiled = {p: toy.executed(spec, schedule, p).lower(*arguments).compile() for p in (policy, "*=keep")}
    offloaded, kept = (compiled[p].memory_analysis() for p in (policy, "*=keep"))
    assert re.search(r"S\(5\)", compiled[policy].as_text()), "a buffer in host memory"
    assert offloaded.host_temp_size_in_bytes > 0 == kept.host_temp_size_in_bytes
    assert offloaded.temp_size_in_bytes < kept.temp_size_in_bytes


def test_permutes_of_rows_name_their_senders(absent_gpus, monkeypatch):
    """Each level of each load is a permute of its own; two replicas send side by side."""
    monkeypatch.setattr(MeshSpec, "build", lambda self, of=None, build=MeshSpec.build: build(self, absent_gpus))
    schedule, appended = build("interleaved_1f1b", stages=4, virtual=2, microbatches=6), (1, 0, 1, 0, 1, 0, 0, 1)
    arguments = jax.eval_shape(lambda: (rows.toy_params(8), *toy.toy_tokens(6, 2)))
    text = rows.executed(schedule, appended).lower(*arguments).compile().as_text()
    senders = {pairs.count("},{") + 1 for pairs in re.findall(r"source_target_pairs=\{(\{.*?\})\}", text)}
    loads = [load for of_way in Relay(schedule, appended).loads for load in of_way.tolist()]
    assert senders >= {2 * sum(n > row for n in load) for load in loads for row in range(max(load))}
