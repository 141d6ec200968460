"""What an expert layer compiled for GPUs does while rows travel, read from the program's schedule; no GPU is needed.

A mixture's layer, forward and backward, is compiled ahead of time for absent GPUs. XLA gives the order in which it starts
operations: what stands between a message's start and its end can run while the message travels.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from k3jax.plan.overlap import messages
from meshes import MeshSpec
from meshes.absent import TARGETS, absent_devices
from meshes.command_line import at_least, parse, refuse

PROG = "python -m experiments.bench moe_overlap"


@dataclasses.dataclass(frozen=True)
class BenchMoeOverlap:
    """Compile a mixture's layer for GPUs that are not here, and list what can run beside each message."""

    ranks: int = 8
    """Expert ranks, on one host."""
    tokens: int = 4096
    """Of each rank."""
    experts: int = 64
    experts_per_token: int = 8
    hidden_size: int = 2048
    latent: int = 1024
    expert_width: int = 768
    target: str = "h200"
    scheduler: bool = True
    """XLA's latency-hiding scheduler, as in the training step; without it, XLA's defaults."""
    json: bool = False

    def __post_init__(self) -> None:
        at_least(1, self, *(field.name for field in dataclasses.fields(self) if field.type == "int"))
        if self.experts % self.ranks:
            raise ValueError(f"--experts={self.experts} must be a multiple of --ranks={self.ranks}")
        if self.experts_per_token >= self.experts:
            raise ValueError(f"--experts-per-token={self.experts_per_token} must be below --experts={self.experts}")
        if self.target not in TARGETS:
            raise ValueError(f"--target={self.target} is not known: choose one of {', '.join(TARGETS)}")


def compiled_layer(config: BenchMoeOverlap, devices: list[Any]) -> Any:
    """A mixture's layer with shared experts, forward and backward in bfloat16, for these devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from k3jax import configs
    from k3jax import model as lm
    from k3jax.layers.common import Axes, Tokens
    from k3jax.sharding import module_specs
    from k3jax.train.devices import compiler_options

    fields = "experts_per_token", "hidden_size", "expert_width"
    model = dataclasses.replace(
        configs.get("nano"),
        name="layer",
        num_experts=config.experts,
        latent_size=config.latent,
        **{name: getattr(config, name) for name in fields},
    )
    mesh = MeshSpec.parse(f"expert={config.ranks}").build(devices)
    axes = Axes(expert="expert", exchange="ragged_all_to_all")

    def local(params, x, bias, ids):
        def layer(params, x):
            return lm.bind(model, "M", params, inside="moe")(x, bias, Tokens(ids, ids, axes))[0]

        # Forward and backward share nothing but residuals: in a pipeline they are apart in time.
        y, pullback = jax.lax.optimization_barrier(jax.vjp(layer, params, x))
        return pullback(y)

    shapes, specs = lm.shapes(model, "M")["moe"], module_specs(model, "M")["moe"]
    tokens = P("expert")
    given = lambda shape, dtype, spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    params = jax.tree.map(lambda leaf, spec: given(leaf.shape, jnp.bfloat16, spec), shapes, specs)
    x = given((config.ranks, config.tokens, config.hidden_size), jnp.bfloat16, tokens)
    bias, ids = given((config.experts,), jnp.float32, P()), given((config.ranks, config.tokens), jnp.int32, tokens)
    run = jax.shard_map(local, mesh=mesh, in_specs=(specs, tokens, P(), tokens), out_specs=(specs, tokens))
    step = jax.jit(run, compiler_options=compiler_options(devices[0].platform) if config.scheduler else None)
    return step.lower(params, x, bias, ids).compile()


def main(argv: Sequence[str] | None = None) -> None:
    """Compile and print; exit 2 for options that cannot be, or without what compiling for GPUs needs."""
    config = parse(BenchMoeOverlap, argv, prog=PROG)
    try:
        devices = absent_devices(config.target, per_host=config.ranks)
    except RuntimeError as missing:
        refuse(PROG, missing)
    compiled = compiled_layer(config, devices)
    found = messages(compiled.as_text())
    memory = compiled.memory_analysis()
    if config.json:
        print(json.dumps({"temporary_bytes": memory.temp_size_in_bytes, "messages": [m._asdict() for m in found]}))
        return
    begun = [m for m in found if m.asynchronous]
    covered = [m for m in begun if m.beside.keys() - {"other"}]
    print(f"{config.ranks} x {config.target}, {memory.temp_size_in_bytes / 1e6:,.0f} MB temporary on each")
    print(f"{len(begun)} of {len(found)} messages are asynchronous, {len(covered)} have matrix products beside them")
    for m in found:
        beside = ", ".join(f"{count} {what}" for what, count in sorted(m.beside.items())) or "nothing"
        print(f"{m.name}, {m.sender or '?'} -> {m.reader or '?'}: {beside if m.asynchronous else 'alone'}")
