"""What is in a checkpoint: every array by layer and name. Needs no mesh, no model and no accelerator."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro

from k3jax.train import step_directory
from k3jax.train.checkpoint import read_arrays
from meshes.command_line import failed, parse
from meshes.tables import print_table

PROG = "python -m experiments.inspect_checkpoint"
HEADER = ("name", "shape", "dtype", "bytes", "norm")
NUMBERS = ("bytes", "norm")


@dataclasses.dataclass(frozen=True)
class InspectCheckpoint:
    """Names, shapes, types, sizes and norms of all arrays of a checkpoint, and the configuration saved with it."""

    directory: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """A run's work directory, or its directory of checkpoints."""
    step: int | None = None
    """Which step; not given, the newest whole one."""

    def __post_init__(self) -> None:
        if self.step is not None and self.step < 0:
            raise ValueError(f"--step={self.step}: a step is 0 or more")


def main(argv: Sequence[str] | None = None) -> None:
    """Print where, the configuration, a table of the arrays, and the sums over each tree of the state.

    SystemExit after one line on stderr: 2 for bad arguments, 1 if there is nothing whole to read.
    """
    asked = parse(InspectCheckpoint, argv, prog=PROG)
    with failed(PROG, OSError):
        directory, step = locate(asked.directory, asked.step)
        manifest = step_directory.read_manifest(directory, step)
        rows, totals = describe(directory, step, manifest)
    print(f"checkpoint {directory / str(step)}")
    for part in ("model", "config", "extra"):
        print(f"{part} {json.dumps(manifest[part])}")
    print_table(HEADER, rows, NUMBERS)
    for tree, (arrays, values, size) in totals.items():
        print(f"{tree}: {arrays:,} arrays, {values:,} values, {size:,} bytes")


def locate(given: Path, step: int | None) -> tuple[Path, int]:
    """The directory of checkpoints and the step that are meant; says on stderr what it skipped. OSError: none."""
    directory = given / "checkpoints" if (given / "checkpoints").is_dir() else given
    if not directory.is_dir():
        raise NotADirectoryError(f"{given} is not a directory")
    if step is not None:
        return directory, step
    found, skipped = step_directory.latest_whole(directory)
    if found is None:
        raise FileNotFoundError(f"{directory} holds no whole checkpoint{''.join(f'; {reason}' for reason in skipped)}")
    for reason in skipped:
        print(f"skipped {reason}", file=sys.stderr)
    return directory, found


def describe(
    directory: Path, step: int, manifest: dict[str, Any]
) -> tuple[list[tuple[str, ...]], dict[str, tuple[int, int, int]]]:
    """Cells under HEADER for every array; and per tree, and of all, how many arrays, values and bytes."""
    rows, sizes = [], {}
    for name, array in read_arrays(directory, step, manifest):
        norm = np.linalg.norm(array.astype(np.float64).ravel())
        shape = "x".join(map(str, array.shape)) or "scalar"
        rows.append((name, shape, array.dtype.name, str(array.nbytes), f"{norm:.6g}"))
        for tree in (name.partition("/")[0], "total"):
            arrays, values, size = sizes.get(tree, (0, 0, 0))
            sizes[tree] = arrays + 1, values + array.size, size + array.nbytes
    return rows, dict(sorted(sizes.items(), key=lambda item: item[0] == "total"))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # a GPU may be busy with the run that wrote the checkpoint
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the table quietly
    main()
