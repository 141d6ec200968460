"""The two halves of a backward program make what the whole makes, no product or collective twice, and hold little."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec as P

from k3jax.activations.leaves import subjaxprs
from k3jax.activations.min_cut import sink_side
from k3jax.activations.split import split
from k3jax.compat import vary_like
from k3jax.parallel import boxes, pipeline
from meshes import AXES, MeshSpec

COLLECTIVES = ("psum", "psum2", "psum_invariant", "all_gather", "reduce_scatter", "all_to_all", "pmax")


def work(jaxpr, times: int = 1) -> tuple[int, int]:
    """FLOPs of all products of a program and number of its collectives; all branches count."""
    flops = collectives = 0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            contracted = eqn.params["dimension_numbers"][0][0]
            flops += (
                2 * times * eqn.outvars[0].aval.size * int(np.prod([eqn.invars[0].aval.shape[i] for i in contracted]))
            )
        collectives += times * (name in COLLECTIVES)
        for sub in subjaxprs(eqn):
            inside = work(sub, times * eqn.params["length"] if name == "scan" else times)
            flops, collectives = flops + inside[0], collectives + inside[1]
    return flops, collectives


def halves(parts, inputs):
    """Jaxprs of both halves."""
    read = lambda which: [inputs[i] for i in which]
    before, (_, crossing) = jax.make_jaxpr(parts.before, return_shape=True)(*read(parts.before_reads))
    return before, jax.make_jaxpr(parts.after)(*read(parts.after_reads), *crossing)


def join(closed, first, inputs, **options):
    """All outputs by way of the two halves."""
    parts = split(closed, first, **options)
    wanted, crossing = parts.before(*(inputs[i] for i in parts.before_reads))
    assert [(c.shape, c.dtype) for c in crossing] == [(c.shape, c.dtype) for c in parts.crossing]
    rest = parts.after(*(inputs[i] for i in parts.after_reads), *crossing)
    early, late = iter(wanted), iter(rest)
    return [next(early) if f else next(late) for f in first]


# ---- a program with everything -------------------------------------------------------------------------------------------


@jax.custom_vjp
def scaled(x, w):
    return x * w


scaled.defvjp(lambda x, w: (x * w, (x, w)), lambda saved, d: (d * saved[1], (d * saved[0]).sum(0)))


def stack(weights, shared, x):
    """Layers in a loop: recomputed in backward, a branch of its own each, one weight for all, a sum over devices."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer(x, layer_weights):
        index, w, scale = layer_weights
        x = scaled(jnp.tanh(x @ w), vary_like(scale, x))
        one, two = lambda x: jnp.sin(x @ w) @ shared, lambda x: jax.nn.relu(x) * shared[0] + lax.psum(x, "data") / 8
        return x + lax.cond(index % 2, one, two, x)

    def step(x, layer_weights):
        return layer(x, layer_weights), None

    return lax.scan(step, x, (jnp.arange(3), *weights))[0]


def backward(w, scale, shared, x, dy):
    d_weights, d_shared, dx = jax.vjp(stack, (w, scale), shared, x)[1](dy)
    return [*d_weights, d_shared, dx]


FIRST = [False, False, False, True]


