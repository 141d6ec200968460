"""Matrices in slices come to one owner each, whole, and their slices come back; work is spread over the owners."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.optim.orthogonal import directed
from k3jax.parallel.matrices import Deal, cost, deals, work
from k3jax.parallel.owners import Owners
from k3jax.plan.overlap import messages
from k3jax.train.devices import compiler_options
from meshes import AXES, MeshSpec

MESH = MeshSpec.parse("data=2,pipe=2,expert=2")
STACK = ("pipe", None, None)


def owners(spec, *shape, sizes=MESH.sizes) -> Owners:
    return Owners(P(*spec), shape, sizes, len(shape) - 2)


CASES = {
    "three heads, and two parameters of one shape": {
        "q": owners((*STACK, None, None, None), 2, 1, 2, 3, 6, 10),
        "k": owners((*STACK, None, None, None), 2, 1, 2, 1, 6, 10),
    },
    "six experts": {"up": owners((*STACK, "expert", None, None), 2, 3, 1, 6, 5, 3)},
    "one matrix": {"out": owners((*STACK, None, None), 2, 1, 1, 7, 3)},
    "in shards of columns": {
        "gate": owners((None, None, "expert"), 5, 3, 8),
        "up": owners((None, None, "expert"), 1, 3, 8),
    },
    "in shards of rows": {"down": owners((None, "expert", None), 2, 6, 3)},
    "eight by eight": {"w": owners((*STACK, None, None), 2, 1, 1, 8, 8)},
}


def run(case: dict[str, Owners], function, round_bytes: int):
    """function of every matrix, through its owner; and the plain one."""
    mesh = MESH.build()
    whole = {n: jax.random.normal(jax.random.key(i), o.shape) for i, (n, o) in enumerate(case.items())}
    dealt = deals(case, round_bytes)

    def local(parts):
        result = {}
        for names, deal in dealt.items():
            slices = [case[name].own(parts[name]) for name in names]
            made = deal.run(function, [x.reshape(-1, x.shape[-1]) for x in slices])
            result |= {n: case[n].gather(y.reshape(x.shape)) for n, x, y in zip(names, slices, made, strict=True)}
        return result

    specs = {name: o.spec for name, o in case.items()}
    got = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=specs))(whole)
    return dealt, got, {name: function(a) for name, a in whole.items()}


@pytest.mark.parametrize("round_bytes", [1, 1 << 20])
@pytest.mark.parametrize("case", CASES)
def test_a_whole_matrix_is_worked_on_and_its_slices_return(case, round_bytes):
    """Rounds of one matrix an owner, and all in one. Treating slices as matrices would be off by tens of percent."""
    dealt, got, want = run(CASES[case], directed, round_bytes)
    assert sum(map(len, dealt)) == len(CASES[case])
    assert (
        {deal.per_round for deal in dealt.values()} == {1}
        if round_bytes == 1
        else {1} == {d.rounds for d in dealt.values()}
    )
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, atol=2e-5)  # float32 in another order, through five products


def test_a_matrix_in_shards_of_two_dims_is_refused():
    with pytest.raises(ValueError, match="w, .* is sharded as .* at most one dim"):
        deals({"w": owners(("pipe", "expert"), 4, 4)})


sizes = st.fixed_dictionaries({axis: st.sampled_from([1, 2, 3, 4]) for axis in AXES})
leaf = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.booleans())


@pytest.mark.quick
@given(sizes, st.lists(leaf, min_size=1, max_size=6), st.sampled_from([1, 100, 1 << 20]))
def test_each_matrix_has_one_owner_and_work_is_spread(sizes, leaves, round_bytes):
    """Work adds up to that of one copy of the model; none has more than its share and one matrix of each shape besides."""
    each = {}
    for i, (virtual, batch, rows, columns, experts) in enumerate(leaves):
        axis = "expert" if experts and batch % sizes["expert"] == 0 else None
        shape = sizes["pipe"], virtual, batch, rows, columns
        each[str(i)] = owners(("pipe", None, axis, None, None), *shape, sizes=sizes)
    dealt = deals(each, round_bytes)
    assert sorted(sum(dealt, ())) == sorted(each)
    of_mesh = lambda a: np.broadcast_to(a, [sizes[axis] for axis in AXES])
    for deal in dealt.values():
        copies = math.prod(sizes.values()) // sizes["pipe"] // deal.owners
        assert of_mesh(deal.held)[:, 0].sum() == deal.matrices * copies
        assert deal.held.max() <= deal.slots and (deal.slots - deal.rounds) * deal.owners < deal.matrices
        assert deal.per_round == 1 or 4 * math.prod(deal.shape) * deal.per_round <= round_bytes
        assert deal.held.max() - deal.held.min() <= 1
    load = work(list(dealt.values()))
    worst = sum(cost(deal) for deal in dealt.values())
    assert load.max() <= load.mean() + worst
    in_order = [Deal(deal.like, deal.rows, 0, round_bytes) for deal in dealt.values()]
    assert load.max() <= work(in_order).max(), "no worse than if each began with the first owner"


def test_few_large_matrices_go_to_different_ranks():
    """Eight shapes of one matrix each on eight replicas: the first rank would do all the work."""
    one = functools.partial(owners, (*STACK, None, None), 1, 1, 1, sizes=MeshSpec.parse("data=8").sizes)
    dealt = deals({str(n): one(64, 64 + n) for n in range(8)})
    assert sorted(deal.first for deal in dealt.values()) == list(range(8))
    assert work(list(dealt.values())).max() == 64 * 64 * 71


@pytest.mark.quick
def test_no_more_than_a_round_is_sent_at_once():
    each = {"w": owners((*STACK, None, None), 1, 2, 24, 8, 8, sizes=MeshSpec.parse("data=4").sizes)}
    (deal,) = deals(each, 3 * 4 * 64).values()
    assert (deal.rounds, deal.per_round, deal.slots) == (4, 3, 12)
    mesh = MeshSpec.parse("data=4").build(jax.devices()[:4])
    spec = P("pipe", None, deal.axes)
    run = jax.shard_map(lambda x: deal.run(lambda m: m + 1, [x[0]])[0][None], mesh=mesh, in_specs=spec, out_specs=spec)
    jaxpr = jax.make_jaxpr(run)(jnp.zeros((1, 48, 64)))
    assert str(jaxpr).count("all_to_all[") == 5, "in: first and in each turn; out: in each turn and the last two"
    assert "length=3" in str(jaxpr)
    sent = 4 + 5  # in each round, and the empty first turn
    assert deal.bytes_sent == sent * 4 * 4 * 3 * 16 * 3 / 4, "float32, owners, matrices, slice, all but one's own"


def test_a_round_is_orthogonalised_while_others_travel(absent_gpus):
    """Compiled for GPUs: in the loop over rounds the next one arrives beside the iteration, after it one leaves beside the last.

    XLA sends what leaves in the loop by itself.
    """
    each = {"w": owners((*STACK, None, None), 1, 1, 64, 256, 256, sizes=MeshSpec(data=8).sizes)}
    (deal,) = deals(each, 2 * 4 * 256 * 256).values()
    assert deal.rounds == 4
    mesh, spec = MeshSpec(data=8).build(absent_gpus), P("pipe", None, deal.axes)
    run = jax.shard_map(lambda x: deal.run(directed, [x[0]])[0][None], mesh=mesh, in_specs=spec, out_specs=spec)
    slices = jax.ShapeDtypeStruct((1, 64, 256 * 256), jnp.float32, sharding=NamedSharding(mesh, spec))
    compiled = jax.jit(run, compiler_options=compiler_options("gpu")).lower(slices).compile()
    found = [m for m in messages(compiled.as_text()) if m.name.startswith("all-to-all")]
    beside = [m.asynchronous and bool(m.beside.keys() - {"other"}) for m in found]
    assert len(found) == 5 and any(beside[:2]) and any(beside[2:]), found
