"""Hugging Face directories: config.json and safetensors of Kimi Linear and of K3's language model."""

from k3jax.interop.huggingface.config import config_from_hf as config_from_hf
from k3jax.interop.huggingface.config import config_to_hf as config_to_hf
from k3jax.interop.huggingface.weights import Source as Source
from k3jax.interop.huggingface.weights import open_directory as open_directory
from k3jax.interop.huggingface.weights import write_directory as write_directory
