"""Weights of a Hugging Face directory to arrays of ours and back, a piece at a time.

Nothing is checked late: `open_directory` has every tensor accounted for before a value is read.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from k3jax.configs import ModelConfig
from k3jax.interop.huggingface.config import config_from_hf, config_to_hf, is_kimi_linear, text_fields
from k3jax.interop.huggingface.files import DTYPES, Stored, allocate, parse_object, read_directory, write_json
from k3jax.interop.huggingface.tensors import Part, Style, Tensor, tensors

CONFIG = "config.json"
TIED = ("params/embed/table", "params/head/weight")
SHARD_BYTES = 4 << 30


@dataclasses.dataclass(frozen=True)
class Source:
    """An opened directory whose tensors are exactly those of its model."""

    document: dict[str, Any]
    """config.json as it is."""
    config: ModelConfig
    style: Style
    stored: dict[str, Stored]
    parts: dict[str, list[tuple[Stored, Part]]]
    """Where each array of ours is, by its name in checkpoints."""

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """These rows, columns, … of an array of ours, float32; slices have a start and a stop. Reads no more than that."""
        result = np.empty([at.stop - at.start for at in index], np.float32)
        for stored, part in self.parts[name]:
            if part.expert is None:
                result[...] = part.of(stored.open())[index]
            elif index[0].start <= part.expert < index[0].stop:
                result[part.expert - index[0].start] = part.of(stored.open())[index[1:]]
        return result

    @property
    def record(self) -> dict[str, Any]:
        """All but the weights, JSON: with it `write_directory` gives back every tensor bit by bit."""
        dtypes = Counter(stored.dtype for stored in self.stored.values())
        usual = dtypes.most_common(1)[0][0]
        kinds: dict[str, set[str]] = {}
        for name, stored in self.stored.items():
            kinds.setdefault(kind_of(name), set()).add(stored.dtype)
        others = {kind: of.pop() for kind, of in kinds.items() if len(of) == 1 and of != {usual}}
        mixed = {kind for kind, of in kinds.items() if len(of) > 1}
        others |= {name: stored.dtype for name, stored in self.stored.items() if kind_of(name) in mixed}
        return {
            "config": self.document,
            "style": dataclasses.asdict(self.style),
            "dtype": usual,
            "other_dtypes": others,
            "padding": self._padding(),
        }

    def _padding(self) -> dict[str, list[float]]:
        """What A_log holds beyond the heads, where that is not zeros."""
        heads, found = self.config.num_heads, {}
        for name, stored in self.stored.items():
            if name.endswith(".A_log") and math.prod(stored.shape) > heads:
                tail = stored.open().reshape(-1)[heads:].astype(float).tolist()
                if any(tail):
                    found[name] = tail
        return found


def kind_of(name: str) -> str:
    """The name without numbers: tensors of one kind are stored alike, with rare exceptions."""
    return re.sub(r"\d+", "*", name)


def open_directory(directory: str | Path, *, name: str = "custom") -> Source:
    """Read config.json and all headers, and check that the tensors are those of the model.

    Raises ValueError, one line that lists what is missing, unexpected, of another shape or dtype; OSError for what cannot
    be read.
    """
    directory = Path(directory)
    document = read_config(directory)
    config = config_from_hf(document, name=name)
    stored = read_directory(directory)
    style = Style.of({name: at.shape for name, at in stored.items()})
    tied = any(fields.get("tie_word_embeddings") for fields in (document, text_fields(document)))
    if style.tied != tied:
        has = "no" if style.tied else "an"
        raise ValueError(
            f"{directory}: there is {has} lm_head.weight, and tie_word_embeddings is {str(tied).lower()}: "
            f"make it {str(style.tied).lower()} if the head is {'' if style.tied else 'not '}the embedding"
        )
    if config.num_moe_layers and not style.fused_experts and config.num_experts > len(stored):
        raise ValueError(
            f"{directory}: num_experts is {config.num_experts}, and there are {len(stored)} tensors in all"
        )
    expected = {tensor.name: tensor for tensor in tensors(config, style)}
    problems = compare(stored, expected)
    if problems:
        raise ValueError(f"{directory} does not hold the tensors of its config.json: {problems}")
    parts: dict[str, list[tuple[Stored, Part]]] = {}
    for tensor in expected.values():
        for part in tensor.parts:
            parts.setdefault(part.ours, []).append((stored[tensor.name], part))
    return Source(document, config, style, stored, parts)


def read_config(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory} is not a directory")
    return parse_object((directory / CONFIG).read_bytes(), str(directory / CONFIG))


def compare(stored: dict[str, Stored], expected: dict[str, Tensor]) -> str:
    """What is wrong, in one line; empty if nothing is."""
    both = [name for name in expected if name in stored]
    shapes = [
        f"{name} is {list(stored[name].shape)}, not {list(expected[name].shape)}"
        for name in both
        if stored[name].shape != expected[name].shape
    ]
    dtypes = [f"{name} is {stored[name].dtype}" for name in both if stored[name].dtype not in DTYPES]
    return described(
        {
            "missing": [name for name in expected if name not in stored],
            "unexpected": [name for name in stored if name not in expected],
            "of another shape": shapes,
            f"of a dtype that is not {', '.join(DTYPES)}": dtypes,
        }
    )


def described(problems: Mapping[str, Collection[str]], *, most: int = 8) -> str:
    """Kinds of problems with the names that have them, in one line."""
    said = []
    for kind, names in problems.items():
        if names:
            shown = ", ".join(list(names)[:most]) + (", ..." if len(names) > most else "")
            said.append(f"{len(names)} {kind}: {shown}")
    return "; ".join(said)


# ---- back ------------------------------------------------------------------------------------------------------------


def write_directory(
    directory: Path,
    config: ModelConfig,
    arrays: Iterable[tuple[str, np.ndarray]],
    *,
    record: dict[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """config.json and safetensors files of a model, from its arrays by name, in any order, each once.

    record: of the directory that the model came from, to write the same names, layouts and dtypes; without one the
    released names of the model's family, float32. Names that are not of the model are ignored. Raises ValueError if an
    array is missing or of another shape, or if the model cannot be said in a config.json.
    """
    document = record["config"] if record else config_to_hf(config)
    if record:
        style = Style.parse(record["style"])
    else:
        style = Style() if is_kimi_linear(config) else Style(prefix="language_model.", a_log_shape=(config.num_heads,))
    listed = list(tensors(config, style))
    about = [(tensor.name, dtype_of(tensor.name, record), tensor.shape) for tensor in listed]
    stored = allocate(directory, about, shard_bytes=shard_bytes)
    parts: dict[str, list[tuple[Stored, Part]]] = {}
    for tensor in listed:
        for part in tensor.parts:
            parts.setdefault(part.ours, []).append((stored[tensor.name], part))
    tied = set(TIED) if style.tied else set()
    for name, array in arrays:
        for at, part in parts.pop(name, ()):
            fill(name, array, at, part, again=tied == {name})
        tied.discard(name)
    if parts:
        raise ValueError(f"the checkpoint lacks {described({'arrays': list(parts)})}")
    for name, tail in (record or {}).get("padding", {}).items():
        stored[name].open("r+").reshape(-1)[-len(tail) :] = tail
    write_json(directory / CONFIG, document)


def dtype_of(name: str, record: dict[str, Any] | None) -> str:
    if record is None:
        return "F32"
    others = record["other_dtypes"]
    return others.get(name, others.get(kind_of(name), record["dtype"]))


def fill(name: str, array: np.ndarray, at: Stored, part: Part, *, again: bool) -> None:
    """Put an array where it belongs. `again`: another array is there already, which must be equal."""
    values = array if part.expert is None else array[part.expert]
    place = part.of(at.open("r+"))
    if place.shape != values.shape:
        raise ValueError(f"the checkpoint's {name} is {list(values.shape)}, the model's {list(place.shape)}")
    if again:
        if not np.array_equal(place, values.astype(place.dtype)):
            raise ValueError(f"{name} differs from what it was tied to: a trained model is no longer tied")
        return
    place[...] = values
