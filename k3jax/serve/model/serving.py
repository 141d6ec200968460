"""The model as an engine sees it: prefill a block of prompts, decode one token of many sequences, copy pages, choose tokens.

R ranks, B rows of all ranks, T tokens, W vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.configs import ModelConfig
from k3jax.layers.common import Axes
from k3jax.parallel.experts import best_exchange
from k3jax.serve.model.buckets import Buckets
from k3jax.serve.model.forward import Weights, forward
from k3jax.serve.model.pages import PageLayout, copy_pages
from k3jax.serve.model.rows import Row, arrange
from k3jax.serve.model.sample import Sampler, draws, sample
from k3jax.sharding import check_divisible, param_specs

RANKS = ("data", "expert")
"""Mesh axes over which sequences are spread, and with them the pool."""


class Step(NamedTuple):
    """What a call computed."""

    logits: jax.Array
    """[B, W] after each row's last token, or [B, T, W]; at least float32. On a mesh a rank's rows lie on it."""
    at: np.ndarray
    """Where in the batch each of the given rows is."""


class ServingModel:
    """Programs over one set of weights; what sequences remember is in a pool that goes in and comes out (and is donated).

    block: tokens of a prompt that prefill takes at once, always from a multiple of it on, so that a state depends on the
    tokens before it alone, wherever prompts were cut and whatever was cached. It is a multiple of KDA's chunk and divides
    hash_unit, the tokens between boundaries that can be named.
    mesh: data × expert ranks; each has rows and a pool of its own, and a share of the experts. None: one device.
    Raises ValueError for sizes that do not fit each other, or a mesh with other axes than these.
    """

    def __init__(
        self,
        weights: Weights,
        pages: PageLayout,
        *,
        block: int,
        hash_unit: int,
        buckets: Buckets,
        chunk_size: int = 64,
        mesh: Mesh | None = None,
    ):
        check_block(block, chunk_size=chunk_size, hash_unit=hash_unit)
        if mesh is not None:
            check_mesh(pages.config, mesh)
        self.weights, self.pages, self.block, self.buckets, self.mesh = weights, pages, block, buckets, mesh
        self.ranks = 1 if mesh is None else mesh.shape["data"] * mesh.shape["expert"]
        axes = Axes() if mesh is None else Axes(expert="expert", exchange=best_exchange(mesh.devices.flat[0].platform))
        self._programs = {
            every: self._program(functools.partial(forward, pages, chunk_size=chunk_size, every_logit=every, axes=axes))
            for every in (False, True)
        }
        self._copy = self._on_ranks(copy_pages, (POOL, P(RANKS), P(RANKS)), POOL, donate=0)

    def _program(self, run: Any) -> Any:
        specs = Weights(weight_specs(self.pages.config), {"chunks": P()}), POOL, P(RANKS)
        return self._on_ranks(run, specs, (P(RANKS), POOL), donate=1)

    def _on_ranks(self, run: Any, in_specs: Any, out_specs: Any, *, donate: int) -> Any:
        if self.mesh is not None:
            run = jax.shard_map(run, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)
        return jax.jit(run, donate_argnums=donate)

    def empty_pool(self, pages: int) -> jax.Array:
        """A pool with so many pages on each rank: [parts, R · pages, words], zeros."""
        if pages < 1:
            raise ValueError(f"pages={pages}: a pool has at least one page")
        shape = self.pages.parts, self.ranks * pages, self.pages.words
        sharding = None if self.mesh is None else NamedSharding(self.mesh, POOL)
        return jnp.zeros(shape, jnp.uint32, device=sharding)

    def prefill(self, pool: jax.Array, rows: Sequence[Row], *, every_logit: bool = False) -> tuple[Step, jax.Array]:
        """A block of each row's prompt: logits after its last token, or after every one; and the pool.

        A block may end early, and only the last one of a prompt does. At most `buckets.prefill` rows on a rank.
        Raises ValueError for a row that does not begin at a multiple of the block, and as `rows.arrange`.
        """
        for i, row in enumerate(rows):
            if row.start % self.block:
                raise ValueError(f"row {i}: start={row.start} is no multiple of the block of {self.block} tokens")
        longest = max((row.start + self.block for row in rows), default=0)
        return self._run(pool, rows, self.block, self.buckets.prefill, longest, every_logit)

    def decode(self, pool: jax.Array, rows: Sequence[Row]) -> tuple[Step, jax.Array]:
        """One token of each row: the logits after it, and the pool. Raises ValueError as `rows.arrange`."""
        on_rank = np.bincount([row.rank for row in rows], minlength=1)
        per_rank = self.buckets.rows_for(int(on_rank.max()))
        return self._run(pool, rows, 1, per_rank, max((row.end for row in rows), default=0), False)

    def _run(self, pool, rows, T: int, per_rank: int, longest: int, every_logit: bool) -> tuple[Step, jax.Array]:
        pool_pages = pool.shape[1] // self.ranks
        width = self.buckets.pages_for(self.pages.pages_for(longest))
        shapes = dict(T=T, per_rank=per_rank, ranks=self.ranks, width=width, pool_pages=pool_pages)
        arrays, at = arrange(self.pages, rows, **shapes)
        logits, pool = self._programs[every_logit](self.weights, pool, arrays)
        return Step(logits, at), pool

    def copy(self, pool: jax.Array, copies: Sequence[Sequence[tuple[int, int]]]) -> jax.Array:
        """Pages (source, target) of each rank, bit by bit, zeros for source −1: all read before any is written."""
        if len(copies) != self.ranks:
            raise ValueError(f"copies of {len(copies)} ranks; there are {self.ranks}")
        pool_pages = pool.shape[1] // self.ranks
        most = 1 << (max(map(len, copies)) - 1).bit_length() if any(copies) else 1  # few programs
        pairs = np.full((self.ranks, most, 2), -1, np.int32)
        for rank, each in enumerate(copies):
            targets = [target for _, target in each]
            if len(set(targets)) < len(targets):
                raise ValueError(f"copies of rank {rank} write a page twice: {targets}")
            if not all(-1 <= source < pool_pages and 0 <= target < pool_pages for source, target in each):
                raise ValueError(f"copies of rank {rank}: pages must be from 0 to {pool_pages - 1}; got {list(each)}")
            pairs[rank, : len(each)] = np.reshape(each, (-1, 2))
        return self._copy(pool, pairs[..., 0].reshape(-1), pairs[..., 1].reshape(-1))

    def choose(
        self, step: Step, samplers: Sequence[Sampler], positions: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The next token of each given row and its log probability (nats); positions: of these tokens.

        Takes logits [B, W]. What a row gets depends neither on the other rows nor on its place.
        """
        if step.logits.ndim != 2 or not len(samplers) == len(positions) == len(step.at):
            raise ValueError(
                f"logits {step.logits.shape} of {len(step.at)} rows, {len(samplers)} samplers, {len(positions)} positions: "
                "needs one of each for every row, and logits [B, W]"
            )
        B = len(step.logits)
        every, where = [Sampler()] * B, [0] * B
        for at, sampler, position in zip(step.at, samplers, positions, strict=True):
            every[at], where[at] = sampler, position
        tokens, log_probabilities = sample(step.logits, draws(every, where))
        return np.asarray(tokens)[step.at], np.asarray(log_probabilities)[step.at]


