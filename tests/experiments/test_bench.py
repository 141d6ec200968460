"""The benchmark's figures are of what it says: errors of the timed programs, the stated work, one line for mistakes."""

import json
import re
import sys

import pytest

from experiments.bench import hf, kda, kda_gpu, moe, moe_overlap, muon
from k3jax.optim import group_table, newton_schulz_flops
from k3jax.plan.overlap import messages


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


@pytest.mark.slow
def test_gpu_benchmark_finds_the_kernels_right_in_the_interpreter(capsys):
    kda_gpu.main(["--interpret", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["times"] == [] and [len(r["errors"]) for r in said["correctness"]] == [8, 3]
    for record in said["correctness"]:
        assert all(0 <= error <= said["allowed_error"] for error in record["errors"].values())
        assert max(record["errors"].values()) > 0


def test_gpu_benchmark_stops_at_a_wrong_kernel_and_names_the_case(monkeypatch, capsys):
    wrong = {
        "case": "odd length",
        "shape": [1],
        "implementation": "mosaic_gpu",
        "errors": {"o": 0.0, "dq": float("nan")},
    }
    monkeypatch.setattr(kda_gpu, "correctness", lambda interpret: [wrong])
    with pytest.raises(SystemExit, match="wrong by more than 0.01: odd length"):
        kda_gpu.main(["--interpret"])


def test_gpu_benchmark_says_what_could_not_be_timed_and_times_the_others():
    timed = kda_gpu.times((1, 70, 1, 64, 64), 1, "NVIDIA H200")
    assert [r["direction"] for r in timed] == ["forward"] * 3 + ["both"] * 3
    for ours, xla, fla in (timed[:3], timed[3:]):
        assert "CPU" in ours["missing"] and xla["median_ms"] > 0 and fla["missing"]
        assert "times_as_long_as_kernels" not in xla


@pytest.mark.parametrize("device", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_gpu_floors_are_those_of_the_kernels_that_run(device):
    shape = 1, 4096, 32, 128, 128
    forward, backward = (kda_gpu.floor(shape, names, device) for names in (kda_gpu.FORWARD, kda_gpu.BACKWARD))
    assert 0 < forward < backward < 0.01
    assert kda_gpu.floor(shape, kda_gpu.FORWARD, "cpu") is None


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "JAX sees no GPU, only cpu"),
        (["--rounds=0"], "--rounds=0 must be at least 1"),
        (["--tokens", "0"], "--tokens"),
    ],
)
def test_gpu_benchmark_refuses_in_one_line_before_it_compiles(argv, said, capsys):
    with pytest.raises(SystemExit) as stop:
        kda_gpu.main(argv)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and said in err and err.count("\n") == 1


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


def test_moe_benchmark_shows_balance_and_drops(capsys):
    moe.main(
        "--rounds=1 --json --tokens=16 --experts=8 --latent=8 --hidden=8 --experts-per-token=2 --planner 4 8 32 2".split()
    )
    said = json.loads(capsys.readouterr().out)
    found = {(r["skew"], r["exchange"]): r for r in said["records"]}
    assert len(found) == 12 and all(r["median_ms"] > 0 and r["received_bytes_per_rank"] > 0 for r in found.values())
    for (_, exchange), record in found.items():
        assert sum(record["rows"]) + round(record["dropped"] * 128) == 128
        if exchange == "moonep":
            assert record["rows"] == [32] * 4
        if exchange != "capacity 1.25":
            assert record["dropped"] == 0
    assert said["planner"]["seconds"] > 0 and sum(said["saved_for_backward"]["by_name"].values()) > 0
    assert found["one hot expert", "exact all-gather"]["rows_max_over_mean"] > 1.5
    assert found["one hot expert", "capacity 1.25"]["dropped"] > 0.2


def test_moe_benchmark_draws_loads(tmp_path):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, which the extra `notebooks` brings")
    moe.draw_loads(moe.BenchMoe(), tmp_path / "loads.png")
    assert (tmp_path / "loads.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--ranks=3"], "--experts=32 must be a multiple of --ranks=3"),
        (["--tokens=0"], "--tokens=0 must be at least 1"),
        (["--skews", "hot"], "['hot']: choose of uniform"),
        (["--experts-per-token=32"], "must be at most 24"),
        (["--planner", "4", "8", "32", "9"], "experts per token at most experts"),
        (["--picture=x.nothing"], "--picture=x.nothing"),
    ],
)
def test_moe_mistakes_are_one_line(argv, said, capsys):
    with pytest.raises(SystemExit) as stop:
        moe.main(argv)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.slow
