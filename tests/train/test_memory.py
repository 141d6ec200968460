"""Predicted memory of a rank: what is allocated by purpose, and differences between policies as XLA has them."""

import dataclasses

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax import configs
from k3jax.parallel.schedules import RECIPES, build
from k3jax.train.config import StepConfig
from k3jax.train.devices import abstract_mesh
from k3jax.train.memory import compiled_temporaries, mail_in_use, memory
from k3jax.train.step import TrainStep
from meshes import MeshSpec


@pytest.mark.quick
@given(st.sampled_from(sorted(RECIPES)), st.integers(1, 5), st.integers(1, 3), st.integers(1, 8))
@settings(max_examples=40)
def test_mail_in_use_never_needs_more_than_the_mailbox(name, stages, virtual, microbatches):
    schedule = build(name, stages=stages, virtual=RECIPES[name].virtual or virtual, microbatches=microbatches)
    waiting = mail_in_use(schedule)
    assert waiting.min() >= 0 and waiting.max() == schedule.num_mail_slots
    assert (waiting[schedule.mail >= 0] > 0).all()


def test_parts_are_allocated_once_and_hold_what_is_alive():
    config = dataclasses.replace(tiny.STEP, activations="kda.*=quantize+local-offload,*=remote-offload", microbatches=4)
    parts = {p.name: p for p in memory(TrainStep(config, abstract_mesh(MeshSpec.parse("pipe=2,data=2"))))}
    assert list(parts) == [
        *("parameters", "optimizer state", "gradients", "mailbox", "residual blocks"),
        *(
            "stores: quantize+local-offload",
            "stores: quantize+local-offload, away",
            "stores: remote-offload",
            "stores: in hand",
        ),
    ]
    assert [part.name for part in parts.values() if part.place == "host"] == ["stores: quantize+local-offload, away"]
    for part in parts.values():
        assert part.alive.shape[1] == 2 and 0 <= part.alive.min() and part.alive.max() <= part.reserved
    assert parts["gradients"].reserved == parts["parameters"].reserved
    assert parts["parameters"].reserved < parts["optimizer state"].reserved


@pytest.mark.slow
def test_differences_between_policies_are_those_of_the_compiled_step(capsys):
    """GPipe keeps 16 microbatches: the stores are most of the memory. 5 %: the workspace of operations differs a little too.

    mini is in docs/notes/planning.md: it takes minutes.
    """
    config = StepConfig(
        model=configs.get("nano"), global_batch=32, microbatches=16, schedule="gpipe", optimizer="adamw"
    )
    mesh = MeshSpec.parse("pipe=2").build()
    predicted, compiled = {}, {}
    for policy in ("keep", "quantize", "recompute"):
        step = TrainStep(dataclasses.replace(config, activations=f"*={policy}"), mesh)
        predicted[policy] = sum(part.reserved for part in memory(step))
        compiled[policy] = compiled_temporaries(step)
    with capsys.disabled():
        print("\nkeep : quantize : recompute =", " : ".join(f"{n / compiled['keep']:.3f}" for n in compiled.values()))
    for policy in ("quantize", "recompute"):
        difference = compiled["keep"] - compiled[policy]
        assert difference > 0.4 * compiled["keep"], "the stores are most of it"
        assert predicted["keep"] - predicted[policy] == pytest.approx(difference, rel=0.05)
