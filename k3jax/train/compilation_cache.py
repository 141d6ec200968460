"""Compiled programs are kept on disk, so that a second start does not compile."""

from __future__ import annotations

import os
from pathlib import Path

import jax


def use_compilation_cache(devices: int) -> Path | None:
    """Keep all compiled programs below the user's cache directory; call it before the first compilation.

    devices: of the mesh. On CPU several devices get no cache: a program that XLA loads from disk has lost the order between
    collectives that do not depend on each other; devices run them in orders of their own, and hang (docs/notes/fake-devices.md).

    A directory that the user gave to JAX (JAX_COMPILATION_CACHE_DIR) stays in use. Returns the directory, or None if there is
    no cache: as said, if it cannot be written, or if JAX_ENABLE_COMPILATION_CACHE is off. The key is the program with its
    compiler options and the version and devices of JAX. An entry that a crash cut short is compiled again, with a warning,
    until it is deleted.
    """
    if devices > 1 and jax.default_backend() == "cpu":
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    if not jax.config.jax_enable_compilation_cache:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    directory = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if directory is None:
        directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "k3jax", "xla")
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError:
            return None
        jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return Path(directory)
