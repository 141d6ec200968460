"""One step of the optimizer alone, over a model's parameters: Muon beside optax's Muon and AdamW.

All programs in turns, on the same random parameters and gradients. Operations are those of matrix products on one rank;
AdamW has none. Every Muon is compared with optax's. Over replicas, a step sums their gradients and brings whole updates to
all. Fake CPU devices share the cores: there the time of replicas is that of all their work.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from experiments.bench.timing import in_turns, ratio
from experiments.model_option import model_named
from k3jax import optim
from k3jax.activations.flops import flops
from k3jax.optim.groups import is_group
from k3jax.parallel.boxes import vary
from k3jax.plan.hlo import received_by_kind
from k3jax.train.config import StepConfig
from k3jax.train.devices import abstract_mesh, build_mesh
from k3jax.train.masters import make_optimizer
from k3jax.train.step import TrainStep
from meshes import MeshSpec, require_devices
from meshes.command_line import at_least, parse, refuse, refused

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
    replicas: int = 4
    """Ranks of the modes that have several."""
    rounds: int = 10
    """Every program runs once a round."""
    json: bool = False
    """One JSON object on stdout instead of a table."""

    def __post_init__(self) -> None:
        at_least(1, self, "layers", "replicas", "rounds")
        unknown = set(self.modes) - set(MODES)
        if unknown:
            raise ValueError(f"--modes {sorted(unknown)}: choose of {', '.join(MODES)}")

    @property
    def shapes(self) -> Any:
        """Of the model's parameters."""
        return self.step(abstract_mesh(MeshSpec()), zero=0).state_shapes.params

    def step(self, mesh: Mesh | AbstractMesh, zero: Literal[0, 1]) -> TrainStep:
        """The training step, for its parameters and who owns them."""
        model = dataclasses.replace(model_named(self.model), num_layers=self.layers)
        batch = 2 * mesh.shape["data"]
        return TrainStep(StepConfig(model, batch, microbatches=1, zero=zero, weight_decay=0.0), mesh)


class Program(NamedTuple):
    """One way to make a step: (gradients, state, weights) -> (whole updates, state)."""

    update: Callable[..., Any]
    gradients: Any
    state: Any
    weights: Any
    ranks: int = 1


def on_one_device(
    make: Callable[[Any], optax.GradientTransformation], config: BenchMuon, params: Any, gradients: Any
) -> Program:
    del config
    optimizer = make(params)
    return Program(optimizer.update, gradients, jax.jit(optimizer.init)(params), params)


def on_replicas(zero: Literal[0, 1], config: BenchMuon, params: Any, gradients: Any) -> Program:
    """With zero=0 optax's Muon, which every replica runs whole; with 1 ours, where owners hold weights and state."""
    step = config.step(build_mesh(MeshSpec(data=config.replicas)), zero)
    masters, everywhere = step.masters, NamedSharding(step.mesh, P())
    optimizer = make_optimizer(step.config, lambda count: RATE, masters) if zero else optax_muon(params)
    lie = step.state_shardings.opt_state if zero else everywhere
    reduced_update = with_reduction(step, optimizer, lie)

    def update(gradients, state, weights):
        updates, state = reduced_update(gradients, state, weights)
        return masters.gather(updates), state

    params, gradients = jax.device_put((params, gradients), everywhere)
    weights = jax.jit(masters.own)(params)
    return Program(update, gradients, jax.jit(optimizer.init, out_shardings=lie)(weights), weights, config.replicas)


def with_reduction(step: TrainStep, optimizer: optax.GradientTransformation, lie: Any) -> Callable[..., Any]:
    """(each rank's contributions to gradients, state, masters) -> (updates, state), both like masters; lie: of the state."""
    masters, specs = step.masters, jax.tree.map(lambda sharding: sharding.spec, lie)
    reduce = jax.shard_map(
        lambda gradients: masters.reduce_local(vary(gradients)),
        mesh=step.mesh,
        in_specs=(masters.param_specs,),
        out_specs=masters.specs,
    )
    return lambda gradients, state, held: masters.update(optimizer, reduce(gradients), state, specs, held, {})


def bfloat16_muon() -> optax.GradientTransformation:
    return optim.muon_with_adamw(RATE, optim.scale_by_muon(mu_dtype=jnp.bfloat16), mu_dtype=jnp.bfloat16)


