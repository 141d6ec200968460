"""A step that chooses its schedule: never slower in lock-step than what would fit, by operations that are counted."""

import dataclasses
import json
from unittest import mock

import jax
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.activations.flops import flops
from k3jax.parallel import pipeline
from k3jax.parallel.schedules import NAMES, ranked
from k3jax.train import choice
from k3jax.train.choice import Times, choose, counted
from k3jax.train.config import StepConfig
from k3jax.train.devices import abstract_mesh, memory_limit
from k3jax.train.memory import Part
from k3jax.train.plan import plan
from k3jax.train.run import Run
from k3jax.train.run_config import RunConfig
from k3jax.train.step import TrainStep
from meshes import MeshSpec

# One kind of layer and plain residuals: it is traced in seconds.
MODEL = dataclasses.replace(tiny.MODEL, vocab_size=320, pattern="M", num_layers=4, attn_res_block=None)
STEP = dataclasses.replace(tiny.STEP, model=MODEL, schedule="auto", seq_len=16, microbatches=4)


def lockstep_time(schedule, times: Times) -> float:
    """A row lasts as long as its longest operation."""
    weight = times.weight if len(schedule.kinds) == 3 else 0
    cost = np.array([0, times.forward, times.backward - weight, weight], float)
    return cost[schedule.table[:, :, 0]].max(axis=1).sum()


@pytest.mark.quick
@settings(max_examples=40)
@given(
    st.tuples(*[st.integers(1, 4)] * 3),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    st.fixed_dictionaries({name: st.integers(1, 100) for name in NAMES}),
    st.none() | st.integers(1, 120),
)
def test_nothing_that_fits_is_faster(counts, operations, needed, limit):
    """Over any times, predictions and limits; host memory has none. The error names every table that was tried."""
    pipe, config = counts[0], StepConfig(virtual=counts[1], microbatches=counts[2])
    times = Times(operations[0], sum(operations[1:]), operations[2])
    replaced = dict(
        TrainStep=lambda config, mesh, platform: config.schedule,
        counted=lambda step: times,
        memory=lambda step, schedule: [
            Part("all", needed[schedule.name], np.zeros(0)),
            Part("away", 10**9, np.zeros(0), "host"),
        ],
        memory_limit=lambda mesh: limit,
    )
    tables = config.tables(MeshSpec(pipe=pipe))
    fitting = [t for t in tables if limit is None or needed[t.name] <= 0.9 * limit]
    with mock.patch.multiple(choice, **replaced):
        if not fitting:
            with pytest.raises(ValueError, match="no schedule fits") as refused:
                choose(config, abstract_mesh(MeshSpec(pipe=pipe)))
            assert all(f"{t.name} {needed[t.name]} bytes" in str(refused.value) for t in tables)
            return
        schedule, why = choose(config, abstract_mesh(MeshSpec(pipe=pipe)))
    assert schedule.name in {t.name for t in fitting}
    fastest = min(lockstep_time(t, times) for t in fitting)
    assert lockstep_time(schedule, times) == pytest.approx(fastest, rel=1e-9)
    bubble = dict((t.name, bubble) for bubble, t in ranked(tables, **times._asdict()))[schedule.name]
    assert f"{bubble:.3f}" in why and ("nothing limits memory" in why) == (limit is None)


@pytest.mark.parametrize("policy", ["*=keep", pytest.param("*=recompute", marks=pytest.mark.slow)])
def test_counted_operations_are_those_of_the_executors_halves(policy):
    """2 %: cheap equations that the split moves or repeats are no products, but it may keep a small one in the other half."""
    config = dataclasses.replace(STEP, activations=policy)
    mesh = abstract_mesh(MeshSpec(pipe=2, expert=2))
    step = TrainStep(dataclasses.replace(config, schedule="zb1p"), mesh)

    def trace(program, params):
        example, histories = pipeline.example_of(step.resolved.schedule, program, params)
        pullback = pipeline.pullback_of(step.resolved.schedule, program, example, histories)
        given = example[0], (), example[2]
        everything = lambda closed: flops(closed.jaxpr, range(len(closed.jaxpr.outvars)))
        made = jax.eval_shape(lambda *args: pullback.forward(args)[0], *example)
        backward, (held, _) = jax.make_jaxpr(pullback.backward_input, return_shape=True)(given, made, example[1])
        weight = jax.make_jaxpr(pullback.backward_weights)(given, made | held)
        return everything(backward), everything(weight)

    backward, weight = step.on_one_rank(trace)
    times = counted(TrainStep(dataclasses.replace(config, schedule="1f1b"), mesh))
    assert times.weight == pytest.approx(weight, rel=0.02)
    assert times.backward - times.weight == pytest.approx(backward, rel=0.02)
    assert 0 < times.weight < 1.2 * times.forward < times.backward


def test_cpus_and_meshes_without_devices_limit_nothing():
    mesh = MeshSpec(data=2).build()
    assert memory_limit(mesh) is None and memory_limit(abstract_mesh(MeshSpec(data=2))) is None


def test_devices_that_say_how_much_they_have_limit_by_the_least():
    told = mock.Mock(spec=jax.sharding.Mesh)
    told.local_devices = [mock.Mock(**{"memory_stats.return_value": {"bytes_limit": n}}) for n in (7, 5)]
    assert memory_limit(told) == 5


def test_the_choice_is_what_runs_and_is_written_down(tmp_path):
    """Fastest by what this chunk's operations take, and not by what they take at a third each."""
    (tmp_path / "text.txt").write_text("some words to learn from\n" * 400)
    config = RunConfig("pipe=2", STEP, data=str(tmp_path / "text.txt"), workdir=str(tmp_path / "run"))
    run = Run(config)
    step, told = run.train_step, dict(plan(run.train_step))
    times = counted(TrainStep(dataclasses.replace(STEP, schedule="1f1b"), step.mesh))
    assert step.resolved.schedule.name == ranked(STEP.tables(MeshSpec(pipe=2)), **times._asdict())[0][1].name
    assert told["schedule"].startswith(step.resolved.schedule.name) and told["chosen because"] == step.why_schedule
    run.load()
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["step"]["schedule"] == "auto"
    assert written["schedule"] == {"name": step.resolved.schedule.name, "why": step.why_schedule}


def test_a_step_that_fits_with_no_schedule_is_refused_before_it_is_compiled(monkeypatch):
    monkeypatch.setattr(choice, "memory_limit", lambda mesh: 100_000)
    config = dataclasses.replace(STEP, virtual=3, model=dataclasses.replace(MODEL, num_layers=6))
    with pytest.raises(
        ValueError, match="no schedule fits: .*of 97.7 KiB on a device.*interleaved_1f1b .* KiB"
    ) as none:
        TrainStep(config, abstract_mesh(MeshSpec(pipe=2)))
    assert "\n" not in str(none.value)
