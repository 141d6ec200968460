"""Fake devices: made in time or refused clearly, with the user's own flags kept."""

import os
import subprocess
import sys

import jax
import pytest

from meshes import require_devices
from meshes.devices import _flags_for

PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=3600 --xla_cpu_collective_timeout_seconds=3600"


def run(code, **variables):
    """Standard output of a fresh Python, without the flags of this process."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_FLAGS", "JAX_"))}
    environment = clean | {"JAX_PLATFORMS": "cpu"} | variables
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.quick
def test_makes_devices_with_flags_that_xla_accepts_and_refuses_once_started():
    code = """
import os, jax, meshes
meshes.require_devices(5)
print(jax.device_count(), *os.environ["XLA_FLAGS"].split())
meshes.require_devices(5), meshes.require_devices(2)
try:
    meshes.require_devices(6)
except RuntimeError as refused:
    assert "6 devices are needed, JAX has 5 on cpu" in str(refused), refused
    assert "before the first JAX computation" in str(refused)
    print("refused")
"""
    mine = "--xla_cpu_enable_fast_math=false --xla_force_host_platform_device_count=2"
    assert run(code, XLA_FLAGS=mine) == [
        *("5", "--xla_cpu_enable_fast_math=false", "--xla_force_host_platform_device_count=5"),
        *PATIENCE.split(),
        "refused",
    ]


def test_overrides_jax_num_cpu_devices_where_it_is_too_small():
    code = "import jax, meshes; meshes.require_devices(4); print(jax.device_count())"
    assert run(code, JAX_NUM_CPU_DEVICES="2") == ["4"]


@pytest.mark.parametrize(
    ("users", "expected"),
    [
        ("", "--xla_force_host_platform_device_count=8"),
        ("--xla_force_host_platform_device_count=16", "--xla_force_host_platform_device_count=16"),
        ("--xla_force_host_platform_device_count=3", "--xla_force_host_platform_device_count=8"),
        (
            "--xla_force_host_platform_device_count=16 --xla_force_host_platform_device_count=3 --xla_x",
            "--xla_x --xla_force_host_platform_device_count=8",
        ),
    ],
)
def test_device_count_is_raised_never_lowered(users, expected):
    assert _flags_for(8, users).split() == [*expected.split(), *PATIENCE.split()]


def test_longer_patience_of_the_user_stays():
    users = "--xla_cpu_collective_timeout_seconds=7200 --xla_cpu_collective_call_terminate_timeout_seconds=40"
    assert _flags_for(8, users).split() == [
        "--xla_cpu_collective_timeout_seconds=7200",
        "--xla_force_host_platform_device_count=8",
        "--xla_cpu_collective_call_terminate_timeout_seconds=3600",
    ]


def test_flags_that_the_user_keeps_in_a_file_stay(tmp_path):
    file = tmp_path / "flags"
    file.write_text("--xla_a=1\n--xla_b=2\n")
    assert _flags_for(2, str(file)).split()[:3] == [
        "--xla_a=1",
        "--xla_b=2",
        "--xla_force_host_platform_device_count=2",
    ]


def test_flags_in_a_file_that_is_not_there_are_refused_before_xla_aborts(tmp_path):
    with pytest.raises(ValueError, match="XLA_FLAGS=.*missing.*readable file"):
        _flags_for(2, str(tmp_path / "missing"))


def test_flags_are_stable_when_asked_again():
    once = _flags_for(8, "--xla_a='x y'")
    assert once.startswith("--xla_a='x y' ") and _flags_for(8, once) == once


def test_too_few_accelerators_are_named_and_cpu_is_offered_not_forced(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(RuntimeError, match="8 devices are needed, JAX has 1 on gpu.*JAX_PLATFORMS=cpu"):
        require_devices(8)


def test_more_fake_devices_than_one_process_can_run_are_refused_at_once():
    code = """
import meshes
try:
    meshes.require_devices(1_000_000)
except RuntimeError as refused:
    print(refused)
"""
    line = " ".join(run(code))
    assert "1000000 devices are needed" in line and "at most 1024 fake ones" in line


@pytest.mark.parametrize("n", [0, -1, 2.0, "8", True])
def test_number_of_devices_is_a_positive_integer(n):
    with pytest.raises(ValueError, match="positive integer"):
        require_devices(n)
