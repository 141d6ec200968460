"""A run's work directory: config.json, metrics.jsonl and checkpoints/."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import time
from pathlib import Path
from typing import Any

from k3jax.train.step_directory import sync_folder

CONFIG, METRICS, CHECKPOINTS, PROFILE = "config.json", "metrics.jsonl", "checkpoints", "profile"


def choose(asked: str, model: str) -> Path:
    """The directory asked for; for an empty text runs/MODEL-TIME, one that does not exist yet."""
    if asked:
        return Path(asked)
    name = f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', model)}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = (Path("runs", name + (f"-{again}" if again > 1 else "")) for again in itertools.count(1))
    return next(path for path in candidates if not path.exists())


def check(path: Path, *, resume: bool) -> None:
    """ValueError if a run cannot live here: something else is of that name, or it holds a run and is not resumed."""
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not existing.is_dir():
        raise ValueError(
            f"workdir {path} is not a directory" if existing == path else f"workdir {path}: {existing} is a file"
        )
    held = [name for name in (CONFIG, METRICS, CHECKPOINTS) if (path / name).exists()]
    if held and not resume:
        raise ValueError(
            f"workdir {path} already holds a run ({', '.join(held)}): continue it with --resume, or name another one"
        )


def write_config(path: Path, config: dict[str, Any]) -> str:
    """Put the configuration into the directory, which is made if need be; at no time is the file half written.

    Returns what is in the file now.
    """
    text = json.dumps(_strict(config), indent=2, allow_nan=False) + "\n"
    path.mkdir(parents=True, exist_ok=True)
    temporary = path / f"{CONFIG}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path / CONFIG)
    sync_folder(path)
    return text


def _strict(value: Any) -> Any:
    """What JSON has no number for, such as inf, as text."""
    if isinstance(value, dict):
        return {key: _strict(inner) for key, inner in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
