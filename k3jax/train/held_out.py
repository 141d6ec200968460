"""The held-out batches of an evaluation."""

from __future__ import annotations

import numpy as np

from k3jax.train.data import Batch, Corpus

MOST_BATCHES = 8
"""Most batches of one evaluation."""


def held_out_batches(corpus: Corpus, size: int, rows: np.ndarray | None = None) -> list[Batch]:
    """The same batches at every evaluation, and for every run with this data, sequence length and batch size.

    The whole split if it fits into MOST_BATCHES; else stretches that lie evenly apart. rows: of each batch, as in
    `Corpus.batches`.
    """
    total = corpus.held_out.num_sequences
    number = min(MOST_BATCHES, -(-total // size))
    whole = number * size >= total
    batches = []
    for i in range(number):
        position = i * size if whole else i * (total - size) // (number - 1)
        batches.append(next(corpus.batches("held_out", size, position, rows=rows)))
    return batches
