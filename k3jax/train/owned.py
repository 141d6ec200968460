"""What a checkpoint knows of an array that lies in pieces with its owners: where the values of each layer are in it.

Such an array is a record as it is; see `parallel.owners`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from k3jax.parallel.owners import Owners

Read = Callable[[str, tuple[slice, ...]], np.ndarray]
"""(name, index) -> part of a named array."""


class OwnedPlace(NamedTuple):
    """Where a named array is in an owners' array: [stacked dims, batch dims, shards of the other dims, elements]."""

    record: str
    dtype: str
    shape: tuple[int, ...]
    at: tuple[int, ...]
    """Index of the stacked dims."""
    batch: int
    """How many of the array's own dims are dims of the record."""
    shards: tuple[int, ...]
    """Which of its other dims are divided into shards."""
    sizes: tuple[int, ...]
    """Of the record's last dims: shards of each of these, and elements with padding. Other owners, other sizes."""

    def take(self, record: Any) -> np.ndarray:
        """The array out of its record. Anything that is sliced like an array will do, and is sliced once."""
        held = np.asarray(record[self.at])
        counts = self.sizes[:-1]
        local = list(self.shape[self.batch :])
        for dim, count in zip(self.shards, counts, strict=True):
            local[dim - self.batch] //= count
        apart = held[..., : math.prod(local)].reshape((*held.shape[:-1], *local))
        first = self.batch + len(counts)
        order = [*range(self.batch), *(first + i for i in range(len(local)))]
        for i, dim in enumerate(self.shards):  # what a dim was divided into goes in front of its rest
            order.insert(order.index(first + dim - self.batch), self.batch + i)
        return apart.transpose(order).reshape(self.shape)


class OwnedLeaf(NamedTuple):
    """A leaf of the state that its owners hold."""

    number: int
    """Its place among the leaves of the state."""
    record: str
    name: str
    """Of its arrays, with {} for the layer; of a leaf that is not of layers, all there is."""
    layers: np.ndarray | None
    """Layer of each place of the stacked dims, -1 for none that is stored; None if it is not of layers."""
    owners: Owners
    dtype: str

    @property
    def stacked(self) -> int:
        """Dims of the whole parameter in front of those of one layer."""
        return 0 if self.layers is None else self.layers.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one named array."""
        return self.owners.shape[self.stacked :]

    def places(self) -> Iterator[tuple[str, OwnedPlace]]:
        """Of every named array."""
        batch, shards = self.owners.kept - self.stacked, tuple(dim - self.stacked for dim in self.owners.shards)
        sizes = self.owners.owned_shape[self.owners.kept :]
        for name, at in self._arrays():
            yield name, OwnedPlace(self.record, self.dtype, self.shape, at, batch, shards, sizes)

    def part(self, read: Read) -> Callable[[tuple[slice, ...]], np.ndarray]:
        """What a device holds of the record, by its index, of arrays that `read` gives part by part.

        The elements of all owners of one device's part of the parameter are in host memory at a time.
        """
        made: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

        def of_device(index: tuple[slice, ...]) -> np.ndarray:
            *before, elements = index
            key = tuple((at.start, at.stop) for at in before)
            if key not in made:
                made.clear()
                made[key] = self._stack(read, before)
            return made[key][..., elements]

        return of_device

    def _stack(self, read: Read, index: list[slice]) -> np.ndarray:
        owners = self.owners
        result = np.zeros((*(at.stop - at.start for at in index), owners.padded), self.dtype)
        wanted = index[self.stacked : owners.kept] + [slice(0, size) for size in owners.shape[owners.kept :]]
        for dim, shard in zip(owners.shards, index[owners.kept :], strict=True):
            size = owners.local[dim]
            wanted[dim - self.stacked] = slice(shard.start * size, shard.stop * size)
        for name, at in self._arrays():
            if all(span.start <= i < span.stop for i, span in zip(at, index, strict=False)):
                here = tuple(i - span.start for i, span in zip(at, index, strict=False))
                values = read(name, tuple(wanted))
                result[here][..., : owners.elements] = values.reshape(*result[here].shape[:-1], owners.elements)
        return result

    def _arrays(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, index of the stacked dims) of every named array."""
        if self.layers is None:
            yield self.name, ()
            return
        for at in map(tuple, np.argwhere(self.layers >= 0).tolist()):
            yield self.name.format(self.layers[at]), at
