"""Whatever the routing: every rank computes equally many rows, on few replicas, and no row is lost or shared."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from k3jax.activations.leaves import subjaxprs
from k3jax.parallel.experts import plan, plan_local
from k3jax.parallel.experts.planner import counts, home_experts, place, static_rows, validate


def routing(R, S, k, E, skew, padding=0.0, seed=0):
    """Distinct experts for each token, the more alike the larger `skew`; some tokens are padding."""
    rng = np.random.default_rng(seed)
    favour = -skew * np.log1p(np.arange(E))[rng.permutation(E)]
    ids = np.argsort(-(favour + rng.gumbel(size=(R, S, E))), -1)[..., :k].astype(np.int32)
    ids[rng.random((R, S)) < padding] = -1
    return ids


routings = st.builds(
    lambda R, S, k, E, skew, padding, seed: (routing(R, S, min(k, E), E, skew, padding, seed), E),
    R=st.integers(1, 16),
    S=st.integers(1, 64),
    k=st.integers(1, 8),
    E=st.integers(1, 64),
    skew=st.sampled_from([0.0, 1.0, 3.0, 20.0]),
    padding=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)


def check_any_routing(case, tile):
    ids, E = case
    made = plan(ids, num_experts=E, tile=tile)
    validate(made, ids, num_experts=E, tile=tile)
    assert (made.replicas >= 0).sum(1).max() <= home_experts(E, len(ids))
    if (ids >= 0).all():
        assert (made.rows_per_rank == ids[0].size).all()


@pytest.mark.quick
@given(case=routings, tile=st.sampled_from([1, 4, 16]))
@settings(max_examples=200)
def test_any_routing_is_planned_evenly(case, tile):
    check_any_routing(case, tile)


@pytest.mark.slow
@given(case=routings, tile=st.sampled_from([1, 4, 16]))
@settings(max_examples=2000)
def test_thousands_of_routings_are_planned_evenly(case, tile):
    check_any_routing(case, tile)


SHAPES = [(1, 5, 2, 7), (4, 16, 3, 8), (3, 7, 4, 10)]
MORE = [(R, S, k, E) for R in (1, 2, 5, 13, 16) for S, k in ((1, 1), (33, 2), (64, 8)) for E in (8, 61)] + SHAPES


def check_compiled(R, S, k, E):
    ids = routing(R, S, k, E, 3.0, 0.1)
    compiled = jax.jit(lambda ids: plan(ids, num_experts=E, tile=4))(jnp.asarray(ids))
    for name, a, b in zip(compiled._fields, compiled, plan(ids, num_experts=E, tile=4), strict=True):
        assert np.array_equal(np.asarray(a), b), name


@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_plans_are_the_same(shape):
    check_compiled(*shape)


@pytest.mark.slow
@pytest.mark.parametrize("shape", MORE)
def test_compiled_plans_of_many_shapes_are_the_same(shape):
    check_compiled(*shape)


@given(case=routings)
@settings(max_examples=50)
def test_every_rank_finds_its_own_part_of_the_same_plan(case):
    ids, E = case
    whole = plan(ids, num_experts=E)
    table = np.stack([counts(own, E) for own in ids])
    for rank, own in enumerate(ids):
        part = plan_local(table.copy(), own, rank)
        assert np.array_equal(part.destination, whole.destination[rank])
        assert np.array_equal(part.group_sizes, whole.group_sizes[rank])
        assert np.array_equal(part.replicas, whole.replicas[rank])


@given(case=routings)
@settings(max_examples=50)
def test_rows_that_bring_a_token_to_a_rank_come_first(case):
    """So that one message of a stretch of rows brings each token once."""
    ids, E = case
    made = plan(ids, num_experts=E)
    rows = static_rows(ids[0].size, E, len(ids), 1)
    for own, destination in zip(ids, made.destination, strict=True):
        segments = {}
        for token, k in np.argwhere(own >= 0):
            rank, row = divmod(int(destination[token, k]), rows)
            here = destination[token][(destination[token] >= 0) & (destination[token] // rows == rank)]
            segments.setdefault((own[token, k], rank), []).append((row, destination[token, k] != here.min()))
        for segment in map(sorted, segments.values()):
            first = segment[0][0]
            assert [row for row, _ in segment] == list(range(first, first + len(segment)))
            again = [repeats for _, repeats in segment]
            assert again == sorted(again)


def test_what_a_rank_plans_grows_with_its_own_assignments_alone():
    """At K3's size nothing is as large as assignments times experts, or as all ranks' assignments."""
    R, E, S, k = 64, 896, 8192, 16
    table, ids = jax.ShapeDtypeStruct((R, E), jnp.int32), jax.ShapeDtypeStruct((S, k), jnp.int32)
    assert max(array_sizes(jax.make_jaxpr(plan_local)(table, ids, 0).jaxpr)) <= S * k * k < min(S * k * E, R * S * k)


def array_sizes(jaxpr):
    """Elements of every array that a program makes, in its sub-programs too."""
    for eqn in jaxpr.eqns:
        yield from (var.aval.size for var in eqn.outvars)
        for sub in subjaxprs(eqn):
            yield from array_sizes(sub)


@pytest.mark.quick
@pytest.mark.parametrize(("R", "E", "needed"), [(8, 896, 98), (32, 896, 28), (4, 8, 2)])
def test_an_idle_home_needs_almost_all_replica_slots(R, E, needed):
    """Experts of rank 0 idle, all others equal: ⌈E(R−1)/R²⌉ replicas on rank 0."""
    H = E // R
    table = np.zeros((R, E), np.int32)
    table[:, H:] = R * H  # divides evenly among ranks
    made = place(table)
    assert needed == -(-E * (R - 1) // R**2)
    assert (made.replicas[0] >= 0).sum() == needed
    assert len(set(made.group_sizes.sum(1).tolist())) == 1


def fewest_replicas(table):
    """By integer programming: rows[e, r] of expert e on rank r, copy[e, r] if there are any away from home."""
    (R, E), load = table.shape, table.sum(0)
    H, total = home_experts(E, R), int(load.sum())
    at = lambda e, r: e * R + r
    n = E * R
    away = np.array([[e // H != r for r in range(R)] for e in range(E)]).ravel()
    of_expert, of_rank, needs_copy = np.zeros((E, 2 * n)), np.zeros((R, 2 * n)), np.zeros((n, 2 * n))
    for e in range(E):
        for r in range(R):
            of_expert[e, at(e, r)] = of_rank[r, at(e, r)] = 1
            needs_copy[at(e, r), at(e, r)], needs_copy[at(e, r), n + at(e, r)] = 1, -load[e]
    found = milp(
        np.concatenate([np.zeros(n), away]),
        constraints=[
            LinearConstraint(of_expert, load, load),
            LinearConstraint(of_rank, total // R, -(-total // R)),
            LinearConstraint(needs_copy[away], -np.inf, 0),
        ],
        integrality=np.ones(2 * n),
        bounds=Bounds(0, np.concatenate([np.full(n, np.inf), np.ones(n)])),
    )
    assert found.status == 0, found.message
    return round(found.fun)


def gaps(cases):
    """(replicas of the plan, fewest possible) of small random routings."""
    rng = np.random.default_rng(0)
    for seed in range(cases):
        R, H = int(rng.integers(2, 5)), int(rng.integers(1, 4))
        E = R * H
        ids = routing(R, int(rng.integers(2, 9)), min(2, E), E, float(rng.choice([0.0, 1.0, 3.0])), seed=seed)
        table = np.stack([counts(own, E) for own in ids])
        yield int((place(table).replicas >= 0).sum()), fewest_replicas(table)


@pytest.mark.parametrize("cases", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_replicas_are_close_to_the_fewest_possible(cases):
    ours, fewest = map(np.array, zip(*gaps(cases), strict=True))
    assert (ours >= fewest).all()
    # Over 100 cases both are 173. The largest first need not always find the fewest, so a little room is left.
    assert ours.sum() <= 1.02 * fewest.sum()


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="tile=0"):
        plan(np.zeros((1, 1, 1), np.int32), num_experts=1, tile=0)
