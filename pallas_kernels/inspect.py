"""What each kernel is and costs: `python -m pallas_kernels.inspect --tokens=8192 --heads=96`.

Lists every kernel with its block sizes, bytes, operations and roofline times for a stated shape. With the extra
`gpu-compile` it also compiles each to Hopper machine code, without a GPU, and prints registers, spills, shared memory
and instruction counts. Exit status: 0, 1 if a kernel spills or does not compile, 2 for a bad shape.
"""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from pallas_kernels import aot
from pallas_kernels.catalog import Kernel, Shape, kernels

# Bytes a second from device memory, dense bfloat16 operations a second.
GPUS = {"H100": (3.35e12, 989e12), "H200": (4.8e12, 989e12)}


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m pallas_kernels.inspect", description="What each GPU kernel is and costs.")
    for name, default in Shape()._asdict().items():
        allowed = (64, 128) if name.endswith("_dim") else None
        kind = whole_tiles if name in ("latent", "expert_hidden") else positive
        words = f"{name.replace('_', ' ')} of the stated shape (default {default})"
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=default, choices=allowed, help=words)
    shape = Shape(**vars(parser.parse_args(arguments)))
    missing = aot.what_is_missing()
    if missing is None:
        aot.restart_ready_to_compile()
    print(" ".join(f"{name}={value}" for name, value in shape._asdict().items()))
    if missing:
        print(f"not compiled: {missing}")
    failed = 0
    for kernel in kernels(shape):
        print(f"\n{kernel.name}   " + " ".join(f"{name}={size}" for name, size in kernel.blocks.items()))
        print("  " + work(kernel))
        if missing is None:
            line, good = machine(kernel)
            print("  " + line)
            failed += not good
    return 1 if failed else 0


class Parser(argparse.ArgumentParser):
    """A mistake is one line on stderr."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def whole_tiles(text: str) -> int:
    value = positive(text)
    if value % 128:
        raise argparse.ArgumentTypeError(f"{text} must be a multiple of 128")
    return value


def work(kernel: Kernel) -> str:
    """Bytes, operations and the time below which no GPU can be."""
    times = []
    for name, (bandwidth, rate) in GPUS.items():
        memory, math = kernel.bytes / bandwidth, kernel.operations / rate
        times.append(f"{name} {1e6 * max(memory, math):.0f} us ({'memory' if memory > math else 'math'})")
    return f"{kernel.bytes / 1e6:.1f} MB, {kernel.operations / 1e9:.1f} GFLOP; roofline " + ", ".join(times)


def machine(kernel: Kernel) -> tuple[str, bool]:
    """The compiled kernel in words, and whether it compiled without spills."""
    try:
        got = aot.compile_kernel(kernel.function, kernel.arguments)
    except RuntimeError as error:
        return str(error), False
    words = f"sm_90a: {got.registers} registers, {got.spilled_bytes} bytes spilled, {got.shared_bytes} bytes shared"
    return f"{words}, {got.wgmma} wgmma, {got.tma} TMA", got.spilled_bytes == 0


if __name__ == "__main__":
    sys.exit(main())
