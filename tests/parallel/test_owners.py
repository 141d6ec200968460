"""Every element has one owner; what owners get is the sum over replicas, and what they send back is what they have."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from k3jax.parallel.owners import Owners
from meshes import AXES, MeshSpec

MESH = "data=2,pipe=2,expert=2"
CASES = {
    "five elements": (P(None), (5,), 0),
    "one element": (P(None, None), (1, 1), 0),
    "rows of an embedding": (P("pipe", None), (6, 3), 0),
    "a layer's elements in shards": (P("pipe", None, None, "expert"), (2, 3, 5, 4), 3),
    "three heads": (P("pipe", None, None, None, None, None), (2, 1, 1, 3, 4, 5), 4),
    "six experts": (P("pipe", None, None, "expert", None, None), (2, 3, 2, 6, 5, 2), 4),
    "matrices in shards of columns": (P(None, None, "expert"), (5, 3, 4), 1),
    "matrices in shards of rows": (P(None, "expert", None), (1, 6, 3), 1),
}


@pytest.mark.quick
@pytest.mark.parametrize("case", CASES)
def test_owners_get_the_sum_and_give_back_what_they_have(case):
    """Each replica contributes its own numbers; the owners' parts are the sum, element by element, and gather to it."""
    spec, shape, kept = CASES[case]
    mesh = MeshSpec.parse(MESH).build()
    owners = Owners(spec, shape, dict(mesh.shape), kept)
    assert (owners.owned - 1) * owners.replicas < owners.elements <= owners.padded

    def local(a):
        mine = a * (1 + lax.axis_index(owners.axes))  # replicas are told apart
        owned = owners.scatter(mine)
        return owned, owners.gather(owned), owners.own(lax.psum(mine, owners.axes))

    out_specs = owners.out_spec, spec, owners.out_spec
    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=out_specs))
    whole = jnp.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    owned, gathered, own = program(whole)
    np.testing.assert_array_equal(gathered, sum(range(1, owners.replicas + 1)) * whole)
    np.testing.assert_array_equal(own, owned)
    assert owned.shape == owners.owned_shape
    # No element lies twice: the parts are apart, and sum to what the whole sums to.
    assert len({str(shard.index) for shard in owned.addressable_shards}) == mesh.devices.size
    assert float(owned.sum()) == float(gathered.sum())


sizes = st.fixed_dictionaries({axis: st.sampled_from([1, 2, 3]) for axis in AXES})


@pytest.mark.quick
@settings(max_examples=25)
@given(sizes, st.integers(0, 2), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(0, 3))
def test_every_element_has_one_owner(sizes, kept, shape, sharded):
    """Over shapes and meshes: what the owners of a device's part have together is the part, once, and zeros.

    Of the dims, up to two are kept, and at most one is sharded over expert.
    """
    kept = min(kept, len(shape))
    spec = P(*("expert" if dim == sharded else None for dim in range(len(shape))))
    whole = tuple(size * sizes["expert"] if dim == sharded else size for dim, size in enumerate(shape))
    owners = Owners(spec, whole, sizes, kept)
    assert owners.local == tuple(shape) and set(owners.axes) == set(AXES) - (
        {"expert"} if sharded < len(shape) else set()
    )
    part = 1 + jnp.arange(math.prod(shape), dtype=jnp.int32).reshape(shape)
    own = owners.own
    for axis in owners.axes:
        own = jax.vmap(own, in_axes=None, out_axes=0, axis_name=axis, axis_size=sizes[axis])
    held = np.asarray(jax.jit(own)(part))
    assert held.shape[len(owners.axes) :] == (*shape[:kept], *[1] * len(owners.shards), owners.owned)
    assert sorted(held[held != 0]) == list(range(1, 1 + part.size))
    assert held.size * owners.elements == part.size * owners.padded
