"""WORKDIR/metrics.jsonl: one JSON object a line, one line a step, in the order in which steps ran.

The file is only ever appended to. A run that resumes from an older checkpoint logs the steps after it again: the values
are the same, but for the speed. `read` keeps the last line of each step.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Sink(Protocol):
    """Where metrics go, one step after the other: this file, and what `sinks.py` has."""

    def write(self, metrics: dict[str, Any]) -> None: ...

    def sync(self) -> None:
        """Return when all of them are safe, as far as it is in this process's hands."""

    def close(self) -> None: ...


class MetricsLog:
    """Appends to a metrics file; a line that a crash cut short is removed first. OSError if it cannot be written."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        cut_torn_line(self.path)
        self._file = open(self.path, "a", encoding="utf-8")

    def write(self, metrics: dict[str, Any]) -> None:
        """Append one object. It survives the end of this process; `sync` makes it survive the machine's.

        What is not finite becomes null: JSON has no name for it.
        """
        strict = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in metrics.items()
        }
        self._file.write(json.dumps(strict, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Return when all lines are on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def cut_torn_line(path: Path) -> None:
    """Remove what follows the last line end. A missing file stays missing."""
    if not path.exists() or path.stat().st_size == 0:  # an empty file cannot be mapped
        return
    with open(path, "r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = content.rfind(b"\n") + 1
        file.truncate(end)


def read(path: str | Path) -> list[dict[str, Any]]:
    """The metrics of every step, in order; of a step that ran again the later ones. A torn last line is left out."""
    last: dict[int, dict[str, Any]] = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                metrics = json.loads(line)
                last[metrics["step"]] = metrics
    return [last[step] for step in sorted(last)]
