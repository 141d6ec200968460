"""Matrices whose elements are shared out, whole for a moment: each has one owner that works on it.

Owners of elements (`parallel.owners`) hold a slice of every matrix. For what needs a matrix in one piece, one of them fetches
the slices that it lacks, works, and sends back what others need: an all-to-all each way. Matrices of one shape are dealt in
rounds, so many to an owner at a time; while a round computes, the next one arrives and the one before leaves, so that no more
than three rounds of matrices exist at any time. K3 report, pre-training: Muon.

D owners, N matrices of a device's part, A matrices of an owner in a round, m rows, n columns, e elements of a slice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from k3jax.compat import vary_like
from k3jax.parallel.boxes import vary
from k3jax.parallel.owners import Owners
from meshes import AXES

ROUND_BYTES = 256 << 20
"""Float32 bytes of an owner's matrices in one round: enough to keep a GPU busy, little beside a model."""


@dataclass(frozen=True)
class Deal:
    """Matrices of one shape with the same owners. They may be of several parameters: rows says how many of each."""

    like: Owners
    """Of one of the parameters; its last two dims are the matrix."""
    rows: tuple[int, ...]
    """Matrices of a device's part of each parameter, or pieces of them."""
    first: int = 0
    """The first owner that has a matrix, where there are fewer matrices than owners."""
    round_bytes: int = ROUND_BYTES

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a matrix: m, n."""
        return self.like.shape[-2:]

    @property
    def pieces(self) -> tuple[int, str] | None:
        """The dim of a matrix that is sharded, -2 or -1, and its axis."""
        found = [(dim - len(self.like.shape), axis) for dim, axis in self.like.shards.items()]
        return found[0] if found else None

    @property
    def axes(self) -> tuple[str, ...]:
        """Over which matrices are dealt: those that hold slices of them."""
        return (*self.like.axes, self.pieces[1]) if self.pieces else self.like.axes

    @property
    def owners(self) -> int:
        return math.prod(self.like.sizes[axis] for axis in self.axes)

    @property
    def matrices(self) -> int:
        return sum(self.rows)

    @property
    def slots(self) -> int:
        """Matrices of an owner, padding included."""
        return self.rounds * self.per_round

    @property
    def rounds(self) -> int:
        most = max(1, self.round_bytes // (4 * math.prod(self.shape)))
        return math.ceil(math.ceil(self.matrices / self.owners) / most)

    @property
    def per_round(self) -> int:
        return math.ceil(math.ceil(self.matrices / self.owners) / self.rounds)

    @property
    def bytes_sent(self) -> float:
        """By a rank, float32, to owners and back; padding too."""
        messages = 2 * self.rounds + (self.rounds > 1)  # where rounds overlap, the first that leaves is empty
        return 4 * messages * self.owners * self.per_round * self.like.owned * (1 - 1 / self.owners)

    @property
    def held(self) -> np.ndarray:
        """Matrices of each owner, padding left out; [data, pipe, expert, context], 1 for axes that do not matter."""
        place = np.arange(self.slots * self.owners).reshape(self.slots, self.owners) - self.first
        held = ((place >= 0) & (place < self.matrices)).sum(axis=0)
        held = held.reshape([self.like.sizes[axis] for axis in self.axes])
        order = sorted(range(held.ndim), key=lambda dim: AXES.index(self.axes[dim]))
        sizes = [self.like.sizes[axis] if axis in self.axes else 1 for axis in AXES]
        return held.transpose(order).reshape(sizes)

    # ---- inside shard_map -------------------------------------------------------------------------------------------------

    def run(self, function: Callable[[jax.Array], jax.Array], slices: list[jax.Array]) -> list[jax.Array]:
        """function([A, m, n]) -> [A, m, n] on whole matrices; slices: of each parameter, [rows, e], before and after."""
        width = slices[0].shape[-1]
        after = self.slots * self.owners - self.first - self.matrices
        rows = jnp.pad(jnp.concatenate(slices), [(self.first, after), (0, 0)])
        # Neighbours go to neighbouring owners.
        rounds = rows.reshape(self.rounds, self.per_round, self.owners, width).swapaxes(1, 2)
        rounds = vary(rounds.reshape(self.rounds, -1, width), self.axes)

        def turn(carry, arriving):
            arrived, done = carry
            return (self.to_owners(arriving), function(arrived)), self.from_owners(done)

        arrived = self.to_owners(rounds[0])
        if self.rounds == 1:
            left = self.from_owners(function(arrived))[None]
        else:
            # What leaves in the first turn is nothing yet.
            (arrived, done), left = lax.scan(turn, (arrived, vary_like(jnp.zeros_like(arrived), arrived)), rounds[1:])
            last = self.from_owners(done), self.from_owners(function(arrived))
            left = jnp.concatenate([left[1:], jnp.stack(last)])
        rows = left.reshape(self.rounds, self.owners, self.per_round, width).swapaxes(1, 2).reshape(-1, width)
        rows = rows[self.first : self.first + self.matrices]
        return jnp.split(rows, np.cumsum(self.rows[:-1]))

    def to_owners(self, slices: jax.Array) -> jax.Array:
        """Slices of the matrices of all owners, [D x A, e], to all slices of this owner's: its matrices, [A, m, n]."""
        mine = lax.all_to_all(slices, self.axes, split_axis=0, concat_axis=0, tiled=True)
        pieces = self.like.sizes[self.pieces[1]] if self.pieces else 1
        apart = mine.reshape(self.like.replicas, pieces, self.per_round, -1).transpose(2, 1, 0, 3)
        parts = self.like.unflat(apart.reshape(self.per_round, pieces, -1))
        if not self.pieces:
            return parts[:, 0]
        return jnp.moveaxis(parts, 1, self.pieces[0] - 1).reshape(self.per_round, *self.shape)

    def from_owners(self, matrices: jax.Array) -> jax.Array:
        """Inverse of `to_owners`."""
        parts = matrices[:, None]
        if self.pieces:
            dim, axis = self.pieces
            split = list(matrices.shape)
            split[dim : dim + 1 or None] = [self.like.sizes[axis], self.like.local[dim]]
            parts = jnp.moveaxis(matrices.reshape(split), dim - 1, 1)
        flat = self.like.flat(parts)
        apart = flat.reshape(self.per_round, flat.shape[1], self.like.replicas, -1).transpose(2, 1, 0, 3)
        slices = apart.reshape(self.owners * self.per_round, -1)
        return lax.all_to_all(slices, self.axes, split_axis=0, concat_axis=0, tiled=True)


