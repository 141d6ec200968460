"""Rows of tokens written straight into the memory of the GPUs that compute them."""

from pallas_kernels.dispatch.addresses import first_copies
from pallas_kernels.dispatch.send import send_rows

__all__ = ["first_copies", "send_rows"]
