"""Predicted memory of a rank: what is allocated by purpose, and differences between policies as XLA has them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from k3jax.model import Batch
from k3jax.parallel.schedules import RECIPES, build
from k3jax.train.devices import abstract_mesh
from k3jax.train.memory import mail_in_use, memory
from k3jax.train.step import TOKENS, TrainStep
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


def compiled_temporaries(step: TrainStep) -> int:
    """Bytes that XLA sets aside on a device beside arguments and results."""
    c = step.config
    shape = (c.microbatches, c.global_batch // c.microbatches, c.seq_len)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(step.mesh, TOKENS))
    given = lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
    state = jax.tree.map(given, step.state_shapes, step.state_shardings)
    return step.step.lower(state, Batch(tokens, tokens, tokens)).compile().memory_analysis().temp_size_in_bytes
