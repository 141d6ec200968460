"""What differs between the supported JAX versions, for kernels."""

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

InterpretParams = getattr(plgpu, "InterpretGPUParams", None)
if InterpretParams is None:  # jax 0.10
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams as InterpretParams

ALIGNED_PEERS = jax.__version_info__ >= (0, 12)
"""Whether the compiler is told that a peer's array is aligned. If not it splits every store there into single elements."""

__all__ = ["ALIGNED_PEERS", "InterpretParams"]
