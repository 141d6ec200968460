"""Steps of a run as directories that are whole or invisible.

A step is written in N.incomplete, at last a manifest with the size and digest of every file in it; when all of this has
reached the disk, one rename makes it N. Whatever interrupts that leaves the older steps as they were. What came to be
called N in another way (a copy cut short, an empty directory) does not pass the manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

MANIFEST = "checkpoint.json"
FORMAT = 1


def begin(directory: Path, step: int) -> None:
    """An empty directory `incomplete` to write the step in."""
    path = incomplete(directory, step)
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)


def complete(directory: Path, step: int, about: dict[str, Any]) -> None:
    """Make the step that was written since `begin` visible; replaces a directory of its name that is not whole.

    about: what to remember beside the files, JSON.
    """
    path, final = incomplete(directory, step), directory / str(step)
    files = {str(file.relative_to(path)): digest(file) for file in sorted(path.rglob("*")) if file.is_file()}
    manifest = {"format": FORMAT, "step": step, **about, "files": files}
    with open(path / MANIFEST, "w") as file:
        json.dump(manifest, file)
        file.flush()
        os.fsync(file.fileno())
    for folder in (path, *(folder for folder in path.rglob("*") if folder.is_dir())):
        sync_folder(folder)
    if final.exists():
        shutil.rmtree(final)
    path.rename(final)
    sync_folder(directory)


def prune(directory: Path, keep: int, newest: int) -> None:
    """Delete all but the newest `keep` whole steps up to the one just saved, and what interrupted saves left behind.

    Later steps are not counted: a run that goes on before them found them damaged, or was told to start over.
    """
    whole = [step for step in steps(directory) if step <= newest and problem(directory, step, digests=False) is None]
    for step in whole[keep:]:
        (directory / str(step)).rename(incomplete(directory, step))
    for path in directory.glob("*.incomplete"):
        if re.fullmatch(r"\d+", path.stem):
            shutil.rmtree(path)


def latest_whole(directory: Path) -> tuple[int | None, list[str]]:
    """The newest whole step, None if there is none; and for what is newer, why it was skipped. Reads all of it."""
    if not directory.exists():
        return None, []
    found, skipped = None, []
    for step in steps(directory):
        reason = problem(directory, step)
        if reason is None:
            found = step
            break
        skipped.append(f"{directory / str(step)}: {reason}")
    for path in sorted(directory.iterdir()):
        number = re.match(r"(\d+)\D", path.name)
        if number and (found is None or int(number[1]) > found):
            skipped.append(f"{path}: left by a save that did not finish")
    return found, skipped


def read_manifest(directory: Path, step: int, *, digests: bool = True) -> dict[str, Any]:
    """The manifest of a step, after `problem` found none. OSError if the step is missing or not whole."""
    reason = problem(directory, step, digests=digests)
    if reason is not None:
        raise OSError(f"{directory / str(step)}: {reason}")
    return json.loads((directory / str(step) / MANIFEST).read_text())


def problem(directory: Path, step: int, *, digests: bool = True) -> str | None:
    """Why a step is not whole, None if it is. Without `digests` only names and sizes are compared."""
    path = directory / str(step)
    if not path.is_dir():
        return "no such step"
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files, said, version = manifest["files"], manifest["step"], manifest["format"]
    except (OSError, ValueError, LookupError, TypeError):
        return f"not whole, it has no readable {MANIFEST}"
    if version != FORMAT:
        return f"of format {version}, this program reads format {FORMAT}"
    if said != step:
        return f"a copy of step {said}"
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            return f"not whole, {name} is missing"
        if file.stat().st_size != expected["bytes"]:
            return f"not whole, {name} has {file.stat().st_size} bytes instead of {expected['bytes']}"
    if digests:
        for name, expected in files.items():
            if digest(path / name) != expected:
                return f"damaged, the content of {name} is not what was saved"
    return None


def steps(directory: Path) -> list[int]:
    """Numbers of all step directories, whole or not, the newest first."""
    if not directory.exists():
        return []
    names = (path.name for path in directory.iterdir())
    return sorted((int(name) for name in names if re.fullmatch(r"0|[1-9]\d*", name)), reverse=True)


def incomplete(directory: Path, step: int) -> Path:
    return directory / f"{step}.incomplete"


def digest(path: Path) -> dict[str, Any]:
    """Size and content of a file; what it says is on disk afterwards."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return {"bytes": os.fstat(file.fileno()).st_size, "blake2b": hashlib.file_digest(file, "blake2b").hexdigest()}


def sync_folder(path: Path) -> None:
    """Make renames and new names in a folder last; where folders cannot be opened (Windows), nothing."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(path, os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
