"""KDA: forward, and forward with backward, of every implementation, beside tokamax's if that can be imported.

B batch, T tokens, H heads, K key dim, V value dim. Every program takes the gate's raw input z and computes
g = bound · sigmoid(z) itself, as tokamax's does; each gets its own layout. Errors are relative norms against float64:
outputs against the recurrence, gradients against the chunked form in float64, which the tests hold against it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.bench.timing import in_turns, machine_rates, ratio
from k3jax.ops.kda import kda, kda_gate
from meshes.command_line import at_least, parse, refuse

PROG = "python -m experiments.bench kda"
PEER = "tokamax xla_chunked"


@dataclasses.dataclass(frozen=True)
class BenchKda:
    """Time and error of KDA's implementations, with a floor and the ratio to tokamax, all in one run."""

    shapes: tuple[str, ...] = ("1,2048,4,128,128",)
    """Shapes, each as B,T,H,K,V."""
    implementations: tuple[str, ...] = ("chunked", "chunked any gate")
    """Of: chunked, chunked any gate, chunked from inputs (states are computed again), recurrent."""
    gate_lower_bound: float = -5.0
    """The gate's bound, above -10000; tokamax takes none below -5."""
    rounds: int = 20
    """Every program runs once a round."""
    errors: bool = True
    """Also run in float64 and report errors; --no-errors saves that time."""
    json: bool = False
    """One JSON object on stdout instead of tables."""

    def __post_init__(self) -> None:
        for shape in self.shapes:
            parts = shape.split(",")
            if len(parts) != 5 or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
                raise ValueError(f"--shapes {shape!r} must be five positive integers B,T,H,K,V")
        if not self.shapes or not self.implementations:
            raise ValueError("--shapes and --implementations each need at least one value")
        unknown = set(self.implementations) - set(OPTIONS)
        if unknown:
            raise ValueError(f"--implementations {sorted(unknown)}: choose of {', '.join(OPTIONS)}")
        at_least(1, self, "rounds")
        if not -1e4 < self.gate_lower_bound < 0:
            raise ValueError(f"--gate-lower-bound={self.gate_lower_bound} must be above -10000 and below 0")


# Options of `kda`, given the bound.
OPTIONS: dict[str, Any] = {
    "chunked": lambda bound: {"gate_lower_bound": bound},
    "chunked any gate": lambda bound: {},
    "chunked from inputs": lambda bound: {"gate_lower_bound": bound, "save_states": False},
    "recurrent": lambda bound: {"implementation": "recurrent"},
}


