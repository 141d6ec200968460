"""What is printed before a run: parameter counts of the released models, and bytes that are really there."""

import dataclasses
import math
import re

import jax
import numpy as np
import pytest
import tiny

from k3jax import configs
from k3jax.optim.groups import is_group, parameter_groups, path_name
from k3jax.parallel.experts import best_exchange
from k3jax.parameters import count, count_by_group, parameters
from k3jax.train.config import StepConfig
from k3jax.train.devices import abstract_mesh, compiler_options
from k3jax.train.plan import bytes_per_rank, in_bytes, ownership_table, plan, runs, short, table
from k3jax.train.step import TrainStep
from meshes import MeshSpec


def planned(mesh: str, **changes) -> dict[str, str]:
    config = dataclasses.replace(tiny.STEP, **changes)
    return dict(plan(TrainStep(config, abstract_mesh(MeshSpec.parse(mesh)))))


@pytest.mark.quick
def test_the_plan_says_how_rows_travel_between_experts():
    """CPU has no ragged all-to-all (jax-ml/jax#34755)."""
    assert planned("expert=4")["experts"] == "2 of 8 on a rank, room for 2 replicas; rows travel by all_gather"
    assert planned("data=2")["experts"] == "all 8 on every rank"
    assert best_exchange("cpu") == "all_gather" and best_exchange("gpu") == "ragged_all_to_all"


@pytest.mark.quick
def test_only_gpus_get_options_of_the_compiler():
    """CPU's would refuse them."""
    assert compiler_options("cpu") is None
    assert compiler_options("gpu") == compiler_options("cuda") == {"xla_gpu_enable_latency_hiding_scheduler": True}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "total", "active"),
    # The K3 report says 2.78T and 104.2B; Kimi Linear's says 48B and 3B, its released weights are 49.1B.
    [("k3", "2.78T", "104.2B"), ("kimi_linear_48b", "49.1B", "3.11B")],
)
def test_counts_of_the_released_models(name, total, active):
    assert tuple(map(short, count(configs.get(name)))) == (total, active)


@pytest.mark.quick
def test_every_parameter_of_the_state_is_counted_once_and_in_its_group():
    """Stacked leaves hold inactive slots and unused mixtures besides; without those the numbers agree leaf by leaf."""
    step = TrainStep(tiny.STEP, abstract_mesh(MeshSpec()))
    shapes, layers = step.state_shapes.params, step.layout.layer_table
    groups = parameter_groups(shapes)
    expected: dict[str, int] = {}
    labels = jax.tree.leaves(groups, is_leaf=is_group)
    for (path, leaf), group in zip(jax.tree_util.tree_leaves_with_path(shapes), labels, strict=True):
        keys = [key.key for key in path]
        here = math.prod(leaf.shape)
        if keys[0] == "chunks":
            held = layers[..., int(keys[1])]
            first = tiny.MODEL.dense_layers if "moe" in keys else 0
            here = math.prod(leaf.shape[3:]) * int((held >= first).sum())
        expected[group.label] = expected.get(group.label, 0) + here
    assert count_by_group(tiny.MODEL) == expected
    assert count(tiny.MODEL)[0] == sum(expected.values())


def test_under_adamw_no_parameter_is_said_to_be_on_muon():
    assert set(count_by_group(tiny.MODEL, "adamw")) == {"adamw", "adamw_no_decay"}
    assert sum(count_by_group(tiny.MODEL, "adamw").values()) == count(tiny.MODEL)[0]


def test_active_leaves_out_the_embedding_table_and_experts_that_are_not_chosen():
    c = tiny.MODEL
    expert = 3 * c.expert_dim * c.expert_width
    idle = c.num_moe_layers * (c.num_experts - c.experts_per_token) * expert + c.vocab_size * c.hidden_size
    total, active = count(c)
    assert total - active == idle
    more = dataclasses.replace(c, num_experts=16)  # the router grows, the chosen experts do not
    assert count(more)[1] - active == c.num_moe_layers * c.hidden_size * 8


def test_layers_with_a_dense_ffn_have_no_mixture():
    none, three = (dataclasses.replace(tiny.MODEL, dense_layers=n) for n in (0, 3))
    layers = lambda config, name: sum(p.layers for p in parameters(config) if p.name.endswith(name))
    assert layers(none, "moe.router") == 7 and layers(none, "dense.up") == 0
    assert layers(three, "moe.router") == 4 and layers(three, "dense.up") == 3


def test_bytes_are_those_that_a_device_holds():
    step = tiny.train_step("data=2,pipe=2,expert=2")
    state = step.init()
    held = sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(state))
    assert bytes_per_rank(step.state_shapes, step.state_shardings) == held
    assert in_bytes(held) in planned("data=2,pipe=2,expert=2")["bytes per rank"]


