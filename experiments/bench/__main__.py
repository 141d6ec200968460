"""`python -m experiments.bench NAME …`: runs one benchmark; each has its own --help."""

from __future__ import annotations

import importlib
import sys

from meshes.command_line import refuse

BENCHMARKS = {
    "kda": "Kimi Delta Attention: implementations, errors, floor, ratio to tokamax",
    "kda_gpu": "the same by Hopper kernels: right or wrong, times, roofline, ratios to XLA and FLA",
    "moe": "experts over ranks under skewed routings: rows, drops, bytes, ratios to exchanges without a plan",
    "moe_overlap": "an expert layer compiled for absent GPUs: what can run while its rows travel",
    "muon": "an optimizer step: Muon beside optax's and AdamW, time, matrix products, bytes of state and messages",
    "hf": "a training step of a small Kimi Linear model, ratio to transformers",
}


def main() -> None:
    """Hand over to the benchmark that the first argument names."""
    prog = "python -m experiments.bench"
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("--help", "-h"):
        print(f"usage: {prog} NAME [options]\n")
        for known, purpose in BENCHMARKS.items():
            print(f"  {known:12} {purpose}")
    elif name not in BENCHMARKS:
        refuse(prog, f"unknown benchmark {name!r}: choose one of {', '.join(BENCHMARKS)}")
    else:
        importlib.import_module(f"experiments.bench.{name}").main(sys.argv[2:])


if __name__ == "__main__":
    main()
