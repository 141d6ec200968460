"""From what the user names (text, JSON lines, token arrays, the standard library) to one stream of tokens."""

from __future__ import annotations

import dataclasses
import glob
import itertools
import json
import math
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from k3jax.train.tokenizer import Tokenizer, open_tokenizer

_CHUNK = 1 << 22  # tokens looked at together when a whole stream is scanned: a memory map is never loaded at once

# Tests are excluded because they are mostly data; the others are not part of the library.
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclasses.dataclass(frozen=True)
class TokenStream:
    """Documents one after the other; document d is `tokens[starts[d]:starts[d + 1]]`, never empty."""

    tokens: np.ndarray
    """[total] of any integer dtype, perhaps a memory map."""
    starts: np.ndarray
    """[documents + 1] int64, from 0 to total."""

    def chunks(self) -> Iterator[np.ndarray]:
        """The tokens in order, some millions at a time."""
        return (self.tokens[i : i + _CHUNK] for i in range(0, len(self.tokens), _CHUNK))


def read_stream(spec: str, *, vocab_size: int, tokenizer: str | None = None) -> TokenStream:
    """All tokens that `spec` names: comma-separated items, each "stdlib", a file, a directory or a glob.

    A file's name says how it is read: `.jsonl` one document a line, `.npy` token ids, anything else UTF-8 text.
    Documents without text are left out. Raises ValueError or OSError, in one line that names the file.
    """
    text_tokenizer = None if tokenizer is None else open_tokenizer(tokenizer, vocab_size=vocab_size)
    streams = []
    # Text files in a row share one buffer; a single token array stays a memory map.
    for is_array, paths in itertools.groupby(find_files(spec), key=lambda path: path.suffix == ".npy"):
        if is_array:
            streams += [open_token_array(path, vocab_size=vocab_size) for path in paths]
        else:
            text_tokenizer = text_tokenizer or open_tokenizer(None, vocab_size=vocab_size)
            texts = itertools.chain.from_iterable(map(read_documents, paths))
            streams.append(_encode(texts, text_tokenizer))
    streams = [stream for stream in streams if len(stream.tokens)]
    if not streams:
        raise ValueError(f"data {spec!r} has no documents: every file is empty; at least one must hold text or tokens")
    return streams[0] if len(streams) == 1 else _concatenate(streams)


def find_files(spec: str) -> list[Path]:
    """The files that `spec` names, item by item, each item's in sorted order; never an empty list."""
    paths: list[Path] = []
    for item in spec.split(","):
        found = _find(item.strip(), spec)
        if not found:
            raise FileNotFoundError(f"data {item.strip()!r} matches no file; give a file, a directory or a glob")
        paths += found
    return paths


def _find(item: str, spec: str) -> list[Path]:
    if not item:
        raise ValueError(f"data {spec!r} has an empty item; give comma-separated files, directories, globs or 'stdlib'")
    if item == "stdlib":
        root = sysconfig.get_path("stdlib")
        return [path for path in _walk(root, excluding=_NOT_LIBRARY) if path.suffix == ".py"]
    if os.path.isdir(item):
        return _walk(item, excluding=set())
    if os.path.exists(item):
        return [Path(item)]
    if glob.has_magic(item):
        return [Path(name) for name in sorted(glob.glob(item, recursive=True)) if os.path.isfile(name)]
    raise FileNotFoundError(f"data {item!r} does not exist; give a file, a directory, a glob or 'stdlib'")


def _walk(root: str, excluding: set[str]) -> list[Path]:
    """Regular files below `root` but not hidden ones, sorted by relative path, so that no file system decides."""

    def refuse(error: OSError):  # os.walk would pass over a folder that it cannot read
        raise error

    paths = []
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if name not in excluding and not name.startswith(".")]
        paths += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted((path for path in paths if path.is_file()), key=lambda path: path.relative_to(root).parts)


def read_documents(path: Path) -> Iterator[str]:
    """Texts of one file's documents: its lines' `text` for `.jsonl`, else the whole file."""
    if path.suffix == ".jsonl":
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _text_of_line(line, f"{path}:{number}")
    else:
        try:
            raw = path.read_bytes()
        except OSError as error:  # a failure while reading names no file
            raise type(error)(f"{path}: {error.strerror}") from None
        yield _utf8(raw, str(path))


