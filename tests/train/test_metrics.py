"""metrics.jsonl: strict JSON, appended to, and never with half a line in the middle."""

import json

import pytest

from k3jax.train.metrics import MetricsLog, cut_torn_line, read


@pytest.mark.quick
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"", b""),
        (b"torn", b""),
        (b'{"step": 1}\n', b'{"step": 1}\n'),
        (b'{"step": 1}\n{"ste', b'{"step": 1}\n'),
        (b'{"step": 1}\n{"step": 2}\n{', b'{"step": 1}\n{"step": 2}\n'),
        (b'{"step": 1}\n\x00\x00', b'{"step": 1}\n'),
    ],
)
def test_a_line_that_a_crash_cut_short_is_removed_before_anything_is_appended(tmp_path, before, after):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(before)
    cut_torn_line(path)
    assert path.read_bytes() == after
    path.write_bytes(before)
    log = MetricsLog(path)
    log.write({"step": 3})
    log.close()
    assert path.read_bytes() == after + b'{"step": 3}\n'


def test_nothing_is_created_by_cutting(tmp_path):
    cut_torn_line(tmp_path / "metrics.jsonl")
    assert not list(tmp_path.iterdir())


@pytest.mark.quick
def test_lines_are_there_at_once_and_strict_json(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "learning_rate": 0.1})
    refuse = lambda name: pytest.fail(f"{name} is not JSON")
    assert json.loads(log.path.read_text(), parse_constant=refuse) == {
        "step": 1, "loss": None, "grad_norm": None, "learning_rate": 0.1,
    }  # fmt: skip
    log.sync()
    log.close()


def test_a_step_that_ran_again_counts_once_and_a_torn_line_not_at_all(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "v": 1}\n{"step": 2, "v": 2}\n{"step": 1, "v": 3}\n{"step": 3')
    assert read(path) == [{"step": 1, "v": 3}, {"step": 2, "v": 2}]


def test_a_file_that_cannot_be_written_is_an_error_that_names_it(tmp_path):
    with pytest.raises(OSError, match="metrics.jsonl"):
        MetricsLog(tmp_path / "missing" / "metrics.jsonl")
