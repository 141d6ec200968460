"""The layers of K3 and Kimi Linear as flax.nnx modules. They know mesh axes only by the names in `Tokens`."""
