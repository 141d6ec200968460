"""What a run will be, in words and numbers, before anything is compiled or allocated."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from k3jax.optim import group_table, newton_schulz_flops
from k3jax.parallel.matrices import work
from k3jax.parallel.relay import Relay
from k3jax.parallel.zero import BUFFERS, bytes_per_parameter
from k3jax.parameters import count, count_by_group
from k3jax.train.config import StepConfig
from k3jax.train.step import TrainStep

Rows = list[tuple[str, str]]


def plan(step: TrainStep) -> Rows:
    """Pairs of a property and its value; the step may be on an abstract mesh."""
    return [*_ranks(step), *_schedule(step), *_parameters(step), *_gradients(step)]


def _ranks(step: TrainStep) -> Rows:
    config, layout, mesh = step.config, step.layout, step.resolved.mesh
    per_chunk = (layout.layer_table >= 0).sum(axis=(2, 3)).T.reshape(-1)  # in the order of chunks
    slots = layout.layer_table.size
    sequences = config.global_batch // config.microbatches // (mesh.data * mesh.expert)
    return [
        ("mesh", f"{mesh}, {mesh.num_devices} ranks"),
        ("stages", f"{layout.stages} with {layout.virtual} virtual, {layout.num_chunks} chunks"),
        ("layers per chunk", f"{runs(per_chunk.tolist())}; {layout.num_inactive} of {slots} slots inactive"),
        ("tokens per step", f"{config.global_batch * config.seq_len:,} in {config.global_batch:,} sequences"),
        (
            "on one rank",
            f"{config.microbatches} microbatches of {sequences} x {config.seq_len // mesh.context} tokens",
        ),
        ("experts", _experts(step)),
    ]


def _experts(step: TrainStep) -> str:
    ranks, experts = step.resolved.mesh.expert, step.config.model.num_experts
    if ranks == 1:
        return f"all {experts} on every rank"
    home = experts // ranks
    return f"{home} of {experts} on a rank, room for {home} replicas; rows travel by {step.axes.exchange}"


def _schedule(step: TrainStep) -> Rows:
    schedule = step.resolved.schedule
    lockstep, free = schedule.bubble_fraction(lockstep=True), schedule.bubble_fraction()
    return [
        ("schedule", f"{schedule.name}, {schedule.num_ticks} ticks"),
        *([("chosen because", step.why_schedule)] if step.config.schedule == "auto" else []),
        ("bubble fraction", f"{lockstep:.3f} in lock-step, {free:.3f} free-running"),
        ("in flight", f"{runs(schedule.in_flight().tolist())} chunk activations per stage"),
        *_residual_blocks(step),
    ]


def _residual_blocks(step: TrainStep) -> Rows:
    """What their messages cost, where layers read blocks that other stages made."""
    config, mesh, begun = step.config, step.resolved.mesh, step.layout.blocks_begun
    if mesh.pipe == 1 or not begun:
        return []
    tokens = config.global_batch * config.seq_len // (config.microbatches * mesh.data * mesh.expert * mesh.context)
    row = tokens * config.model.hidden_size * jnp.dtype(config.dtype).itemsize
    relay = Relay(step.resolved.schedule, begun)
    moved, naive = (in_bytes(number // mesh.pipe) for number in relay.traffic(row))
    kept = f"{relay.num_rows} blocks of {relay.num_values} microbatches kept on a stage"
    return [("residual blocks", f"{kept}; a step sends {moved}, where all would be {naive}")]


def _parameters(step: TrainStep) -> Rows:
    total, active = count(step.config.model)
    groups = count_by_group(step.config.model, step.config.optimizer)
    weights = bytes_per_rank(step.state_shapes.params, step.state_shardings.params)
    state = bytes_per_rank(step.state_shapes, step.state_shardings)
    return [
        ("parameters", f"{short(total)} total, {short(active)} active ({total:,} and {active:,})"),
        ("parameter groups", ", ".join(f"{number:,} on {label}" for label, number in groups.items())),
        ("bytes per rank", f"{in_bytes(weights)} of parameters, {in_bytes(state)} with the optimizer state"),
    ]


def parameter_table(step: TrainStep) -> str:
    """Every parameter of the state, inactive slots included: shape, optimizer, matrices, decay."""
    return group_table(jax.eval_shape(step.init_params), step.masters.groups)


def ownership_table(step: TrainStep) -> str:
    """Who orthogonalises what, a line for matrices of one shape, then what that comes to; empty without owners of matrices."""
    dealt = step.masters.deals
    if not dealt:
        return ""
    rows = [("matrices", "of", "owners", "most on one", "rounds", "operations on it", "bytes it sends", "parameters")]
    for names, deal in dealt.items():
        most = int(deal.held.max())
        operations = short(most * newton_schulz_flops(*deal.shape))
        sent = in_bytes(round(deal.bytes_sent))
        size = "x".join(map(str, deal.shape))
        numbers = (str(deal.matrices), size, str(deal.owners), str(most), str(deal.rounds), operations, sent)
        rows.append((*numbers, ", ".join(names)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    load = work(list(dealt.values()))
    each = bytes_per_rank(step.state_shapes.master, step.state_shardings.master)
    lines.append(
        f"every rank owns {in_bytes(each)} of master weights; the busiest orthogonalises {load.max() / load.mean():.2f} times "
        "the mean"
    )
    return "\n".join(lines)


def _gradients(step: TrainStep) -> Rows:
    config, sizes = step.config, step.resolved.mesh.sizes
    whole, master = float32_bytes(step)
    if not step.masters.owners:
        said = f"{in_bytes(whole)} on every replica"
    elif config.zero == 1:
        said = f"{in_bytes(whole)} in the pipeline; then {in_bytes(master)} on each owner"
    else:
        buffers = f"{in_bytes(buffer_bytes(step))} in {min(BUFFERS, config.virtual)} chunk buffers"
        said = (
            f"{buffers}, {in_bytes(shard_bytes(step))} of shards in host memory; then {in_bytes(master)} on each owner"
        )
    dense, experts = (
        math.prod(sizes[a] for a in axes) for axes in (("data", "expert", "context"), ("data", "context"))
    )
    return [
        ("gradients", said),
        ("bytes per parameter", f"{_each(config, dense)}; experts {_each(config, experts)}"),
    ]


def _each(config: StepConfig, replicas: int) -> str:
    """Bytes per parameter of a chunk."""
    held = bytes_per_parameter(
        config.zero,
        replicas,
        virtual=config.virtual,
        # Float32 master weights that nobody shares out are also what is computed with.
        weight={"float32": 4 if config.zero else 0, "bfloat16": 2}[config.dtype],
        moments=jnp.dtype(config.momentum_dtype).itemsize + {"muon": 0, "adamw": 4}[config.optimizer],
    )
    on_host = f" and {held.host:.3g} in host memory" if held.host else ""
    return f"{held.device:.3g} on the device{on_host} with {replicas} replicas"


def float32_bytes(step: TrainStep) -> tuple[int, int]:
    """Of one float32 number for each parameter of a rank: of all that it computes with, and of those that it owns."""
    shapes = jax.eval_shape(step.init_params)
    lie = lambda specs: jax.tree.map(lambda spec: NamedSharding(step.mesh, spec), specs)
    whole = bytes_per_rank(shapes, lie(step.specs))
    if not step.masters.owners:
        return whole, whole
    return whole, bytes_per_rank(step.state_shapes.master, step.state_shardings.master)


def shard_bytes(step: TrainStep) -> int:
    """Float32 bytes of a rank's sums over microbatches, in host memory, of the gradients that it owns (ZeRO-2)."""
    owners: Any = step.masters.owners
    return 4 * step.config.virtual * sum(o.of_chunk(o.owned) for o in jax.tree.leaves(owners["chunks"]))


