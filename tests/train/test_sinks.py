"""Where metrics go beside the file: the optional packages are stood in for, their calls are what the sinks rely on."""

import importlib.util
import sys
import types

import pytest

from k3jax.train import sinks
from k3jax.train.run_config import RunConfig
from k3jax.train.sinks import check_installed, numbers, open_sinks

LINE = {"step": 3, "loss": 2.5, "skipped": 0, "max_logit": float("-inf"), "eval_loss": float("nan")}


@pytest.fixture
def calls(monkeypatch):
    """What the packages were called with."""
    made = []

    class Recorder:
        def __init__(self, *args, **how):
            made.append(("open", args, how))

        def __getattr__(self, name):
            return lambda *args, **how: made.append((name, args, how))

    wandb = types.ModuleType("wandb")
    wandb.Error = type("Error", (Exception,), {})
    wandb.init = Recorder
    tensorboard = types.ModuleType("tensorboardX")
    tensorboard.SummaryWriter = Recorder
    for module in (wandb, tensorboard):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


def open_in(directory, *, start=0, **asked):
    return open_sinks(directory, **{"tensorboard": False, "wandb": ""} | asked, start=start, config={"seed": 1})


def test_nothing_is_opened_unless_asked_for(tmp_path):
    assert open_in(tmp_path) == [] and not list(tmp_path.iterdir())


@pytest.mark.quick
def test_tensorboard_gets_every_number_and_drops_steps_that_run_again(calls, tmp_path):
    (sink,) = open_in(tmp_path, tensorboard=True, start=7)
    sink.write(LINE)
    sink.sync()
    sink.close()
    (_, (directory,), how), *scalars, flush, close = calls
    assert directory == str(tmp_path / "tensorboard") and how == {"purge_step": 8}
    assert [(args[0], args[2]) for _, args, _ in scalars] == [(name, 3) for name in numbers(LINE)]
    assert (flush[0], close[0]) == ("flush", "close")


@pytest.mark.quick
def test_a_resumed_run_goes_on_in_the_same_wandb_run(calls, tmp_path):
    for start in (0, 7):
        (sink,) = open_in(tmp_path, wandb="project", start=start)
        sink.write(LINE)
        sink.sync()
        sink.close()
    (_, _, first), define, (log, (logged,), _), (finish, *_), (_, _, second), *_ = calls
    assert first == second and first["project"] == "project" and first["resume"] == "allow"
    assert first["config"] == {"seed": 1} and first["name"] == tmp_path.name
    assert define == ("define_metric", ("*",), {"step_metric": "step"})
    assert (log, finish) == ("log", "finish") and logged == numbers(LINE)


def test_wandb_that_cannot_be_reached_is_an_error_of_one_line(calls, tmp_path, monkeypatch):
    def refuse(**how):
        raise sys.modules["wandb"].Error("no API key")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(OSError, match="W&B project 'project': no API key"):
        open_in(tmp_path, wandb="project")


def test_what_is_infinite_or_no_number_is_not_drawn():
    assert set(numbers(LINE | {"why": "text"})) == {"step", "loss", "skipped", "eval_loss"}


@pytest.mark.parametrize(("asked", "extra"), [({"tensorboard": True}, "tensorboard"), ({"wandb": "project"}, "wandb")])
def test_a_missing_package_is_refused_with_what_to_install(monkeypatch, asked, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf'pip install "k3jax\[{extra}\]"'):
        check_installed(**{"tensorboard": False, "wandb": ""} | asked)
    check_installed(tensorboard=False, wandb="")


@pytest.mark.parametrize("package", ["tensorboardX", "wandb"])
def test_the_real_package_takes_what_the_sinks_hand_it(package, tmp_path, monkeypatch):
    pytest.importorskip(package)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    asked = {"wandb": "project"} if package == "wandb" else {"tensorboard": True}
    for start in (0, 2):
        (sink,) = open_in(tmp_path, start=start, **asked)
        sink.write(LINE)
        sink.sync()
        sink.close()
    if package == "wandb":
        assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2
    else:
        written = b"".join(file.read_bytes() for file in (tmp_path / sinks.TENSORBOARD).iterdir())
        assert all(name.encode() in written for name in numbers(LINE))


@pytest.mark.parametrize("profile", ["3", "3:2", "0:1", "a:b", "1:101"])
def test_a_profile_is_of_steps_that_there_are(profile):
    with pytest.raises(ValueError, match=f"profile={profile}"):
        RunConfig(profile=profile)
