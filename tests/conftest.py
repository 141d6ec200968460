"""Eight fake CPU devices before JAX starts; shapes and types of public functions are checked while tests run."""

import os

import meshes

# Tests compile much and compute little.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
meshes.require_devices(8)

from jaxtyping import install_import_hook  # noqa: E402

install_import_hook(["k3jax", "pallas_kernels"], "beartype.beartype")
