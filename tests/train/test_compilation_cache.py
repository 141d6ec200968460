"""Compiled programs are kept for one device, not for several CPU devices, whose collectives would lose their order."""

import jax
import pytest

from k3jax.train.compilation_cache import use_compilation_cache

OPTIONS = (
    "jax_enable_compilation_cache", "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)  # fmt: skip


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """JAX as it starts, with a cache directory of its own."""
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path / "k3jax" / "xla"
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.quick
def test_one_device_has_a_cache_several_cpu_devices_have_none(fresh):
    assert use_compilation_cache(1) == fresh and fresh.is_dir()
    assert jax.config.jax_compilation_cache_dir == str(fresh)
    assert use_compilation_cache(2) is None and not jax.config.jax_enable_compilation_cache
    assert use_compilation_cache(1) is None, "a user who turned it off"
