"""Routed experts over ranks by MoonEP's plan, beside an exact exchange without it and one that drops, under skews.

Forward with backward of the experts alone, all exchanges in turns. Fake CPU devices share the cores: a rank with more
rows slows all, and messages are memory copies. The buffers of all three have static shapes, so skews change who has how
many rows, and what is dropped, more than they change times.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import meshes
from experiments.bench import moe_peers
from experiments.bench.timing import in_turns, ratio
from k3jax.activations.leaves import leaf_origins
from k3jax.parallel.experts import mixture, plan, plan_local, run_experts
from k3jax.parallel.experts.planner import counts, home_experts
from k3jax.plan.hlo import received_by_kind
from meshes.command_line import at_least, parse, refuse

PROG = "python -m experiments.bench moe"
TOKENS = P(moe_peers.AXIS)
BETAS = 4.0, 25.0


@dataclasses.dataclass(frozen=True)
class BenchMoe:
    """Rows, drops, bytes and times of expert exchanges under skewed routings."""

    ranks: int = 4
    """Expert ranks."""
    tokens: int = 512
    """Of each rank."""
    experts: int = 32
    """A multiple of ranks."""
    experts_per_token: int = 4
    latent: int = 128
    """Width of a row."""
    hidden: int = 128
    """Width inside an expert."""
    skews: tuple[str, ...] = ("uniform", "zipf", "one hot expert", "one idle rank")
    """Of: uniform, zipf, one hot expert (of every token), one idle rank (nothing for its experts)."""
    planner: tuple[int, int, int, int] = (64, 896, 8192, 16)
    """Ranks, experts, tokens of a rank and experts per token for which one rank's planning is timed; K3's size."""
    rounds: int = 10
    """Every program runs once a round."""
    json: bool = False
    """One JSON object on stdout instead of tables."""
    picture: Path | None = None
    """Draw the rows of each rank with and without the plan to this file (.png, .svg, .pdf); needs matplotlib."""

    def __post_init__(self) -> None:
        at_least(1, self, "ranks", "tokens", "experts", "experts_per_token", "latent", "hidden", "rounds")
        if min(self.planner) < 1 or self.planner[3] > self.planner[1]:
            raise ValueError(f"--planner {self.planner}: positive integers, experts per token at most experts")
        unknown = set(self.skews) - set(SKEWS)
        if unknown or not self.skews:
            raise ValueError(f"--skews {sorted(unknown)}: choose of {', '.join(SKEWS)}")
        if self.experts % self.ranks:
            raise ValueError(f"--experts={self.experts} must be a multiple of --ranks={self.ranks}")
        most = self.experts - (self.experts // self.ranks if "one idle rank" in self.skews and self.ranks > 1 else 0)
        if self.experts_per_token > most:
            raise ValueError(f"--experts-per-token={self.experts_per_token} must be at most {most} under these skews")


# How much a router favours each expert [E] of H a rank; np.inf: chosen by every token.
SKEWS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "uniform": lambda expert, H: np.zeros(len(expert)),
    "zipf": lambda expert, H: -np.log1p(expert),
    "one hot expert": lambda expert, H: np.where(expert == 0, np.inf, 0.0),
    "one idle rank": lambda expert, H: np.where(expert < H, -np.inf, 0.0),
}


def routing(skew: str, ranks: int, tokens: int, experts: int, experts_per_token: int) -> np.ndarray:
    """Distinct experts of each token of all ranks, [ranks · tokens, k], int32."""
    favour = SKEWS[skew](np.arange(experts), experts // ranks)
    drawn = favour + np.random.default_rng(0).gumbel(size=(ranks * tokens, experts))
    return np.argsort(-drawn, -1, kind="stable")[:, :experts_per_token].astype(np.int32)


def moonep(z_NL, experts_Nk, weights_Nk, kernels, *, betas, num_experts: int):
    how = {"betas": betas, "num_experts": num_experts, "axis_name": moe_peers.AXIS}
    u, load = run_experts(z_NL, experts_Nk, weights_Nk, kernels, **how)
    return u, load.computed, jnp.zeros((), jnp.int32)


EXCHANGES: dict[str, Any] = {
    "moonep": moonep,
    "exact all-gather": moe_peers.at_home,
    "capacity 1.25": functools.partial(moe_peers.with_drops, factor=1.25),
}


def program(config: BenchMoe, exchange: str, mesh: jax.sharding.Mesh):
    """(z, experts, weights, kernels, cotangent) -> gradients, rows [R], drops [R]."""
    run = functools.partial(EXCHANGES[exchange], betas=BETAS, num_experts=config.experts)

    def local(z, experts, weights, kernels, du):
        def forward(z, weights, kernels):
            u, rows, drops = run(z, experts, weights, kernels)
            return u, (rows, drops)

        _, pullback, (rows, drops) = jax.vjp(forward, z, weights, kernels, has_aux=True)
        return pullback(du), rows[None], drops[None]

    specs = (TOKENS, TOKENS, TOKENS, TOKENS, TOKENS)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=TOKENS))


def bench(config: BenchMoe) -> list[dict[str, Any]]:
    """One record a skew and exchange."""
    R, E, k, L, F = config.ranks, config.experts, config.experts_per_token, config.latent, config.hidden
    mesh = meshes.MeshSpec.parse(f"expert={R}").build(jax.devices()[:R])
    place = lambda x: jax.device_put(x, jax.sharding.NamedSharding(mesh, TOKENS))
    rng = np.random.default_rng(0)
    draw = lambda *shape: place(rng.normal(size=shape).astype(np.float32) / np.sqrt(shape[-1]))
    kernels = draw(E, L, F), draw(E, L, F), draw(E, F, L)
    z, du, weights = draw(R * config.tokens, L), draw(R * config.tokens, L), draw(R * config.tokens, k)
    experts = {skew: place(routing(skew, R, config.tokens, E, k)) for skew in config.skews}
    example = next(iter(experts.values()))
    compiled = {
        name: program(config, name, mesh).lower(z, example, weights, kernels, du).compile() for name in EXCHANGES
    }
    runs = {
        (skew, name): functools.partial(run, z, ids, weights, kernels, du)
        for skew, ids in experts.items()
        for name, run in compiled.items()
    }
    seconds = in_turns(runs, config.rounds)
    records = []
    for (skew, name), run in runs.items():
        _, rows, drops = jax.device_get(run())
        records.append(
            {
                "skew": skew,
                "exchange": name,
                "rows": rows.tolist(),
                "rows_max_over_mean": float(rows.max() / rows.mean()),
                "dropped": float(drops.sum() / (R * config.tokens * k)),
                "received_bytes_per_rank": sum(received_by_kind(compiled[name].as_text() or "").values()),
                "median_ms": 1e3 * statistics.median(seconds[skew, name]),
                "time_of_exact_all_gather": ratio(seconds[skew, name], seconds[skew, "exact all-gather"]),
                "time_of_first_skew": ratio(seconds[skew, name], seconds[config.skews[0], name]),
            }
        )
    return records


def saved_for_backward(config: BenchMoe) -> dict[str, Any]:
    """Bytes that one rank alone keeps from forward to backward, by name, and those that plain autodiff would."""
    N, k, E, L, F = config.tokens, config.experts_per_token, config.experts, config.latent, config.hidden
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    inputs = array(N, L), array(N, k), (array(E, L, F), array(E, L, F), array(E, F, L))
    ids = jax.ShapeDtypeStruct((N, k), jnp.int32)

    def leaves(run, ids, z, weights, kernels):
        z, weights = checkpoint_name(z, "moe.dispatch_in"), checkpoint_name(weights, "moe.weights")
        return jax.tree.leaves(jax.vjp(lambda *a: run(*a, ids), z, weights, kernels)[1])

    def ours(z, weights, kernels, ids):
        return run_experts(z, ids, weights, kernels, betas=BETAS, num_experts=E, axis_name=None)[0]

    def plain(z, weights, kernels, ids):
        how = mixture.exchange_of("all_gather", None, E), BETAS
        return mixture.plain_mixture(how, z, weights, kernels, how[0].plan(ids))

    size = lambda leaf: math.prod(leaf.shape) * leaf.dtype.itemsize
    of = lambda run: (functools.partial(leaves, run), ids, *inputs)
    by_name: dict[str, int] = {}
    for origin, leaf in zip(leaf_origins(*of(ours)), jax.eval_shape(*of(ours)), strict=True):
        for name in origin.names:
            by_name[name] = by_name.get(name, 0) + size(leaf)
    parameters = sum(map(size, inputs[2]))
    return {"by_name": by_name, "plain_autodiff": sum(map(size, jax.eval_shape(*of(plain)))) - parameters}


def planner_cost(R: int, E: int, S: int, k: int) -> dict[str, Any]:
    """What one of R ranks runs to plan its S tokens' k assignments to E experts: seconds, and bytes beyond its arguments."""
    ids = jnp.asarray(routing("zipf", 1, S, E, k))
    table = jnp.broadcast_to(counts(ids, E), (R, E))
    run = jax.jit(plan_local).lower(table, ids, 0).compile()
    seconds = in_turns({"plan": lambda: run(table, ids, 0)}, 5)["plan"]
    analysis: Any = run.memory_analysis()
    return {"ranks": R, "experts": E, "tokens": S, "experts_per_token": k, "seconds": statistics.median(seconds),
            "temporary_bytes": analysis.temp_size_in_bytes}  # fmt: skip


