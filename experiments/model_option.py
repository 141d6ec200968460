"""The model that a command line names: a preset, or a file of fields."""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from k3jax.configs import ModelConfig, get


def model_option(argv: Sequence[str]) -> str | None:
    """The value of --model, the last one if there are several; None if there is none."""
    found = None
    for token, following in zip(argv, [*argv[1:], None], strict=True):
        name, equals, value = token.partition("=")
        if name == "--model":
            found = value if equals else following
    return found


def model_named(name: str) -> ModelConfig:
    """The preset, or the model whose fields NAME.json holds; the others have the defaults of `ModelConfig`.

    Raises ValueError for an unknown preset, an unknown field or a value of the wrong type, OSError for the file.
    """
    if not name.endswith(".json"):
        return get(name)
    try:
        fields = json.loads(Path(name).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{name}: not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{name}: got a JSON {type(fields).__name__}; it must be an object with fields of the model")
    types_of = get_type_hints(ModelConfig)
    for field, value in fields.items():
        if field not in types_of:
            near = difflib.get_close_matches(field, types_of, n=1)
            raise ValueError(
                f"{name}: unknown field {field!r}{f', did you mean {near[0]}?' if near else ';'} "
                f"fields are {', '.join(types_of)}"
            )
        if not _fits(value, types_of[field]):
            raise ValueError(f"{name}: {field} is {json.dumps(value)}; it must be {_words(types_of[field])}")
    return ModelConfig(**fields)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value is of the type; a float may be written as an integer."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    return type(value) in ((int, float) if hint is float else (hint,))


def _words(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(map(_words, get_args(hint)))
    names = {int: "an integer", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
    return names[hint]
