"""Canonical form: names by global layer, records on their own stage, the same on every mesh, nothing communicated.

The state here is made by hand: every kind of leaf that the mapping must know, in odd sizes, with distinct values.
"""

import functools
import re
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.configs import ModelConfig
from k3jax.parallel.layout import StackLayout
from k3jax.parallel.owners import Owners
from k3jax.train.canonical import CanonicalForm
from k3jax.train.step import TrainState
from meshes import MeshSpec

# Layers K M K M K M M: the last group has an inactive slot; two layers have a dense FFN.
CONFIG = ModelConfig(name="tiny", pattern="KM", num_layers=7, dense_layers=2)
MESHES = [("data=1", 1), ("data=2,pipe=2,expert=2", 1), ("expert=4,context=2", 3), ("pipe=4,expert=2", 2)]


class Moments(NamedTuple):
    """Stands for an optimizer's state."""

    count: jax.ShapeDtypeStruct
    mu: dict


class Case:
    """A state's shapes and shardings on one mesh."""

    def __init__(self, mesh: str, virtual: int, config: ModelConfig = CONFIG):
        spec = MeshSpec.parse(mesh)
        self.mesh = spec.build(jax.devices()[: spec.num_devices])
        self.layout = StackLayout(config, spec.pipe, virtual)
        stack, n = self.layout.layer_table.shape[:3], config.dense_layers
        stacked = P("pipe", None, None)

        def leaf(shape, *dims, dtype="float32"):
            return jax.ShapeDtypeStruct(shape, dtype), P(*dims)

        layer = {
            "attn": {"gate": leaf((*stack, 3, 5), *stacked), "a_log": leaf(stack, "pipe")},
            "half": leaf((*stack, 2, 3), *stacked, dtype=ml_dtypes.bfloat16),
            "moe": {
                "expert_up": leaf((*stack, 4, 3, 2), *stacked, "expert"),
                "expert_down": leaf((*stack, 3, 4), *stacked, None, "expert"),
                "other_split": leaf((*stack, 8, 2), *stacked, "expert"),
                "norm": leaf((*stack, 3), *stacked),
            },
        }
        params = {
            "chunks": {"0": layer, "1": {name: layer[name] for name in ("moe", "half")}},
            "dense": {"up": leaf((n, 3, 8), None, None, "expert"), "down": leaf((n, 8, 3), None, "expert")},
            "embed": {"table": leaf((8, 3), "pipe")},
        }
        moments = {"chunks": params["chunks"], "dense": params["dense"]}
        both = TrainState(
            step=leaf((), dtype="int32"),
            params=params,
            master=None,
            opt_state=({"inner_states": {"muon": Moments(leaf((), dtype="int32"), moments)}},),
            balance={"chunks": {p: leaf((*stack, 4), "pipe") for p in ("0", "1")}},
            skipped=leaf((), dtype="int32"),
        )
        pick = functools.partial(jax.tree.map, is_leaf=lambda x: type(x) is tuple and isinstance(x[-1], P))
        self.shapes = pick(lambda pair: pair[0], both)
        self.shardings = pick(lambda pair: NamedSharding(self.mesh, pair[1]), both)
        self.form = CanonicalForm(self.shapes, self.shardings, self.layout)

    def state(self, seed: int):
        """Distinct values in every leaf, also where nothing is stored."""
        rng = np.random.default_rng(seed)
        values = jax.tree.map(lambda a: rng.integers(1, 1 << 7, a.shape).astype(a.dtype), self.shapes)
        return jax.device_put(values, self.shardings)


