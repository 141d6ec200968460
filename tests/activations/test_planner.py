"""Plans of activations: within the budget at every tick, the cheapest there is, never worse than the greedy one."""

import itertools
import json
import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import OptimizeResult

from k3jax.activations import planner as planner_module
from k3jax.activations.plan import HEADER, ActivationPlan
from k3jax.activations.planner import Activation, Planner
from k3jax.activations.policy import ALWAYS_KEPT, POLICIES, ActivationPolicy, Policy
from k3jax.activations.records import Leaf, mirrored, records, timeline
from k3jax.parallel.schedules import BACKWARD, FORWARD, build

HOST, REMOTE = 16.0, 64.0  # bytes a second
seconds = st.integers(0, 40).map(lambda n: n / 8)


@st.composite
def problems(draw, most_names, least_bytes=0):
    """Counts of a schedule, activations, bandwidths, holders."""
    stages, virtual, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 4))
    names = draw(st.lists(st.sampled_from(["a", "b", "c", "group.in"]), min_size=1, max_size=most_names, unique=True))
    activations = []
    for name in names:
        size, recompute = least_bytes + draw(st.integers(0, 20)), draw(st.none() | seconds)
        quantized = draw(st.none() | st.just(size // 2))
        consumer = draw(st.sampled_from([None, None, FORWARD, BACKWARD]))
        activations.append(Activation(name, size, quantized, recompute, draw(seconds), consumer=consumer))
    host, remote = draw(st.sampled_from([None, HOST])), draw(st.sampled_from([None, REMOTE]))
    holders = draw(st.none() | st.tuples(*[st.integers(0, stages - 1)] * stages))
    return (stages, virtual, microbatches), activations, host, remote, holders


def planner_of(problem):
    (stages, virtual, microbatches), activations, host, remote, holders = problem
    schedule = build("interleaved_1f1b", stages=stages, virtual=virtual, microbatches=microbatches)
    return Planner(schedule, activations, host_bandwidth=host, remote_bandwidth=remote, holders=holders)


def ledger(schedule, leaves):
    return timeline(records(schedule, leaves), schedule.num_ticks, schedule.stages)


def cost_of(leaf, activation, counts, host, remote):
    """Seconds of a name's policy, as the words say."""
    stages, virtual, microbatches = counts
    seconds = activation.codec * stages if leaf.policy.quantized else 0
    if leaf.policy.storage == "recompute":
        seconds = activation.recompute * stages
    elif leaf.policy.storage == "local-offload":
        seconds += 2 * leaf.bytes / host * stages
    elif leaf.policy.storage == "remote-offload":
        parks = sum(holder != rank for rank, holder in enumerate(leaf.holders or mirrored(stages)))
        seconds += 2 * leaf.bytes / remote * parks
    return seconds * virtual * microbatches


def every_plan(problem):
    """(cost, peak) of all combinations of policies and of ranks that park."""
    counts, activations, host, remote, holders = problem
    schedule, stages = planner_of(problem).schedule, counts[0]
    holders = holders or mirrored(stages)
    choices = []
    for a in activations:
        options = []
        for policy in POLICIES:
            allowed = {
                "keep": True,
                "recompute": a.recompute is not None and a.name not in ALWAYS_KEPT,
                "local-offload": host is not None,
                "remote-offload": remote is not None,
            }[policy.storage]
            if not allowed or (policy.quantized and (a.quantized_bytes is None or a.name in ALWAYS_KEPT)):
                continue
            size = 0 if policy.storage == "recompute" else a.quantized_bytes if policy.quantized else a.bytes
            parks = [(s, h) if h != s else (s,) for s, h in enumerate(holders)]
            for chosen in itertools.product(*parks) if policy.storage == "remote-offload" else [None]:
                leaf = Leaf(a.name, size, policy, a.producer, a.consumer, chosen)
                options.append((cost_of(leaf, a, counts, host, remote), ledger(schedule, [leaf]).device))
        choices.append(options)
    for combination in itertools.product(*choices):
        yield sum(cost for cost, _ in combination), max(0, *sum(held for _, held in combination).max(axis=0).tolist())


def check(problem, plan, budget):
    """Within the budget by the ledger; bytes, costs and policies are those of the activations."""
    counts, activations, host, remote, _ = problem
    schedule = planner_of(problem).schedule
    assert plan.budget == budget and plan.peak == tuple(ledger(schedule, plan.leaves).peak.tolist())
    assert max(plan.peak) <= budget
    for leaf, activation, cost in zip(plan.leaves, activations, plan.seconds, strict=True):
        kept = activation.quantized_bytes if leaf.policy.quantized else activation.bytes
        assert leaf.bytes == (0 if leaf.policy.storage == "recompute" else kept)
        assert math.isclose(cost, cost_of(leaf, activation, counts, host, remote), rel_tol=1e-12)
        assert leaf.name not in ALWAYS_KEPT or leaf.policy.storage != "recompute" and not leaf.policy.quantized


@pytest.mark.quick
@settings(max_examples=60)
@given(problems(most_names=2), st.floats(0, 1.1))
def test_small_plans_are_the_optimum_and_the_least_budget_is_the_least(problem, share):
    plans = list(every_plan(problem))
    peaks = [peak for _, peak in plans]
    budget = int(share * max(peaks))
    planner = planner_of(problem)
    if min(peaks) > budget:
        with pytest.raises(
            ValueError, match=f"into {budget} bytes a rank: the least budget that works is {min(peaks)}$"
        ):
            planner.plan(budget)
        assert planner.greedy(budget) is None
        budget = min(peaks)
    plan = planner.plan(budget, gap=0)
    check(problem, plan, budget)
    # Sums of eighths are exact; the solver stops within 1e-9 of the largest cost.
    assert plan.cost == pytest.approx(min(cost for cost, peak in plans if peak <= budget), rel=1e-8, abs=1e-8)


@settings(max_examples=40)
@given(problems(most_names=4), st.floats(0, 1.1))
def test_no_plan_exceeds_its_budget_nor_costs_more_than_the_greedy_one(problem, share):
    planner = planner_of(problem)
    budget = int(share * sum(a.bytes for a in problem[1]) * max(planner.schedule.in_flight()))
    greedy = planner.greedy(budget)
    try:
        plan = planner.plan(budget)
    except ValueError:
        assert greedy is None
        return
    check(problem, plan, budget)
    if greedy is not None:
        check(problem, greedy, budget)
        assert plan.cost <= greedy.cost


@settings(max_examples=30)
@given(problems(most_names=3, least_bytes=10**11), st.integers(0, 400))
def test_not_a_single_byte_too_many_where_the_solver_cannot_see_one(problem, few):
    """100 GB and a few bytes: the tolerance of floating point lets them pass, the plan may not."""
    planner = planner_of(problem)
    whole = max(max(planner.live[i].max() for i in range(len(problem[1]))), 1)
    budget = int(whole) * 10**11 + few
    try:
        plan = planner.plan(budget)
    except ValueError:
        return
    check(problem, plan, budget)


@pytest.mark.quick
def test_the_solver_is_told_of_a_byte_too_many():
    """Keeping a is cheaper, and one byte of 100 GB too much."""
    schedule = build("1f1b", stages=1, microbatches=1)
    pair = [Activation("a", 10**11 + 1, 0, codec=2.0), Activation("b", 10**11, 0, codec=1.0)]
    plan = Planner(schedule, pair).plan(10**11)
    assert plan.cost == 2 and plan.peak == (10**11,)


@pytest.mark.quick
def test_early_ranks_park_with_late_ones_when_that_is_cheapest():
    """1f1b on 4 ranks holds 7, 5, 3, 1 microbatches of 4 bytes: rank 0 parks half of its 28 bytes at rank 3, and no other."""
    schedule = build("1f1b", stages=4, microbatches=16)
    halves = [Activation(name, 2) for name in "ab"]
    planner = Planner(schedule, halves, remote_bandwidth=1e9)
    plan = planner.plan(20)
    assert planner.greedy(20) is None
    assert plan.peak == (14, 20, 12, 18)
    parked = [leaf for leaf in plan.leaves if leaf.policy == Policy("remote-offload")]
    assert [leaf.holders for leaf in parked] == [(3, 1, 2, 3)]
    with pytest.raises(ValueError, match="the least budget that works is 20"):
        planner.plan(19)


@pytest.mark.quick
def test_without_time_for_the_solver_the_greedy_plan_counts():
    schedule = build("1f1b", stages=2, microbatches=4)
    planner = Planner(schedule, [Activation("a", 8, 4, 1.0, 0.25), Activation("b", 8, 4, 0.5, 0.25)])
    assert planner.plan(30, time_limit=0) == planner.greedy(30) != planner.plan(100)


@pytest.mark.quick
def test_a_budget_is_called_the_least_only_if_the_solver_came_to_its_end(monkeypatch):
    planner = Planner(build("1f1b", stages=1, microbatches=1), [Activation("a", 8, 4)])
    solve = planner_module.milp
    for stopped, said in [
        ({}, "the least budget that works is 4$"),
        ({"status": 1}, "the least budget found that works is 4$"),
        ({"status": 1, "x": None}, "no plan was found within time_limit=8.0 seconds"),
    ]:
        monkeypatch.setattr(planner_module, "milp", lambda *a, s=stopped, **k: OptimizeResult({**solve(*a, **k), **s}))
        with pytest.raises(ValueError, match=said):
            planner.plan(3)


PLAN = ActivationPlan(
    budget=2**40,
    peak=(3, 5),
    leaves=(
        Leaf("moe.dispatch_in", 12345678, Policy.parse("quantize+remote-offload"), FORWARD, BACKWARD, (1, 1)),
        Leaf("kda.o", 0, Policy("recompute")),
    ),
    seconds=(0.1 + 0.2, 1e-17),
)


@pytest.mark.quick
def test_a_plan_is_the_same_after_a_file(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    assert ActivationPlan.load(tmp_path / "plan.json") == PLAN


@pytest.mark.quick
def test_a_plan_reads_as_a_table_and_as_an_option():
    lines = str(PLAN).splitlines()
    assert lines[0].split() == list(HEADER)
    assert lines[1].split() == ["moe.dispatch_in", "quantize+remote-offload", "12,345,678", "0.3", "0", "at", "1"]
    assert lines[2].split() == ["kda.o", "recompute", "0", "1e-17"]
    assert lines[3] == "0.3 seconds of all ranks; at most 5 of 1,099,511,627,776 bytes on a rank"
    policy = ActivationPolicy.parse(PLAN.activations, POLICIES)
    assert [policy.of(leaf.name) for leaf in PLAN.leaves] == [leaf.policy for leaf in PLAN.leaves]


def damaged():
    """Texts of files that are no plan, and what is said about them."""
    whole = {"budget": 8, "peak": [3], "names": []}
    name = {**Leaf("x", 8, Policy())._asdict(), "policy": "keep", "seconds": 0.5}
    yield from [
        (b"", "Expecting value"),
        (b"\xff\xfe\xff", "utf"),
        (b"[" * 100_000, "recursion"),
        (b"[]", "the plan is"),
    ]
    for change, said in [
        ({"budget": -1}, "budget is -1"),
        ({"budget": True}, "budget is True"),
        ({"peak": [1.5]}, "peak is 1.5"),
        ({"names": {}}, "names is {}, must be of type list"),
        ({"more": 1}, "the plan has budget, more, names, peak, needs budget, names, peak"),
        ({"names": [{"name": "x"}]}, "a name has name, needs bytes"),
        ({"names": [{**name, "policy": "drop"}]}, "'drop' is not a policy"),
        ({"names": [{**name, "bytes": "8"}]}, "bytes is 8, must be of type int"),
        ({"names": [{**name, "seconds": math.nan}]}, "seconds is nan"),
        ({"names": [{**name, "holders": [0, -1]}]}, "holders is -1"),
    ]:
        yield json.dumps({**whole, **change}).encode(), said


@pytest.mark.quick
@pytest.mark.parametrize(("text", "said"), list(damaged()))
def test_files_that_are_no_plan_are_refused_in_one_line(tmp_path, text, said):
    (tmp_path / "plan.json").write_bytes(text)
    with pytest.raises(ValueError) as error:
        ActivationPlan.load(tmp_path / "plan.json")
    assert str(error.value).startswith(f"{tmp_path / 'plan.json'} is not a plan of activations: ")
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.quick
def test_problems_that_make_no_sense_are_refused():
    schedule = build("1f1b", stages=2, microbatches=1)
    one = Activation("x", 1)
    for activations, options, said in [
        ([], {}, "needs one or more"),
        ([one, one], {}, "each name once"),
        ([one], {"host_bandwidth": 0.0}, "host_bandwidth=0.0: must be above 0"),
        ([one], {"remote_bandwidth": math.nan}, "remote_bandwidth=nan"),
        ([one], {"holders": (0, 2)}, "must be 2 ranks of 0 to 1"),
    ]:
        with pytest.raises(ValueError, match=said):
            Planner(schedule, activations, **options)
    for field in ({"recompute": -1.0}, {"codec": math.inf}, {"quantized_bytes": -4}, {"recompute": math.nan}):
        with pytest.raises(ValueError, match="x: .*must be finite and at least 0"):
            Activation("x", 1, **field)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.03, 0.3, 0.9])
def test_thirty_names_on_eight_stages(share):
    """The size of K3: the table's 206 ticks come down to a few rows, and the plan is better than the greedy one."""
    random = Random(0)
    activations = []
    for i in range(30):
        size = random.randrange(2**20, 2**28)
        quantized, recompute = (size * 33 // 64 if i % 5 else None), (random.uniform(1e-5, 5e-3) if i % 7 else None)
        activations.append(Activation(f"name{i}", size, quantized, recompute, size / 1e12))
    schedule = build("interleaved_1f1b", stages=8, virtual=3, microbatches=32)
    planner = Planner(schedule, activations, host_bandwidth=5e10, remote_bandwidth=1e11)
    budget = int(share * sum(a.bytes for a in activations) * max(schedule.in_flight()))
    plan, greedy = planner.plan(budget), planner.greedy(budget)
    assert len(planner.bytes) <= 2 * schedule.stages
    assert plan.peak == tuple(ledger(schedule, plan.leaves).peak.tolist()) and max(plan.peak) <= budget
    assert greedy is not None and plan.cost < greedy.cost