@pytest.mark.quick
def test_plan_says_what_gradients_take():
    said = {zero: planned("data=4,pipe=2", virtual=4, zero=zero, dtype="bfloat16") for zero in (0, 1, 2)}
    weights = said[0]["bytes per rank"].split(" of parameters")[0]
    assert said[0]["gradients"] == f"{weights} on every replica"
    assert said[0]["bytes per parameter"] == "; experts ".join(["14 on the device with 4 replicas"] * 2)
    step = TrainStep(dataclasses.replace(tiny.STEP, virtual=4, zero=2), abstract_mesh(MeshSpec(data=4, pipe=2)))
    own = in_bytes(bytes_per_rank(step.state_shapes.master, step.state_shardings.master))
    assert said[1]["gradients"] == f"{weights} in the pipeline; then {own} on each owner"
    assert said[1]["bytes per parameter"].startswith("8 on the device with 4 replicas")  # 2 + 4 + 8 / 4
    owners = jax.tree.leaves(step.masters.owners["chunks"])
    buffers, shards = (
        in_bytes(4 * sum(n(o) for o in owners))
        for n in (lambda o: o.of_chunk(2 * o.padded), lambda o: o.of_chunk(4 * o.owned))
    )
    held = f"{buffers} in 2 chunk buffers, {shards} of shards in host memory"
    assert said[2]["gradients"] == f"{held}; then {own} on each owner"
    # 2 of the weight, two of four float32 buffers, and a quarter of master weight and momentum.
    assert said[2]["bytes per parameter"].startswith("6 on the device and 1 in host memory with 4 replicas")
    halved = planned("data=4,pipe=2", zero=1, dtype="bfloat16", momentum_dtype="bfloat16")
    assert halved["bytes per parameter"].startswith("7.5 on the device with 4 replicas")  # 2 + 4 + (4 + 2) / 4


@pytest.mark.quick
def test_the_table_of_owners_has_every_matrix_of_a_rank_once():
    step = TrainStep(dataclasses.replace(tiny.STEP, zero=1), abstract_mesh(MeshSpec.parse("data=2,pipe=2,expert=2")))
    header, *rows, last = (re.split("  +", line) for line in ownership_table(step).splitlines())
    at = header.index
    names = sum((row[at("parameters")].split(", ") for row in rows), [])
    owned = {path_name(path): o for path, o in jax.tree_util.tree_leaves_with_path(step.masters.owners)}
    assert len(names) > 20 and sorted(names) == sorted(n for n, o in owned.items() if n in set(names))
    elements = sum(int(row[at("matrices")]) * math.prod(map(int, row[at("of")].split("x"))) for row in rows)
    on_a_rank = lambda o: math.prod(o.local) * (2 if o.shards else 1)  # dealt over expert too, where it has pieces
    assert elements == sum(on_a_rank(owned[name]) for name in names)
    assert "times the mean" in last[0]
    for changes in ({"zero": 0}, {"zero": 1, "optimizer": "adamw"}):
        assert not ownership_table(
            TrainStep(dataclasses.replace(tiny.STEP, **changes), abstract_mesh(MeshSpec(data=2)))
        )


@pytest.mark.quick
def test_plan_says_where_layers_and_microbatches_are():
    said = planned("data=2,pipe=2,expert=2", virtual=2, global_batch=32, microbatches=4, seq_len=24)
    assert said["mesh"] == "data=2,pipe=2,expert=2,context=1, 8 ranks"
    assert said["stages"] == "2 with 2 virtual, 4 chunks"
    assert said["layers per chunk"] == "3 x 2, 1; 1 of 8 slots inactive"  # K M | K M | K M | . M
    assert said["on one rank"] == "4 microbatches of 2 x 24 tokens"
    assert said["tokens per step"] == "768 in 32 sequences"
    # (p - 1) / (v m + p - 1) of the closed form
    assert said["bubble fraction"] == f"{1 / 9:.3f} in lock-step, {1 / 9:.3f} free-running"
    assert all("\n" not in line for line in table(list(said.items())).splitlines())


def test_a_plan_for_thousands_of_ranks_needs_no_devices():
    config = StepConfig(model=configs.get("k3"), global_batch=2048, microbatches=8, virtual=3)
    said = dict(plan(TrainStep(config, abstract_mesh(MeshSpec.parse("data=8,pipe=8,expert=32")))))
    assert said["mesh"].endswith("2048 ranks")
    assert said["layers per chunk"] == "23 x 4, 1; 3 of 96 slots inactive"


def test_numbers_are_short_and_runs_are_folded():
    assert [short(n) for n in (7, 1500, 2_779_484_393_568)] == ["7", "1.50K", "2.78T"]
    assert [in_bytes(n) for n in (7, 3 * 2**20, 2**40)] == ["7 bytes", "3.0 MiB", "1.0 TiB"]
    assert runs([4, 4, 4, 1]) == "3 x 4, 1" and runs(np.array([2]).tolist()) == "2"