def test_muon_benchmark_counts_the_iteration_and_compares_with_optax(capsys):
    options = ["--rounds=1", "--json", "--model=nano", "--layers=1", "--replicas=2"]
    muon.main([*options, "--modes", "muon", "adamw", "muon, zero=1"])
    ours, adamw, owned = json.loads(capsys.readouterr().out)["records"]
    groups = group_table(muon.BenchMuon(model="nano", layers=1).shapes)
    matrices = re.findall(r"muon +(\d+) of (\d+)x(\d+) ", groups)
    assert len(matrices) > 10
    assert ours["flops_per_rank"] == sum(int(n) * newton_schulz_flops(int(a), int(b)) for n, a, b in matrices)
    assert adamw["flops_per_rank"] == 0 and adamw["largest_difference_to_optax_muon"] is None
    assert ours["largest_difference_to_optax_muon"] < 1e-6 and not ours["received_bytes_per_rank"]
    assert ours["state_bytes_per_rank"] < 0.7 * adamw["state_bytes_per_rank"]
    assert ours["time_of_adamw"] > 0 and ours["time_of_optax_muon"] > 0
    assert owned["ranks"] == 2 and owned["largest_difference_to_optax_muon"] < 1e-6
    # Of one layer some shapes have a single matrix, which cannot be halved.
    for what in ("flops_per_rank", "state_bytes_per_rank"):
        assert 0.5 * ours[what] <= owned[what] < 0.7 * ours[what]
    assert set(owned["received_bytes_per_rank"]) == {"all-gather", "all-to-all", "reduce-scatter"}


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--modes", "sgd"], "--modes ['sgd']: choose of adamw, optax muon, muon"),
        (["--layers=0"], "--layers=0 must be at least 1"),
        (["--model=huge"], "huge"),
    ],
)
def test_muon_mistakes_are_one_line(argv, said, capsys):
    with pytest.raises(SystemExit) as stop:
        muon.main(argv)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


SCHEDULED = """
%tile (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  ROOT %dot.1 = f32[8,8]{1,0} dot(%x, %x), metadata={op_name="jit(f)/shard_map/jvp(moe.other)/dot_general"}
}

%turn (i: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %i = (s32[], f32[8,8]{1,0}) parameter(0)
  ROOT %tiles.2 = (s32[], f32[8,8]{1,0}) fusion(%i), kind=kCustom, calls=%tile
}

%wrapped (y: f32[8,8]) -> f32[8,8] {
  %y = f32[8,8]{1,0} parameter(0)
  ROOT %reduce-scatter.0 = f32[1,8]{1,0} reduce-scatter(%y), replica_groups={{0,1}}
}

ENTRY %main (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0), metadata={op_name="params[\\'gate\\']"}
  %all-gather.1 = f32[64,8]{1,0} all-gather(%p), replica_groups={{0,1}}, metadata={op_name="jit(f)/moe.plan/all_gather"}
  %a.1 = f32[8,8]{1,0} fusion(%p), kind=kLoop, calls=%c, metadata={op_name="jit(f)/moe.dispatch/gather"}
  %b.1 = f32[8,8]{1,0} bitcast(%a.1)
  %ragged-all-to-all-start.1 = ((f32[8,8]{1,0}, s64[2]{0}), f32[4,8]{1,0:S(7)}) ragged-all-to-all-start(%b.1, %o)
  %b.2 = f32[8,8]{1,0} custom-call(%x), custom_call_target="__cublas$gemm", metadata={op_name="jit(f)/moe.shared/dot"}
  %c.3 = f32[8,8]{1,0} fusion(%b.2), kind=kLoop, calls=%c
  %d.4 = (s32[], f32[8,8]{1,0}) while(%w), body=%turn, metadata={op_name="jit(f)/transpose(jvp(moe.part0))/while"}
  %async-start.1 = ((f32[8,8]{1,0}), f32[1,8]{1,0}) async-start(%c.3), calls=%wrapped
  %e.5 = f32[8,8]{1,0} copy(%c.3)
  %async-done.1 = f32[1,8]{1,0} async-done(%async-start.1)
  %ragged-all-to-all-done.1 = f32[4,8]{1,0:S(7)} ragged-all-to-all-done(%ragged-all-to-all-start.1)
  ROOT %f.6 = f32[8,8]{1,0} fusion(%ragged-all-to-all-done.1), kind=kLoop, metadata={op_name="jit(f)/moe.experts.part0/add"}
}
"""


def test_overlap_is_read_from_between_start_and_end():
    alone, travels, wrapped = messages(SCHEDULED)
    assert alone == ("all-gather f32[64,8]", "params['gate']", "", False, {})
    beside = {"shared": 1, "part0 backward": 1, "other": 2}
    assert travels == ("ragged-all-to-all f32[4,8]", "dispatch", "experts.part0", True, beside)
    assert wrapped[0] == "reduce-scatter f32[1,8]" and wrapped[3:] == (True, {"other": 1})


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--experts=30"], "--experts=30 must be a multiple of --ranks=8"),
        (["--tokens=0"], "--tokens=0 must be at least 1"),
        (["--experts-per-token=64"], "must be below --experts=64"),
        (["--target=tpu"], "--target=tpu is not known: choose one of h200"),
    ],
)
def test_overlap_mistakes_are_one_line(argv, said, capsys):
    with pytest.raises(SystemExit) as stop:
        moe_overlap.main(argv)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
