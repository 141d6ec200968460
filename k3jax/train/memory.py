"""Where a rank's device memory goes over the ticks of a step, predicted from shapes and the schedule's table.

What the executor allocates does not change from tick to tick: stores and mailbox are slots that are there for the whole
loop. `Part.alive` says how much of it is in use. Neither predicted: the workspace of operations (what XLA needs between the
values named here), and what the optimizer needs after the loop, when stores are free again.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Int64

from k3jax import model as lm
from k3jax.activations.residency import by_tick, reserved, resident
from k3jax.parallel import pipeline
from k3jax.parallel.relay import Relay
from k3jax.parallel.schedules import Schedule
from k3jax.train.plan import buffer_bytes, bytes_per_rank, shard_bytes
from k3jax.train.step import TrainStep
from k3jax.train.stored import StoredLeaf, of_program


class Part(NamedTuple):
    """Bytes of a rank for one purpose."""

    name: str
    reserved: int
    """Allocated, the same on all ranks and at all ticks."""
    alive: Int64[np.ndarray, "ticks stages"]
    """In use."""
    place: str = "device"
    """Or "host". XLA's statistics on CPU count both as one."""


def memory(step: TrainStep, schedule: Schedule | None = None) -> list[Part]:
    """Weights, optimizer state, gradients, mailbox, and stores by policy; traced, not compiled.

    schedule: another table for the step's chunks; not given, its own.
    """
    schedule = schedule or step.resolved.schedule

    def trace(program: pipeline.Program, params: Any):
        example, histories = pipeline.example_of(schedule, program, params)
        message = histories.part(example[1], jnp.int32(0))[0], histories.no_rows
        sizes = nbytes(params), nbytes(message), nbytes(histories.empty())
        return *sizes, of_program(step, schedule, program, example, histories)

    cast, message, history, leaves = step.on_one_rank(trace)
    parts, weights = state_parts(step, schedule), bytes_of_state(step, "params")
    if cast != weights:
        before = [part.name for part in parts].index("gradients")
        parts.insert(before, _constant(schedule, f"parameters in {step.config.dtype}", cast))
    slots = schedule.num_mail_slots + 2  # one takes what nobody waits for, and one is on its way
    parts.append(Part("mailbox", slots * message, message * mail_in_use(schedule)))
    if step.layout.blocks_begun:
        relay = Relay(schedule, step.layout.blocks_begun)
        parts.append(Part("residual blocks", history, history // relay.num_slots * relay.alive))
    return parts + stores(schedule, leaves)


def state_parts(step: TrainStep, schedule: Schedule | None = None) -> list[Part]:
    """The same of what does not depend on activations: nothing of the model is traced for it."""
    schedule = schedule or step.resolved.schedule
    sizes = {
        "parameters": bytes_of_state(step, "params"),
        "master weights": bytes_of_state(step, "master"),
        "optimizer state": bytes_of_state(step, "opt_state") + bytes_of_state(step, "balance"),
        "gradients": gradients(step),
    }
    parts = [_constant(schedule, name, size) for name, size in sizes.items() if size]
    if step.masters.local_chunk_owners is not None:
        parts.append(_constant(schedule, "sums of gradients", shard_bytes(step), "host"))
    return parts


def bytes_of_state(step: TrainStep, name: str) -> int:
    """Of one rank's part of a field of the training state."""
    return bytes_per_rank(getattr(step.state_shapes, name), getattr(step.state_shardings, name))


def _constant(schedule: Schedule, name: str, size: int, place: str = "device") -> Part:
    return Part(name, size, np.full(schedule.mail.shape, size), place)


def compiled_temporaries(step: TrainStep) -> int:
    """Bytes that XLA sets aside on a device, beside the step's arguments and results; compiles it, on a mesh of devices.

    Parameters and optimizer state are arguments; all other parts are in it, and the workspace of operations. On CPU what
    waits in host memory is in it too.
    """
    analysis: Any = step.step.lower(*step.operands()).compile().memory_analysis()
    return analysis.temp_size_in_bytes


def gradients(step: TrainStep) -> int:
    """Bytes of the sums that the executor's loop carries on the device; with ZeRO-2, chunks have a few buffers for all."""
    shapes, specs = lm.init_shapes(step.config.model, step.layout), step.specs
    whole = lambda part: bytes_per_rank(shapes[part], jax.tree.map(lambda s: NamedSharding(step.mesh, s), specs[part]))
    rest = sum(whole(part) for part in shapes if part != "chunks")
    return rest + (buffer_bytes(step) if step.config.zero == 2 else whole("chunks"))


def stores(schedule: Schedule, leaves: list[StoredLeaf]) -> list[Part]:
    """A part for each policy; and in the operations' hands, beside the slots, one content to store and one that is read."""
    parts: dict[str, Part] = {}
    for leaf in leaves:
        where = (schedule, *leaf.span, leaf.policy.storage)
        name = f"stores: {leaf.policy}"
        before = parts.get(name, Part(name, 0, np.zeros(schedule.mail.shape, np.int64)))
        slots, alive = leaf.bytes * reserved(*where).device, leaf.bytes * by_tick(resident(*where).device)
        parts[name] = Part(name, before.reserved + slots, before.alive + alive)
        if room := leaf.bytes * reserved(*where).host:
            name = f"{name}, away"
            before = parts.get(name, Part(name, 0, np.zeros(schedule.mail.shape, np.int64)))
            alive = before.alive + leaf.bytes * by_tick(resident(*where).host)
            parts[name] = Part(name, before.reserved + room, alive, "host")
    # A branch returns what is encoded, and reads what it then decodes: so XLA's buffer assignment has it.
    in_hand = sum(leaf.bytes + nbytes(leaf.shape) for leaf in leaves)
    busy = np.where(schedule.table[:, :, 0] > 0, in_hand, 0).astype(np.int64)
    return [*parts.values(), Part("stores: in hand", in_hand, busy)]


def mail_in_use(schedule: Schedule) -> Int64[np.ndarray, "ticks stages"]:
    """Messages that wait on each rank, from their arrival to the operation that reads them."""
    waiting = np.zeros((schedule.num_ticks + 1, schedule.stages), np.int64)
    arrived: dict[tuple[int, int], int] = {}
    for tick in range(schedule.num_ticks):
        for stage in range(schedule.stages):
            for slot in schedule.arrivals[tick, stage]:
                arrived |= {(stage, int(slot)): tick} if slot >= 0 else {}
            slot = int(schedule.mail[tick, stage])
            if slot >= 0:
                waiting[arrived.pop((stage, slot), tick), stage] += 1
                waiting[tick + 1, stage] -= 1
    return waiting.cumsum(axis=0)[:-1]


def nbytes(tree: Any) -> int:
    """Bytes of all leaves, of arrays or of what stands for them."""
    return sum(math.prod(a.shape) * jnp.dtype(a.dtype).itemsize for a in jax.tree.leaves(tree))