def show(records: list[dict[str, Any]], saved: dict[str, Any], planner: dict[str, Any], first: str) -> None:
    table = Table()
    columns = "skew", "exchange", "rows max/mean", "dropped", "MB received", "median ms", "× all-gather", f"× {first}"
    for column in columns:
        table.add_column(column)
    for r in records:
        table.add_row(
            r["skew"],
            r["exchange"],
            f"{r['rows_max_over_mean']:.3f}",
            f"{100 * r['dropped']:.1f} %",
            f"{r['received_bytes_per_rank'] / 1e6:.1f}",
            f"{r['median_ms']:.1f}",
            f"{r['time_of_exact_all_gather']:.2f}",
            f"{r['time_of_first_skew']:.2f}",
        )
    console = Console(width=max(120, Console().width))
    console.print(table)
    total, plain = sum(saved["by_name"].values()), saved["plain_autodiff"]
    named = ", ".join(f"{name} {size / 1e3:,.0f} kB" for name, size in saved["by_name"].items())
    console.print(
        f"saved for backward: {named}; plain autodiff of the same saves {plain / 1e3:,.0f} kB, {plain / total:.1f} times that"
    )
    console.print(
        f"planning on one of {planner['ranks']} ranks, {planner['tokens']:,} tokens x {planner['experts_per_token']} of "
        f"{planner['experts']} experts: {planner['seconds']:.3f} s, {planner['temporary_bytes'] / 1e6:.1f} MB temporary"
    )


