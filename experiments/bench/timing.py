"""Times of compiled programs in turns, and the rates of this machine that floors are made of."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import track

Key = TypeVar("Key")


def in_turns(programs: dict[Key, Callable[[], object]], rounds: int) -> dict[Key, list[float]]:
    """Seconds of each program, one a round: neighbours in time, so that ratios of a round share the machine's mood."""
    for run in programs.values():
        jax.block_until_ready(run())
    seconds: dict[Key, list[float]] = {name: [] for name in programs}
    for _ in track(range(rounds), "timing", transient=True, console=_stderr()):
        for name, run in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(of: list[float], to: list[float]) -> float:
    """Median of the ratios of the rounds: how many times as long `of` took."""
    return statistics.median(a / b for a, b in zip(of, to, strict=True))


def machine_rates(rounds: int = 5) -> dict[str, float]:
    """What this device does a second: flops of batched 64-row products, exponentials, bytes read and written."""
    a, b = jnp.ones((256, 64, 128)), jnp.ones((256, 128, 128))
    x = jnp.linspace(-5, 0, 1 << 22)
    measured = {
        "flops": (jnp.matmul, (a, b), 2 * a.size * 128),
        "exponentials": (jnp.exp, (x,), x.size),
        "bytes": (lambda x: x + 1, (x,), 2 * x.nbytes),
    }
    programs = {
        name: functools.partial(jax.jit(run).lower(*inputs).compile(), *inputs)
        for name, (run, inputs, _) in measured.items()
    }
    seconds = in_turns(programs, rounds)
    return {name: work / min(seconds[name]) for name, (_, _, work) in measured.items()}


def _stderr() -> Console:
    return Console(stderr=True)
