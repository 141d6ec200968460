"""Eight fake CPU devices before JAX starts; shapes and types of public functions are checked while tests run."""

import os
from importlib.metadata import version

import meshes

# Tests compile much and compute little.
flags = ["--xla_backend_optimization_level=0"]
if version("jaxlib").startswith("0.10."):  # newer ones do not know it, and abort
    flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # for tests that compile for absent GPUs
meshes.require_devices(8)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

from meshes.absent import absent_devices  # noqa: E402

# A busy machine is no failure.
settings.register_profile("k3jax", deadline=None)
settings.load_profile("k3jax")
jaxtyping.install_import_hook(["k3jax", "pallas_kernels"], "beartype.beartype")


@pytest.fixture(scope="session")
def absent_gpus():
    """Eight H200s to compile for; a test that asks for them needs the extra gpu-compile, and Python 3.12."""
    try:
        return absent_devices("h200", per_host=8)
    except RuntimeError as missing:
        pytest.skip(str(missing))


@pytest.fixture
def double_precision(monkeypatch):
    """What is float32 whatever the compute dtype (gates, norms, states, sums of gradients) is float64, as in dtype="float64".

    Little is left of rounding then: what is equal but for the order of sums differs by 1e-14.
    """
    monkeypatch.setattr(jnp, "float32", jnp.float64)
    jaxtyping.config.update("jaxtyping_disable", True)  # annotations say float32
    with jax.enable_x64(True):
        yield
    jaxtyping.config.update("jaxtyping_disable", False)


def pytest_collection_modifyitems(items):
    """Tests that compile whole steps come first: so that in the end no worker is left alone with a file of them."""
    first = ("train", "experiments", "activations")
    items.sort(key=lambda item: item.path.parent.name not in first)
