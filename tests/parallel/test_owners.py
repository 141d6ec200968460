"""Every unit has one owner, whole; what owners get is the sum over replicas, and what they send back is what they have."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from k3jax.parallel.owners import Owners, balanced, loads
from meshes import AXES, MeshSpec

MESH = "data=2,pipe=2,expert=2"

CASES = {
    "five elements": (P(None), (5,), 0, 0),
    "one element": (P(None, None), (1, 1), 0, 0),
    "rows of an embedding": (P("pipe", None), (6, 3), 0, 0),
    "elements of experts": (P("pipe", None, None, "expert"), (2, 3, 5, 4), 2, 0),
    "three heads": (P("pipe", None, None, None, None, None), (2, 1, 1, 3, 4, 5), 2, 2),
    "six experts": (P("pipe", None, None, "expert", None, None), (2, 3, 2, 6, 5, 2), 2, 2),
    "one matrix": (P("pipe", None, None, None, None), (2, 1, 1, 3, 7), 2, 2),
    "matrices in pieces of columns": (P(None, None, "expert"), (5, 3, 4), 0, 2),
    "matrices in pieces of rows": (P(None, "expert", None), (1, 6, 3), 0, 2),
}


def owners_of(case: str, first: int = 0) -> Owners:
    spec, shape, kept, unit_dims = CASES[case]
    return Owners(spec, shape, MeshSpec.parse(MESH).sizes, kept, unit_dims, first)


@pytest.mark.quick
@pytest.mark.parametrize(("case", "first"), [*((case, 0) for case in CASES), ("one matrix", 2), ("three heads", 1)])
def test_owners_get_the_sum_and_give_back_what_they_have(case, first):
    """Each replica contributes its own numbers; the owners' parts are the sum, unit by unit, and gather to it."""
    owners, mesh = owners_of(case, first), MeshSpec.parse(MESH).build()
    assert (owners.slots - 1) * owners.owners < owners.units <= owners.slots * owners.owners

    def local(a):
        mine = a * (1 + lax.axis_index(owners.axes))  # replicas are told apart
        owned = owners.scatter(mine)
        return owned, owners.gather(owned), owners.own(lax.psum(mine, owners.axes))

    out_specs = owners.out_spec, owners.spec, owners.out_spec
    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=owners.spec, out_specs=out_specs))
    whole = jnp.arange(1.0, 1 + math.prod(owners.shape)).reshape(owners.shape)
    owned, gathered, own = program(whole)
    factor = sum(range(1, owners.replicas + 1))
    np.testing.assert_array_equal(gathered, factor * whole)
    np.testing.assert_array_equal(own, owned)
    assert owned.shape == owners.owned_shape
    # No element lies twice: the parts are apart, and sum to what the whole sums to.
    assert len({str(shard.index) for shard in owned.addressable_shards}) == mesh.devices.size
    assert float(owned.sum()) == float(gathered.sum())
    # Every unit is on its owner in one piece.
    units = np.asarray(owned).reshape(-1, *owners.unit)
    held = {unit.tobytes() for unit in units if unit.any()}
    batch = (*range(len(owners.shape) - owners.unit_dims),)
    wanted = np.asarray(factor * whole).reshape(-1, *owners.unit) if batch else np.asarray(factor * whole)[None]
    assert held == {unit.tobytes() for unit in wanted}


def test_a_unit_in_pieces_of_two_dims_is_refused():
    with pytest.raises(ValueError, match="at most one of its dims may be"):
        Owners(P("pipe", "expert"), (4, 4), MeshSpec.parse(MESH).sizes, 0, 2)
    with pytest.raises(ValueError, match="3 units from owner 2 on: there are 4 owners"):
        owners_of("three heads", 2)


sizes = st.fixed_dictionaries({axis: st.sampled_from([1, 2, 3, 4]) for axis in AXES})
leaf = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 7), st.integers(1, 7), st.booleans())


@pytest.mark.quick
@given(sizes, st.lists(leaf, min_size=1, max_size=6))
def test_each_unit_has_one_owner_and_work_is_spread(sizes, leaves):
    """Loads add up to the work of one copy of the model, and no device has more than its share and one unit of each."""
    owners, costs = [], []
    for virtual, units, rows, columns, experts in leaves:
        of_experts = experts and units % sizes["expert"] == 0
        spec = P("pipe", None, "expert" if of_experts else None, None, None)
        owners.append(Owners(spec, (sizes["pipe"], virtual, units, rows, columns), sizes, 2, 2))
        costs.append(float(rows * columns))
    spread = balanced(owners, costs)
    load = loads(spread, costs)
    for stage in range(sizes["pipe"]):
        once = sum(c * o.units * (sizes["expert"] if o.batch_parts else 1) for o, c in zip(owners, costs, strict=True))
        np.testing.assert_allclose(np.broadcast_to(load, [sizes[a] for a in AXES])[:, stage].sum(), once)
    assert load.max() <= loads(owners, costs).max(), "no worse than if each began with the first owner"
    assert all(o.first + o.units <= o.owners for o in spread if o.units < o.owners)
    fewest = load.sum() / load.size
    assert load.max() <= fewest + sum(c * o.slots for o, c in zip(owners, costs, strict=True))


def test_large_single_matrices_go_to_different_devices():
    """Eight parameters of one large matrix each on eight replicas: the first owner of all would do all the work."""
    sizes = MeshSpec.parse("data=8").sizes
    one = functools.partial(Owners, P("pipe", None, None, None), (1, 1, 64, 64), sizes, 2, 2)
    spread = balanced([one() for _ in range(8)], [1.0] * 8)
    assert sorted(o.first for o in spread) == list(range(8))
    assert loads(spread, [1.0] * 8).max() == 1
