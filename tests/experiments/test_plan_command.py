"""Plans on the command line: what they print is what the step stores, and mistakes are one line."""

import dataclasses
import importlib.util
import json
import re

import pytest
import tiny

from experiments.plan.__main__ import PLANS, main
from experiments.plan.memory import bars
from k3jax.activations.plan import ActivationPlan
from k3jax.activations.policy import ActivationPolicy
from k3jax.train.plan import bytes_of, in_bytes
from k3jax.train.stored import stored_leaves, summed
from meshes.targets import FOLDER

MODEL = dataclasses.replace(tiny.MODEL, vocab_size=320, pattern="K", num_layers=4, attn_res_block=None)


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.json"
    path.write_text(json.dumps(dataclasses.asdict(MODEL)))
    sizes = ["--mesh=pipe=2,expert=2", "--global-batch=16", "--seq-len=24", "--microbatches=8"]
    return [f"--model={path}", "--schedule=1f1b", *sizes]  # which auto would choose, after some tracing


def said(capsys, *argv):
    main(argv)
    return capsys.readouterr().out


def column(text, header, name):
    """{first cell: cell} of a printed table; columns are two spaces apart or more."""
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if re.split(r" {2,}", line.strip())[: len(header)] == header)
    rows = until_blank(lines[at + 1 :])
    return {row[0]: row[header.index(name)] for row in (re.split(r" {2,}", line.strip()) for line in rows)}


def until_blank(lines):
    return lines[: next((i for i, line in enumerate(lines) if "  " not in line.strip()), len(lines))]


def test_activations_are_listed_by_name_with_bytes_places_and_totals(options, capsys):
    policies = "kda.o=recompute,kda.qkv=quantize+local-offload"
    text = said(capsys, "activations", *options, f"--activations={policies}")
    from experiments.plan.activations import PlanActivations
    from meshes.command_line import parse

    asked = parse(PlanActivations, [*options, f"--activations={policies}"], prog="plan")
    leaves = summed(stored_leaves(asked.train_step()))
    header = ["name", "bytes", "span", "ticks", "policy", "where", "restored by"]
    assert column(text, header, "bytes") == {leaf.name: in_bytes(leaf.bytes) for leaf in leaves}
    assert column(text, header, "restored by")["kda.qkv"] == "decode, fetch and decode"
    assert column(text, header, "where")["kda.qkv"] == "device, host"
    assert "recomputed: kda.o\n" in text
    totals = column(text, ["rank", "own", "parked", "device", "host"], "device")
    assert list(totals) == ["0", "1", "max", "mean"] and totals["max"] == totals["0"]


def test_a_plan_fits_its_budget_is_saved_and_gives_the_option_of_train(options, capsys, tmp_path):
    file = tmp_path / "plan.json"
    text = said(capsys, "activations", *options, "--budget=100kB", f"--save={file}")
    plan = ActivationPlan.load(file)
    assert 0 < plan.reserved <= 100_000 and plan.cost > 0
    option = re.search(r"^--activations=(.*)$", text, re.M)[1]
    assert ActivationPolicy.parse(option) == ActivationPolicy.parse(plan.activations)
    assert f"reserved on every rank for the whole step: {in_bytes(plan.reserved)} on the device" in text
    assert "more than the budget" not in text and "\n--schedule=1f1b\n" in text
    loaded = said(capsys, "activations", *options, f"--load={file}")
    assert loaded == text


def test_a_schedule_is_compared_printed_and_drawn(capsys, tmp_path):
    text = said(capsys, "schedule", "--pipe=4", "--microbatches=8", "--gantt")
    header = ["schedule", "ticks", "time", "bubble in lock-step", "free-running", "mail slots", "in flight per rank"]
    # (p - 1) / (m + p - 1), in lock-step too where a row holds one kind.
    assert column(text, header, "bubble in lock-step")["1f1b"] == f"{3 / 11:.3f}"
    assert column(text, header, "free-running")["plain_1f1b"] == f"{3 / 11:.3f}"
    assert column(text, header, "in flight per rank")["plain_1f1b"] == "4, 3, 2, 1"
    assert "zbv (virtual=2)" in text and "F3.7" in text
    pytest.importorskip("matplotlib")
    picture = tmp_path / "zbv.png"
    said(capsys, "schedule", "--pipe=2", "--virtual=2", "--microbatches=4", "--schedule=zbv", f"--picture={picture}")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_memory_is_listed_by_purpose(options, capsys, monkeypatch):
    compiled = []
    monkeypatch.setattr("experiments.plan.memory.compiled_temporaries", lambda step: compiled.append(step) or 3 * 2**20)
    text = said(capsys, "memory", *options, "--dtype=bfloat16", "--activations=kda.*=quantize", "--compile")
    assert compiled[0].mesh.devices.size == 4 and "XLA sets aside 3.0 MiB" in text
    sizes = column(text, ["bytes for", "place", "allocated", "in use, most", "in use, mean"], "allocated")
    assert list(sizes) == [
        *("parameters", "optimizer state", "parameters in bfloat16", "gradients", "mailbox"),
        *("stores: quantize", "stores: keep", "stores: in hand", "total"),
    ]
    assert text.count("stage ") == 2
    import numpy as np

    assert bars(np.array([0, 1, 2]), 2) == " ▄█" and len(bars(np.arange(1000), 999)) == 96