POOL = P(None, RANKS)


def weight_specs(config: ModelConfig) -> dict[str, Any]:
    """How parameters lie: those of experts, and the dense FFN, over the expert axis, all others on every rank."""
    keep = lambda spec: P(*(axis if axis == "expert" else None for axis in spec))
    return jax.tree.map(keep, param_specs(config), is_leaf=lambda x: isinstance(x, P))


def check_block(block: int, *, chunk_size: int, hash_unit: int) -> None:
    """ValueError unless chunk_size divides block and block divides hash_unit."""
    if chunk_size < 1 or block < 1 or block % chunk_size:
        raise ValueError(
            f"block={block} must be a multiple of KDA's chunk_size={chunk_size}: states are exact at its edges"
        )
    if hash_unit < 1 or hash_unit % block:
        raise ValueError(
            f"block={block} must divide hash_unit={hash_unit}: else a boundary that has a name would lie inside a block"
        )


def check_mesh(config: ModelConfig, mesh: Mesh) -> None:
    """ValueError for a mesh that splits anything but sequences and experts, or experts that do not divide."""
    for axis in ("pipe", "context"):
        if mesh.shape[axis] != 1:
            raise ValueError(f"mesh {axis}={mesh.shape[axis]}: serving spreads over data and expert; {axis} must be 1")
    check_divisible(config, dict(mesh.shape))
