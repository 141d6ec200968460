"""The mesh's text form: what is accepted, what is refused and how, and the jax mesh it becomes."""

import math
import subprocess
import sys

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from meshes import AXES, MeshSpec

sizes = st.integers(min_value=1, max_value=999_999_999)
specs = st.builds(MeshSpec, data=sizes, pipe=sizes, expert=sizes, context=sizes)


def refusal(text, num_devices=None):
    with pytest.raises(ValueError) as caught:
        MeshSpec.parse(text, num_devices)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert all(axis in message for axis in AXES)
    return message


@pytest.mark.quick
def test_missing_axes_are_one_and_order_is_free():
    spec = MeshSpec.parse("expert=4,data=2")
    assert spec == MeshSpec(data=2, pipe=1, expert=4, context=1)
    assert list(spec.sizes.items()) == [("data", 2), ("pipe", 1), ("expert", 4), ("context", 1)]
    assert str(spec) == "data=2,pipe=1,expert=4,context=1"
    assert spec.num_devices == 8


@given(spec=specs)
def test_text_form_round_trips(spec):
    assert MeshSpec.parse(str(spec)) == spec
    assert tuple(spec.sizes) == AXES
    assert spec.num_devices == math.prod(spec.sizes.values())


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("data=2,pip=2", "'pip'"),
        ("data=2,data=2", "'data' again"),
        ("data=2,data=-1", "'data' again"),
        ("data=0", "'0'"),
        ("data=x", "'x'"),
        ("data=2.5", "'2.5'"),
        ("data=1e1", "'1e1'"),
        ("data=1_0", "'1_0'"),
        ("data=+2", "'+2'"),
        ("data=02", "'02'"),
        ("data=٢", "'٢'"),
        ("data=-2", "'-2'"),
        ("data=", "''"),
        ("data=2=2", "'2=2'"),
        ("data=" + "9" * 5000, "positive integer"),
        ("data", "'data' has no '='"),
        ("=2", "''"),
        ("Data=2", "'Data'"),
        ("", "empty"),
        (" ", "space"),
        ("data=2, pipe=2", "' pipe=2' has a space"),
        ("data = 2", "'data = 2' has a space"),
        ("data=2\n", r"'data=2\n' has a space"),
        ("data=2,", "empty token"),
        (",data=2", "empty token"),
        ("data=2,,pipe=2", "empty token"),
        ("data=2;pipe=2", "'2;pipe=2'"),
        ("data=-1,pipe=-1", "second -1"),
    ],
)
def test_bad_text_is_refused_in_one_line_with_the_token_and_the_axes(text, named):
    assert named in refusal(text)
    assert "8 devices" in refusal(text, num_devices=8)


@given(text=st.text(alphabet="dataipexcn=,-0123456789 ", max_size=30))
def test_any_text_becomes_a_mesh_that_fits_or_a_refusal(text):
    try:
        spec = MeshSpec.parse(text, num_devices=720720)
    except ValueError as refused:
        assert len(str(refused).splitlines()) == 1
    else:
        assert 720720 % spec.num_devices == 0 and min(spec.sizes.values()) >= 1


def test_minus_one_is_resolved_when_parsed():
    """A size of -1 read as a size is the mistake of AI-Hypercomputer/maxtext#1637: no spec ever holds one."""
    spec = MeshSpec.parse("data=-1,pipe=2", num_devices=8)
    assert spec.sizes == {"data": 4, "pipe": 2, "expert": 1, "context": 1}
    assert str(spec) == "data=4,pipe=2,expert=1,context=1" and spec.num_devices == 8
    assert MeshSpec.parse("context=-1", num_devices=1).num_devices == 1
    assert MeshSpec.parse("data=-1").num_devices == jax.device_count()


@pytest.mark.parametrize(
    ("text", "num_devices", "needed"),
    [("data=-1,pipe=3", 8, "multiple of 3"), ("data=-1,pipe=16", 8, "multiple of 16"), ("data=-1", 0, "multiple of 1")],
)
def test_minus_one_that_cannot_be_filled_names_both_counts(text, num_devices, needed):
    message = refusal(text, num_devices)
    assert "'data=-1'" in message and needed in message and f"{num_devices} devices" in message


@pytest.mark.parametrize(("text", "product"), [("data=3", 3), ("data=4,pipe=4", 16), ("context=5", 5)])
def test_mesh_that_does_not_fit_the_device_count_is_refused(text, product):
    message = refusal(text, num_devices=8)
    assert f"needs {product} devices" in message and "8 devices" in message


def test_mesh_that_divides_the_device_count_is_accepted():
    assert MeshSpec.parse("data=2,pipe=2", num_devices=8).num_devices == 4


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", True, None])
def test_constructor_takes_positive_integers_only(size):
    with pytest.raises(ValueError, match=f"pipe={size!r}.*data, pipe, expert, context"):
        MeshSpec(pipe=size)


@pytest.mark.quick
def test_build_lays_devices_out_row_major_with_auto_axes():
    mesh = MeshSpec.parse("data=2,expert=2,context=2").build()
    assert mesh.axis_names == AXES and mesh.axis_types == (AxisType.Auto,) * 4
    assert mesh.devices.shape == (2, 1, 2, 2)
    assert list(mesh.devices.flat) == jax.devices()[:8]


def test_build_uses_the_first_devices_in_the_given_order():
    reverse = jax.devices()[:8][::-1]
    assert list(MeshSpec(pipe=3).build(reverse).devices.flat) == reverse[:3]
    assert list(MeshSpec(pipe=3).build().devices.flat) == jax.devices()[:3]


def test_build_with_too_few_devices_names_needed_and_available():
    with pytest.raises(ValueError, match=r"data=3,pipe=3,expert=1,context=1 needs 9 devices, 8 are available"):
        MeshSpec(data=3, pipe=3).build(jax.devices()[:8])


def test_tables_and_parsing_do_not_import_jax():
    """The who-is-who tables stay instant, and require_devices can still set flags after `import meshes`."""
    code = "import sys, meshes, meshes.__main__; meshes.MeshSpec.parse('data=-1', 4); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
