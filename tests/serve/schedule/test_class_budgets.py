"""Classes share uncached tokens by weight; nobody waits forever; refusals say what a request would have cost."""

import random
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.serve.schedule import ClassBudget, ClassQueues, Lookup, Refusal
from k3jax.serve.schedule.budgets import Round, serve


def filled(quanta, costs, depth=10_000):
    queues = ClassQueues({f"{i}": ClassBudget(q, 1 << 20, depth) for i, q in enumerate(quanta)})
    for i, each in enumerate(costs):
        for n, cost in enumerate(each):
            assert queues.offer(f"{i}/{n}", f"{i}", cost) is None
    return queues


def test_A10_token_service_follows_the_quanta_with_a_giant_among_mixed_sizes():
    pick = random.Random(0)
    sizes = lambda n: [pick.choice((1, 64, 500, 2000, 6000)) for _ in range(n)]
    small = sizes(700)
    small.insert(150, 50_000)
    queues = filled((4096, 1024), (sizes(2000), small))
    served, giant, waiting = [0, 0], False, [2000, 701]
    while all(waiting):  # both classes have something to do
        ticket = queues.take()
        kind = int(ticket.request[0])
        waiting[kind] -= 1
        served[kind] += ticket.cost
        giant |= ticket.cost == 50_000
    assert giant
    assert served[0] / served[1] == pytest.approx(4, rel=0.1)


def test_A11_a_replay_that_costs_too_much_is_refused_until_a_nearer_checkpoint_exists():
    queues = ClassQueues({"interactive": ClassBudget(quantum=1024, largest=2000, depth=4)})
    far, near = Lookup(hit=8192, replay=4096, pages=3), Lookup(hit=8192, replay=512, pages=3)
    assert queues.offer("a", "interactive", far.cost(8300)) == Refusal("cost", 4204, 2000)
    assert len(queues) == 0
    assert queues.offer("a", "interactive", near.cost(8300)) is None
    assert queues.take().cost == 620
    assert queues.offer("just", "interactive", 2000) is None


quanta = st.lists(st.integers(1, 50), min_size=1, max_size=4)


@st.composite
def backlogs(draw):
    weights = draw(quanta)
    costs = st.lists(st.integers(1, 200), max_size=12)
    return weights, [draw(costs) for _ in weights]


def plain_rounds(quanta, costs):
    """Deficit round robin as the paper has it, one visit after the other."""
    queues, deficits, order = [list(enumerate(each)) for each in costs], [0] * len(costs), []
    while any(queues):
        for i, queue in enumerate(queues):
            if not queue:
                continue
            deficits[i] += quanta[i]
            while queue and queue[0][1] <= deficits[i]:
                n, cost = queue.pop(0)
                deficits[i] -= cost
                order.append(f"{i}/{n}")
            if not queue:
                deficits[i] = 0
    return order


@given(backlogs())
def test_the_order_is_that_of_plain_deficit_round_robin(backlog):
    queues = filled(*backlog)
    foreseen = [ticket.request for ticket in queues.order()]
    assert foreseen == [queues.take().request for _ in range(len(queues))] == plain_rounds(*backlog)


@given(backlogs())
def test_while_two_classes_wait_neither_gets_ahead_by_more_than_a_round_and_its_largest_request(backlog):
    weights, costs = backlog
    queues, served, left = filled(weights, costs), [0] * len(weights), list(map(len, costs))
    largest = max((max(each, default=0) for each in costs), default=0)
    busy = [i for i, each in enumerate(costs) if each]
    for ticket in list(queues.order()):
        kind = int(ticket.request.split("/")[0])
        served[kind] += ticket.cost
        rounds = [served[i] / weights[i] for i in busy]
        slack = [1 + largest / weights[i] for i in busy]
        pairs = list(zip(rounds, slack, strict=True))
        assert all(abs(a - b) <= s + t for a, s in pairs for b, t in pairs)
        left[kind] -= 1
        if not left[kind]:
            break


@given(backlogs(), st.data())
def test_requests_that_come_and_go_leave_no_credit_in_an_empty_class(backlog, data):
    weights, costs = backlog
    queues = filled(weights, costs)
    for _ in range(len(queues)):
        if data.draw(st.booleans()):
            queues.take()
        else:
            assert queues.drop(data.draw(st.sampled_from(sorted(t.request for t in queues.order()))))
    assert len(queues) == 0 and not any(queues._at.deficits)
    assert not queues.drop("0/0")


def test_one_visit_hands_out_a_quantum_once():
    at = Round(0, False, (0, 0))
    served, at = serve((10, 10), (6, 6), at)
    assert (served, at.deficits) == (0, (4, 0))
    served, at = serve((10, 10), (6, 6), at)  # 4 left in this turn: the next class is served
    assert (served, at.deficits) == (1, (4, 4))


def test_a_far_future_is_reached_without_counting_rounds():
    assert serve((1, 1), (10**15, 10**15 + 1), Round(0, False, (0, 0)))[0] == 0


def test_a_full_queue_refuses():
    queues = filled((1,), ([5, 5],), depth=2)
    assert queues.offer("late", "0", 7) == Refusal("queue", 7, 2)
    queues.take()
    assert queues.offer("late", "0", 7) is None


def test_looking_ahead_changes_nothing():
    queues = filled((3, 1), ([5, 5, 1], [2, 2]))
    ahead = [t.request for t in islice(queues.order(), 2)]
    assert [t.request for t in islice(queues.order(), 2)] == ahead == [queues.take().request, queues.take().request]


def test_bad_input_is_refused():
    queues = filled((1,), ([],))
    with pytest.raises(ValueError, match="'batch' has no budget; there are 0"):
        queues.offer("a", "batch", 1)
    with pytest.raises(ValueError, match="cost=0"):
        queues.offer("a", "0", 0)
    with pytest.raises(ValueError, match="No class"):
        queues.take()
    with pytest.raises(ValueError, match="at least 1"):
        ClassBudget(0, 1, 1)
    with pytest.raises(ValueError, match="At least one class"):
        ClassQueues({})
