"""The who-is-who command: readable when piped, one rank on request, mistakes in one line."""

import os
import re
import subprocess
import sys

import pytest

from meshes import AXES, MeshSpec, membership
from meshes.__main__ import main, ranks


@pytest.mark.quick
def test_table_has_a_line_for_every_rank_and_prints_resolved_sizes(capsys):
    main(["--mesh=data=-1,pipe=2,expert=2", "--devices=8", "--virtual=2"])
    title, header, *rows = capsys.readouterr().out.splitlines()
    assert title == "mesh data=2,pipe=2,expert=2,context=1: devices 8, stages 2 x virtual 2 = chunks 4"
    assert header.split()[:2] == ["rank", "data"]
    spec = MeshSpec(data=2, pipe=2, expert=2)
    for rank, row in enumerate(rows):
        who = membership(spec, rank, 2)
        groups = (who.chunks, who.expert_group, who.dense_replicas, who.expert_replicas)
        assert row.split() == [str(rank), *map(str, who.coordinates), *(",".join(map(str, group)) for group in groups)]
    assert len(rows) == 8


def test_card_shows_one_rank(capsys):
    main(["--mesh=data=2,pipe=2,context=2", "--rank=5", "--virtual=2"])
    lines = capsys.readouterr().out.splitlines()
    shown = dict(line.split("  ", 1) for line in lines[1:])
    assert {name: value.strip() for name, value in shown.items()} == {
        "rank": "5",
        "coordinates": "data=1, pipe=0, expert=0, context=1",
        "stage": "0 of 2",
        "chunks": "0,2",
        "pipeline": "5,7",
        "previous stage": "rank 7",
        "next stage": "rank 7",
        "expert group": "5",
        "context shard": "1 of 2",
        "context group": "4,5",
        "previous context": "rank 4",
        "next context": "none",
        "dense replicas": "0,1,4,5",
        "expert replicas": "0,1,4,5",
    }


def test_long_groups_are_shortened_in_the_table_and_whole_on_a_card():
    assert ranks((0, 1, 2, 3, 8, 9, 11)) == "0-3,8,9,11"
    strided = tuple(range(0, 100, 10))
    assert ranks(strided) == "0,10,20,30,40,50,60,70,80,90"
    assert ranks(strided, limit=8) == "0,10,20,...,90 (10 ranks)"
    assert ranks((4,), limit=8) == "4"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("argv", "token"),
    [
        (["--mesh=data=2,pip=2", "--devices=8"], "'pip'"),
        (["--mesh=data=2,data=2", "--devices=8"], "'data' again"),
        (["--mesh=data=0", "--devices=8"], "'0'"),
        (["--mesh=data=x", "--devices=8"], "'x'"),
        (["--mesh=data=3", "--devices=8"], "3 devices"),
        (["--mesh=", "--devices=8"], "empty"),
        (["--mesh= ", "--devices=8"], "space"),
        (["--mesh=data=2, pipe=2", "--devices=8"], "' pipe=2'"),
        (["--mesh=data=-1,pipe=3", "--devices=8"], "'data=-1'"),
    ],
)
def test_bad_mesh_is_one_line_with_token_axes_and_device_count(capsys, argv, token):
    line = refusal(capsys, argv)
    assert token in line and "8 devices" in line and all(axis in line for axis in AXES)


@pytest.mark.parametrize(
    ("argv", "token"),
    [
        (["--me=data=2"], "--mesh"),
        (["--mesh=data=2", "--rank=2"], "rank 2"),
        (["--mesh=data=2", "--rank=-1"], "rank -1"),
        (["--mesh=data=2", "--virtual=0"], "virtual=0"),
        (["--mesh=data=2", "--devices=0"], "--devices=0"),
    ],
)
def test_bad_option_is_one_line(capsys, argv, token):
    assert token in refusal(capsys, argv)


def refusal(capsys, argv):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("python -m meshes: error: ")
    return err


def test_module_runs_and_exits_with_two_on_a_mistake():
    for mesh, code in (("pipe=2", 0), ("pipe=two", 2)):
        done = subprocess.run([sys.executable, "-m", "meshes", f"--mesh={mesh}"], capture_output=True, text=True)
        assert done.returncode == code and len(done.stderr.splitlines()) == (code == 2)


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_a_narrow_terminal_gets_whole_groups():
    """On a terminal the table is fitted to its width; ranks may move to the next line but none is cut off."""
    ours, theirs = os.openpty()
    environment = os.environ | {"COLUMNS": "60", "TERM": "xterm", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "meshes", "--mesh=data=2,pipe=2,expert=2"]
    done = subprocess.Popen(command, stdout=theirs, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # Linux reports the closed end of a pseudo-terminal as an error
        pass
    os.close(ours)
    assert done.wait() == 0
    table = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).splitlines()[1:]
    assert max(map(len, table)) <= 60
    assert not any("…" in line for line in table)
    assert {line.split()[0] for line in table if line.strip()} >= set("01234567")
