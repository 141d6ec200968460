"""From the mesh that the user asks for to devices, or to the mere shape of a mesh."""

from __future__ import annotations

import re

import jax

from k3jax.train import processes
from meshes import AXES, MeshSpec, require_devices

_FILL = re.compile("=-1(?=,|$)")


def resolve_mesh(text: str) -> MeshSpec:
    """The mesh as numbers. An axis of -1 is filled from the devices that are there, which starts JAX.

    Raises ValueError if the text is not a mesh, or for -1 where nothing says how many devices there should be.
    """
    if not _FILL.search(text):
        return MeshSpec.parse(text)
    MeshSpec.parse(_FILL.sub("=1", text))
    require_devices(1)
    if jax.default_backend() == "cpu" and jax.local_device_count() == 1:
        raise ValueError(
            f"mesh {text!r}: nothing to fill -1 from, there is no accelerator and fake devices are made to measure; "
            f"write the size as a number"
        )
    return MeshSpec.parse(text, jax.device_count())


def build_mesh(spec: MeshSpec) -> jax.sharding.Mesh:
    """The mesh on devices, on CPU made for it. ValueError if there are too few, or if they are no multiple of it.

    Of several processes each makes or has its own share; the mesh must be of all their devices.
    """
    number = processes.count()
    try:
        require_devices(-(-spec.num_devices // number))
    except RuntimeError as too_few:
        raise ValueError(f"mesh {spec}: {too_few}") from None
    if number > 1 and jax.device_count() != spec.num_devices:
        raise ValueError(
            f"mesh {spec} is of {spec.num_devices} devices, {number} processes have {jax.device_count()}: all must be in it"
        )
    MeshSpec.parse(str(spec), jax.device_count())
    return spec.build()


def abstract_mesh(spec: MeshSpec) -> jax.sharding.AbstractMesh:
    """The shape of a mesh, for plans: no device is touched."""
    return jax.sharding.AbstractMesh(
        tuple(spec.sizes.values()), AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES)
    )


def shape_of(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> MeshSpec:
    """The mesh as numbers."""
    return MeshSpec(**{axis: mesh.shape[axis] for axis in AXES})


def memory_limit(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> int | None:
    """Bytes that every device of the mesh lets a program have; None if one does not say, as on CPU, or if there is none."""
    devices = mesh.local_devices if isinstance(mesh, jax.sharding.Mesh) else []
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    told = [limit for limit in limits if limit is not None]
    return min(told) if told and len(told) == len(limits) else None


def compiler_options(platform: str) -> dict[str, bool] | None:
    """What XLA is told beside its defaults when it compiles for devices of this platform.

    GPUs: messages begin early and end late, with other work between; by default nearly all of them run alone.
    """
    return {"xla_gpu_enable_latency_hiding_scheduler": True} if platform in ("gpu", "cuda") else None
