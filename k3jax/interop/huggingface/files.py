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
    """All tensors by name. ValueError, in one line, if a file is damaged or the index and the files disagree."""
    index = directory / INDEX
    if not index.exists():
        files = sorted(directory.glob("*.safetensors"))
        if len(files) != 1:
            raise FileNotFoundError(f"{directory} has {len(files)} .safetensors files and no {INDEX}")
        return read_header(files[0])
    places = parse_object(index.read_bytes(), str(index)).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ValueError(f"{index}: not an index, it has no weight_map of names to files")
    names = sorted(set(places.values()))
    elsewhere = [name for name in names if Path(name).name != name]
    if elsewhere:
        raise ValueError(f"{index}: it names {', '.join(elsewhere[:5])}; files must lie beside it")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{directory} lacks {', '.join(missing[:5])}, which {INDEX} names")
    held = {(name, file): stored for file in names for name, stored in read_header(directory / file).items()}
    unlisted = [f"{name} of {file}" for name, file in held if places.get(name) != file]
    absent = [f"{name} of {file}" for name, file in places.items() if (name, file) not in held]
    if unlisted or absent:
        said = [f"does not list {', '.join(unlisted[:5])}"] if unlisted else []
        said += [f"lists {', '.join(absent[:5])}, which is not there"] if absent else []
        raise ValueError(f"{index}: it {' and '.join(said)}")
    return {name: stored for (name, _), stored in held.items()}


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of one file. ValueError unless they are well-formed and fill it, one after the other, to its end."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 + length:
            raise ValueError(f"{file}: cut short or not a safetensors file, it ends inside its header")
        header = parse_object(opened.read(length), f"{file}: not a safetensors file, its header")
    header.pop("__metadata__", None)
    found: dict[str, Stored] = {}
    spans: list[tuple[int, int, str]] = []
    for name, about in header.items():
        match about:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]} if all(
                isinstance(dim, int) and dim >= 0 for dim in shape
            ):
                found[name] = Stored(file, dtype, tuple(shape), 8 + length + start)
                spans.append((start, stop, name))
            case _:
                raise ValueError(f"{file}: not a safetensors file, its header cannot be read at {name}")
    end = 0
    for start, stop, name in sorted(spans):
        at = found[name]
        if start != end or stop < start:
            raise ValueError(f"{file}: damaged, {name} is at bytes {start} to {stop} and should begin at {end}")
        if at.dtype in DTYPES and stop - start != math.prod(at.shape) * DTYPES[at.dtype].itemsize:
            raise ValueError(f"{file}: damaged, {name} of shape {list(at.shape)} {at.dtype} has {stop - start} bytes")
        end = stop
    if 8 + length + end != size:
        what = "cut short" if 8 + length + end > size else "damaged"
        raise ValueError(f"{file}: {what}, its tensors end at byte {8 + length + end} and it has {size} bytes")
    return found


def parse_object(text: bytes, what: str) -> dict[str, Any]:
    """The JSON object that `text` is; ValueError, which begins with `what`, if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what}: got a JSON {type(value).__name__}; it must be an object")
    return value


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
