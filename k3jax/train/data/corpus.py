"""One stream of tokens cut into sequences, split in two, and served in an order that only data and seed decide.

N sequences of a batch, R of them that one process has, T tokens of a sequence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int32, Int64

from k3jax.train.data.sources import TokenStream, read_stream

HELD_OUT_EVERY = 20
"""One window of about this many is held out: 5 %."""
_BATCHES_AHEAD = 2


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences for one step. -1 marks padding in tokens, and in targets a token without loss."""

    tokens: Int32[np.ndarray, "R T"]
    targets: Int32[np.ndarray, "R T"]
    """The next token where it belongs to the same document."""
    segment_ids: Int32[np.ndarray, "R T"]
    """0 for a window's first document, 1 for its second, ...; padding is a last segment of its own."""
    sample_ids: Int64[np.ndarray, " N"]
    """Which window each sequence of the whole batch is; -1 for a sequence that is all padding."""
    position: int
    """Samples consumed when this batch is done: what a checkpoint stores to resume."""


@dataclasses.dataclass(frozen=True)
class Split:
    """Windows that are used for one purpose, as ascending ids."""

    windows: Int64[np.ndarray, " windows"]

    @property
    def num_sequences(self) -> int:
        return len(self.windows)


class Corpus:
    """Documents in file order, packed without gaps into windows of T tokens, and two disjoint splits of the windows.

    Window w holds tokens w*T to (w+1)*T of the stream and reads one further for its last target; the last window is
    padded. The splits depend on the number of windows alone, so runs with different seeds share their held-out loss.
    """

    def __init__(self, stream: TokenStream, *, seq_len: int, seed: int, name: str = "tokens"):
        total = len(stream.tokens)
        if seq_len < 1:
            raise ValueError(f"seq_len is {seq_len}; it must be at least 1")
        if total < seq_len + 1:
            raise ValueError(
                f"data {name!r} has {total} tokens, fewer than one sequence and its last target: needs at least "
                f"{seq_len + 1}; give more data or a smaller seq_len"
            )
        if total == len(stream.starts) - 1:
            raise ValueError(
                f"data {name!r} has {total} documents of one token each, so no token has a successor to predict; "
                f"needs documents of two tokens or more"
            )
        self._stream, self._seq_len, self._seed, self._name = stream, seq_len, seed, name
        num_windows = -(-(total - 1) // seq_len)  # the very last token is nobody's input: nothing follows it
        held_out = _held_out_windows(num_windows)
        self.train = Split(np.setdiff1d(np.arange(num_windows), held_out))
        self.held_out = Split(held_out)

    def batches(
        self, split: str, global_batch: int, position: int = 0, *, rows: Int64[np.ndarray, " R"] | None = None
    ) -> Iterator[Batch]:
        """Batches of `global_batch` sequences, starting after `position` samples.

        rows: which sequences of each batch to make, for a process that feeds only these; not given, all.
        "train": endless; every epoch is another permutation of the split, a batch may span two epochs, and the sample
        at each position is the same whatever the batch sizes before it. "held_out": one pass in order, the last batch
        filled with padding. A thread prepares the next batches; closing or dropping the iterator ends it.
        Raises ValueError for an unknown split, global_batch < 1, or position < 0.
        """
        if split not in ("train", "held_out"):
            raise ValueError(f"split is {split!r}; it must be 'train' or 'held_out'")
        if global_batch < 1 or position < 0:
            raise ValueError(f"global_batch is {global_batch} and position {position}; need at least 1 and 0")
        import grain  # late: a second of imports that --help should not wait for

        endless = split == "train"
        windows = (self.train if endless else self.held_out).windows
        samples = grain.MapDataset.range(len(windows))
        if endless:
            # grain shuffles epoch e with seed + e: hashing keeps the epochs of runs with nearby seeds apart.
            samples = samples.shuffle(seed=int(hashlib.sha256(str(self._seed).encode()).hexdigest()[:8], 16)).repeat()
        batches = samples[position:].batch(
            global_batch,
            drop_remainder=endless,  # only held-out sequences can run out
            batch_fn=lambda samples: self._batch(windows[np.asarray(samples)], size=global_batch, rows=rows),
        )
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_BATCHES_AHEAD)
        return self._count(iter(batches.to_iter_dataset(options)), position)

    @staticmethod
    def _count(batches, position: int) -> Iterator[Batch]:
        with contextlib.closing(batches):
            for batch in batches:
                position += int((batch.sample_ids >= 0).sum())
                yield dataclasses.replace(batch, position=position)

    def _batch(self, windows: Int64[np.ndarray, " windows"], *, size: int, rows: np.ndarray | None = None) -> Batch:
        """The windows as arrays, with sequences of padding up to `size`; of these some rows, or all."""
        ids = np.full(size, -1, np.int64)
        ids[: len(windows)] = windows
        total, made = len(self._stream.tokens), ids if rows is None else ids[rows]
        at = made[:, None] * self._seq_len + np.arange(self._seq_len + 1)  # [R, T+1] positions in the stream
        at[made < 0] = total
        document = np.searchsorted(self._stream.starts, at, side="right").astype(np.int32)
        exists = at < total
        tokens = self._stream.tokens[np.minimum(at, total - 1)].astype(np.int32)
        tokens[~exists] = -1
        followed = exists[:, 1:] & (document[:, 1:] == document[:, :-1])
        return Batch(
            tokens=tokens[:, :-1],
            targets=np.where(followed, tokens[:, 1:], np.int32(-1)),
            segment_ids=document[:, :-1] - document[:, :1],
            sample_ids=ids,
            position=0,
        )

    def unigram_entropy(self) -> float:
        """Entropy in nats of the training targets' frequencies: the loss of the best model that ignores its input.

        Raises ValueError if there are no training targets, which takes a tiny corpus of one-token documents.
        """
        # Every token but a document's first is the target of exactly one window; take away the held-out ones.
        stream = self._stream
        chunk_counts = [np.bincount(chunk.astype(np.int64)) for chunk in stream.chunks()]
        counts = np.zeros(max(map(len, chunk_counts)), np.int64)
        for chunk_count in chunk_counts:
            counts[: len(chunk_count)] += chunk_count
        counts -= np.bincount(stream.tokens[stream.starts[:-1]].astype(np.int64), minlength=len(counts))
        for windows in np.array_split(self.held_out.windows, 1 + self.held_out.num_sequences * self._seq_len // 2**20):
            targets = self._batch(windows, size=len(windows)).targets
            counts -= np.bincount(targets[targets >= 0], minlength=len(counts))
        counts = counts[counts > 0]
        if not counts.size:
            raise ValueError(f"data {self._name!r} has 0 training targets; needs longer documents or more of them")
        return float(np.log(counts.sum()) - (counts * np.log(counts)).sum() / counts.sum())

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 hex digits of tokens, documents, seq_len and seed: equal means the same samples at every position."""
        digest = hashlib.blake2b(f"packed in file order, {self._seq_len}, {self._seed}".encode(), digest_size=8)
        digest.update(self._stream.starts.astype("<i8").tobytes())
        for chunk in self._stream.chunks():
            digest.update(chunk.astype("<i4").tobytes())
        return digest.hexdigest()

    def describe(self) -> str:
        """One line for logs."""
        return (
            f"{self._name}: {len(self._stream.starts) - 1:,} documents, {len(self._stream.tokens):,} tokens, "
            f"{self.train.num_sequences:,} training and {self.held_out.num_sequences:,} held-out sequences of "
            f"{self._seq_len}, fingerprint {self.fingerprint}"
        )


def _held_out_windows(num_windows: int) -> np.ndarray:
    """One window of each of equal stretches of the corpus; none if there is only one window."""
    stretches = max(1, num_windows // HELD_OUT_EVERY) if num_windows > 1 else 0
    edges = np.arange(stretches + 1) * num_windows // max(1, stretches)
    # A fixed place in each stretch could fall in step with documents of equal length. Multiples of the golden ratio
    # fall in step with nothing, and they are the same in every release of every library.
    places = (np.arange(1, stretches + 1, dtype=np.uint64) * np.uint64(2654435769)) % np.uint64(2**32)
    width = np.diff(edges).astype(np.uint64)
    return edges[:-1] + (places * width >> np.uint64(32)).astype(np.int64)


def open_corpus(spec: str, *, vocab_size: int, seq_len: int, seed: int, tokenizer: str | None = None) -> Corpus:
    """The corpus that `spec` names: "stdlib", text files, directories, globs, `.jsonl`, `.npy`, separated by commas.

    Text becomes bytes, each document closed by id 256, or the ids of a local `tokenizer` (a tokenizer.json), closed by
    its end-of-document token if it has one; `.npy` arrays are used as they are. Raises ValueError or OSError, in one
    line, for data that cannot be read or used whole.
    """
    stream = read_stream(spec, vocab_size=vocab_size, tokenizer=tokenizer)
    return Corpus(stream, seq_len=seq_len, seed=seed, name=spec)