def problem():
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = ((3, 6, 6), (3, 6), (6, 6), (8, 5, 6), (8, 5, 6))
    return [0.5 * jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


@functools.cache
def on_two_devices(function):
    """The function of one device's arrays; the last two arguments are spread over devices."""
    mesh = MeshSpec.parse("data=2").build()
    specs = (P(), P(), P(), P("data"), P("data"))
    flat = lambda w, scale, shared, x, dy: function(w, scale, shared, x.reshape(-1, 6), dy.reshape(-1, 6))
    return jax.jit(jax.shard_map(flat, mesh=mesh, in_specs=specs, out_specs=[P(), P(), P(), P("data")]))


@pytest.mark.quick
@pytest.mark.parametrize("refine", [False, True])
@pytest.mark.parametrize("first", [FIRST, [True, False, False, False], [False, False, True, False], [True] * 4])
def test_halves_make_what_the_whole_makes(first, refine):
    """Through loops, branches, recomputation, rules and sums over devices, whichever output is first; in float32."""

    def both(*inputs):
        closed = jax.make_jaxpr(backward)(*inputs)
        return join(closed, first, inputs, refine=refine)

    expected, got = on_two_devices(backward)(*problem()), on_two_devices(both)(*problem())
    for a, b in zip(expected, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)  # sums of a fused loop may be ordered otherwise


@pytest.mark.quick
@pytest.mark.parametrize("refine", [False, True])
def test_no_product_and_no_collective_runs_twice(refine):
    """Whereas a program of weight gradients alone makes the cotangents again: on the model's chunk below it does 98 % of
    the whole backward's products, and both halves 178 % (182 % with recomputation); cut in two they do 98 %."""
    seen = {}

    def measure(*inputs):
        closed = jax.make_jaxpr(backward)(*inputs)
        parts = split(closed, FIRST, refine=refine)
        seen["whole"], seen["halves"] = work(closed.jaxpr), [work(h.jaxpr) for h in halves(parts, inputs)]
        alone = split(closed, [not f for f in FIRST], refine=refine)
        seen["alone"] = work(halves(alone, inputs)[0].jaxpr)[0]
        return backward(*inputs)

    jax.eval_shape(on_two_devices(measure), *problem())
    (flops, collectives), pair = seen["whole"], seen["halves"]
    assert sum(f for f, _ in pair) <= flops and all(f > 0 for f, _ in pair)
    assert sum(c for _, c in pair) == collectives > 0
    assert seen["alone"] + pair[0][0] >= 1.3 * flops


@pytest.mark.quick
def test_sums_of_shared_weights_move_to_the_second_loop():
    """A gradient that accumulates in the loop's carry is wanted late, so its carry leaves the first loop."""

    def run(shared, x, dy):
        function = lambda shared, x: lax.scan(lambda x, _: (jnp.sin(x @ shared), None), x, None, length=4)[0]
        return jax.vjp(function, shared, x)[1](dy)

    inputs = [jnp.ones((6, 6)), jnp.ones((5, 6)), jnp.ones((5, 6))]
    closed = jax.make_jaxpr(run)(*inputs)
    before, after = halves(split(closed, [False, True]), inputs)
    loops = lambda jaxpr: [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "scan"]
    (second,) = loops(after)  # and no loop that only copies what crosses
    assert [v.aval.shape for v in second.outvars] == [(6, 6)]
    assert all((6, 6) not in [v.aval.shape for v in loop.outvars] for loop in loops(before))


@pytest.mark.quick
def test_effects_happen_once_and_first():
    seen = []

    def run(x):
        jax.debug.callback(lambda v: seen.append(float(v)), x.sum())
        return [x * 2, x @ x]

    closed = jax.make_jaxpr(run)(jnp.ones((2, 2)))
    parts = split(closed, [True, False])
    wanted, crossing = parts.before(jnp.ones((2, 2)))
    jax.effects_barrier()
    assert seen == [4.0]
    parts.after(jnp.ones((2, 2)), *crossing)
    jax.effects_barrier()
    assert seen == [4.0]


# ---- what crosses --------------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_cheap_values_are_made_again_rather_than_held():
    """W makes a wide value again from the narrow one that crosses, but never a product."""

    def run(x, w):
        product = x @ w
        wide = jnp.exp(jnp.broadcast_to(product[:, None], (4, 50, 6)))
        return [wide.sum(), jnp.einsum("anb,anc->bc", wide, jnp.sin(wide))]

    inputs = [jnp.ones((4, 5)), jnp.ones((5, 6))]
    closed = jax.make_jaxpr(run)(*inputs)
    plain, refined = (split(closed, [True, False], refine=refine) for refine in (False, True))
    assert plain.crossing_bytes == 4 * 50 * 6 * 4 and refined.crossing_bytes == 4 * 6 * 4
    assert not refined.after_reads
    before, after = halves(refined, inputs)
    assert (
        work(before.jaxpr)[0] == 2 * 4 * 5 * 6 and work(before.jaxpr)[0] + work(after.jaxpr)[0] == work(closed.jaxpr)[0]
    )


@pytest.mark.quick
def test_a_sum_moves_to_the_first_half_if_its_operand_would_be_held():
    def run(dy, x, w):
        d = dy @ w
        return [d, (d * x).sum(0)]

    inputs = [jnp.ones((40, 6)), jnp.ones((40, 6)), jnp.ones((6, 6))]
    closed = jax.make_jaxpr(run)(*inputs)
    parts = split(closed, [True, False], free=[False, False, True])
    assert parts.crossing_bytes == 6 * 4 and not parts.after_reads
    assert split(closed, [True, False], refine=False).crossing_bytes == 40 * 6 * 4


@pytest.mark.quick
def test_what_a_loop_reads_of_both_halves_numbers_is_there_in_both():
    """A number that only the second half needs, until a sum that it scales moves to the first."""

    def function(x):
        number = lax.iota(jnp.float32, 3)[1]

        def body(early, row):
            wide = jnp.sin(row)
            return early + wide.sum(), (wide * number).sum()

        return lax.scan(body, 0.0, x)

    x = jnp.linspace(0.0, 1.0, 4 * 64).reshape(4, 64)
    closed = jax.make_jaxpr(function)(x)
    got = join(closed, [True, False], [x], free=[False])
    jax.tree.map(np.testing.assert_array_equal, got, list(function(x)))
    assert [c.shape for c in split(closed, [True, False], free=[False]).crossing] in ([(4,)], [])


def test_an_input_that_is_not_free_is_read_by_w_only_where_that_holds_less():
    """A residual that W needs rounded: the rounded copy crosses and the residual dies; as a free input it is read again."""

    def run(residual, dy):
        rounded = residual.astype(jnp.bfloat16)
        return [dy @ rounded, rounded.T @ dy]

    inputs = [jnp.ones((6, 6)), jnp.ones((6, 6), jnp.bfloat16)]
    closed = jax.make_jaxpr(run)(*inputs)
    held = split(closed, [True, False], free=[False, False])
    assert held.after_reads == (1,) and held.crossing_bytes == 6 * 6 * 2
    free = split(closed, [True, False])
    assert free.after_reads == (0, 1) and not free.crossing


@pytest.mark.quick
def test_branches_share_room_for_what_crosses():
    def run(index, x, w):
        made = lambda function: lambda x: (lambda h: (h @ w, h.T @ h))(function(x @ w))
        return lax.switch(index, [made(jnp.sin), made(jnp.cos), lambda x: (x, x.T @ x)], x)

    inputs = [jnp.int32(1), jnp.arange(10.0).reshape(5, 2), jnp.eye(2) + 0.5]
    closed = jax.make_jaxpr(run)(*inputs)
    assert [c.shape for c in split(closed, [True, False]).crossing] == [(5, 2)]
    for index in range(3):
        inputs[0] = jnp.int32(index)
        for a, b in zip(run(*inputs), join(closed, [True, False], inputs), strict=True):
            np.testing.assert_array_equal(a, b)


def test_minimum_cut_is_the_best_of_all_cuts():
    random = np.random.default_rng(0)
    for _ in range(30):
        n = 6
        edges = [
            (a, b, int(random.integers(0, 9))) for a in range(n) for b in range(n) if a != b and random.random() < 0.5
        ]
        price = lambda late, edges=edges: sum(p for a, b, p in edges if a not in late and b in late)
        inner = range(1, n - 1)
        all_cuts = [{n - 1, *c} for k in range(n - 1) for c in itertools.combinations(inner, k)]
        found = sink_side(edges, 0, n - 1)
        best = min(map(price, all_cuts))
        assert price(found) == best and len(found) == min(len(c) for c in all_cuts if price(c) == best)
    with pytest.raises(ValueError, match="finite price"):
        sink_side([(0, 1, float("inf"))], 0, 1)


@pytest.mark.quick
def test_masks_that_do_not_fit_are_refused():
    closed = jax.make_jaxpr(lambda x: [x, x])(1.0)
    with pytest.raises(ValueError, match="first has 1 entries, the program needs 2"):
        split(closed, [True])
    with pytest.raises(ValueError, match="free has 2 entries, the program needs 1"):
        split(closed, [True, False], free=[True, True])


# ---- the model's chunk ---------------------------------------------------------------------------------------------------


class ChunkBackward:
    """The pullback of the model's chunk as a program, and values of its inputs on every device."""

    def __init__(self, policy: str):
        step = tiny.train_step("data=1,pipe=1,expert=2,context=1", activations=policy)
        self.mesh, self.everywhere = step.mesh, P(AXES)

        def forward(params, balance, flags, batch):
            program, params = step._program(params, balance, flags, batch)
            schedule = step.resolved.schedule
            args, histories = pipeline.example_of(schedule, program, params)
            stream = boxes.vary(program.embed(params["embed"], jnp.int32(0)))
            args = args[0], histories.join(stream, histories.none), args[2]
            pullback = pipeline.pullback_of(schedule, program, args, histories)
            leaves, (out, _) = pullback.forward(args)
            given = args[0], out[1], args[2]
            inputs, tree = jax.tree.flatten(boxes.vary((given, leaves, jax.tree.map(jnp.sin, out))))
            run = lambda *flat: jax.tree.leaves(pullback.backward(*jax.tree.unflatten(tree, flat)))
            self.closed = jax.make_jaxpr(run)(*inputs)
            self.first = [False] * len(jax.tree.leaves(args[0])) + [True] * len(jax.tree.leaves(args[1]))
            self.free = [i < len(jax.tree.leaves(given)) for i in range(len(inputs))]
            return [x[None] for x in inputs]

        self.step = step
        self.rest = (
            tiny.skewed_balance(step.config.model, step.layout),
            step._flags(),
            step.place(tiny.batch(step.config)),
        )
        run = jax.jit(step._sharded(forward, self.everywhere))
        self.forward = run.trace(step.state_shapes.params, *self.rest)
        self.bytes = [a.dtype.itemsize * a.size for a in self.closed.in_avals]

    def inputs(self):
        """Values of a forward pass; leading dim: devices."""
        params = jax.jit(lambda: self.step._init().params, out_shardings=self.step.state_shardings.params)()
        return self.forward.lower().compile()(params, *self.rest)

    def compile(self, function, inputs):
        local = lambda *xs: [y[None] for y in function(*(x[0] for x in xs))]
        specs = (self.everywhere,) * len(inputs)
        sharded = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=self.everywhere)
        traced = jax.jit(sharded).trace(*inputs)
        return work(traced.jaxpr.jaxpr), traced.lower().compile()


