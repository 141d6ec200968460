"""KDA on a Hopper GPU: are the kernels right, and how long do they take beside XLA's chunked form and FLA's Triton kernels.

B batch, T tokens, H heads, K key dim, V value dim.

Right first: outputs, states and every gradient against the recurrence in float64; times only if all are. Times are taken in
turns, in one process, with the roofline of the kernels' own traffic and operations. With --interpret the first part runs in
Mosaic's interpreter, on tiny shapes and any machine.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.bench.timing import in_turns, ratio
from k3jax.ops.kda import api, kda, mosaic
from k3jax.ops.kda.segments import evaluate
from meshes.command_line import parse, refuse
from pallas_kernels.catalog import Shape, kernels
from pallas_kernels.inspect import GPUS
from pallas_kernels.kda import Token, Weights, decode, decode_token

PROG = "python -m experiments.bench.kda_gpu"
BOUND = -5.0
CLOSE = 1e-2
"""Error allowed, of the norm of the result: operands of products are bfloat16."""
KERNELS, XLA, FLA = "mosaic_gpu", "chunked", "fla chunk_kda"
NAMES = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state")
# The kernels of each direction in the catalog.
FORWARD = ("kda_prepare", "kda_recurrence")
BACKWARD = ("kda_prepare, for backward", "kda_recurrence, for backward", "kda_reverse")
BACKWARD += ("kda_chunk_gradients", "kda_pair_gradients")
# And if a sequence is split.
MAPS, BACK = ("kda_segment_maps",), ("kda_entering_cotangents",)


@dataclasses.dataclass(frozen=True)
class BenchKdaGpu:
    """Correctness, then times, of the Hopper kernels for KDA; exit 1 if they are wrong, 2 without a GPU."""

    batches: tuple[int, ...] = (1, 2, 4, 8)
    """Sequences of a call; decoding takes one token of each."""
    tokens: tuple[int, ...] = (4096, 8192, 16384, 32768, 65536)
    """Tokens of a sequence; every length is timed with every batch."""
    heads: int = 32
    """Heads, of 128 key and 128 value channels."""
    rounds: int = 10
    """Every program runs once a round."""
    interpret: bool = False
    """Only whether the kernels are right, on tiny shapes in Mosaic's interpreter on CPU."""
    json: bool = False
    """One JSON object on stdout instead of tables."""

    def __post_init__(self) -> None:
        for name in ("batches", "tokens", "heads", "rounds"):
            value = getattr(self, name)
            if not value or np.min(value) < 1:
                raise ValueError(f"--{name}={value} must be at least 1")


class Problem(NamedTuple):
    """Arguments of `kda`, segment_ids None without documents, and cotangents of both results."""

    inputs: tuple[jax.Array, ...]
    segment_ids: jax.Array | None
    cotangents: tuple[jax.Array, jax.Array]


def problem(shape: tuple[int, ...], documents: tuple[int, ...] = ()) -> Problem:
    """Made on the device: unit keys of cosine about 0.45, channels that forget slowly and at all speeds."""
    B, T, H, K, V = shape
    key = iter(jax.random.split(jax.random.key(0), 12))
    normal = lambda *shape: jax.random.normal(next(key), shape)
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    half = lambda x: x.astype(jnp.bfloat16)
    keys = unit(unit(normal(B, T, H, K)) + 0.9 * unit(normal(B, 1, H, K)))
    g = BOUND * jax.nn.sigmoid(2 * normal(B, T, H, K) - 5 * (jnp.arange(K) < K // 2))
    beta = jax.random.uniform(next(key), (B, T, H))
    inputs = half(unit(normal(B, T, H, K))), half(keys), half(normal(B, T, H, V)), g, beta, normal(B, H, K, V)
    ids = None
    if documents:
        ids = jnp.broadcast_to(jnp.searchsorted(jnp.array(documents), jnp.arange(T), side="right"), (B, T))
    return Problem(inputs, ids, (half(normal(B, T, H, V)), normal(B, H, K, V)))


def run(implementation: str, p: Problem, *inputs, segments: int | None = None, interpret: bool = False):
    """(o, final state) of `inputs`, which stand for the problem's own."""
    q, k, v, g, beta, state = inputs
    if not interpret:
        how: dict[str, Any] = {"segments": segments, "implementation": implementation}
        if implementation != "recurrent":
            how["gate_lower_bound"] = BOUND
        return kda(q, k, v, g, beta, initial_state=state, segment_ids=p.segment_ids, **how)
    alike = api.alike(q, k, v, g, beta, state, p.segment_ids, BOUND)
    plan = api.plan(alike, implementation, api.static_scale(q, None), BOUND, segments=segments)
    stages: Any = plan.stages
    return evaluate(plan._replace(stages=stages._replace(interpret=True)), *alike)


def with_backward(function: Callable, p: Problem):
    out, pullback = jax.vjp(function, *p.inputs)
    return *out, *pullback(p.cotangents)


def right_answers(p: Problem) -> list[np.ndarray]:
    """By the recurrence in float64."""
    with jax.enable_x64(True):
        widen = lambda x: x.astype(jnp.float64)
        wide = Problem(tuple(map(widen, p.inputs)), p.segment_ids, (widen(p.cotangents[0]), widen(p.cotangents[1])))
        got = jax.jit(lambda wide: with_backward(functools.partial(run, "recurrent", wide), wide))(wide)
        return [np.asarray(x) for x in got]


def distance(got, right) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - right) / np.linalg.norm(right))


