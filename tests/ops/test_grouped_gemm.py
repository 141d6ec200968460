"""Grouped products: every implementation against products group by group, on uneven groups.

C rows, G groups, D and F widths.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from k3jax.ops import grouped_gemm as ops
from k3jax.ops.grouped_gemm import api, reference, xla
from k3jax.ops.grouped_gemm.mosaic import Mosaic

# Sums are made in float32; the results were rounded to bfloat16 once (2^-9).
CLOSE = 3e-3
ACTIVATIONS = {"SiTU": {"beta": 4.0, "linear_beta": 25.0}, "SwiGLU": {"beta": None, "linear_beta": None}}


KERNELS = "mosaic_gpu"


@pytest.fixture(params=["xla", KERNELS])
def implementation(request, monkeypatch):
    """Its name; the kernels run in Mosaic's interpreter."""
    monkeypatch.setitem(api.IMPLEMENTATIONS, KERNELS, Mosaic(interpret=True))
    return request.param


# Borders inside tiles of 128 rows and inside copies of 8, an empty group, rows that no group has.
UNEVEN = ([9, 0, 150, 12], 184)
CASES = {
    "one has all, no whole copy": ([0, 131], 131),
    "fewer rows than a tile": ([3, 2], 7),
    "none": ([0, 0], 5),
}


def arrays(sizes, C, dtype=jnp.bfloat16, D=128, F=128, seed=0):
    """x [C, D], two of w [G, D, F], dy [C, F], p [C], group sizes; rows of no group are not numbers."""
    rng = np.random.default_rng(seed)
    shapes = (C, D), (len(sizes), D, F), (len(sizes), D, F), (C, F), (C,)
    used = np.arange(C) < sum(sizes)
    x, gate, up, dy, p = (rng.normal(size=shape) for shape in shapes)
    x, dy = (np.where(used[:, None], a, np.nan) for a in (x, dy))
    rounded = [jnp.asarray(a, dtype) for a in (x, gate / D**0.5, up / D**0.5, dy)]
    return *rounded, jnp.asarray(p, jnp.promote_types(dtype, jnp.float32)), jnp.asarray(sizes, jnp.int32)


def wide(*given):
    return [jnp.asarray(np.asarray(x, np.float64)) for x in given]


def assert_close(got, right, used, tolerance=CLOSE):
    got, right = (np.asarray(x, np.float64)[:used] for x in (got, right))
    assert np.abs(got - right).max(initial=0) <= tolerance * np.abs(right).max(initial=0)


@pytest.mark.parametrize("case", CASES)
def test_each_row_meets_its_own_groups_matrix(case, implementation):
    sizes, C = CASES[case]
    x, w, _, _, _, group_sizes = arrays(sizes, C)
    y = ops.grouped_gemm(x, w, group_sizes, implementation=implementation)
    assert (y.shape, y.dtype) == ((C, w.shape[2]), jnp.bfloat16)
    with jax.enable_x64(True):
        right = reference.grouped_gemm(*wide(x, w), group_sizes)
    assert_close(y, right, sum(sizes))


@pytest.mark.quick
def test_its_gradient_uses_no_row_of_no_group(implementation):
    x, w, _, dy, _, group_sizes = arrays(*UNEVEN)
    y, pullback = jax.vjp(lambda x, w: ops.grouped_gemm(x, w, group_sizes, implementation=implementation), x, w)
    dx, dw = pullback(dy)
    assert [a.dtype for a in (y, dx, dw)] == [jnp.bfloat16] * 3
    with jax.enable_x64(True):
        wide_x, wide_w, wide_dy = wide(x, w, dy)
        right = [reference.grouped_gemm(wide_x, wide_w, group_sizes)]
        right.append(reference.input_gradient(wide_dy, wide_w, group_sizes))
        right.append(reference.weight_gradient(wide_x, wide_dy, group_sizes))
    for got, expected, used in zip((y, dx, dw), right, (sum(UNEVEN[0]), len(dx), len(dw)), strict=True):
        assert_close(got, expected, used)
    assert not np.asarray(dx, np.float32)[sum(UNEVEN[0]) :].any() and not np.asarray(dw, np.float32)[1].any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_experts_activate_unrounded_products(activation, implementation):
    x, gate, up, _, _, group_sizes = arrays(*UNEVEN)
    how = ACTIVATIONS[activation]
    hidden = ops.expert_hidden(x, gate, up, group_sizes, implementation=implementation, **how)
    assert hidden.dtype == jnp.bfloat16
    with jax.enable_x64(True):
        right = reference.expert_hidden(*wide(x, gate, up), group_sizes, **how)
    assert_close(hidden, right, sum(UNEVEN[0]))


