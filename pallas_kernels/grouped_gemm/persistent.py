"""Persistent programs: one on a multiprocessor, each working through items of one list, loads ahead of products.

A program has three warpgroups. The last one only starts loads, into a ring of stages in shared memory, and runs ahead into
the next item while the others finish theirs. The other two compute, each its own half of an item's result; they have a
stage's operands in common, and it is loaded again once both are done with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import operand, value

CONSUMERS = 2
WARPGROUPS = CONSUMERS + 1
REGISTERS = {"producer": 24, "consumer": 240}
"""Of a thread: a multiprocessor has 65,536 for three times 128."""
SHARED = 232448 - 1024
"""Bytes of shared memory for arrays; the rest is for barriers."""
PROGRAMS = 132
"""Multiprocessors of an H100 or H200. Where there are fewer, some programs begin when others have ended."""
INTERPRETED_PROGRAMS = 1
"""In the interpreter, which runs one after the other and compiles each anew."""


def programs(interpret: bool) -> int:
    """How many share the items."""
    return INTERPRETED_PROGRAMS if interpret else PROGRAMS


def deepest(stage: int, besides: int) -> int:
    """Stages of so many bytes that fit into shared memory besides so many others."""
    return min(4, (SHARED - besides) // stage)


def ring(stages: int, copies: int) -> list:
    """Barriers of a ring: loaded, by so many copies a stage, and consumed."""
    return [
        plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
    ]


@dataclasses.dataclass(frozen=True)
class Ring:
    """Stages of shared memory between the warpgroup that loads and those that compute; `turn` counts their uses."""

    barriers: Any  # as `ring` makes them
    stages: int
    interpret: bool

    @property
    def loaded(self):
        return self.barriers[0]

    @property
    def consumed(self):
        return self.barriers[1]

    def run(self, count, steps: Callable, load: Callable, compute: Callable) -> None:
        """Works through this program's share of `count` items.

        steps(item): how many stages it needs. load(item)(step, slot, barrier): starts the copies of one.
        compute(item, warpgroup, turn): takes its stages by `sum` and writes the result.
        """
        program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        others = programs(self.interpret)
        share = lax.div(count - program + others - 1, others)
        each = lambda body: lax.fori_loop(0, share, lambda n, turn: body(program + n * others, turn), 0)

        @pl.when(warpgroup == CONSUMERS)
        def _():
            plgpu.set_max_registers(REGISTERS["producer"], action="decrease")

            def produce(item, turn):
                start = load(item)

                def step(n, turn):
                    slot = lax.rem(turn, self.stages)
                    pl.when(turn >= self.stages)(lambda: plgpu.barrier_wait(self.consumed.at[slot]))
                    start(n, slot, self.loaded.at[slot])
                    return turn + 1

                return lax.fori_loop(0, steps(item), step, turn)

            end = each(produce)
            drain = lambda turn, _: plgpu.barrier_wait(self.consumed.at[lax.rem(turn, self.stages)])
            lax.fori_loop(lax.max(end - self.stages, 0), end, drain, None)

        @pl.when(warpgroup < CONSUMERS)
        def _():
            plgpu.set_max_registers(REGISTERS["consumer"], action="increase")

            def consume(item, turn):
                compute(item, warpgroup, turn)
                return turn + steps(item)

            each(consume)
            plgpu.wait_smem_to_gmem(0)

    def sum(self, shapes, turn, steps, products: Callable) -> list[jax.Array]:
        """For each of `shapes` the sum, float32, of the products (left, right) that products(step, slot) lists for it."""
        slot = lambda n: lax.rem(turn + n, self.stages)
        release = lambda n: plgpu.barrier_arrive(self.consumed.at[slot(n)])

        def arrived(n):
            plgpu.barrier_wait(self.loaded.at[slot(n)])
            return products(n, slot(n))

        if self.interpret:

            def add(n, sums):
                dot = lambda x, y: jnp.dot(value(x), value(y), preferred_element_type=jnp.float32)
                sums = [total + dot(*pair) for total, pair in zip(sums, arrived(n), strict=True)]
                release(n)
                return sums

            return lax.fori_loop(0, steps, add, [jnp.zeros(shape, jnp.float32) for shape in shapes])

        def run(*accumulators):
            def add(n, _):
                for accumulator, (x, y) in zip(accumulators, arrived(n), strict=True):
                    plgpu.wgmma(accumulator, operand(x), operand(y))
                plgpu.wgmma_wait(len(shapes))  # The products of the step before are done.
                pl.when(n > 0)(lambda: release(n - 1))

            lax.fori_loop(0, steps, add, None)
            sums = [accumulator[...] for accumulator in accumulators]
            pl.when(steps > 0)(lambda: release(steps - 1))
            return sums

        return pl.run_scoped(run, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))