def deals(owners: Mapping[str, Owners], round_bytes: int = ROUND_BYTES) -> dict[tuple[str, ...], Deal]:
    """How the matrices of these parameters are dealt: {names: deal}; those of one shape with the same owners together.

    Raises ValueError for a matrix that is sharded in two dims.
    """
    alike: dict[tuple, list[str]] = {}
    for name, each in owners.items():
        if len(each.shards) > 1:
            raise ValueError(f"{name}, {each.shape}, is sharded as {each.spec}: of a matrix at most one dim may be")
        shards = [(dim - len(each.shape), axis) for dim, axis in each.shards.items()]
        alike.setdefault((each.shape[-2:], each.axes, *shards), []).append(name)
    rows = lambda names: tuple(math.prod(owners[name].local[:-2]) for name in names)
    made = {tuple(names): Deal(owners[names[0]], rows(names), 0, round_bytes) for names in alike.values()}
    return dict(zip(made, spread(list(made.values())), strict=True))


def spread(deals: Sequence[Deal]) -> list[Deal]:
    """The same, with the owners of deals of fewer matrices than owners chosen so that work is spread.

    Greedy, the largest matrices first: each deal begins where the most loaded of all ranks then has the least.
    """
    result, load = list(deals), np.zeros(())
    for i in sorted(range(len(deals)), key=lambda i: (-cost(deals[i]), i)):
        starts = range(max(1, deals[i].owners - deals[i].matrices + 1))
        tried = [dataclasses.replace(deals[i], first=first) for first in starts]
        loads = [load + cost(each) * each.held for each in tried]
        best = min(starts, key=lambda first: (loads[first].max(), first))
        result[i], load = tried[best], loads[best]
    return result


def cost(deal: Deal) -> int:
    """Of one matrix, in the unit of `work`: products of its smaller Gram matrix."""
    small, large = sorted(deal.shape)
    return small * small * large


def work(deals: Sequence[Deal]) -> np.ndarray:
    """min(m, n)² · max(m, n) summed over the matrices of each device, [data, pipe, expert, context]."""
    total = np.zeros([deals[0].like.sizes[axis] for axis in AXES] if deals else ())
    for deal in deals:
        total = total + cost(deal) * deal.held
    return total
