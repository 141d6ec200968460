"""The inspector shows what is stored, by name, without knowing the model; its mistakes are one line."""

import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.inspect_checkpoint import main
from k3jax.configs import ModelConfig
from k3jax.train.checkpoint import Checkpoints
from k3jax.train.config import StepConfig
from k3jax.train.step import TrainStep
from meshes import MeshSpec

ROOT = Path(__file__).parents[2]
MODEL = ModelConfig(name="tiny", pattern="KM", num_layers=3, hidden_size=16, num_experts=4)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run's directory with steps 2 and 4; all values are 2."""
    path = tmp_path_factory.mktemp("run")
    step = TrainStep(
        StepConfig(model=MODEL, schedule="1f1b"), MeshSpec.parse("pipe=2,expert=2").build(jax.devices()[:4])
    )
    twos = jax.tree.map(lambda a: np.full(a.shape, 2, a.dtype), step.state_shapes)
    checkpoints = Checkpoints(path / "checkpoints", step)
    for number in (2, 4):
        checkpoints.save(number, jax.device_put(twos, step.state_shardings), {"position": number * 100})
    checkpoints.wait()
    return path


def shown(capsys, *argv) -> tuple[list[str], dict[str, list[str]]]:
    """Lines of the output, and the cells of the table by name."""
    main([str(arg) for arg in argv])
    lines = capsys.readouterr().out.splitlines()
    start = next(at for at, line in enumerate(lines) if line.split() == ["name", "shape", "dtype", "bytes", "norm"])
    rows = [line.split() for line in lines[start + 1 :] if ": " not in line]
    return lines, {name: cells for name, *cells in rows}


@pytest.mark.quick
def test_arrays_configuration_and_totals_are_shown(workdir, capsys):
    lines, table = shown(capsys, workdir)
    assert lines[0] == f"checkpoint {workdir}/checkpoints/4"
    assert '"name": "tiny"' in lines[1] and '"optimizer": "muon"' in lines[2] and lines[3] == 'extra {"position": 400}'
    assert table["params/layers/2/moe/router"] == ["16x4", "float32", "256", "16"]  # 2 * sqrt(64)
    assert table["params/layers/0/dense/gate"] == ["16x192", "float32", "12288", f"{2 * math.sqrt(16 * 192):.6g}"]
    assert table["optimizer/muon/mu/layers/1/moe/expert_up"][0] == "4x32x32"
    assert table["step"] == ["scalar", "int32", "4", "2"]
    sizes = {line.split(":")[0]: line.split(": ")[1] for line in lines[-6:]}
    assert list(sizes) == ["balance", "optimizer", "params", "skipped", "step", "total"]
    assert sizes["balance"] == "2 arrays, 8 values, 32 bytes"
    bytes_shown = sum(int(cells[2]) for cells in table.values())
    assert sizes["total"].startswith(f"{len(table)} arrays, ") and sizes["total"].endswith(f" {bytes_shown:,} bytes")


def test_a_step_can_be_chosen_and_the_directory_of_checkpoints_named(workdir, capsys):
    lines, _ = shown(capsys, workdir / "checkpoints", "--step=2")
    assert lines[0].endswith("checkpoints/2") and lines[3] == 'extra {"position": 200}'


def test_what_was_skipped_is_said(workdir, capsys):
    (workdir / "checkpoints" / "6").mkdir()
    try:
        main([str(workdir)])
        out, err = capsys.readouterr()
    finally:
        (workdir / "checkpoints" / "6").rmdir()
    assert out.startswith(f"checkpoint {workdir}/checkpoints/4\n")
    assert err == f"skipped {workdir}/checkpoints/6: not whole, it has no readable checkpoint.json\n"


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["{run}", "--step=3"], 1, "3: no such step"),
        (["{run}/nowhere"], 1, "nowhere is not a directory"),
        (["{empty}"], 1, "holds no whole checkpoint"),
        (["{run}", "--step=-1"], 2, "--step=-1: a step is 0 or more"),
        (["{run}", "--step=x"], 2, "'x'"),
        (["{run}", "--stpe=2"], 2, "did you mean --step?"),
        ([], 2, "DIR"),
    ],
)
def test_a_mistake_is_one_line(workdir, tmp_path, capsys, argv, code, said):
    with pytest.raises(SystemExit) as stop:
        main([arg.format(run=workdir, empty=tmp_path) for arg in argv])
    out, err = capsys.readouterr()
    assert stop.value.code == code and out == ""
    assert err.startswith("python -m experiments.inspect_checkpoint: error: ") and err.count("\n") == 1 and said in err


def test_it_runs_by_itself_and_on_a_terminal(workdir):
    """In a process of its own, with one device; on a terminal the table is framed to fit it."""
    command = [sys.executable, "-m", "experiments.inspect_checkpoint", str(workdir)]
    main_end, terminal = os.openpty()
    run = subprocess.Popen(
        command, cwd=ROOT, stdout=terminal, stderr=subprocess.PIPE, env=os.environ | {"COLUMNS": "100", "XLA_FLAGS": ""}
    )
    os.close(terminal)
    text = b""
    try:
        while chunk := os.read(main_end, 1 << 16):
            text += chunk
    except OSError:  # Linux's way to say that the other end has closed
        pass
    os.close(main_end)
    assert run.wait() == 0 and run.stderr is not None and run.stderr.read() == b""
    run.stderr.close()
    shown = text.decode()
    assert "params/layers/2/moe/router" in shown and "16x4" in shown and "─" in shown
