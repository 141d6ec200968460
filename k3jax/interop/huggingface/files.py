"""Directories of safetensors files: headers first, values by memory map, so that a tensor need never be in memory whole.

A file is eight bytes that give the length of a JSON header, the header {name: {dtype, shape, data_offsets}}, and the
values. (The safetensors package reads whole tensors into numpy, and writes only what is all there.)
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

INDEX = "model.safetensors.index.json"
DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
"""Those that float32 holds exactly."""


class Stored(NamedTuple):
    """A tensor in a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Byte in the file at which its values begin."""

    def open(self, mode: Any = "r") -> np.ndarray:
        """The values, mapped from the file."""
        if math.prod(self.shape) == 0:
            return np.zeros(self.shape, DTYPES[self.dtype])
        return np.memmap(self.file, DTYPES[self.dtype], mode, self.start, self.shape)


def read_directory(directory: Path) -> dict[str, Stored]:
    """All tensors by name. ValueError, in one line, if a file is cut short or the index and the files disagree."""
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory} is not a directory")
    index = directory / INDEX
    if not index.exists():
        files = sorted(directory.glob("*.safetensors"))
        if len(files) != 1:
            raise FileNotFoundError(f"{directory} has {len(files)} .safetensors files and no {INDEX}")
        return read_header(files[0])
    try:
        places: dict[str, str] = json.loads(index.read_text())["weight_map"]
        names = sorted(set(places.values()))
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"{index}: not an index, it has no weight_map of names to files") from None
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{directory} lacks {', '.join(missing)}, which {INDEX} names")
    found: dict[str, Stored] = {}
    for name in names:
        found |= read_header(directory / name)
    unlisted = [name for name, stored in found.items() if places.get(name) != stored.file.name]
    absent = [name for name in places if name not in found]
    if unlisted or absent:
        said = [f"does not list {', '.join(unlisted[:5])}"] if unlisted else []
        said += [f"lists {', '.join(absent[:5])}, which no file holds"] if absent else []
        raise ValueError(f"{index}: it {' and '.join(said)}")
    return found


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of one file. ValueError if it is no safetensors file or shorter than its header says."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 + length:
            raise ValueError(f"{file}: cut short or not a safetensors file, it ends inside its header")
        try:
            header: dict[str, Any] = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            found = {
                name: (Stored(file, about["dtype"], tuple(about["shape"]), 8 + length + start), end - start)
                for name, about in header.items()
                for start, end in [about["data_offsets"]]
            }
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ValueError(f"{file}: not a safetensors file, its header cannot be read") from None
    for name, (stored, length) in found.items():
        if stored.start + length > size:
            raise ValueError(
                f"{file}: cut short, {name} ends at byte {stored.start + length} and the file has {size} bytes"
            )
        if stored.dtype in DTYPES and length != math.prod(stored.shape) * DTYPES[stored.dtype].itemsize:
            raise ValueError(f"{file}: damaged, {name} of shape {list(stored.shape)} {stored.dtype} has {length} bytes")
    return {name: stored for name, (stored, _) in found.items()}


def allocate(
    directory: Path, tensors: Sequence[tuple[str, str, tuple[int, ...]]], *, shard_bytes: int
) -> dict[str, Stored]:
    """Files for tensors given as (name, dtype, shape), with room for their values and an index if there are several.

    A tensor larger than `shard_bytes` has a file of its own. OSError if the disk has no room.
    """
    shards: list[list[tuple[str, str, tuple[int, ...], int]]] = [[]]
    filled = 0
    for name, dtype, shape in tensors:
        size = math.prod(shape) * DTYPES[dtype].itemsize
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((name, dtype, shape, size))
        filled += size
    stored: dict[str, Stored] = {}
    for number, shard in enumerate(shards, 1):
        single = len(shards) == 1
        file = directory / ("model.safetensors" if single else f"model-{number:05}-of-{len(shards):05}.safetensors")
        stored |= allocate_file(file, shard)
    if len(shards) > 1:
        total = sum(size for shard in shards for *_, size in shard)
        write_json(
            directory / INDEX,
            {"metadata": {"total_size": total}, "weight_map": {name: at.file.name for name, at in stored.items()}},
        )
    return stored


def allocate_file(file: Path, shard: Sequence[tuple[str, str, tuple[int, ...], int]]) -> dict[str, Stored]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape, size in shard:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        if end and hasattr(os, "posix_fallocate"):  # a full disk shows here, not as a signal in the middle of a copy
            os.posix_fallocate(opened.fileno(), 8 + len(text), end)
        opened.truncate(8 + len(text) + end)
    return read_header(file)


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
