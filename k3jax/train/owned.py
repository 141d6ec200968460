"""What a checkpoint knows of an array that lies in pieces with its owners: where the values of each layer are in it.

Such an array is a record as it is. Which of its units are whose layer's is a matter of counting; see `parallel.owners`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from k3jax.parallel.owners import Owners

Read = Callable[[str, tuple[slice, ...]], np.ndarray]
"""(name, index) -> part of a named array."""


class OwnedPlace(NamedTuple):
    """Where a named array is in an owners' array, [kept dims, parts of batch dims, owners x slots, unit]."""

    record: str
    dtype: str
    shape: tuple[int, ...]
    at: tuple[int, ...]
    """Index of the kept dims."""
    units: tuple[int, int]
    """From which to before which."""
    parts: tuple[int, ...]
    """Dims of the named array that are divided among parts."""

    def take(self, record: Any) -> np.ndarray:
        """The array out of its record. Anything that is sliced like an array will do, and is sliced once."""
        every = (slice(None),) * len(self.parts)
        held = np.asarray(record[(*self.at, *every, slice(*self.units))])
        counts = held.shape[: len(self.parts)]
        local = list(self.shape)
        for dim, count in zip(self.parts, counts, strict=True):
            local[dim] //= count
        apart, order = held.reshape((*counts, *local)), [i + len(counts) for i in range(len(local))]
        for part, dim in enumerate(self.parts):  # what a dim was divided into goes in front of its rest
            order.insert(order.index(dim + len(counts)), part)
        return apart.transpose(order).reshape(self.shape)


class OwnedLeaf(NamedTuple):
    """A leaf of the state that its owners hold."""

    number: int
    """Its place among the leaves of the state."""
    record: str
    name: str
    """Of its arrays, with {} for the layer; of a leaf that is not of layers, all there is."""
    layers: np.ndarray | None
    """Layer of each of [kept dims, stacked dim], -1 for none that is stored; None if it is not of layers."""
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
        parts = tuple(dim - self.stacked for dim in self.owners.batch_parts)
        for layer, at, units in self._units():
            yield self._named(layer), OwnedPlace(self.record, self.dtype, self.shape, at, units, parts)

    def part(self, read: Read) -> Callable[[tuple[slice, ...]], np.ndarray]:
        """What a device holds of the record, by its index, of arrays that `read` gives part by part.

        The units of one stage and one part of the batch dims are in host memory at a time.
        """
        made: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

        def of_device(index: tuple[slice, ...]) -> np.ndarray:
            owners = self.owners
            dim = owners.kept + len(owners.batch_parts)
            before = tuple((at.start, at.stop) for at in index[:dim])
            if before not in made:
                made.clear()
                made[before] = self._stack(read, index[:dim])
            return made[before][(slice(None),) * dim + (index[dim],)]

        return of_device

    def _stack(self, read: Read, index: tuple[slice, ...]) -> np.ndarray:
        owners = self.owners
        sizes = [at.stop - at.start for at in index]
        result = np.zeros((*sizes, owners.owners * owners.slots, *owners.unit), self.dtype)
        wanted = [slice(0, size) for size in self.shape]
        for dim, part in zip(owners.batch_parts, index[owners.kept :], strict=True):
            size = owners.local[dim - owners.kept]
            wanted[dim - self.stacked] = slice(part.start * size, part.stop * size)
        for layer, at, (start, stop) in self._units():
            here = [i - span.start for i, span in zip(at, index, strict=False)]
            if all(span.start <= i < span.stop for i, span in zip(at, index, strict=False)):
                values = read(self._named(layer), tuple(wanted))
                ones = (0,) * len(owners.batch_parts)
                result[(*here, *ones, slice(start, stop))] = values.reshape(stop - start, *owners.unit)
        return result

    def _units(self) -> Iterator[tuple[int | None, tuple[int, ...], tuple[int, int]]]:
        """(layer, index of the kept dims, units) of every named array."""
        owners = self.owners
        first = owners.first * owners.slots
        if self.layers is None:
            yield None, (), (first, first + owners.units)
            return
        each = owners.units // self.layers.shape[-1]
        for *at, i in np.argwhere(self.layers >= 0).tolist():
            start = first + i * each
            yield int(self.layers[(*at, i)]), tuple(at), (start, start + each)

    def _named(self, layer: int | None) -> str:
        return self.name if layer is None else self.name.format(layer)
