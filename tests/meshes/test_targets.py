"""Targets are files that users edit: what is wrong in one is said in a line."""

import pytest

from meshes.absent import TARGETS
from meshes.targets import FOLDER, NAMES, Target


@pytest.mark.quick
def test_what_is_here_loads_and_agrees_with_what_xla_is_told():
    assert set(NAMES) == set(TARGETS)
    for name in NAMES:
        target = Target.load(name)
        assert target.name == name
        told = TARGETS[name].read_text()
        assert f"device_memory_size: {target.memory.bytes}\n" in told
        assert f"memory_bandwidth: {int(target.memory.bandwidth)}\n" in told


def test_an_edited_copy_is_read(tmp_path):
    text = (FOLDER / "h200.toml").read_text()
    copy = tmp_path / "ours.toml"
    copy.write_text(text.replace("devices = 8", "devices = 72"))
    assert Target.load(str(copy)).host.devices == 72


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("devices = 8", "", "host.devices is missing"),
        ("devices = 8", "devices = 8.5", "host.devices = 8.5 must be whole"),
        ("devices = 8", "devices = 8\ncolour = 1", "host.colour is not known"),
        ("[network]", "[networks]", "network is missing"),
        ("[latency]", "[latency", "at line"),
        ("devices = 8", "devices = true", "must be positive and finite"),
        ("bandwidth = 4.8e12", "bandwidth = nan", "must be positive and finite"),
        ("links = [0.60, 0.85]", "links = [0.85, 0.60]", "the lower one first"),
        ("links = [0.60, 0.85]", "links = 0.6", "two shares"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path, old, new, said):
    text = (FOLDER / "h200.toml").read_text()
    assert old in text
    copy = tmp_path / "ours.toml"
    copy.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=r"^target [^\n]*$") as refused:
        Target.load(str(copy))
    assert said in str(refused.value)


@pytest.mark.parametrize("name", ["h300", "none.toml"])
def test_an_unknown_one_names_those_there_are(name):
    with pytest.raises(ValueError, match=f"target '{name}' is not known: choose .*h200"):
        Target.load(name)