def problem(B: int, T: int, H: int, K: int, V: int) -> tuple[np.ndarray, ...]:
    """(q, k, v, z, β, cotangent of o) in float32: unit keys of cosine about 0.45, gates of all strengths."""
    rng = np.random.default_rng(0)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    q, own, common = (unit(rng.normal(size=(B, t, H, K))) for t in (T, T, 1))
    z = np.concatenate([rng.normal(-5, 2, (B, T, H, K // 2)), rng.normal(0, 2, (B, T, H, K - K // 2))], -1)
    arrays = (
        q,
        unit(own + 0.9 * common),
        rng.normal(size=(B, T, H, V)),
        z,
        rng.random((B, T, H)),
        rng.normal(size=(B, T, H, V)),
    )
    return tuple(x.astype(np.float32) for x in arrays)


def ours(options: dict[str, Any], bound: float, q, k, v, z, beta):
    H, K = q.shape[2:]
    g = kda_gate(z, jnp.zeros(H, z.dtype), jnp.zeros((H, K), z.dtype), lower_bound=bound)
    return kda(q, k, v, g, beta, **options)[0]


def tokamax_program(bound: float):
    """tokamax's operation with the same arguments, in its layout [H, B, T, …]; None if it cannot be imported."""
    try:
        from tokamax._src.ops.kda import api  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None

    def run(q, k, v, z, beta):
        heads = jnp.zeros(q.shape[0])
        return api.kimi_delta_attention(
            q, k, v, z, beta, a_log=heads, use_gate_in_kernel=True, lower_bound=bound, implementation="xla_chunked"
        )[0]

    return run


def with_backward(run, q, k, v, z, beta, do):
    o, pullback = jax.vjp(run, q, k, v, z, beta)
    return o, *pullback(do)


def floor(B: int, T: int, H: int, K: int, V: int) -> dict[str, dict[str, int]]:
    """Operations and bytes that no chunked evaluation saves: products over the lower triangle of pairs, the solve, the
    state's read, write and update; exponentials of one decay in each direction of a tile; every array once."""
    tokens, C = B * T * H, min(64, T)
    forward = {
        "flops": tokens * (2 * C * K + C * (K + V) + 6 * K * V + C * V),
        "exponentials": 3 * tokens * K,
        "bytes": 4 * tokens * (3 * K + 2 * V + 1),
    }
    both = {
        "flops": 3 * forward["flops"],
        "exponentials": 2 * forward["exponentials"],
        "bytes": forward["bytes"] + 4 * tokens * (6 * K + 3 * V + 2),
    }
    return {"forward": forward, "both": both}


def errors(results: list[np.ndarray], right: list[np.ndarray]) -> dict[str, float]:
    names = ("o", "dq", "dk", "dv", "dz", "dbeta")
    norm = np.linalg.norm
    pairs = zip(names, results, right, strict=True)
    return {name: float(norm(np.asarray(a, np.float64) - b) / norm(b)) for name, a, b in pairs}


def in_float64(arrays: tuple[np.ndarray, ...], bound: float) -> list[np.ndarray]:
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in arrays]
        o = jax.jit(functools.partial(ours, {"implementation": "recurrent"}, bound))(*wide[:5])
        _, *grads = jax.jit(functools.partial(with_backward, functools.partial(ours, {}, bound)))(*wide)
        return [np.asarray(x) for x in (o, *grads)]


def bench(config: BenchKda, shape: tuple[int, ...], rates: dict[str, float]) -> list[dict[str, Any]]:
    """One record an implementation and direction."""
    arrays = problem(*shape)
    programs: dict[str, tuple[Any, tuple[np.ndarray, ...]]] = {
        name: (functools.partial(ours, OPTIONS[name](config.gate_lower_bound), config.gate_lower_bound), arrays)
        for name in config.implementations
    }
    peer = tokamax_program(config.gate_lower_bound)
    if peer is not None and shape[1] % 64 == 0 and -5 <= config.gate_lower_bound:
        programs[PEER] = peer, tuple(np.ascontiguousarray(np.moveaxis(x, 2, 0)) for x in arrays)
    runs, memory = {}, {}
    for name, (run, own) in programs.items():
        own = tuple(map(jnp.asarray, own))
        for direction, function, given in (
            ("forward", run, own[:5]),
            ("both", functools.partial(with_backward, run), own),
        ):
            compiled = jax.jit(function).lower(*given).compile()
            runs[name, direction] = functools.partial(compiled, *given)
            analysis: Any = compiled.memory_analysis()
            memory[name, direction] = analysis.temp_size_in_bytes
    seconds = in_turns(runs, config.rounds)
    right = in_float64(arrays, config.gate_lower_bound) if config.errors else None
    records = []
    for (name, direction), run in runs.items():
        mine = seconds[name, direction]
        needed = floor(*shape)[direction]
        record = {
            "shape": list(shape),
            "implementation": name,
            "direction": direction,
            "median_ms": 1e3 * statistics.median(mine),
            "floor_ms": 1e3 * max(work / rates[what] for what, work in needed.items()),
            "temporary_bytes": memory[name, direction],
        }
        if (PEER, direction) in runs:
            theirs = seconds[PEER, direction]
            record["times_as_fast_as_tokamax"] = ratio(theirs, mine)
            record["memory_of_tokamax"] = memory[name, direction] / memory[PEER, direction]
        if right is not None and direction == "both":
            results = [np.moveaxis(np.asarray(x), 0, 2) if name == PEER else np.asarray(x) for x in run()]
            record["errors"] = errors(results, right)
        records.append(record)
    return records


def show(records: list[dict[str, Any]], rates: dict[str, float]) -> None:
    console = Console(width=max(120, Console().width))
    console.print(
        f"this machine: {rates['flops'] / 1e9:.0f} GFLOP/s in batched products, {rates['exponentials'] / 1e9:.2f} G exp/s, "
        f"{rates['bytes'] / 1e9:.1f} GB/s"
    )
    table = Table(
        "B,T,H,K,V",
        "implementation",
        "direction",
        *("median ms", "floor ms", "temporary MB"),
        "× tokamax",
        "largest error",
    )
    for r in records:
        worst = max(r.get("errors", {"": 0.0}).items(), key=lambda item: item[1])
        table.add_row(
            ",".join(map(str, r["shape"])),
            r["implementation"],
            r["direction"],
            f"{r['median_ms']:.1f}",
            f"{r['floor_ms']:.1f}",
            f"{r['temporary_bytes'] / 2**20:.1f}",
            f"{r['times_as_fast_as_tokamax']:.2f}" if "times_as_fast_as_tokamax" in r else "",
            f"{worst[1]:.1e} ({worst[0]})" if worst[0] else "",
        )
    console.print(table)
    if not any("times_as_fast_as_tokamax" in r for r in records):
        console.print("tokamax could not be imported, or takes none of these shapes: no ratios")


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print; exit 2 for options that cannot be."""
    config = parse(BenchKda, argv, prog=PROG)
    rates = machine_rates()
    records = []
    for text in config.shapes:
        try:
            records += bench(config, tuple(map(int, text.split(","))), rates)
        except ValueError as mistake:
            refuse(PROG, mistake)
    if config.json:
        machine = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "rates": rates}
        print(json.dumps(machine | {"records": records}))
    else:
        show(records, rates)
