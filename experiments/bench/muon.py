"""One step of the optimizer alone, over a model's parameters: Muon beside optax's Muon and AdamW.

All programs in turns, on the same random parameters and gradients. Operations are those of matrix products on one rank;
AdamW has none. Every Muon is compared with optax's.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

import meshes
from experiments.bench.collectives import received_bytes
from experiments.bench.timing import in_turns, ratio
from experiments.model_option import model_named
from k3jax import optim
from k3jax.activations.flops import flops
from k3jax.train.config import StepConfig
from k3jax.train.devices import abstract_mesh
from k3jax.train.step import TrainStep
from meshes.command_line import at_least, parse, refused

PROG = "python -m experiments.bench muon"
RATE = 0.01


@dataclasses.dataclass(frozen=True)
class BenchMuon:
    """Time, operations and bytes of an optimizer step."""

    model: str = "mini"
    """nano, mini, kimi_linear_48b or k3, or a file with fields of the model."""
    layers: int = 4
    """Of the model; it is as deep as that."""
    modes: tuple[str, ...] = ()
    """Of those that the table names; none: all."""
    rounds: int = 10
    """Every program runs once a round."""
    json: bool = False
    """One JSON object on stdout instead of a table."""

    def __post_init__(self) -> None:
        at_least(1, self, "layers", "rounds")
        unknown = set(self.modes) - set(MODES)
        if unknown:
            raise ValueError(f"--modes {sorted(unknown)}: choose of {', '.join(MODES)}")

    @property
    def step(self) -> TrainStep:
        """The training step on one device, for the shapes of its parameters."""
        model = dataclasses.replace(model_named(self.model), num_layers=self.layers)
        return TrainStep(StepConfig(model=model, microbatches=1), abstract_mesh(meshes.MeshSpec()))


class Program(NamedTuple):
    """One way to make a step: (gradients, state, params) -> (updates, state)."""

    update: Callable[..., Any]
    gradients: Any
    state: Any
    params: Any
    ranks: int = 1
    whole: Callable[[Any], Any] = lambda updates: updates
    """Its updates as one device has them."""


def on_one_device(make: Callable[[Any], optax.GradientTransformation], params: Any, gradients: Any) -> Program:
    """The step of one device, which is also that of every replica where nothing is sharded."""
    optimizer = make(params)
    return Program(optimizer.update, gradients, jax.jit(optimizer.init)(params), params)


def optax_muon(params: Any) -> optax.GradientTransformation:
    """With our groups: the last two axes of the same leaves."""

    def dims(group: optim.Group, leaf: jax.Array):
        axes = [axis % leaf.ndim for axis in group.matrix_axes]
        return optax.contrib.MuonDimensionNumbers(*axes) if axes else None

    groups = optim.parameter_groups(params)
    numbers = jax.tree.map(dims, groups, params, is_leaf=lambda x: isinstance(x, optim.Group))
    return optax.contrib.muon(RATE, consistent_rms=0.2, muon_weight_dimension_numbers=numbers)


# Programs from (parameters, gradients), as one device has them.
MODES: dict[str, Callable[[Any, Any], Program]] = {
    "adamw": functools.partial(on_one_device, lambda params: optim.adamw(RATE)),
    "optax muon": functools.partial(on_one_device, optax_muon),
    "muon": functools.partial(on_one_device, lambda params: optim.muon(RATE)),
    "muon, bf16": functools.partial(on_one_device, lambda params: optim.muon(RATE, mu_dtype=jnp.bfloat16)),
}


def random_like(shapes: Any, seed: int) -> Any:
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return tree.unflatten([jax.random.normal(k, a.shape, a.dtype) for k, a in zip(keys, leaves, strict=True)])


def bench(config: BenchMuon) -> list[dict[str, Any]]:
    """One record a mode."""
    shapes = config.step.state_shapes.params
    params, gradients = jax.jit(random_like)(shapes, 0), jax.jit(random_like)(shapes, 1)
    names = config.modes or tuple(MODES)
    programs = {name: MODES[name](params, gradients) for name in dict.fromkeys([*names, "adamw", "optax muon"])}
    inputs = {name: (p.gradients, p.state, p.params) for name, p in programs.items()}
    traced = {name: jax.jit(p.update).trace(*inputs[name]) for name, p in programs.items()}
    compiled = {name: step.lower().compile() for name, step in traced.items()}
    runs = {name: functools.partial(run, *inputs[name]) for name, run in compiled.items()}
    seconds = in_turns(runs, config.rounds)
    matrices = [g.optimizer == "muon" for g in jax.tree.leaves(optim.parameter_groups(shapes), is_leaf=optim_group)]
    updates = {name: jax.tree.leaves(programs[name].whole(run()[0])) for name, run in runs.items()}
    records = []
    for name in names:
        pairs = zip(updates[name], updates["optax muon"], matrices, strict=True)
        off = max(float(jnp.abs(a - b).max()) for a, b, matrix in pairs if matrix)
        records.append(
            {
                "mode": name,
                "ranks": programs[name].ranks,
                "median_ms": 1e3 * statistics.median(seconds[name]),
                "time_of_adamw": ratio(seconds[name], seconds["adamw"]),
                "time_of_optax_muon": ratio(seconds[name], seconds["optax muon"]),
                "flops_per_rank": flops(traced[name].jaxpr.jaxpr),
                "state_bytes_per_rank": bytes_on_a_rank(programs[name].state),
                "received_bytes_per_rank": received_bytes(compiled[name]),
                "largest_difference_to_optax_muon": off if "muon" in name else None,
            }
        )
    return records


def optim_group(x: Any) -> bool:
    return isinstance(x, optim.Group)


def bytes_on_a_rank(tree: Any) -> int:
    """Of the rank that holds most."""
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values())


def show(config: BenchMuon, records: list[dict[str, Any]]) -> None:
    shapes = config.step.state_shapes.params
    groups = jax.tree.leaves(optim.parameter_groups(shapes), is_leaf=optim_group)
    sizes = [(leaf.size, g.optimizer == "muon") for leaf, g in zip(jax.tree.leaves(shapes), groups, strict=True)]
    table = Table(
        title=f"{sum(n for n, _ in sizes):,} parameters, {sum(n for n, matrix in sizes if matrix):,} of them in matrices"
    )
    columns = "mode", "ranks", "median ms", "× adamw", "× optax muon", "GFLOP a rank", "MB of state", "MB received"
    for column in (*columns, "off optax by"):
        table.add_column(column)
    for r in records:
        off = r["largest_difference_to_optax_muon"]
        table.add_row(
            r["mode"],
            str(r["ranks"]),
            f"{r['median_ms']:.1f}",
            f"{r['time_of_adamw']:.2f}",
            f"{r['time_of_optax_muon']:.2f}",
            f"{r['flops_per_rank'] / 1e9:.2f}",
            f"{r['state_bytes_per_rank'] / 1e6:.1f}",
            f"{r['received_bytes_per_rank'] / 1e6:.1f}",
            "" if off is None else f"{off:.1e}",
        )
    Console(width=max(120, Console().width)).print(table)


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print; exit 2 for options that cannot be."""
    config = parse(BenchMuon, argv, prog=PROG)
    with refused(PROG):
        records = bench(config)
    if config.json:
        about = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
        print(json.dumps(about | {"records": records}))
    else:
        show(config, records)
