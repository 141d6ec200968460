"""How fast a rank computes and moves bytes: what the costs of a plan of activations come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Rates of one rank; the defaults are about those of an H100 in a node with NVLink and PCIe 5.

    Raises ValueError for rates that are not positive; those of a storage may be 0: there is none.
    """

    host_bandwidth: float = 50e9
    """Bytes a second between device and host memory; 0: nothing is offloaded to the host."""
    remote_bandwidth: float = 100e9
    """Bytes a second to another rank of the pipeline; 0: nothing is parked there."""
    memory_bandwidth: float = 3.35e12
    """Bytes a second of the device's own memory."""
    flops: float = 4e14
    """Floating-point operations a second that matrix products reach."""

    def __post_init__(self):
        for name, rate in vars(self).items():
            least = "at least 0" if name in ("host_bandwidth", "remote_bandwidth") else "above 0"
            if not 0 <= rate < float("inf") or (rate == 0 and least == "above 0"):
                raise ValueError(f"--{name.replace('_', '-')}={rate} must be finite and {least}")
