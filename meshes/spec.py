"""The mesh as text and as arithmetic: which axes there are, how large, and the jax.sharding.Mesh they describe."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # jax takes most of a second to import; parsing and the who-is-who tables do without it
    import jax

AXES = ("data", "pipe", "expert", "context")
"""Mesh axes, slowest first: ranks count row-major, so neighbours on the context axis are consecutive ranks."""

_SIZE = re.compile(r"[1-9][0-9]{0,8}")  # ASCII digits only: int() would also take "1_0", "+2" and other scripts' digits


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """Sizes of the four mesh axes; every size is a resolved positive integer, never -1.

    Raises ValueError if a size is not a positive integer.
    """

    data: int = 1
    pipe: int = 1
    expert: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if type(size) is not int or size < 1:
                raise ValueError(f"mesh axis {axis}={size!r}: a size is a positive integer; axes are {_names(AXES)}")

    @classmethod
    def parse(cls, text: str, num_devices: int | None = None) -> MeshSpec:
        """Mesh described by "data=2,pipe=2": axes in any order, missing axes are 1, one may be -1 (fills the devices).

        With num_devices given, the mesh must also fit: its size divides num_devices, so data=3 on 8 devices is refused.
        Without it, -1 asks JAX for its devices (and starts its backend); nothing else touches JAX.
        Spaces are refused. Raises ValueError, one line, naming the bad token, the valid axes and the device count.
        """
        count = "" if num_devices is None else f" ({num_devices} devices)"

        def refuse(what: str) -> ValueError:
            return ValueError(
                f"mesh {text!r}{count}: {what}; write it as data=2,pipe=2 with axes {_names(AXES)}, each at most once"
            )

        if not text:
            raise refuse("it is empty")
        sizes: dict[str, int] = {}
        for token in text.split(","):
            axis, equals, size = token.partition("=")
            if not token:
                raise refuse("there is an empty token before, between or after the commas")
            if any(letter.isspace() for letter in token):
                raise refuse(f"token {token!r} has a space in it, remove it")
            if not equals:
                raise refuse(f"token {token!r} has no '='")
            if axis not in AXES:
                raise refuse(f"token {token!r} names an unknown axis {axis!r}")
            if axis in sizes:
                raise refuse(f"token {token!r} gives axis {axis!r} again")
            if not _SIZE.fullmatch(size) and size != "-1":
                raise refuse(
                    f"token {token!r} has the size {size!r}, which is neither a positive integer below 10^9 nor -1"
                )
            if size == "-1" and -1 in sizes.values():
                raise refuse(f"token {token!r} is the second -1, only one axis can be filled from the device count")
            sizes[axis] = int(size)

        known = math.prod(size for size in sizes.values() if size != -1)
        if -1 in sizes.values():
            available = _count_devices() if num_devices is None else num_devices
            filled = next(axis for axis, size in sizes.items() if size == -1)
            if available < known or available % known:
                raise refuse(
                    f"token '{filled}=-1' cannot be filled: the other axes need a multiple of {known} devices, "
                    f"there are {available}"
                )
            sizes[filled] = available // known
        elif num_devices is not None and (num_devices < known or num_devices % known):
            raise refuse(f"it needs {known} devices, which does not divide the {num_devices} there are")
        return cls(**sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of every axis, in AXES order."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def num_devices(self) -> int:
        """Devices in the mesh, the product of the sizes."""
        return math.prod(self.sizes.values())

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.sizes.items())

    def build(self, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
        """Mesh with axes AXES, all of type Auto, over the first num_devices of `devices` (default: jax.devices()).

        Devices keep their order, so mesh.devices.flat[rank] is devices[rank] and `membership` tells the truth.
        Raises ValueError if there are too few devices; devices beyond num_devices stay unused.
        """
        import jax
        import numpy as np

        available = jax.devices() if devices is None else list(devices)
        if len(available) < self.num_devices:
            raise ValueError(
                f"mesh {self} needs {self.num_devices} devices, {len(available)} are available: use smaller axes, "
                f"or call meshes.require_devices({self.num_devices}) before JAX starts"
            )
        grid = np.array(available[: self.num_devices], dtype=object).reshape(tuple(self.sizes.values()))
        return jax.sharding.Mesh(grid, AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))


def _names(axes: Sequence[str]) -> str:
    return ", ".join(axes)


def _count_devices() -> int:
    import jax

    return jax.device_count()