def _text_of_line(line: bytes, where: str) -> str:
    try:
        record = json.loads(_utf8(line, where))
    except (json.JSONDecodeError, RecursionError) as error:
        detail = (
            f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        )
        raise ValueError(f"{where}: not JSON ({detail}); each line must be an object with a 'text' field") from None
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        if not isinstance(record, dict):
            got = f"a JSON {type(record).__name__}"
        elif "text" in record:
            got = f"'text' of type {type(record['text']).__name__}"
        else:
            got = "no 'text' but " + (", ".join(map(repr, record)) or "no field at all")
        raise ValueError(f"{where}: got {got}; each line must be an object whose 'text' is a string")
    try:
        record["text"].encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise ValueError(f"{where}: 'text' is no valid Unicode ({error}); repair the line or leave it out") from None
    return record["text"]


def _utf8(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: not UTF-8, byte {error.start} is 0x{raw[error.start]:02x}; convert the file or leave it out"
        ) from None


def _encode(texts: Iterable[str], tokenizer: Tokenizer) -> TokenStream:
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32
    end_ids = [] if tokenizer.end_of_document is None else [tokenizer.end_of_document]
    end = np.asarray(end_ids, dtype).tobytes()
    buffer, starts = bytearray(), [0]
    for ids in tokenizer.encode(texts):
        if len(ids):
            buffer += ids.astype(dtype).tobytes() + end
            starts.append(len(buffer) // np.dtype(dtype).itemsize)
    return TokenStream(np.frombuffer(buffer, dtype), np.asarray(starts, np.int64))


def _concatenate(streams: list[TokenStream]) -> TokenStream:
    largest = max(int(chunk.max()) for stream in streams for chunk in stream.chunks())
    dtype = np.uint16 if largest < 1 << 16 else np.int32
    tokens = np.concatenate([stream.tokens for stream in streams], dtype=dtype, casting="unsafe")
    bases = np.cumsum([0] + [len(stream.tokens) for stream in streams])
    starts = [base + stream.starts[:-1] for base, stream in zip(bases[:-1], streams, strict=True)]
    return TokenStream(tokens, np.concatenate([*starts, bases[-1:]]))


def open_token_array(path: Path, *, vocab_size: int) -> TokenStream:
    """Memory-maps a `.npy` of token ids: one dimension is one document, two are one document a row.

    Raises ValueError if it is not a whole integer array with 0 <= id < vocab_size.
    """
    with open(path, "rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            read_header = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, fortran_order, dtype = read_header(file)
        except (ValueError, KeyError) as error:
            detail = str(error).splitlines()[0]
            raise ValueError(f"{path}: not a .npy array ({detail}); save token ids with numpy.save") from None
        offset = file.tell()
    if dtype.kind not in "iu" or len(shape) not in (1, 2):
        raise ValueError(
            f"{path}: got {dtype} of shape {shape}; token ids must be integers, [tokens] or [documents, tokens]"
        )
    count = math.prod(shape)
    needed, size = offset + count * dtype.itemsize, os.path.getsize(path)
    if size < needed:
        raise ValueError(f"{path}: truncated, {size} bytes; {dtype} of shape {shape} needs {needed}; write it again")
    if not count:
        raise ValueError(f"{path}: holds no tokens (shape {shape}); leave it out")
    array = np.memmap(path, dtype, mode="r", offset=offset, shape=shape, order="F" if fortran_order else "C")
    stream = TokenStream(np.asarray(array).reshape(-1), np.arange(0, count + 1, shape[-1], dtype=np.int64))
    least = min(int(chunk.min()) for chunk in stream.chunks())
    most = max(int(chunk.max()) for chunk in stream.chunks())
    if least < 0 or most >= vocab_size:
        worst = least if least < 0 else most
        raise ValueError(f"{path}: token id {worst}; ids must be at least 0 and less than vocab_size {vocab_size}")
    return stream