@pytest.mark.parametrize(
    ("implementation", "activation"),
    [("xla", "SiTU"), ("xla", "SwiGLU"), (KERNELS, "SiTU"), pytest.param(KERNELS, "SwiGLU", marks=pytest.mark.slow)],
    indirect=["implementation"],
)
def test_backward_makes_the_products_again_and_weighs_what_follows(activation, implementation):
    x, gate, up, da, p, group_sizes = arrays(*UNEVEN)
    how = ACTIVATIONS[activation]
    got = ops.expert_hidden_gradients(x, gate, up, da, p, group_sizes, implementation=implementation, **how)
    assert [a.dtype for a in got] == [jnp.bfloat16] * 3 + [jnp.float32]
    with jax.enable_x64(True):
        right = reference.expert_hidden_gradients(*wide(x, gate, up, da, p), group_sizes, **how)
    for a, b, tolerance in zip(got, right, [CLOSE] * 3 + [1e-6], strict=True):  # dp is never rounded to bfloat16
        assert_close(a, b, sum(UNEVEN[0]), tolerance)


def test_the_gradient_of_the_input_is_rounded_once(implementation):
    _, gate, up, d_gate, _, group_sizes = arrays(*UNEVEN)
    d_up = d_gate[:, ::-1]
    got = ops.expert_input_gradient(d_gate, d_up, gate, up, group_sizes, implementation=implementation)
    with jax.enable_x64(True):
        right = reference.expert_input_gradient(*wide(d_gate, d_up, gate, up), group_sizes)
    assert_close(got, right, sum(UNEVEN[0]))


def test_row_weights_act_before_any_rounding(implementation):
    x, w, _, _, p, group_sizes = arrays(*UNEVEN)
    y = ops.weighted_gemm(x, w, p, group_sizes, implementation=implementation)
    assert y.dtype == jnp.float32
    with jax.enable_x64(True):
        right = reference.weighted_gemm(*wide(x, w, p), group_sizes)
    assert_close(y, right, sum(UNEVEN[0]), tolerance=1e-6)  # nothing was rounded to bfloat16


def test_float64_stays_float64():
    with jax.enable_x64(True):
        x, w, up, dy, p, group_sizes = arrays([3, 0, 25, 4], 41, jnp.float64, D=5, F=6)
        how = ACTIVATIONS["SiTU"]
        pairs = [
            (ops.grouped_gemm(x, w, group_sizes), reference.grouped_gemm(x, w, group_sizes)),
            (ops.input_gradient(dy, w, group_sizes), reference.input_gradient(dy, w, group_sizes)),
            (ops.weight_gradient(x, dy, group_sizes), reference.weight_gradient(x, dy, group_sizes)),
            (ops.expert_hidden(x, w, up, group_sizes, **how), reference.expert_hidden(x, w, up, group_sizes, **how)),
            (ops.weighted_gemm(x, w, p, group_sizes), reference.weighted_gemm(x, w, p, group_sizes)),
            (
                ops.expert_input_gradient(dy, dy, w, up, group_sizes),
                reference.expert_input_gradient(dy, dy, w, up, group_sizes),
            ),
            *zip(
                ops.expert_hidden_gradients(x, w, up, dy, p, group_sizes, **how),
                reference.expert_hidden_gradients(x, w, up, dy, p, group_sizes, **how),
                strict=True,
            ),
        ]
        for got, right in pairs:
            assert got.dtype == jnp.float64
            assert_close(got, right, min(len(got), 32), tolerance=1e-14)


