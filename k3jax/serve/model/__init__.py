"""The model side of serving: prefill in blocks, decode from pages, sampling, weights."""

from k3jax.serve.model.buckets import Buckets
from k3jax.serve.model.forward import Weights
from k3jax.serve.model.pages import PageLayout
from k3jax.serve.model.rows import Row, blocks
from k3jax.serve.model.sample import Sampler
from k3jax.serve.model.serving import ServingModel, Step
from k3jax.serve.model.weights import from_checkpoint, from_huggingface

__all__ = [
    "Buckets",
    "PageLayout",
    "Row",
    "Sampler",
    "ServingModel",
    "Step",
    "Weights",
    "blocks",
    "from_checkpoint",
    "from_huggingface",
]
