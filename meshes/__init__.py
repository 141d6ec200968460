"""What a device is: the named mesh, fake devices, and who is who. Knows no model."""

from meshes.devices import require_devices
from meshes.membership import Membership, membership
from meshes.spec import AXES, MeshSpec

__all__ = ["AXES", "Membership", "MeshSpec", "membership", "require_devices"]