def test_the_reference_is_a_loop_over_groups():
    x, w, _, dy, _, _ = (np.asarray(a, np.float64) for a in arrays([2, 0, 3], 5, jnp.float32, D=4, F=3))
    group_sizes = jnp.asarray([2, 0, 3])
    with jax.enable_x64(True):
        y = reference.grouped_gemm(*wide(x, w), group_sizes)
        dw = reference.weight_gradient(*wide(x, dy), group_sizes)
    np.testing.assert_allclose(y, np.concatenate([x[:2] @ w[0], x[2:] @ w[2]]), rtol=1e-12)
    np.testing.assert_allclose(dw, np.stack([x[:2].T @ dy[:2], 0 * w[1], x[2:].T @ dy[2:]]), rtol=1e-12)


@pytest.mark.parametrize("copied", [1, 3 * 5 * 6 * 8])
def test_tiles_in_turns_are_the_same(copied, monkeypatch):
    """Where copies of matrices would be large: one tile a turn, three tiles a turn."""
    monkeypatch.setattr(xla, "COPIED_BYTES", copied)
    test_float64_stays_float64()


@pytest.mark.quick
def test_all_kernels_lower_for_cuda_inside_shard_map():
    # shard_map compares the types of gradients and inputs: weights that all ranks share get the sum over ranks.
    x, gate, up, _, p, group_sizes = arrays([100, 28], 128)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def step(x, p, sizes, gate, up):
        how = {"implementation": "mosaic_gpu"}
        hidden = ops.expert_hidden(x, gate, up, sizes, **ACTIVATIONS["SiTU"], **how)
        loss = lambda x, w: ops.grouped_gemm(x, w, sizes, **how).astype(jnp.float32).sum()
        dx, dw = jax.grad(loss, argnums=(0, 1))(x, gate)
        weighted, d_gate, d_up, dp = ops.expert_hidden_gradients(
            x, gate, up, hidden, p, sizes, **ACTIVATIONS["SiTU"], **how
        )
        dx += ops.expert_input_gradient(d_gate, d_up, gate, up, sizes, **how)
        return ops.weighted_gemm(weighted, gate, p, sizes, **how), dx, dp, dw

    per_rank, shared = PartitionSpec("data"), PartitionSpec()
    specs = {
        "in_specs": (per_rank, per_rank, per_rank, shared, shared),
        "out_specs": (per_rank, per_rank, per_rank, shared),
    }
    arguments = *(jnp.concatenate([a, a]) for a in (x, p, group_sizes)), gate, up
    text = (
        jax.jit(jax.shard_map(step, mesh=mesh, **specs)).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    )
    for name in ("grouped_product", "grouped_gated_product", "grouped_gated_gradients", "grouped_weight_gradient"):
        assert name in text


@pytest.mark.parametrize(
    "change, said",
    [
        ({"x": (184, 128, "float32")}, "x is float32"),
        ({"x": (184, 96, "bfloat16"), "w": (4, 96, 128, "bfloat16")}, "D = 96"),
        ({"w": (4, 128, 192, "bfloat16")}, "F = 192"),
        ({"w": (4, 128, 128, "float32")}, "w is float32"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused(change, said):
    shapes = {"x": (184, 128, "bfloat16"), "w": (4, 128, 128, "bfloat16")} | change
    x, w = (jnp.zeros(shape, dtype) for *shape, dtype in shapes.values())
    with pytest.raises(ValueError, match=said):
        ops.grouped_gemm(x, w, jnp.zeros(4, jnp.int32), implementation="mosaic_gpu")


def test_shapes_and_names_that_do_not_fit_are_refused():
    x, w, *_, group_sizes = arrays([1, 1], 2, D=4, F=4)
    for bad, said in (({"w": (w[:, :3], "GDF")}, "w has shape"), ({"w": (w[:1], "GDF")}, "group_sizes has shape")):
        with pytest.raises(ValueError, match=said):
            api.check(group_sizes, x=(x, "CD"), **bad)
    with pytest.raises(ValueError, match="group_sizes are float32"):
        api.check(group_sizes.astype(jnp.float32))
    with pytest.raises(ValueError, match="'triton' is unknown"):
        ops.grouped_gemm(x, w, group_sizes, implementation="triton")
