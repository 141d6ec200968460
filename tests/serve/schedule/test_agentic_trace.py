"""Traces are what they say: growing prompts that repeat what came before, in the given ratio, the same for a seed."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.serve.schedule import TraceSpec, generate

SMALL = TraceSpec(sessions=3, turns=6, branches=3, system=64, output=8, ratio=30.0, vocab=1 << 30)


def computed(trace, request):
    """Tokens of which a cache can hold keys and state when a request is over."""
    return np.concatenate([trace.prompt(request), trace.answer(request.session, request.turn)[:-1]])


def common(a, b):
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


@settings(max_examples=15)
@given(
    seed=st.integers(0, 99), sessions=st.integers(1, 3), turns=st.integers(2, 5), branches=st.integers(0, 3),
    unit=st.integers(1, 9),
)  # fmt: skip
def test_the_ideal_hit_rate_is_that_of_comparing_every_prompt_with_what_must_be_there(
    seed, sessions, turns, branches, unit
):
    """There must be: all turns that it follows, and what sessions before began with."""
    spec = replace(SMALL, seed=seed, sessions=sessions, turns=turns, branches=branches, ratio=60.0)
    trace = generate(spec)
    by_name = {request.name: request for request in trace.requests}
    saved, strangers = 0, {}
    for request in trace.requests:
        tokens, seen, before = trace.prompt(request), [], request
        assert len(tokens) == request.prompt
        while before.after is not None:
            before = by_name[before.after]
            seen.append(computed(trace, before))
        seen += [each for key, each in strangers.items() if key != trace.key(request)]
        hit = max((common(tokens, each) for each in seen), default=0)
        assert hit == request.repeated
        saved += min(hit, len(tokens) - 1) // unit * unit
        strangers.setdefault(trace.key(request), computed(trace, request))
    assert trace.ideal_hit_rate(unit) == pytest.approx(saved / trace.input_tokens, abs=1e-12)


def test_a_whole_agentic_trace_has_33_turns_and_131_to_1():
    trace = generate(TraceSpec(sessions=6, branches=3))
    assert trace.input_tokens / trace.output_tokens == pytest.approx(131, rel=1e-3)
    turns = [request.turn for request in trace.requests if request.session == 0]
    assert turns == list(range(33))
    assert 0.95 < trace.ideal_hit_rate(512) < trace.ideal_hit_rate() < 0.98
    scaled = generate(TraceSpec(sessions=6, branches=3, scale=1 / 64))
    assert scaled.input_tokens / scaled.output_tokens == pytest.approx(131, rel=0.02)
    assert scaled.input_tokens / trace.input_tokens == pytest.approx(1 / 64, rel=0.1)


def test_a_branch_is_its_parents_conversation_up_to_the_fork():
    trace = generate(SMALL)
    by_name = {request.name: request for request in trace.requests}
    for index, session in enumerate(trace.sessions[3:], start=3):
        first = by_name[f"{index}.{session.fork}"]
        parent = by_name[f"{session.parent}.{session.fork - 1}"]
        assert first.after == parent.name
        assert session.key == trace.sessions[session.parent].key
        assert common(trace.prompt(first), computed(trace, parent)) == len(computed(trace, parent))
        sibling = by_name[f"{session.parent}.{session.fork}"]
        assert common(trace.prompt(first), trace.prompt(sibling)) == parent.prompt + parent.output


def test_a_seed_names_a_trace():
    one, same, other = generate(SMALL), generate(SMALL), generate(replace(SMALL, seed=1))
    assert one.requests == same.requests != other.requests
    assert all(np.array_equal(one.prompt(r), same.prompt(r)) for r in one.requests)
    assert not np.array_equal(one.system, other.system)


def test_what_a_model_really_said_takes_the_place_of_answers():
    trace = generate(SMALL)
    second, third = trace.requests[1:3]
    said = np.full(5, 7, np.int32)
    prompt = trace.prompt(third, {second.name: said})
    start = second.prompt
    assert np.array_equal(prompt[start : start + 5], said)
    assert len(prompt) == third.prompt - second.output + 5


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"sessions": 0}, "sessions=0"),
        ({"turns": 1}, "nothing to branch from"),
        ({"ratio": 3.0}, "input tokens an output token; take a higher ratio"),
        ({"ratio": float("nan")}, "ratio=nan"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"think": -1.0}, "think=-1.0 seconds"),
    ],
)
def test_traces_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        generate(replace(SMALL, **wrong))