def optax_muon(params: Any) -> optax.GradientTransformation:
    """With our groups: the last two axes of the same leaves."""

    def dims(group: optim.Group, leaf: jax.Array):
        axes = [axis % leaf.ndim for axis in group.matrix_axes]
        return optax.contrib.MuonDimensionNumbers(*axes) if axes else None

    groups = optim.parameter_groups(params)
    numbers = jax.tree.map(dims, groups, params, is_leaf=is_group)
    return optax.contrib.muon(RATE, consistent_rms=0.2, muon_weight_dimension_numbers=numbers)


# Programs from parameters and gradients, as one device has them.
MODES: dict[str, Callable[[BenchMuon, Any, Any], Program]] = {
    "adamw": functools.partial(on_one_device, lambda params: optim.adamw(RATE)),
    "optax muon": functools.partial(on_one_device, optax_muon),
    "muon": functools.partial(on_one_device, lambda params: optim.muon(RATE)),
    "muon, bf16": functools.partial(on_one_device, lambda params: bfloat16_muon()),
    "optax muon, replicas": functools.partial(on_replicas, 0),
    "muon, zero=1": functools.partial(on_replicas, 1),
}


def random_like(shapes: Any, seed: int) -> Any:
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return tree.unflatten([jax.random.normal(k, a.shape, a.dtype) for k, a in zip(keys, leaves, strict=True)])


def bench(config: BenchMuon) -> list[dict[str, Any]]:
    """One record a mode."""
    shapes = config.shapes
    params, gradients = jax.jit(random_like)(shapes, 0), jax.jit(random_like)(shapes, 1)
    names = config.modes or tuple(MODES)
    programs = {name: MODES[name](config, params, gradients) for name in dict.fromkeys([*names, "adamw", "optax muon"])}
    inputs = {name: (p.gradients, p.state, p.weights) for name, p in programs.items()}
    traced = {name: jax.jit(p.update).trace(*inputs[name]) for name, p in programs.items()}
    compiled = {name: step.lower().compile() for name, step in traced.items()}
    runs = {name: functools.partial(run, *inputs[name]) for name, run in compiled.items()}
    seconds = in_turns(runs, config.rounds)
    matrices = [g.optimizer == "muon" for g in jax.tree.leaves(optim.parameter_groups(shapes), is_leaf=is_group)]
    updates = {name: jax.device_get(jax.tree.leaves(run()[0])) for name, run in runs.items()}
    records = []
    for name in names:
        pairs = zip(updates[name], updates["optax muon"], matrices, strict=True)
        off = max(float(np.abs(a - b).max()) for a, b, matrix in pairs if matrix)
        records.append(
            {
                "mode": name,
                "ranks": programs[name].ranks,
                "median_ms": 1e3 * statistics.median(seconds[name]),
                "time_of_adamw": ratio(seconds[name], seconds["adamw"]),
                "time_of_optax_muon": ratio(seconds[name], seconds["optax muon"]),
                "flops_per_rank": flops(traced[name].jaxpr.jaxpr),
                "state_bytes_per_rank": bytes_on_a_rank(programs[name].state),
                "received_bytes_per_rank": received_by_kind(compiled[name].as_text() or ""),
                "largest_difference_to_optax_muon": off if "muon" in name else None,
            }
        )
    return records


def bytes_on_a_rank(tree: Any) -> int:
    """Of the rank that holds most."""
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values())


def show(config: BenchMuon, records: list[dict[str, Any]]) -> None:
    shapes = config.shapes
    groups = jax.tree.leaves(optim.parameter_groups(shapes), is_leaf=is_group)
    sizes = [(leaf.size, g.optimizer == "muon") for leaf, g in zip(jax.tree.leaves(shapes), groups, strict=True)]
    table = Table(
        title=f"{sum(n for n, _ in sizes):,} parameters, {sum(n for n, matrix in sizes if matrix):,} of them in matrices"
    )
    columns = "mode", "ranks", "median ms", "× adamw", "× optax muon", "GFLOP a rank", "MB of state", "MB received"
    for column in (*columns, "off optax by"):
        table.add_column(column, no_wrap=True)
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
            "\n".join(f"{size / 1e6:.1f} {kind}" for kind, size in r["received_bytes_per_rank"].items()),
            "" if off is None else f"{off:.1e}",
        )
    Console(width=max(140, Console().width)).print(table)


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print; exit 2 for options that cannot be."""
    config = parse(BenchMuon, argv, prog=PROG)
    try:
        require_devices(config.replicas)
    except RuntimeError as failure:
        refuse(PROG, failure)
    with refused(PROG):
        records = bench(config)
    if config.json:
        about = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
        print(json.dumps(about | {"records": records}))
    else:
        show(config, records)