@functools.cache
def chunk_backward(policy: str) -> ChunkBackward:
    return ChunkBackward(policy)


POLICIES = ("*=keep", "*=recompute")


def held(parts, chunk) -> int:
    """Bytes that a device holds from B to W: what crosses, and inputs other than weights that W reads."""
    return parts.crossing_bytes + sum(chunk.bytes[i] for i in parts.after_reads if not chunk.free[i])


@pytest.mark.parametrize(
    "policy", [pytest.param("*=keep", marks=pytest.mark.slow), pytest.param("*=recompute", marks=pytest.mark.slow)]
)
def test_split_of_the_models_chunk_is_exact_and_repeats_no_product(policy):
    """In products of the jaxpr, and in all FLOPs of the compiled programs, what cheap equations repeat included."""
    chunk = chunk_backward(policy)
    parts, wanted, inputs = split(chunk.closed, chunk.first, free=chunk.free), sum(chunk.first), chunk.inputs()
    written, compiled, outputs = {}, {}, {}

    def run(name, function, inputs):
        written[name], executable = chunk.compile(function, inputs)
        compiled[name] = executable.cost_analysis()["flops"]
        outputs[name] = executable(*inputs)

    read = lambda which: [inputs[i] for i in which]
    run("whole", core.jaxpr_as_fun(chunk.closed), inputs)
    run("B", lambda *xs: itertools.chain(*parts.before(*xs)), read(parts.before_reads))
    run("W", parts.after, read(parts.after_reads) + outputs["B"][wanted:])

    early, late = iter(outputs["B"][:wanted]), iter(outputs["W"])
    for f, expected in zip(chunk.first, outputs["whole"], strict=True):
        # XLA fuses and orders sums otherwise in a smaller program: errors of float32 sums, of the size of the largest.
        atol = 1e-6 * float(jnp.abs(expected).max())
        np.testing.assert_allclose(next(early if f else late), expected, rtol=1e-6, atol=atol)
    for count in range(2):
        assert written["B"][count] + written["W"][count] <= written["whole"][count]
    assert compiled["B"] + compiled["W"] <= 1.02 * compiled["whole"]


@pytest.mark.parametrize("policy", [pytest.param(POLICIES[0], marks=pytest.mark.slow), *POLICIES[1:]])
def test_the_models_chunk_holds_little(policy):
    """Against cutting at every value that W reads; bytes a device holds from B to W."""
    chunk = chunk_backward(policy)
    plain, parts = (split(chunk.closed, chunk.first, free=chunk.free, refine=refine) for refine in (False, True))
    assert held(parts, chunk) <= 0.4 * held(plain, chunk)
    stored = lambda which: sum(chunk.bytes[i] for i in which if not chunk.free[i])
    assert stored(parts.after_reads) <= 0.2 * stored(parts.before_reads)  # nearly all residuals die after B