def stored(form: CanonicalForm, records) -> dict[str, np.ndarray]:
    """Every named array out of its record."""
    return {name: place.take(np.asarray(records[place.record])) for name, place in form.index.items()}


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.quick
def test_arrays_are_named_by_global_layer_and_taken_from_its_slot():
    case = Case("data=2,pipe=2,expert=2", 2)
    state = case.state(0)
    arrays = stored(case.form, case.form.to_records(state))
    stack = state.params["chunks"]
    moments = state.opt_state[0]["inner_states"]["muon"]
    for layer in range(CONFIG.num_layers):
        *at, p = case.layout.position(layer)
        held, prefix = jax.tree.map(lambda a, at=at: np.asarray(a)[*at], stack[str(p)]), f"params/layers/{layer}"
        expected = {f"{prefix}/half": held["half"]}
        if p == 0:
            expected |= {f"{prefix}/attn/gate": held["attn"]["gate"], f"{prefix}/attn/a_log": held["attn"]["a_log"]}
        if layer < CONFIG.dense_layers:
            expected |= {f"{prefix}/dense/{name}": np.asarray(a)[layer] for name, a in state.params["dense"].items()}
            assert not [name for name in arrays if re.search(rf"layers/{layer}/(moe|bias)", name)]
        else:
            expected |= {f"{prefix}/moe/{name}": a for name, a in held["moe"].items()}
            mu = np.asarray(moments.mu["chunks"][str(p)]["moe"]["expert_down"])[*at]
            expected[f"optimizer/muon/mu/layers/{layer}/moe/expert_down"] = mu
            expected[f"balance/layers/{layer}/bias"] = np.asarray(state.balance["chunks"][str(p)])[*at]
        assert {name for name in arrays if name.startswith(f"{prefix}/")} == {
            n for n in expected if n.startswith(prefix)
        }
        for name, array in expected.items():
            assert same(arrays[name], array), name
    alone = {"step": state.step, "skipped": state.skipped, "params/embed/table": state.params["embed"]["table"]}
    for name, array in (alone | {"optimizer/muon/count": moments.count}).items():
        assert same(arrays[name], np.asarray(array)), name
    assert not [name for name in arrays if "chunks" in name or "-1" in name]


@pytest.mark.parametrize(("mesh", "virtual"), MESHES)
def test_what_one_mesh_stores_another_reads_bitwise(mesh, virtual):
    source, target = Case("data=2,pipe=2,expert=2", 2), Case(mesh, virtual)
    assert source.form.index == target.form.index
    records = source.form.to_records(source.state(1))
    likes = target.form.records
    assert {name: (a.shape, a.dtype) for name, a in records.items()} == {
        n: (a.shape, a.dtype) for n, a in likes.items()
    }
    moved = {name: jax.device_put(np.asarray(a), likes[name].sharding) for name, a in records.items()}
    state = target.form.from_records(moved)
    jax.tree.map(
        lambda leaf, sharding: leaf.sharding == sharding or pytest.fail(f"{leaf.sharding}"), state, target.shardings
    )
    before, after = stored(source.form, records), stored(target.form, target.form.to_records(state))
    assert before.keys() == after.keys()
    for name, array in before.items():
        assert same(array, after[name]), name


def test_what_is_not_stored_comes_back_as_zeros():
    case = Case("pipe=2,expert=2", 2)
    state = case.form.from_records(case.form.to_records(case.state(2)))
    table = case.layout.layer_table
    assert (table < 0).any()
    for p, slots in state.params["chunks"].items():
        here = table[..., int(p)]
        for name, leaf in jax.tree_util.tree_leaves_with_path(slots):
            used = here >= (CONFIG.dense_layers if "moe" in jax.tree_util.keystr(name) else 0)
            filled = np.asarray(leaf).astype(np.float32).reshape(*here.shape, -1)
            assert (filled[used] != 0).all() and not filled[~used].any()
        bias = np.asarray(state.balance["chunks"][p])
        assert bias[here >= CONFIG.dense_layers].all() and not bias[here < CONFIG.dense_layers].any()


@pytest.mark.quick
def test_a_record_never_leaves_the_devices_of_its_stage():
    case = Case("data=2,pipe=2,expert=2", 2)
    state = case.state(3)
    for name, record in case.form.to_records(state).items():
        layer = re.search(r"layers/(\d+)/(?!dense)", name)
        if layer:
            stage = case.layout.position(int(layer[1]))[0]
            assert record.sharding.device_set == set(case.mesh.devices[:, stage].flat), name
            assert record.sharding == case.form.records[name].sharding
    # Between a device's own memory and itself: the compiled program has no collective.
    program = case.form._pack_leaves.lower(jax.tree.leaves(state)).compile().as_text()
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter", program)


def test_a_leaf_that_is_sharded_in_another_way_is_refused():
    case = Case("data=2,pipe=2,expert=2", 1)
    for spec in (P("pipe", None, None, "data"), P("pipe", None, None, "expert", "data")):
        bad = jax.tree.map(lambda s: s, case.shardings)
        bad.params["chunks"]["0"]["attn"]["gate"] = NamedSharding(case.mesh, spec)
        with pytest.raises(ValueError, match=r"params/chunks/0/attn/gate is sharded as .*one dim, over expert"):
            CanonicalForm(case.shapes, bad, case.layout)