def draw_loads(config: BenchMoe, file: Path) -> None:
    """Rows of each rank before and after planning, one panel a skew."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * len(config.skews), 3), layout="constrained")
    panels = figure.subplots(1, len(config.skews), sharey=True, squeeze=False)[0]
    ranks, R = np.arange(config.ranks), config.ranks
    for panel, skew in zip(panels, config.skews, strict=True):
        ids = routing(skew, R, config.tokens, config.experts, config.experts_per_token)
        home = counts(ids, config.experts).reshape(R, home_experts(config.experts, R)).sum(1)
        planned = plan(ids.reshape(R, config.tokens, -1), num_experts=config.experts).rows_per_rank
        panel.bar(ranks - 0.2, home, 0.4, label="at home")
        panel.bar(ranks + 0.2, planned, 0.4, label="planned")
        panel.set(title=skew, xlabel="rank", xticks=ranks)
    panels[0].set_ylabel("rows")
    panels[0].legend()
    figure.savefig(file)


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print; exit 2 for options that cannot be, 1 for a picture that cannot be written."""
    config = parse(BenchMoe, argv, prog=PROG)
    if config.picture:
        try:
            draw_loads(config, config.picture)
        except (ImportError, ValueError) as mistake:
            refuse(PROG, f"--picture={config.picture}: {mistake}")
        except OSError as failure:
            raise SystemExit(f"{PROG}: error: --picture: {failure}") from None
    try:
        meshes.require_devices(config.ranks)
    except RuntimeError as failure:
        refuse(PROG, failure)
    records = bench(config)
    saved, planner = saved_for_backward(config), planner_cost(*config.planner)
    if config.json:
        about = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
        print(json.dumps(about | {"records": records, "saved_for_backward": saved, "planner": planner}))
    else:
        show(records, saved, planner, config.skews[0])
