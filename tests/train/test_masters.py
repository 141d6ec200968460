"""Owners' updates are those of one device, and what a rank computes, sends and holds is its share."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from jax.sharding import PartitionSpec as P

from experiments.bench.muon import with_reduction
from k3jax.activations.flops import flops
from k3jax.parallel.boxes import vary
from k3jax.parallel.matrices import work
from k3jax.plan.hlo import collectives
from k3jax.train.devices import abstract_mesh
from k3jax.train.step import TrainStep
from meshes import MeshSpec

# Three heads and six experts divide by hardly any number of owners; a latent projection is one matrix a layer.
MODEL = dataclasses.replace(
    tiny.MODEL, attn_res_block=None, num_heads=3, num_experts=6, pattern="M", num_layers=3, dense_layers=1
)
STEP = dataclasses.replace(tiny.STEP, model=MODEL, seq_len=16, global_batch=16, qk_clip=2e-3)
STEPS = 5


@functools.cache
def after_steps(mesh: str, zero: int = 0, pattern: str = "M", **changes):
    """{name: weight} and what the last step logged."""
    model = dataclasses.replace(MODEL, pattern=pattern, num_layers=3 * len(pattern))
    step = tiny.train_step(mesh, STEP, model=model, zero=zero, **changes)
    state, clipped = step.init(), 0
    for seed in range(STEPS):
        state, metrics = step.step(state, step.place(tiny.batch(step.config, seed)))
        clipped += int(metrics["qk_clipped"])
    return tiny.by_layer(model, step.layout, state.params), metrics, clipped


def check_equal_to_one_device(mesh: str, zero: int, pattern: str = "M", **changes):
    want, expected, clipped = after_steps("data=1", pattern=pattern)
    got, metrics, also_clipped = after_steps(mesh, zero, pattern, **changes)
    assert clipped == also_clipped > 0, "some heads are clipped, the same ones everywhere"
    for name in ("loss", "grad_norm", "max_logit"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5)
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, atol=1e-5, err_msg=name)  # 1.2e-7 seen


@pytest.mark.slow
def test_five_steps_of_owners_equal_one_device():
    check_equal_to_one_device("data=2,pipe=2,expert=2", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "zero", "pattern"),
    [
        ("data=2", 1, "M"),
        ("data=4", 2, "M"),
        ("data=8", 1, "M"),
        ("data=2,expert=2", 2, "KM"),
        ("data=2,pipe=2,expert=2", 2, "M"),
        ("pipe=2,expert=2,context=2", 1, "KM"),
        ("context=2", 2, "M"),
        ("data=1", 1, "M"),
    ],
)
def test_five_steps_of_owners_equal_one_device_on_every_mesh(mesh, zero, pattern):
    check_equal_to_one_device(mesh, zero, pattern)


@pytest.mark.parametrize("zero", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_matrices_that_lie_in_pieces_are_orthogonalised_whole(zero):
    """The dense FFN is sharded by its width: half a matrix has other singular vectors than the whole."""
    one, two = (tiny.train_step(mesh, STEP, zero=z) for mesh, z in (("data=1", 0), ("expert=2", zero)))
    random = np.random.default_rng(0)
    draw = lambda a: random.normal(size=a.shape).astype(np.float32)
    grads = jax.tree.map(draw, jax.eval_shape(one.init_params))
    tops = {"0": jnp.zeros((*one.layout.layer_table.shape[:3], MODEL.num_heads))}

    def updates(step: TrainStep):
        masters, specs = step.masters, jax.tree.map(lambda s: s.spec, step.state_shardings.opt_state)
        held = masters.own(step.init_params())
        changed, _ = masters.update(step.optimizer, masters.own(grads), step.optimizer.init(held), specs, held, tops)
        return masters.gather(changed)

    want, got = (jax.jit(functools.partial(updates, step))() for step in (one, two))
    assert two.masters.param_specs["dense"]["up"] == P(None, None, "expert")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), got, want)


@pytest.mark.parametrize("q_lora_rank", [MODEL.q_lora_rank, None])
def test_owners_clip_heads_under_adamw_too(q_lora_rank):
    """MLA in two slots, of which each head of each layer has a largest logit of its own."""
    model = dataclasses.replace(MODEL, q_lora_rank=q_lora_rank, pattern="MM", num_layers=6)
    random = np.random.default_rng(0)
    draw = lambda a: random.normal(size=a.shape).astype(np.float32)

    def updates(step: TrainStep, params, grads, max_logits):
        masters, specs = step.masters, jax.tree.map(lambda s: s.spec, step.state_shardings.opt_state)
        held, grads = masters.own(params), masters.own(grads)
        changed, _ = masters.update(step.optimizer, grads, step.optimizer.init(held), specs, held, max_logits)
        return masters.gather(changed)

    plain, owned = (
        tiny.train_step("data=2,pipe=2,expert=2", STEP, model=model, optimizer="adamw", zero=zero) for zero in (0, 1)
    )
    shapes = jax.eval_shape(plain.init_params)
    params, grads = (jax.tree.map(draw, shapes) for _ in range(2))
    heads = *plain.layout.layer_table.shape[:3], model.num_heads
    tops = {p: random.uniform(0, 2 * STEP.qk_clip, heads).astype(np.float32) for p in ("0", "1")}
    of = lambda step: jax.jit(functools.partial(updates, step))
    want, got = of(plain)(params, grads, tops), of(owned)(params, grads, tops)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want)
    free = of(plain)(params, grads, {p: top * 0 for p, top in tops.items()})
    query = "q_proj" if q_lora_rank is None else "q_up"
    for p, top in tops.items():
        for name in (query, "k_up"):
            changed = want["chunks"][p]["attn"][name] != free["chunks"][p]["attn"][name]
            np.testing.assert_array_equal(np.asarray(changed).any((-2, -1)), top > STEP.qk_clip)


# ---- what is computed, sent and held ---------------------------------------------------------------------------------

# Numbers of heads, layers and experts that divide by eight owners: nothing is padding.
EVEN = dataclasses.replace(
    tiny.MODEL, attn_res_block=None, num_heads=8, num_experts=8, pattern="M", num_layers=8, dense_layers=0,
    hidden_size=32, q_lora_rank=16, kv_lora_rank=16, latent_size=16, expert_width=16, shared_experts=1,
)  # fmt: skip


def even_step(mesh: str, zero: int, *, abstract: bool = False, **changes) -> TrainStep:
    config = dataclasses.replace(tiny.STEP, model=EVEN, zero=zero, global_batch=16, microbatches=1, **changes)
    spec = MeshSpec.parse(mesh)
    return TrainStep(config, abstract_mesh(spec) if abstract else spec.build(jax.devices()[: spec.num_devices]))


def optimizer_half(step: TrainStep):
    """(contributions to gradients, state, masters) -> (weights to compute with, state, masters), as in the step."""
    masters, update = step.masters, with_reduction(step, step.optimizer, step.state_shardings.opt_state)

    def half(grads, state, held):
        updates, state = update(grads, state, held)
        held = optax.apply_updates(held, updates)
        return masters.params(held), state, held

    shapes, state = jax.eval_shape(step.init_params), step.state_shapes
    return half, (shapes, state.opt_state, state.master if masters.owners else state.params)


@pytest.mark.quick
@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_orthogonalising_is_shared_out(replicas):
    """Operations of the traced update, on one device and on one of its owners: 1/D of it; no padding, so no more."""
    whole, shared = even_step("data=1", 0, abstract=True), even_step(f"data={replicas}", 1, abstract=True)
    count = lambda step: flops(jax.make_jaxpr(optimizer_half(step)[0])(*optimizer_half(step)[1]).jaxpr)
    assert count(shared) * replicas == pytest.approx(count(whole), rel=0.05)
    load = work(list(shared.masters.deals.values()))
    assert load.max() * replicas == pytest.approx(load.sum(), rel=1e-6)


@pytest.mark.parametrize("mesh", ["data=8", "data=2,expert=2,context=2"])
def test_bytes_that_travel_are_twice_those_of_the_weights(mesh):
    """Gradients go to owners, matrices to one of them and back, weights to all: no all-reduce, nothing as large as all."""
    step = even_step(mesh, 1)
    half, inputs = optimizer_half(step)
    found = collectives(jax.jit(half).lower(*inputs).compile().as_text())
    assert {c.kind for c in found} == {"reduce-scatter", "all-gather", "all-to-all"}, found
    sizes = [4 * o.elements * math.prod(o.local[: o.kept]) for o in jax.tree.leaves(step.masters.owners)]
    assert sum(c.received * c.times for c in found) <= 2.1 * sum(sizes)
    assert max(c.result for c in found) <= max(sizes) < sum(sizes) / 4


@pytest.mark.quick
@pytest.mark.parametrize("replicas, mu_dtype", [(2, "float32"), (4, "float32"), (8, "float32"), (4, "bfloat16")])
def test_a_matrix_takes_two_bytes_and_eight_shared_out(replicas, mu_dtype):
    """bfloat16 weight, and float32 master weight and momentum of what a rank owns; or six, with momentum in bfloat16."""
    step = even_step(f"data={replicas}", 1, abstract=True, dtype="bfloat16", momentum_dtype=mu_dtype)
    state, lie = step.state_shapes, step.state_shardings
    groups = jax.tree.leaves(step.masters.groups, is_leaf=lambda x: hasattr(x, "matrix_axes"))
    muon = state.opt_state[0].inner_states["muon"].inner_state
    momentum = lie.opt_state[0].inner_states["muon"].inner_state.mu
    held, elements = 0, 0
    trees = (state.params, lie.params), (state.master, lie.master)
    for shapes, shardings in trees:
        for a, s, group in zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), groups, strict=True):
            if group.optimizer == "muon":
                held += a.dtype.itemsize * int(np.prod(s.shard_shape(a.shape)))
    for a, s in zip(jax.tree.leaves(muon.mu), jax.tree.leaves(momentum), strict=True):
        held += a.dtype.itemsize * int(np.prod(s.shard_shape(a.shape)))
    for a, group in zip(jax.tree.leaves(state.params), groups, strict=True):
        elements += a.size * (group.optimizer == "muon")
    shared = 4 + jnp.dtype(mu_dtype).itemsize
    # The router is computed with in float32.
    assert held / elements == pytest.approx(2 + shared / replicas, rel=0.05)


def test_messages_run_beside_the_iteration_on_gpus(absent_gpus):
    """Compiled for GPUs: between the start of a message and its end stand products of Newton–Schulz."""
    from k3jax.plan.overlap import messages

    model = dataclasses.replace(EVEN, hidden_size=256, q_lora_rank=128, kv_lora_rank=128, latent_size=128)
    config = dataclasses.replace(tiny.STEP, model=model, zero=1, global_batch=16, microbatches=1)
    step = TrainStep(config, MeshSpec(data=8).build(absent_gpus))
    half, inputs = optimizer_half(step)
    found = messages(step.jit(half).lower(*inputs).compile().as_text())
    beside = [m for m in found if m.asynchronous and m.beside.keys() - {"other"}]
    assert beside, found


def test_the_contributions_of_ranks_are_summed_whatever_owns_them():
    """Only the sum over replicas may be orthogonalised, not each rank's contribution."""
    step = even_step("data=4", 1)
    masters = step.masters
    grads = jax.tree.map(
        lambda a: jax.random.normal(jax.random.key(a.size), (4, *a.shape)), jax.eval_shape(step.init_params)
    )

    def local(grads):
        return masters.reduce_local(jax.tree.map(lambda g: vary(g[0]), grads))

    reduce = jax.shard_map(local, mesh=step.mesh, in_specs=(P("data"),), out_specs=masters.specs)
    summed = jax.jit(lambda g: masters.gather(reduce(g)))(grads)
    jax.tree.map(lambda got, g: np.testing.assert_allclose(got, g.sum(0), atol=1e-5), summed, grads)