def test_optimizer_names_keep_what_tells_them_apart():
    case = Case("data=1", 1)
    twice = (case.shapes.opt_state[0], case.shapes.opt_state[0])
    shardings = (case.shardings.opt_state[0], case.shardings.opt_state[0])
    nothing = TrainState(None, None, None, None, None, None)
    form = CanonicalForm(nothing._replace(opt_state=twice), nothing._replace(opt_state=shardings), case.layout)
    assert "optimizer/0/inner_states/muon/count" in form.index and "optimizer/1/inner_states/muon/count" in form.index
    assert "optimizer/1/inner_states/muon/mu/layers/6/moe/norm" in form.index


# ---- arrays with owners ----------------------------------------------------------------------------------------------------


class OwnedCase(Case):
    """The same with the parameters' matrices and elements dealt to owners; `params` are left out, as they follow."""

    def __init__(self, mesh: str, virtual: int):
        super().__init__(mesh, virtual)
        specs = jax.tree.map(lambda s: s.spec, self.shardings.params)
        matrices = {"gate", "expert_up", "expert_down", "up"}  # the rest, dense "down" among them, lies by elements

        def own(path, a, spec):
            stacked = {"chunks": 3, "dense": 1, "embed": 0}[path[0].key]
            kept = a.ndim - 2 if path[-1].key in matrices else stacked
            return Owners(spec, a.shape, dict(self.mesh.shape), kept)

        self.owners = jax.tree_util.tree_map_with_path(own, self.shapes.params, specs)
        self.whole = self.shapes, self.shardings
        of = lambda o: jax.ShapeDtypeStruct(o.owned_shape, np.float32)
        lies = lambda o: NamedSharding(self.mesh, o.out_spec)
        mu = {part: self.owners[part] for part in ("chunks", "dense")}
        state = lambda leaf, old: TrainState(
            old.step,
            None,
            jax.tree.map(leaf, self.owners),
            ({"inner_states": {"muon": Moments(old.step, jax.tree.map(leaf, mu))}},),
            old.balance,
            old.skipped,
        )
        self.shapes, self.shardings = state(of, self.shapes), state(lies, self.shardings)
        self.form = CanonicalForm(self.shapes, self.shardings, self.layout, self.owners)

    def dealt(self, whole):
        """The state whose whole arrays these are."""
        specs = jax.tree.map(lambda s: s.spec, self.whole[1])

        def deal(owners, tree, spec):
            out = jax.tree.map(lambda o: o.out_spec, owners)
            own = lambda tree: jax.tree.map(lambda o, a: o.own(a.astype(np.float32)), owners, tree)
            return jax.jit(jax.shard_map(own, mesh=self.mesh, in_specs=(spec,), out_specs=out))(tree)

        moments, mu = (s.opt_state[0]["inner_states"]["muon"] for s in (whole, specs))
        mu_owners = {part: self.owners[part] for part in mu.mu}
        moments = moments._replace(mu=deal(mu_owners, moments.mu, mu.mu))
        master = deal(self.owners, whole.params, specs.params)
        return whole._replace(params=None, master=master, opt_state=({"inner_states": {"muon": moments}},))


OWNED_MESHES = [("data=2,pipe=2,expert=2", 2), ("expert=4,context=2", 3), ("data=8", 1)]


@pytest.fixture(scope="module")
def named():
    """Every named array of one state, from the form without owners."""
    case = Case("data=1", 1)
    state = case.state(7)
    return stored(case.form, case.form.to_records(state))


@pytest.mark.parametrize(("mesh", "virtual"), OWNED_MESHES)
def test_owners_arrays_hold_what_is_stored_under_each_name(mesh, virtual, named):
    """The same state dealt to owners: every named array is found in the records, with nothing of a neighbour or padding."""
    case = OwnedCase(mesh, virtual)
    plain = Case(mesh, virtual)
    read = lambda name, index: named[name][index]
    dealt = case.dealt(plain.form.from_records(plain.form.records_of(read)))
    records = case.form.to_records(dealt)
    arrays = stored(case.form, records)
    assert arrays.keys() == named.keys()
    for name, array in arrays.items():
        assert np.array_equal(array, named[name].astype(array.dtype)), name
    # And back, from names alone: the very same arrays, padding and places that hold nothing included.
    again = case.form.records_of(read)
    for name, record in records.items():
        assert again[name].sharding.is_equivalent_to(record.sharding, record.ndim), name
        assert np.array_equal(again[name], record), name