CASES: dict[str, dict[str, Any]] = {
    "one document": {"shape": (2, 1024, 4, 128, 128)},
    "odd length, documents": {"shape": (2, 997, 3, 128, 128), "documents": (1, 64, 500, 640, 990)},
    "segments, documents over and at their borders": {
        "shape": (2, 997, 3, 128, 128),
        "documents": (200, 384, 700),
        "segments": 3,
    },
    "K != V, segments": {"shape": (1, 500, 2, 64, 128), "segments": 2},
}
TINY: dict[str, dict[str, Any]] = {
    "odd length, documents, segments": {"shape": (1, 69, 1, 64, 64), "documents": (20, 64), "segments": 2},
}


def correctness(interpret: bool) -> list[dict[str, Any]]:
    """One record a case and implementation: the error of each result."""
    records = []
    for case, how in (TINY if interpret else CASES).items():
        p = problem(how["shape"], how.get("documents", ()))
        right = right_answers(p)
        for implementation in (KERNELS,) if interpret else (KERNELS, XLA):
            segments = how.get("segments", 1)
            function = functools.partial(run, implementation, segments=segments, interpret=interpret)
            both = lambda p, function=function: with_backward(functools.partial(function, p), p)
            # The interpreter runs one kernel at a time: not compiled into one program.
            got = both(p) if interpret else jax.jit(both)(p)
            errors = {name: distance(a, b) for name, a, b in zip(NAMES, got, right, strict=True)}
            records.append(
                {"case": case, "shape": list(how["shape"]), "implementation": implementation, "errors": errors}
            )
    return [*records, decode_correctness(interpret)]


def decode_problem(B: int, H: int, K: int, V: int, width: int = 4):
    """(token, weights, state, tail) of `decode_token`."""
    key = iter(jax.random.split(jax.random.key(0), 12))
    normal = lambda *shape: jax.random.normal(next(key), shape)
    D = 2 * K + V
    token = Token(normal(B, H, D).astype(jnp.bfloat16), normal(B, H, K), normal(B, H), normal(B, H, V))
    weights = Weights(0.5 * normal(width, H, D), 0.3 * normal(H), normal(H, K), 1 + 0.1 * normal(V))
    return token, weights, normal(B, H, K, V), normal(B, width - 1, H, D).astype(jnp.bfloat16)


def decode_correctness(interpret: bool) -> dict[str, Any]:
    shape = (1, 1, 64, 64) if interpret else (4, 8, 128, 128)
    given, how = decode_problem(*shape), {"scale": shape[2] ** -0.5, "gate_lower_bound": BOUND}
    got = decode_token(*given, interpret=interpret, **how)
    with jax.enable_x64(True):
        token, weights, state, tail = jax.tree.map(lambda x: x.astype(jnp.float64), given)
        right = [np.asarray(x) for x in decode.reference(token, weights, state, tail, **how)]
    errors = {name: distance(a, b) for name, a, b in zip(("y", "state", "tail"), got, right, strict=True)}
    return {"case": "decode, one token", "shape": list(shape), "implementation": KERNELS, "errors": errors}


def fla_program(p: Problem, backward: bool) -> Callable[[], None] | None:
    """FLA's operation on the same arrays; None if it cannot be imported."""
    try:
        torch, ops = importlib.import_module("torch"), importlib.import_module("fla.ops.kda")
    except ImportError:
        return None
    *arrays, state = (torch.from_dlpack(x).requires_grad_(backward) for x in p.inputs)
    do, d_final = map(torch.from_dlpack, p.cotangents)
    promise = {"safe_gate": True, "lower_bound": BOUND}  # as ours: cheap tiles

    def once() -> None:
        with torch.set_grad_enabled(backward):
            o, final = ops.chunk_kda(*arrays, initial_state=state, output_final_state=True, **promise)
        if backward:
            torch.autograd.grad((o, final), (*arrays, state), (do.to(o.dtype), d_final))
        torch.cuda.synchronize()

    return once


def floor(shape: tuple[int, ...], names: Sequence[str], device: str) -> float | None:
    """Seconds below which these kernels cannot be; None for a GPU whose rates are not known."""
    rates = next((rates for gpu, rates in GPUS.items() if gpu in device), None)
    if rates is None:
        return None
    found = [kernel for kernel in kernels(Shape(*shape)) if kernel.name in names]
    assert len(found) == len(names)
    return sum(max(kernel.bytes / rates[0], kernel.operations / rates[1]) for kernel in found)


