"""In simulated time: affinity wins on sessions, loses no balance on unique prompts, and survives what fleets go through."""

from dataclasses import replace

import pytest

from k3jax.serve.schedule import ClassBudget, Limits, TraceSpec, generate
from k3jax.serve.schedule.fleet import POLICIES, Failure, Fleet, simulate
from k3jax.serve.schedule.worker import Job, PrefixModel, Rates

LIMITS = Limits(step=512, rows=32, chunk=256, block=16, state_block=64, page=16, state_pages=2, pool=1500)
SESSIONS = TraceSpec(sessions=24, branches=8, turns=9, ratio=80.0, scale=1 / 16, arrival=0.5)

pytestmark = pytest.mark.usefixtures("without_type_checks")


@pytest.fixture(scope="module")
def sessions():
    trace = generate(SESSIONS)
    return trace, {policy: simulate(trace, Fleet(5, LIMITS), policy) for policy in POLICIES}


def test_affinity_wins_on_sessions(sessions):
    trace, figures = sessions
    assert all(each.served == len(trace.requests) and not each.refused for each in figures.values())
    mine = figures["affinity"]
    assert mine.hit_rate > 0.97 * trace.ideal_hit_rate(LIMITS.page)
    for other in (figures["round_robin"], figures["least_load"]):
        assert mine.hit_rate > other.hit_rate + 0.15
        assert mine.ttft.p50 < 0.6 * other.ttft.p50
        assert mine.ttft.p90 < 0.6 * other.ttft.p90
        assert sum(mine.busy.values()) < 0.8 * sum(other.busy.values())
    assert min(mine.requests.values()) > 0
    assert mine.spread < 1.4  # two dozen sessions, each in one place, on five workers


def test_affinity_loses_no_balance_on_unique_prompts():
    trace = generate(TraceSpec(sessions=256, turns=1, system=0, output=2, arrival=0.05))
    affinity, least = (simulate(trace, Fleet(5, LIMITS), policy) for policy in ("affinity", "least_load"))
    assert affinity.hit_rate == least.hit_rate == 0
    assert max(affinity.requests.values()) / min(affinity.requests.values()) <= 1.5
    assert affinity.spread < 1.15
    assert affinity.ttft.p90 < 1.5 * least.ttft.p90


def test_figures_are_the_same_each_time(sessions):
    trace, figures = sessions
    assert simulate(trace, Fleet(5, LIMITS), "affinity") == figures["affinity"]


def test_a_lost_worker_costs_its_sessions_a_prefill_and_nobody_an_answer(sessions):
    trace, _ = sessions
    busy = Fleet(5, LIMITS, rates=Rates(step=0.02, token=0.002))
    failures = (Failure("worker-2", at=5.0, back=15.0), Failure("worker-3", at=7.0))
    whole, lossy = (simulate(trace, fleet, "affinity") for fleet in (busy, replace(busy, failures=failures)))
    assert lossy.served == whole.served == len(trace.requests)
    assert lossy.rerouted > 0
    assert 0.9 * whole.hit_rate < lossy.hit_rate < whole.hit_rate


def test_lost_events_are_noticed_and_cost_little(sessions):
    trace, figures = sessions
    lossy = simulate(trace, Fleet(5, LIMITS, lost_events=0.3, seed=3), "affinity")
    assert lossy.resyncs > 10 and not figures["affinity"].resyncs
    assert lossy.served == len(trace.requests)
    assert lossy.hit_rate > 0.97 * figures["affinity"].hit_rate


def test_pages_that_are_short_preempt_and_all_are_served():
    trace = generate(TraceSpec(sessions=12, turns=2, system=800, output=800, ratio=3.0, scale=1 / 16, arrival=0.0))
    roomy = replace(LIMITS, page=4, block=4, state_block=16)
    tight = replace(roomy, pool=120)
    figures = [simulate(trace, Fleet(2, limits), "affinity") for limits in (roomy, tight)]
    assert [each.served for each in figures] == [len(trace.requests)] * 2
    assert figures[0].preempted == 0 and figures[1].preempted > 0
    assert figures[1].ttft.p90 > figures[0].ttft.p90


def test_the_modelled_cache_evicts_the_end_of_a_prefix_before_its_beginning():
    limits = replace(LIMITS, pool=8)
    jobs = {"a": Job("a", (b"1", b"2", b"3", b"4"), 65, 1), "b": Job("b", (b"5", b"6"), 33, 1)}
    pages = PrefixModel(limits, jobs)
    pages.admit("a")
    pages.computed("a", 65)
    pages.release("a")
    assert pages.lookup("a").hit == 64 and pages.available() == 8
    pages.admit("b")
    assert pages.removed == [b"4"]
    assert pages.lookup("a").hit == 48
    assert pages.owned("b") == 5 and pages.available() == 3


def test_a_class_over_its_budget_is_refused_and_the_other_is_served():
    trace = generate(replace(SESSIONS, sessions=4, branches=2))
    budgets = {"user": ClassBudget(4096, 1 << 20, 100), "branch": ClassBudget(1024, 20, 100)}
    fleet = Fleet(2, LIMITS, budgets, kind=lambda request: "user" if request.session < 4 else "branch")
    figures = simulate(trace, fleet, "affinity")
    assert figures.refused == 2, "a branch's first turn costs more than 20 tokens, and its later ones never come"
    assert figures.served == sum(request.session < 4 for request in trace.requests)


def test_what_cannot_be_simulated_is_refused():
    trace = generate(replace(SESSIONS, sessions=1, branches=0))
    with pytest.raises(ValueError, match="there are affinity, least_load, round_robin"):
        simulate(trace, Fleet(2, LIMITS), "random")
    with pytest.raises(ValueError, match="pages; the pool has 20"):
        simulate(trace, Fleet(2, replace(LIMITS, pool=20)), "affinity")
    with pytest.raises(ValueError, match="the workers are worker-0"):
        Fleet(1, LIMITS, failures=(Failure("worker-1", 1.0),))
    with pytest.raises(ValueError, match="lost_events=1.0"):
        Fleet(1, LIMITS, lost_events=1.0)
