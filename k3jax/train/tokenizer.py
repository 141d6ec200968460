"""Text to token ids and back: bytes by default, a local tokenizer.json on request."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

END_OF_DOCUMENT_NAMES = (
    "[EOS]", "[EOD]", "<|endoftext|>", "<|end_of_text|>", "<|end_of_document|>", "</s>", "<eos>", "<|eos|>",
)  # fmt: skip
"""A tokenizer.json does not say which token ends a document: the first of these that it has does."""

_DOCUMENTS_PER_CALL = 256  # the tokenizers library spreads the documents of one call over the cores


class ByteTokenizer:
    """UTF-8 bytes are ids 0..255; 256 ends a document."""

    name = "bytes"
    vocab_size = 257
    end_of_document = 256

    def encode(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """Ids of each text, as one-dimensional integer arrays, without `end_of_document`."""
        return (np.frombuffer(text.encode(), np.uint8) for text in texts)

    def decode(self, ids: Iterable[int | np.integer]) -> str:
        """Text of the ids, without those above 255; bytes that form no character become U+FFFD."""
        return bytes(int(i) for i in ids if 0 <= i < 256).decode(errors="replace")


class FileTokenizer:
    """A local tokenizer.json, read by the `tokenizers` library.

    Raises OSError if it cannot be read, ValueError if it is no tokenizer.
    """

    def __init__(self, path: str):
        from tokenizers import Tokenizer as Library  # late: imported only when asked for

        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise type(error)(f"tokenizer {path}: {error.strerror}; give a local tokenizer.json") from None
        try:
            self._tokenizer = Library.from_file(path)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path}: not a tokenizer.json of the tokenizers library ({_line(error)})") from None
        # Settings meant for fixed-size inference would cut or fill documents without a word.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise ValueError(f"{path}: the tokenizer's vocabulary is empty; it must hold at least one token")
        self.name = path
        self.vocab_size = max(ids.values()) + 1  # ids may have gaps
        self.end_of_document = next((ids[name] for name in END_OF_DOCUMENT_NAMES if name in ids), None)
        """None: documents are told apart by their segment ids alone."""

    def encode(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """Ids of each text, as one-dimensional integer arrays, without special tokens. Raises ValueError."""
        texts = iter(texts)
        while group := list(itertools.islice(texts, _DOCUMENTS_PER_CALL)):
            try:
                encodings = self._tokenizer.encode_batch_fast(group, add_special_tokens=False)
            except Exception as error:
                raise ValueError(f"{self.name}: cannot encode the text ({_line(error)})") from None
            for encoding in encodings:
                yield np.asarray(encoding.ids, np.int64)

    def decode(self, ids: Iterable[int | np.integer]) -> str:
        """Text of the ids, without special tokens and ids outside the vocabulary."""
        return self._tokenizer.decode([int(i) for i in ids if 0 <= i < self.vocab_size], skip_special_tokens=True)


Tokenizer = ByteTokenizer | FileTokenizer


def open_tokenizer(path: str | None, *, vocab_size: int) -> Tokenizer:
    """The byte tokenizer for None, else the local tokenizer.json at `path`.

    Raises ValueError if the file is no tokenizer or the model's `vocab_size` is too small for its ids, OSError if it
    cannot be read.
    """
    tokenizer = ByteTokenizer() if path is None else FileTokenizer(path)
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"tokenizer {tokenizer.name} has ids up to {tokenizer.vocab_size - 1}, but the model's vocab_size is "
            f"{vocab_size}: it must be at least {tokenizer.vocab_size}"
        )
    return tokenizer


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
