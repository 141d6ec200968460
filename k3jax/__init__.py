"""The Kimi K3 system in JAX: one training step over a data, pipe, expert, context mesh."""
