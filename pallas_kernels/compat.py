"""What differs between the supported JAX versions, for kernels."""

from jax.experimental.pallas import mosaic_gpu as plgpu

InterpretParams = getattr(plgpu, "InterpretGPUParams", None)
if InterpretParams is None:  # jax 0.10
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams as InterpretParams

__all__ = ["InterpretParams"]
