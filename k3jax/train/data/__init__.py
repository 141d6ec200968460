"""Training data: sources of text and tokens, packed into sequences, in an order that resumes exactly."""

from k3jax.train.data.corpus import Batch, Corpus, Split, open_corpus

__all__ = ["Batch", "Corpus", "Split", "open_corpus"]