@pytest.mark.parametrize(
    ("argv", "needed"),
    [
        (["activation"], "unknown command 'activation'"),
        (["activations", "--budget=4xiB"], "'4xiB' is not a number of bytes"),
        (["activations", "--budget=1GiB", "--activations=*=recompute"], "--budget and --activations"),
        (["activations", "--budget=1GiB", "--load=x"], "--budget and --load"),
        (["activations", "--save=x"], "--save=x"),
        (["activations", "--budget=1GiB", f"--save={__file__}"], "exists: name a file to be made"),
        (["activations", "--flops=0"], "--flops=0.0 must be finite and above 0"),
        (["activations", "--host-bandwidth=-1"], "--host-bandwidth=-1.0 must be finite and at least 0"),
        (["activations", "--mesh=pipe=2,foo=2"], "unknown axis 'foo'"),
        (["activations", "--model=big"], "big"),
        (["activations", "--microbatches=0"], "microbatches=0"),
        (["activations", "--budgt=1"], "did you mean --budget"),
        (["schedule", "--pipe=0"], "--pipe=0 must be at least 1"),
        (["schedule", "--schedule=zbv"], "it needs virtual=2"),
        (["schedule", "--schedule=fast"], "--schedule=fast"),
        (["schedule", "--backward=-1"], "times must be positive"),
        (["schedule", "--weight=0.5", "--schedule=1f1b"], "--weight=0.5: no weight gradients run on their own in 1f1b"),
        (["schedule", "--weight=nan"], "above 0 and below it: got nan"),
        (["schedule", "--picture=x.txt"], "must end in .png"),
        (["memory", "--picture=x"], "must end in .png"),
    ],
)
def test_mistakes_are_one_line(argv, needed, capsys):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    printed = capsys.readouterr()
    assert stop.value.code == 2 and needed in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_a_file_that_is_not_there_is_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["activations", "--load=/nowhere/plan.json"])
    assert stop.value.code == 1 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", PLANS)
def test_help_names_every_option(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0 and "--help" in capsys.readouterr().out


@pytest.mark.quick
def test_bytes_are_read_as_they_are_written():
    assert [bytes_of(t) for t in ("80GiB", "1.5 MB", "4096", "2KiB", "3 TB", "7kB")] == [
        *(80 * 2**30, 1_500_000, 4096, 2048, 3 * 10**12, 7000)
    ]
    for wrong in ("", "GiB", "-1", "1e9", "4 xB", "nan"):
        with pytest.raises(ValueError, match="not a number of bytes"):
            bytes_of(wrong)


def test_traffic_is_listed_by_part_and_axis_with_the_time_of_links(options, capsys):
    table = said(capsys, "traffic", *options)
    header = ["part of the step", "axes", "collective", "ranks", "hosts", "messages", "bytes", "seconds"]
    kinds = column(table, header, "collective")
    assert {"forward", "backward", "between stages", "embedding and head", "sums of gradients"} <= kinds.keys()
    assert kinds["between stages"] == "collective-permute" and column(table, header, "hosts")["backward"] == "1"
    told = json.loads(said(capsys, "traffic", *options, "--json"))
    assert told["mesh"] == {"data": 1, "pipe": 2, "expert": 2, "context": 1} and told["target"] == "h200"
    assert all(0 < one["seconds"]["best"] <= one["seconds"]["worst"] for one in told["traffic"])
    assert f"in all {in_bytes(round(sum(one['bytes'] for one in told['traffic'])))}" in table


def test_traffic_refuses_a_target_that_is_not_there(options, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["traffic", *options, "--target=h300"])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and "choose h200" in err and err.count("\n") == 1


@pytest.mark.slow
def test_a_whole_step_is_what_is_planned_without_a_name(options, capsys):
    """As a table and as JSON, the same figures; what cannot be is one line."""
    table = said(capsys, *options)
    for expected in ("fits: ", "bubble ", "MFU ", "bound by", "assumed"):
        assert expected in table
    told = json.loads(said(capsys, "step", *options, "--json"))
    assert told["fits"] and f"fits: {in_bytes(told['device_bytes'])} of" in table
    assert {"forward", "backward", "optimizer"} <= {one["part"] for one in told["parts"]}
    for wrong, line in (
        (["--anyway"], "give both"),
        (["--target=h300"], "choose h200"),
        (["--compile"], "extra|gpu-compile|does not fill"),
    ):
        if wrong == ["--compile"] and importlib.util.find_spec("jax_plugins"):
            continue  # it can be
        with pytest.raises(SystemExit) as stop:
            main([*options, *wrong])
        err = capsys.readouterr().err
        assert stop.value.code == 2 and re.search(line, err) and err.count("\n") == 1, err


@pytest.mark.slow
def test_what_does_not_fit_is_said_with_what_would(options, capsys, tmp_path):
    """A device with the memory of a toy."""
    told = json.loads(said(capsys, *options, "--json"))
    cluster = (FOLDER / "h200.toml").read_text().replace("150754820096", str(int(told["device_bytes"] / 0.9) - 4096))
    (tmp_path / "small.toml").write_text(cluster)
    less = json.loads(said(capsys, *options, f"--target={tmp_path}/small.toml", "--json"))
    assert not less["fits"] and less["smallest_change"] == {"zero": 1}