def buffer_bytes(step: TrainStep) -> int:
    """Of a rank's buffers for the gradients of chunks; 0 where those are whole."""
    if not step.masters.owners or step.config.zero < 2:
        return 0
    return (
        4
        * min(BUFFERS, step.config.virtual)
        * sum(o.of_chunk(o.padded) for o in jax.tree.leaves(step.masters.owners["chunks"]))
    )


def bytes_per_rank(shapes: Any, shardings: Any) -> int:
    """Bytes of a tree of arrays on one rank; all ranks hold equally much."""
    leaves = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    return sum(math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, sharding in leaves)


def runs(numbers: Iterable[int]) -> str:
    """Numbers with commas, equal neighbours as "23 x 4"."""
    grouped = [(len(list(same)), number) for number, same in itertools.groupby(numbers)]
    return ", ".join(f"{times} x {number}" if times > 1 else str(number) for times, number in grouped)


def short(number: int) -> str:
    """Three or four digits and a unit of a thousand: 2.78T, 104.2B."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            scaled = number / size
            return f"{scaled:.1f}{unit}" if scaled >= 10 else f"{scaled:.2f}{unit}"
    return str(number)


def in_bytes(number: int) -> str:
    """Bytes with a binary unit."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"


def bytes_of(text: str) -> int:
    """Bytes from a number with a unit or without: 80GiB, 1.5 MB, 4096; ValueError for anything else."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([kKMGT]i?)?(?:B|bytes)?\s*", text)
    if not match:
        raise ValueError(f"{text!r} is not a number of bytes: write 80GiB, 1.5MB or 4096")
    number, unit = match.groups()
    scale = (1024 if unit.endswith("i") else 1000) ** (1 + "KMGT".index(unit[0].upper())) if unit else 1
    return int(float(number) * scale) if "." in number else int(number) * scale


def table(rows: Rows) -> str:
    """The pairs as aligned lines."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
