"""Steps of a worker: budgets hold, states can be kept at every boundary, whoever is oldest advances, everybody finishes."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from k3jax.serve.schedule import Batch, Limits, Lookup, Row, Waiting, advance, chunk_end, plan, without

TOY = Limits(step=24, rows=4, chunk=16, block=4, state_block=8, page=4, state_pages=1, pool=40)


class Pages:
    """The plainest pool: nobody shares, a hit is given for each request; it checks that nothing is taken that is not there."""

    def __init__(self, limits, lengths, hits=None):
        self.limits, self.lengths, self.hits = limits, dict(lengths), hits or {}
        self.held = {}

    def available(self):
        return self.limits.pool - sum(self.held.values())

    def lookup(self, request):
        hit, replay = self.hits.get(request, (0, 0))
        return Lookup(hit, replay, self.limits.pages(self.lengths[request]))

    def owned(self, request):
        return self.held[request]

    def follow(self, step):
        for request in step.preempted:
            del self.held[request]
        for one in step.admitted:
            assert one.request not in self.held
            self.held[one.request] = one.found.pages
        for request in step.grown:
            self.held[request] += 1
        assert self.available() >= 0


def test_P4_every_state_boundary_is_a_chunk_end():
    def sizes(length, most, state_block):
        ends = [0]
        while ends[-1] < length:
            ends.append(chunk_end(ends[-1], length, most, block=64, state_block=state_block))
        return [b - a for a, b in zip(ends, ends[1:], strict=False)]

    assert sizes(1300, 384, 512) == [384, 128, 384, 128, 276]
    assert sizes(30000, 8192, 11392) == [8192, 3200, 8192, 3200, 7216]


def test_P4_through_the_planner():
    limits = Limits(step=8256, rows=64, chunk=8192, block=64, state_block=11392, page=512, state_pages=1, pool=100)
    batch, pool, sizes = Batch(limits), Pages(limits, {"a": 30000}), []
    while not any(row.decoding for row in batch.running):
        step = plan(batch, [Waiting("a", 30000)] if not batch.ages else [], pool)
        pool.follow(step)
        batch = advance(batch, step)
        sizes += [chunk.end - chunk.start for chunk in step.prefill]
    assert sizes == [8192, 3200, 8192, 3200, 7216]


@given(
    length=st.integers(1, 400),
    start=st.integers(0, 399),
    block=st.integers(1, 8),
    blocks=st.integers(1, 6),
    budgets=st.lists(st.integers(0, 60), min_size=1),
)
def test_chunks_end_at_absolute_multiples_however_budgets_cut_them(length, start, block, blocks, budgets):
    state_block, at = block * blocks, min(start, length - 1)
    ends = []
    for most in [*budgets, *[block] * length]:
        end = chunk_end(at, length, most, block=block, state_block=state_block)
        assert at <= end <= at + most
        assert end > at or most < block
        if end > at:
            assert end == length or end % block == 0
            assert end <= (at // state_block + 1) * state_block
            ends.append(end)
        if (at := end) == length:
            break
    first = min(start, length - 1)
    assert at == length
    assert {b for b in range(state_block, length, state_block) if b > first} <= set(ends)


@pytest.mark.usefixtures("without_type_checks")
@settings(max_examples=50)  # each is some hundred steps
@example(requests=[(8, 12, 0)] * 6, rows=5, extra=30, chunk=16, slack=3)  # preempts, and takes back
@given(
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 39)), min_size=1, max_size=8),
    rows=st.integers(1, 5),
    extra=st.integers(0, 30),
    chunk=st.integers(4, 20),
    slack=st.integers(0, 20),
)
def test_whoever_is_oldest_advances_and_everybody_finishes(requests, rows, extra, chunk, slack):
    outputs = {str(i): output for i, (_, output, _) in enumerate(requests)}
    prompts = {str(i): prompt for i, (prompt, _, _) in enumerate(requests)}
    limits = replace(TOY, rows=rows, step=rows + 4 + extra, chunk=chunk)
    most = max(limits.pages(prompts[r] + outputs[r]) for r in outputs)
    limits = replace(limits, pool=most + slack)
    hits = {str(i): (min(hit, prompt - 1) // 4 * 4, 0) for i, (prompt, _, hit) in enumerate(requests)}
    pool, batch, queue = Pages(limits, prompts, hits), Batch(limits), list(outputs)
    generated = dict.fromkeys(outputs, 0)
    allowed = sum(-(-(prompts[r] + outputs[r]) // 4) + 2 * outputs[r] + 2 for r in outputs)  # each alone, one by one
    steps = 0
    while queue or batch.running or batch.preempted:
        steps += 1
        assert steps <= allowed
        before = {row.request: row for row in batch.running}
        step = plan(batch, (Waiting(r, prompts[r]) for r in queue), pool)
        pool.follow(step)
        assert 0 < step.tokens <= limits.step
        assert len(before) - len(step.preempted) + len(step.admitted) <= limits.rows
        computed = {*step.decode, *(c.request for c in step.prefill)}
        assert len(computed) == len(step.decode) + len(step.prefill)
        assert not computed & set(step.preempted)
        if batch.running:
            assert batch.running[0].request in computed
        for victim in step.preempted:
            assert any(before[r].age < before[victim].age for r in step.grown)
        if step.preempted or len(step.admitted) < len(batch.preempted):
            assert step.taken == 0
        for request in step.decode:
            assert before[request].decoding
        for c in step.prefill:
            assert c.end - c.start <= limits.chunk
        del queue[: step.taken]
        batch = advance(batch, step)
        for row in batch.running:
            assert row.done <= row.capacity == (pool.held[row.request] - limits.state_pages) * limits.page
        for request in [*step.decode, *(c.request for c in step.prefill if c.last)]:
            generated[request] += 1
            pool.lengths[request] += 1
        for row in [*batch.running]:
            assert row.known == pool.lengths[row.request]
        finished = [r for r in before | dict.fromkeys(pool.held) if generated[r] == outputs[r] and r in pool.held]
        for request in finished:
            del pool.held[request]
        batch = without(batch, finished)
    assert generated == outputs


def decoding(request, age, done, capacity):
    return Row(request, age, done, goal=done, capacity=capacity)


def test_the_youngest_gives_its_pages_to_the_older_ones_and_comes_back_first():
    rows = (decoding("old", 0, 8, 8), decoding("middle", 1, 6, 8), Row("young", 2, 4, goal=12, capacity=12))
    batch = Batch(TOY, rows, ages=3)
    pool = Pages(TOY, {"old": 9, "middle": 7, "young": 12, "new": 4})
    pool.held = {"old": 3, "middle": 33, "young": 4}
    step = plan(batch, [Waiting("new", 4)], pool)
    assert step.preempted == ("young",) and step.grown == ("old",) and step.decode == ("old", "middle")
    assert not step.admitted, "a new request must not take what was just given up"
    pool.follow(step)
    batch = advance(batch, step)
    assert batch.preempted == (Waiting("young", 12, 2),)
    pool.held["middle"] -= 10
    step = plan(batch, [Waiting("new", 4)], pool)
    assert [(one.request, one.age) for one in step.admitted] == [("young", 2), ("new", 3)] and step.taken == 1


def test_the_youngest_waits_with_its_pages_when_only_older_ones_hold_any():
    batch = Batch(TOY, (decoding("old", 0, 6, 8), decoding("young", 1, 8, 8)), ages=2)
    pool = Pages(TOY, {})
    pool.held = {"old": 37, "young": 3}
    step = plan(batch, [], pool)
    assert step.decode == ("old",) and not step.preempted and not step.grown
    assert advance(batch, step).running[1] == batch.running[1]


def test_a_row_whose_pages_others_hold_too_is_not_preempted_for_nothing():
    batch = Batch(TOY, (decoding("old", 0, 8, 8), decoding("own", 1, 6, 8), decoding("shares", 2, 6, 8)), ages=3)
    pool = Pages(TOY, {})
    pool.held = {"old": 3, "own": 37, "shares": 0}
    assert plan(batch, [], pool).preempted == ("own",)


def test_P9_a_prefill_of_one_token_is_no_decode_row():
    pool = Pages(TOY, {"cold": 1, "warm": 9}, {"warm": (8, 0)})
    step = plan(Batch(TOY), [Waiting("cold", 1), Waiting("warm", 9)], pool)
    assert not step.decode
    assert [(c.start, c.end, c.last) for c in step.prefill] == [(0, 1, True), (8, 9, True)]
    after = advance(Batch(TOY), step)
    assert all(row.decoding for row in after.running)


def test_P9_the_one_token_after_a_boundary_is_prefilled_too():
    pool, batch, kinds = Pages(TOY, {"a": 17}), Batch(TOY), []
    for _ in range(4):
        step = plan(batch, [] if batch.ages else [Waiting("a", 17)], pool)
        pool.follow(step)
        batch = advance(batch, step)
        kinds += [c.end for c in step.prefill] + list(step.decode)
    assert kinds == [8, 16, 17, "a"]


def test_what_was_preempted_comes_back_oldest_first_whoever_lost_its_pages_first():
    rows = (decoding("old", 0, 8, 8), decoding("middle", 1, 6, 8))
    batch = Batch(TOY, rows, preempted=(Waiting("young", 9, 2), Waiting("youngest", 5, 3)), ages=4)
    pool = Pages(TOY, {})
    pool.held = {"old": 3, "middle": 37}
    batch = advance(batch, plan(batch, [], pool))
    assert batch.preempted == (Waiting("middle", 7, 1), Waiting("young", 9, 2), Waiting("youngest", 5, 3))


def test_replayed_tokens_run_through_the_forward_and_count():
    pool = Pages(TOY, {"a": 30}, {"a": (20, 8)})
    assert pool.lookup("a").cost(30) == 18
    step = plan(Batch(TOY), [Waiting("a", 30)], pool)
    assert [(c.start, c.end) for c in step.prefill] == [(12, 16)]


def test_nobody_overtakes_a_request_that_does_not_fit():
    pool = Pages(TOY, {"large": 140, "small": 4})
    pool.held["running"] = 10
    batch = Batch(TOY, (decoding("running", 0, 30, 36),), ages=1)
    assert not plan(batch, [Waiting("large", 140), Waiting("small", 4)], pool).admitted


def test_an_admission_leaves_a_page_for_each_running_row():
    batch = Batch(TOY, (decoding("running", 0, 30, 36),), ages=1)
    pool = Pages(TOY, {"new": 12})
    for held, admitted in ((36, False), (35, True)):
        pool.held["running"] = held
        assert bool(plan(batch, [Waiting("new", 12)], pool).admitted) == admitted


def test_the_waiting_are_read_only_as_far_as_needed():
    def endless():
        n = 0
        while True:
            yield Waiting(str(n), 10)
            n += 1

    pool = Pages(TOY, {str(i): 10 for i in range(10)})
    step = plan(Batch(TOY), endless(), pool)
    assert [one.request for one in step.admitted] == ["0", "1", "2"]  # chunks of 8 tokens: a state boundary, 24 in all


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"step": 7}, "at least 8"),
        ({"chunk": 3}, "no prefill can run"),
        ({"state_block": 6}, "multiple of block=4"),
        ({"rows": 0}, "rows=0"),
        ({"page": 0}, "page=0"),
        ({"state_pages": -1}, "state_pages=-1"),
    ],
)
def test_limits_under_which_nothing_could_run_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        replace(TOY, **wrong)


def test_what_can_never_run_is_told_before_it_is_queued():
    assert TOY.unfit(150, 6) is None
    assert "41 pages; the pool has 40" in TOY.unfit(150, 7)
    assert "at least 1" in TOY.unfit(0, 7)


def test_a_hit_of_everything_is_refused():
    with pytest.raises(ValueError, match="last token is always computed"):
        plan(Batch(TOY), [Waiting("a", 8)], Pages(TOY, {"a": 8}, {"a": (8, 0)}))
    with pytest.raises(ValueError, match="replay <= hit"):
        Lookup(4, 5, 0)
