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
from k3jax.activations.records import Leaf, records, timeline
from k3jax.activations.residency import reserved, transfers
from k3jax.parallel.schedules import BACKWARD, FORWARD, RECIPES, WEIGHT, build

HOST, REMOTE = 16.0, 64.0  # bytes a second
seconds = st.integers(0, 40).map(lambda n: n / 8)


@st.composite
def problems(draw, most_names, least_bytes=0):
    """A schedule's name and counts, activations, bandwidths, and how bytes are counted; a name may have two spans."""
    name = draw(st.sampled_from(["interleaved_1f1b", "interleaved_1f1b", "gpipe", "zb1p"]))
    virtual = RECIPES[name].virtual or draw(st.integers(1, 2))
    counts = dict(stages=draw(st.integers(1, 4)), virtual=virtual, microbatches=draw(st.integers(1, 6)))
    names = draw(st.lists(st.sampled_from(["a", "b", "c", "group.in"]), min_size=1, max_size=most_names, unique=True))
    activations = []
    for activation in names:
        spans = [None]
        if len(RECIPES[name].kinds) == 3:
            spans = draw(st.lists(st.sampled_from([BACKWARD, WEIGHT]), min_size=1, unique=True))
        for consumer in spans:
            size, recompute = least_bytes + draw(st.integers(0, 20)), draw(st.none() | seconds)
            quantized = draw(st.none() | st.just(size // 2))
            activations.append(Activation(activation, size, quantized, recompute, draw(seconds), consumer=consumer))
    host, remote = draw(st.sampled_from([None, HOST])), draw(st.sampled_from([None, REMOTE]))
    return (name, counts), activations, host, remote, draw(st.booleans())


def planner_of(problem):
    (name, counts), activations, host, remote, reserve = problem
    schedule = build(name, **counts)
    return Planner(schedule, activations, host_bandwidth=host, remote_bandwidth=remote, reserve=reserve)


def span(schedule, a):
    return a.producer, schedule.kinds[-1] if a.consumer is None else a.consumer


def peaks(schedule, leaves):
    """The most bytes alive on each rank by the ledger, and those reserved."""
    alive = timeline(schedule, records(schedule, leaves)).peak.tolist()
    return alive, sum(x.bytes * reserved(schedule, *span(schedule, x), x.policy.storage).device for x in leaves)


def counted(schedule, leaves, reserve):
    alive, slots = peaks(schedule, leaves)
    assert max(alive) <= slots
    return slots if reserve else max(alive)


def cost_of(leaf, activation, schedule, host, remote):
    """Seconds of a name's policy, as the words say."""
    pieces = schedule.chunks * schedule.microbatches
    if leaf.policy.storage == "recompute":
        return activation.recompute * pieces
    seconds = activation.codec * pieces if leaf.policy.quantized and activation.quantized_bytes is not None else 0
    bandwidth = {"local-offload": host, "remote-offload": remote}.get(leaf.policy.storage)
    crossings = transfers(schedule, *span(schedule, activation), leaf.policy.storage)
    return seconds + (leaf.bytes * crossings / bandwidth if crossings else 0)


def every_plan(problem):
    """(cost, bytes on a rank) of all combinations of policies."""
    _, activations, host, remote, reserve = problem
    schedule, choices = planner_of(problem).schedule, []
    for name in dict.fromkeys(a.name for a in activations):
        options, parts = [], [a for a in activations if a.name == name]
        for policy in POLICIES:
            allowed = {
                "keep": True,
                "recompute": all(a.recompute is not None for a in parts) and name not in ALWAYS_KEPT,
                "local-offload": host is not None,
                "remote-offload": remote is not None,
            }[policy.storage]
            quantizable = any(a.quantized_bytes is not None for a in parts) and name not in ALWAYS_KEPT
            if allowed and (quantizable or not policy.quantized):
                leaves = [a.leaf(policy) for a in parts]
                cost = sum(cost_of(*pair, schedule, host, remote) for pair in zip(leaves, parts, strict=True))
                options.append((cost, leaves))
        choices.append(options)
    for combination in itertools.product(*choices):
        leaves = [leaf for _, of_name in combination for leaf in of_name]
        yield sum(cost for cost, _ in combination), counted(schedule, leaves, reserve)


def check(problem, plan, budget):
    """Within the budget by the ledger; bytes, costs and policies are those of the activations."""
    _, activations, host, remote, reserve = problem
    schedule = planner_of(problem).schedule
    assert plan.budget == budget and (list(plan.peak), plan.reserved) == peaks(schedule, plan.leaves)
    assert counted(schedule, plan.leaves, reserve) <= budget
    policies = {}
    for leaf, activation, cost in zip(plan.leaves, activations, plan.seconds, strict=True):
        assert policies.setdefault(leaf.name, leaf.policy) == leaf.policy, "a name has one policy in all its spans"
        whole = activation.quantized_bytes is None or not leaf.policy.quantized
        kept = activation.bytes if whole else activation.quantized_bytes
        assert leaf.bytes == (0 if leaf.policy.storage == "recompute" else kept)
        assert math.isclose(cost, cost_of(leaf, activation, schedule, host, remote), rel_tol=1e-12)
        assert leaf.name not in ALWAYS_KEPT or leaf.policy.storage != "recompute" and not leaf.policy.quantized


@pytest.mark.quick
@settings(max_examples=60)
@given(problems(most_names=2), st.floats(0, 1.1))
def test_small_plans_are_the_optimum_and_the_least_budget_is_the_least(problem, share):
    plans = list(every_plan(problem))
    needs = [needed for _, needed in plans]
    budget = int(share * max(needs))
    planner = planner_of(problem)
    if min(needs) > budget:
        with pytest.raises(
            ValueError, match=f"into {budget} bytes a rank: the least budget that works is {min(needs)}$"
        ):
            planner.plan(budget)
        assert planner.greedy(budget) is None
        budget = min(needs)
    plan = planner.plan(budget, gap=0)
    check(problem, plan, budget)
    # Sums of eighths are exact; the solver stops within 1e-9 of the largest cost.
    assert plan.cost == pytest.approx(min(cost for cost, needed in plans if needed <= budget), rel=1e-8, abs=1e-8)


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
    budget = int(max(planner.schedule.in_flight())) * 10**11 + few
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
@pytest.mark.parametrize("reserve", [False, True])
def test_names_are_parked_with_late_ranks_when_that_is_cheapest(reserve):
    """1f1b on 4 ranks holds 7, 5, 3, 1 microbatches; what no policy but remote offload makes smaller is parked."""
    schedule = build("1f1b", stages=4, microbatches=16)
    halves = [Activation(name, 2) for name in "ab"]
    planner = Planner(schedule, halves, remote_bandwidth=1e9, reserve=reserve)
    assert planner.plan(28).cost == 0
    plan = planner.plan(27)
    assert [str(leaf.policy) for leaf in plan.leaves].count("remote-offload") == 1
    assert plan.seconds.count(0) == 1 and plan.cost == 2 * transfers(schedule, *schedule.kinds, "remote-offload") / 1e9
    both = counted(schedule, [Leaf(name, 2, Policy("remote-offload")) for name in "ab"], reserve)
    assert planner.plan(both).peak < (28,)
    with pytest.raises(ValueError, match=f"the least budget that works is {both}"):
        planner.plan(both - 1)


@pytest.mark.quick
def test_a_name_with_two_spans_has_one_policy():
    """What weight gradients read waits longer; dropping one span of the name alone would be cheaper."""
    schedule = build("zb1p", stages=2, microbatches=4)
    parts = [Activation("a", 8, None, cost, consumer=last) for cost, last in [(1.0, BACKWARD), (2.0, WEIGHT)]]
    plan = Planner(schedule, parts).plan(0)
    assert [leaf.policy.storage for leaf in plan.leaves] == ["recompute"] * 2
    assert plan.activations == "a=recompute" and plan.cost == 3.0 * 8


@pytest.mark.quick
def test_without_time_for_the_solver_the_greedy_plan_counts():
    schedule = build("1f1b", stages=2, microbatches=4)
    planner = Planner(schedule, [Activation("a", 8, 4, 1.0, 0.25), Activation("b", 8, 4, 0.5, 0.25)])
    assert planner.plan(30, time_limit=0) == planner.greedy(30) != planner.plan(100)


@pytest.mark.quick
def test_a_plan_of_the_solver_that_costs_more_than_the_greedy_one_is_not_taken(monkeypatch):
    """It stops within a gap, or at its time."""
    planner = Planner(build("1f1b", stages=2, microbatches=4), [Activation("a", 8, 4, 1.0, 0.25)])
    dear = planner.seconds == planner.seconds.max()
    monkeypatch.setattr(planner, "_cheapest", lambda *of: dear)
    assert planner.plan(1000) == planner.greedy(1000) and planner.plan(1000).cost < planner._plan(dear, 1000).cost


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
    reserved=8,
    leaves=(
        Leaf("moe.dispatch_in", 12345678, Policy.parse("quantize+remote-offload"), FORWARD, BACKWARD),
        Leaf("kda.o", 0, Policy("recompute")),
    ),
    seconds=(0.1 + 0.2, 1e-17),
)


@pytest.mark.quick
def test_a_plan_is_the_same_after_a_file(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    with pytest.raises(FileExistsError):
        PLAN.save(tmp_path / "plan.json")
    assert ActivationPlan.load(tmp_path / "plan.json") == PLAN


@pytest.mark.quick
def test_a_plan_reads_as_a_table_and_as_an_option():
    lines = str(PLAN).splitlines()
    assert lines[0].split() == list(HEADER)
    assert lines[1].split() == ["moe.dispatch_in", "quantize+remote-offload", "12,345,678", "0.3"]
    assert lines[2].split() == ["kda.o", "recompute", "0", "1e-17"]
    said = "0.3 seconds of all ranks; at most 5 bytes alive on a rank, 8 reserved, budget 1,099,511,627,776"
    assert lines[3] == said
    policy = ActivationPolicy.parse(PLAN.activations)
    assert [policy.of(leaf.name) for leaf in PLAN.leaves] == [leaf.policy for leaf in PLAN.leaves]


def damaged():
    """Texts of files that are no plan, and what is said about them."""
    whole = {"budget": 8, "peak": [3], "reserved": 4, "names": []}
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
        ({"more": 1}, "the plan has budget, more, names, peak, reserved, needs budget, names, peak, reserved"),
        ({"names": [{"name": "x"}]}, "a name has name, needs bytes"),
        ({"names": [{**name, "policy": "drop"}]}, "'drop' is not a policy"),
        ({"names": [{**name, "bytes": "8"}]}, "bytes is 8, must be of type int"),
        ({"names": [{**name, "seconds": math.nan}]}, "seconds is nan"),
        ({"reserved": "many"}, "reserved is many"),
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
        ([Activation("x", 1, producer=BACKWARD)], {}, "must be two of"),
    ]:
        with pytest.raises(ValueError, match=said):
            Planner(schedule, activations, **options)
    for field in ({"recompute": -1.0}, {"codec": math.inf}, {"quantized_bytes": -4}, {"recompute": math.nan}):
        with pytest.raises(ValueError, match="x: .*must be finite and at least 0"):
            Activation("x", 1, **field)


@pytest.mark.slow
@pytest.mark.parametrize("reserve", [False, True])
@pytest.mark.parametrize("share", [0.03, 0.3, 0.9])
def test_thirty_names_on_eight_stages(share, reserve):
    """The size of K3: the table's 206 ticks come down to a few rows, and the plan is no worse than the greedy one."""
    random = Random(0)
    activations = []
    for i in range(30):
        size = random.randrange(2**20, 2**28)
        quantized, recompute = (size * 33 // 64 if i % 5 else None), (random.uniform(1e-5, 5e-3) if i % 7 else None)
        activations.append(Activation(f"name{i}", size, quantized, recompute, size / 1e12))
    schedule = build("interleaved_1f1b", stages=8, virtual=3, microbatches=32)
    planner = Planner(schedule, activations, host_bandwidth=5e10, remote_bandwidth=1e11, reserve=reserve)
    budget = int(share * sum(a.bytes for a in activations) * max(schedule.in_flight()))
    plan, greedy = planner.plan(budget), planner.greedy(budget)
    assert len(planner.bytes) <= (1 if reserve else 2 * schedule.stages)
    assert (list(plan.peak), plan.reserved) == peaks(schedule, plan.leaves)
    assert counted(schedule, plan.leaves, reserve) <= budget
    assert greedy is not None and plan.cost <= greedy.cost
