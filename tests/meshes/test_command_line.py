"""Command lines: strict options, and one line per mistake instead of tyro's box."""

import dataclasses
import sys
from typing import Literal

import pytest

from meshes.command_line import parse, refuse


@dataclasses.dataclass(frozen=True)
class Inner:
    depth: int = 3
    """How deep."""

    def __post_init__(self):
        if self.depth > 100:
            raise ValueError(f"depth {self.depth} is beyond 100")


@dataclasses.dataclass(frozen=True)
class Job:
    """A job."""

    mesh: str
    """Axis sizes."""
    global_batch: int = 8
    """Sequences in a step."""
    rank: int | None = None
    learning_rate: float = 1e-3
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    remat: bool = False
    resume: bool = True
    inner: Inner = Inner()

    def __post_init__(self):
        if not self.learning_rate > 0:
            raise ValueError(f"learning rate {self.learning_rate} is not positive:\n  give a positive number")


def mistake(capsys, *argv, cls=Job):
    """The line on stderr, without "job: error: "."""
    with pytest.raises(SystemExit) as stop:
        parse(cls, argv, prog="job")
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ""
    assert err.startswith("job: error: ") and err.count("\n") == 1 and err.endswith("\n")
    assert not set("╭╮╰╯│─") & set(err) and "---" not in err.replace("--", "", 1)
    return err.removeprefix("job: error: ").rstrip("\n")


@pytest.mark.quick
def test_options_fill_the_dataclass():
    job = parse(Job, ["--mesh", "data=-1", "--global-batch=16", "--rank=2", "--inner.depth", "4"], prog="job")
    assert job == Job(mesh="data=-1", global_batch=16, rank=2, inner=Inner(4))
    assert parse(Job, ["--global_batch=4"], prog="job", default=job) == dataclasses.replace(job, global_batch=4)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("argv", "token", "closest"),
    [
        (["--me=data=2"], "'--me=data=2'", "--mesh"),
        (["--mesh=data=2", "--global-bach=8"], "'--global-bach=8'", "--global-batch"),
        (["--mesh=data=2", "--inner.dept", "3"], "'--inner.dept'", "--inner.depth"),
        (["--mesh=data=2", "--Mesh=data=2"], "'--Mesh=data=2'", "--mesh"),
        (["--mesh=data=2", "--learning-rate=nan", "--remt"], "'--remt'", "--remat"),
    ],
)
def test_unknown_and_shortened_options_name_the_closest_and_all(capsys, argv, token, closest):
    line = mistake(capsys, *argv)
    assert f"unknown option {token}" in line and f"did you mean {closest}" in line
    assert line.endswith(
        "Options are --help, --mesh, --global-batch, --rank, --learning-rate, --schedule, --remat, --no-remat, "
        "--resume, --no-resume, --inner.depth"
    )


@pytest.mark.quick
def test_switches_are_named_and_never_read_the_word_false_as_true(capsys):
    job = parse(Job, ["--mesh=a", "--remat", "--no-resume"], prog="job")
    assert (job.remat, job.resume) == (True, False)
    for argv in (["--remat", "False"], ["--remat=False"], ["--remat=true"], ["--resume", "FALSE"]):
        line = mistake(capsys, "--mesh=a", *argv)
        assert "a switch takes none" in line and argv[-1].split("=")[-1] in line


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--global-batch=x"], ["--global-batch INT", "'x'"]),
        (["--global-batch", "2.5"], ["--global-batch INT", "'2.5'"]),
        (["--global-batch=" + "9x" * 60], ["--global-batch INT", "9x" * 60]),
        (["--inner.depth="], ["--inner.depth INT", "''"]),
        (["--rank=x"], ["--rank", "'x'", "INT"]),
        (["--schedule=zb"], ["--schedule", "'zb'", "gpipe", "1f1b"]),
        (["--global-batch"], ["Missing value", "--global-batch"]),
        (["--learning-rate=nan"], ["learning rate nan is not positive: give a positive number"]),
        (["--learning-rate=-1"], ["learning rate -1.0 is not positive"]),
        (["--inner.depth=101"], ["depth 101 is beyond 100"]),
        (["pipe=2"], ["unexpected argument 'pipe=2'", "--name=value"]),
        (["-x"], ["unexpected argument '-x'"]),
    ],
)
def test_bad_values_are_one_line_with_the_value_and_what_is_allowed(capsys, argv, parts):
    line = mistake(capsys, "--mesh=a", *argv)
    assert all(part in line for part in parts), line


def test_missing_required_option_is_named(capsys):
    line = mistake(capsys)
    assert "--mesh STR" in line and "full helptext" not in line


def test_help_is_complete_and_succeeds(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(Job, ["--help"], prog="job", description="What it does.")
    out, err = capsys.readouterr()
    assert stop.value.code == 0 and err == ""
    for text in ("What it does.", "Axis sizes.", "Sequences in a step.", "(default: 8)", "--inner.depth", "gpipe"):
        assert text in out


def test_other_errors_of_a_dataclass_are_not_hidden():
    @dataclasses.dataclass
    class Broken:
        def __post_init__(self):
            raise KeyError("a bug, not a mistake of the user")

    with pytest.raises(KeyError, match="a bug"):
        parse(Broken, [], prog="job")


def test_what_a_dataclass_says_on_stderr_is_passed_on(capsys):
    @dataclasses.dataclass
    class Talkative:
        def __post_init__(self):
            print("slow choice", file=sys.stderr)

    parse(Talkative, [], prog="job")
    assert capsys.readouterr().err == "slow choice\n"


def test_refuse_prints_one_line_and_exits_with_two(capsys):
    with pytest.raises(SystemExit) as stop:
        refuse("job", ValueError("got 3,\n  need 4"))
    assert stop.value.code == 2
    assert capsys.readouterr().err == "job: error: got 3, need 4\n"
