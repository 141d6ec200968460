"""The benchmark's figures are of what it says: errors of the timed programs, the stated work, one line for mistakes."""

import json
import sys

import pytest

from experiments.bench import hf, kda


def records(capsys, *argv):
    kda.main(["--rounds=1", "--json", *argv])
    out = json.loads(capsys.readouterr().out)
    return out["rates"], {(r["implementation"], r["direction"]): r for r in out["records"]}


def test_kda_benchmark_measures_the_errors_of_what_it_times(capsys):
    options = "--shapes", "1,70,2,16,8", "--implementations", "chunked", "chunked from inputs"
    rates, found = records(capsys, *options)
    assert set(found) >= {(name, way) for name in options[4:] for way in ("forward", "both")}
    assert all(rate > 0 for rate in rates.values())
    for (name, way), record in found.items():
        assert record["median_ms"] > 0 and record["temporary_bytes"] > 0 and record["floor_ms"] > 0
        if way == "both" and name in options:
            assert all(0 < error < 1e-5 for error in record["errors"].values())
    assert found["chunked", "forward"]["floor_ms"] < found["chunked", "both"]["floor_ms"]


def test_a_wrong_gradient_would_show():
    right = [kda.np.ones(3)] * 6
    wrong = [*right[:3], 2 * right[3], *right[4:]]
    found = kda.errors(wrong, right)
    assert found["dv"] == 1 and sum(found.values()) == 1


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--shapes", "1,2,3"], "'1,2,3' must be five positive integers"),
        (["--shapes", "1,64,0,16,16"], "five positive integers"),
        (["--implementations", "fast"], "'fast'"),
        (["--implementations"], "at least one value"),
        (["--rounds=0"], "--rounds=0 must be at least 1"),
        (["--gate-lower-bound=1"], "above -10000 and below 0"),
    ],
)
def test_mistakes_are_one_line(argv, said, capsys):
    with pytest.raises(SystemExit) as stop:
        kda.main(argv)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "install the extra 'peers'"),
        (["--rounds=0"], "--rounds=0 must be at least 1"),
        (["--seq-len=1"], "--seq-len=1 must be at least 2"),
    ],
)
def test_the_comparison_with_transformers_says_what_it_lacks(argv, said, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # as where it is not installed
    with pytest.raises(SystemExit) as stop:
        hf.main(argv)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