def attempt(make: Callable[[], Callable[[], Any] | None], name: str, missing: dict[str, str]):
    """A program that has run once, or None with the reason noted: it is not there, or out of memory, or fails."""
    try:
        program = make()
        if program is None:
            missing[name] = "not installed"
            return None
        jax.block_until_ready(program())
    except Exception as error:  # whatever a peer raises: its row says so, the others' times are not lost
        missing[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return None
    return program


def compiled(function: Callable, p: Problem) -> Callable[[], Any]:
    return functools.partial(jax.jit(function).lower(p).compile(), p)


def times(shape: tuple[int, ...], rounds: int, device: str) -> list[dict[str, Any]]:
    """One record a direction and implementation."""
    p = problem(shape)
    records = []
    split = mosaic.planned_segments(shape[:4], shape[4]) > 1
    for direction, names in (("forward", FORWARD + MAPS * split), ("both", FORWARD + BACKWARD + (MAPS + BACK) * split)):
        backward, missing = direction == "both", {}

        def ours(implementation: str, backward=backward):
            function = functools.partial(run, implementation)
            if backward:
                return compiled(lambda p: with_backward(functools.partial(function, p), p), p)
            return compiled(lambda p: function(p, *p.inputs), p)

        makers: dict[str, Callable[[], Any]] = {name: functools.partial(ours, name) for name in (KERNELS, XLA)}
        makers[FLA] = functools.partial(fla_program, p, backward)
        programs = {name: attempt(make, name, missing) for name, make in makers.items()}
        seconds = in_turns({name: program for name, program in programs.items() if program is not None}, rounds)
        least = floor(shape, names, device)
        for name in programs:
            record: dict[str, Any] = {"shape": list(shape), "direction": direction, "implementation": name}
            if name in missing:
                records.append(record | {"missing": missing[name]})
                continue
            record["median_ms"] = 1e3 * statistics.median(seconds[name])
            if name == KERNELS and least is not None:
                record["floor_ms"] = 1e3 * least
            if name != KERNELS and KERNELS in seconds:
                record["times_as_long_as_kernels"] = ratio(seconds[name], seconds[KERNELS])
            records.append(record)
    return records


def decode_times(B: int, heads: int, rounds: int, device: str) -> dict[str, Any]:
    """Of one token of each sequence."""
    shape = B, heads, 128, 128
    given = decode_problem(*shape)
    step = jax.jit(functools.partial(decode_token, scale=128**-0.5, gate_lower_bound=BOUND)).lower(*given).compile()
    seconds = in_turns({KERNELS: functools.partial(step, *given)}, rounds)[KERNELS]
    record = {"shape": list(shape), "direction": "decode, one token", "implementation": KERNELS}
    record["median_ms"] = 1e3 * statistics.median(seconds)
    least = floor((B, 1, *shape[1:]), ("kda_decode, one token",), device)
    return record if least is None else record | {"floor_ms": 1e3 * least}


def show(right: list[dict[str, Any]], timed: list[dict[str, Any]]) -> None:
    console = Console(width=max(120, Console().width))
    table = Table("case", "shape", "implementation", "largest error")
    for r in right:
        name, error = max(r["errors"].items(), key=lambda item: item[1])
        table.add_row(r["case"], ",".join(map(str, r["shape"])), r["implementation"], f"{error:.1e} ({name})")
    console.print(table)
    if not timed:
        return
    table = Table("B,T,H,K,V", "direction", "implementation", "median ms", "floor ms", "× the kernels' time")
    number = lambda r, name: f"{r[name]:.3f}" if name in r else ""
    for r in timed:
        middle = r.get("missing") or number(r, "median_ms")
        ends = number(r, "floor_ms"), number(r, "times_as_long_as_kernels")
        table.add_row(",".join(map(str, r["shape"])), r["direction"], r["implementation"], middle, *ends)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print; exit 1 if the kernels are wrong, 2 for options that cannot be and without a GPU."""
    config = parse(BenchKdaGpu, argv, prog=PROG)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs some of the memory
    device = jax.devices()[0]
    if not config.interpret and device.platform != "gpu":
        refuse(
            PROG,
            f"JAX sees no GPU, only {device.platform}: the kernels need a Hopper GPU; --interpret runs without one",
        )
    right = correctness(config.interpret)
    far = [r for r in right if r["implementation"] == KERNELS and not all(x <= CLOSE for x in r["errors"].values())]
    timed: list[dict[str, Any]] = []
    if not config.interpret and not far:
        for B in config.batches:
            for T in config.tokens:
                timed += times((B, T, config.heads, 128, 128), config.rounds, device.device_kind)
            timed.append(decode_times(B, config.heads, config.rounds, device.device_kind))
    if config.json:
        about = {"device": device.device_kind, "jax": jax.__version__, "allowed_error": CLOSE}
        print(json.dumps(about | {"correctness": right, "times": timed}))
    else:
        show(right, timed)
    if far:
        sys.exit(f"{PROG}: wrong by more than {CLOSE}: {', '.join(r['case'] for r in far)}; no times taken")


if __name__ == "__main__":
    main()
