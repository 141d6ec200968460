"""Which groups of ranks share a host. Ranks fill hosts in their order, row-major in AXES: context and expert come first."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from meshes.spec import AXES, MeshSpec


class Placement(NamedTuple):
    """Of the groups of ranks that differ on some axes only."""

    ranks: int
    """In a group."""
    hosts: int
    """That a group is spread over, at most."""
    inside: float
    """Share of a rank's peers in its group that are in its own host, the mean over ranks; 1 for a group of one."""
    steps_inside: float
    """Share of the steps from a rank to the next in its group, in a ring, that stay in a host."""


def placement(spec: MeshSpec, axes: str | Iterable[str], per_host: int) -> Placement:
    """Of the groups along one axis, or along several together. ValueError for hosts of less than one device."""
    if per_host < 1:
        raise ValueError(f"a host of {per_host} devices: it has 1 or more")
    along = [axis for axis in AXES if axis in ((axes,) if isinstance(axes, str) else tuple(axes))]
    size = math.prod(spec.sizes[axis] for axis in along)
    ranks = np.arange(spec.num_devices).reshape(tuple(spec.sizes.values()))
    groups = np.moveaxis(ranks, [AXES.index(axis) for axis in along], range(-len(along), 0)).reshape(-1, size)
    host = groups // per_host
    on_each_host = [np.unique(of_group, return_counts=True)[1] for of_group in host]
    peers = np.mean([(count * (count - 1)).sum() / size for count in on_each_host])
    return Placement(
        ranks=size,
        hosts=max(map(len, on_each_host)),
        inside=float(peers) / (size - 1) if size > 1 else 1.0,
        steps_inside=float((host == np.roll(host, -1, axis=1)).mean()),
    )
