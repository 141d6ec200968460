"""Synthetic agentic sessions: what a serving run is fed with, and the share of its input that a perfect cache would save.

A session is a conversation of turns: each prompt is the one before, the answer to it, and new input (what a user said or a
tool returned). All begin with one system prompt. A branch starts as another session's conversation up to some turn (a
subagent, a retry) and goes its own way. Input to output is a given ratio over the whole trace: the lengths of new inputs,
log-normal, are scaled to meet it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

SPREAD = 0.5  # of the logarithm of lengths


@dataclass(frozen=True)
class TraceSpec:
    """What to generate. Tokens: system, output (mean an answer). Seconds: arrival, think (means). Lengths are times `scale`.

    ratio: input to output tokens, over all requests. branches: sessions beside the others, each from one of them.
    """

    sessions: int = 8
    turns: int = 33
    branches: int = 0
    system: int = 6000
    output: int = 200
    ratio: float = 131.0
    scale: float = 1.0
    arrival: float = 1.0
    think: float = 2.0
    vocab: int = 50_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in {"sessions": 1, "turns": 1, "branches": 0, "system": 0, "output": 1, "vocab": 2}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least {least}.")
        for name in ("ratio", "scale"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: it must be above 0.")
        for name in ("arrival", "think"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} seconds: it must be at least 0.")
        if self.branches and self.turns < 2:
            raise ValueError(f"branches={self.branches} with one turn a session: there is nothing to branch from.")


@dataclass(frozen=True)
class Session:
    """A conversation. `parent`: whose first `fork` turns it shares, None if it shares none.

    `key` is what routers know it by: branches carry that of the session from which they come.
    `delays`: seconds before each own turn, after what it follows.
    """

    key: str
    parent: int | None
    fork: int
    inputs: tuple[np.ndarray, ...]
    outputs: tuple[np.ndarray, ...]
    delays: tuple[float, ...]


@dataclass(frozen=True)
class Request:
    """Turn `turn` of session `session`. Tokens: prompt, output, and `repeated`, those that a perfect cache has.

    It comes `delay` seconds after request `after` is answered, or after the start if that is None.
    """

    name: str
    session: int
    turn: int
    prompt: int
    output: int
    repeated: int
    after: str | None
    delay: float


@dataclass(frozen=True)
class Trace:
    spec: TraceSpec
    system: np.ndarray
    sessions: tuple[Session, ...]
    requests: tuple[Request, ...]

    @property
    def input_tokens(self) -> int:
        return sum(request.prompt for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.output for request in self.requests)

    def key(self, request: Request) -> str:
        return self.sessions[request.session].key

    def prompt(self, request: Request, answers: Mapping[str, np.ndarray] | None = None) -> np.ndarray:
        """The prompt's tokens, int32. `answers`: what a model really said, by request, in place of the trace's outputs."""
        parts = [self.system]
        for session, turn in _path(self.sessions, request.session, request.turn):
            parts.append(self.sessions[session].inputs[turn - self.sessions[session].fork])
            if (session, turn) != (request.session, request.turn):
                said = None if answers is None else answers.get(_name(session, turn))
                parts.append(self.answer(session, turn) if said is None else said)
        return np.concatenate(parts)

    def answer(self, session: int, turn: int) -> np.ndarray:
        """The tokens that the trace has as the answer of a session's own turn."""
        return self.sessions[session].outputs[turn - self.sessions[session].fork]

    def ideal_hit_rate(self, unit: int = 1) -> float:
        """Share of input tokens that a cache of any size saves if it keeps every prefix of a multiple of `unit` tokens.

        Requests of one session follow each other, so the parent's turns are there; of the system prompt only the first
        session's is computed. The last token of an answer is never computed, and the last of a prompt always.
        """
        saved = sum(min(request.repeated, request.prompt - 1) // unit * unit for request in self.requests)
        return saved / self.input_tokens


def _name(session: int, turn: int) -> str:
    return f"{session}.{turn}"


def _path(sessions: tuple[Session, ...], session: int, turn: int) -> list[tuple[int, int]]:
    """(session, turn) of each turn of a conversation up to this one, each with the session that it is an own turn of."""
    own = sessions[session]
    before = [] if own.parent is None else _path(sessions, own.parent, own.fork - 1)
    return before + [(session, t) for t in range(own.fork, turn + 1)]


def generate(spec: TraceSpec) -> Trace:
    """The trace of a seed. Raises ValueError if the system prompts alone exceed the ratio."""
    random = np.random.default_rng(spec.seed)
    system = random.integers(spec.vocab, size=round(spec.system * spec.scale), dtype=np.int32)
    origins: list[tuple[int | None, int]] = [(None, 0)] * spec.sessions
    for _ in range(spec.branches):
        origins.append((int(random.integers(spec.sessions)), int(random.integers(1, spec.turns))))
    own_turns = [spec.turns - fork for _, fork in origins]
    lengths = lambda: [random.lognormal(-(SPREAD**2) / 2, SPREAD, n) for n in own_turns]  # of mean 1
    weights, answers = lengths(), [np.maximum(1, np.rint(spec.scale * spec.output * y)).astype(int) for y in lengths()]
    inputs = _inputs(spec, len(system), origins, weights, answers)
    arrivals = np.cumsum(random.exponential(spec.arrival, spec.sessions))
    draw = lambda sizes: tuple(random.integers(spec.vocab, size=int(n), dtype=np.int32) for n in sizes)
    sessions: list[Session] = []
    for index, (parent, fork) in enumerate(origins):
        delays = random.exponential(spec.think, own_turns[index])
        if parent is None:
            delays[0] = arrivals[index]
        key = sessions[parent].key if parent is not None else f"session-{spec.seed}-{index}"
        sessions.append(
            Session(key, parent, fork, draw(inputs[index]), draw(answers[index]), tuple(map(float, delays)))
        )
    return Trace(spec, system, tuple(sessions), tuple(_requests(len(system), tuple(sessions))))


def _inputs(
    spec: TraceSpec,
    system: int,
    origins: list[tuple[int | None, int]],
    weights: list[np.ndarray],
    answers: list[np.ndarray],
) -> list[np.ndarray]:
    """Lengths of new inputs, proportional to the weights, that meet the ratio of input to output."""
    fixed, growing = 0.0, 0.0  # all prompts together are fixed + x · growing
    for index, (parent, fork) in enumerate(origins):
        n = len(weights[index])
        before = 0 if parent is None else answers[parent][:fork].sum()
        base = 0.0 if parent is None else weights[parent][:fork].sum()
        fixed += n * (system + before) + (np.cumsum(answers[index]) - answers[index]).sum()
        growing += n * base + np.cumsum(weights[index]).sum()
    target = spec.ratio * sum(int(each.sum()) for each in answers)
    if target <= fixed:
        raise ValueError(
            f"ratio={spec.ratio}: system prompt and earlier answers alone are {fixed / target * spec.ratio:.1f} input tokens "
            "an output token; take a higher ratio or a shorter system prompt."
        )
    x = (target - fixed) / growing
    return [np.maximum(1, np.rint(x * each)).astype(int) for each in weights]


def _requests(system: int, sessions: tuple[Session, ...]) -> Iterator[Request]:
    """Every turn of every session, each after the one it follows."""
    ends: dict[tuple[int, int], int] = {}  # tokens of a conversation after a turn, with its answer
    for index, session in enumerate(sessions):
        before = (session.parent, session.fork - 1) if session.parent is not None else None
        for own, delay in enumerate(session.delays):
            turn = session.fork + own
            if before is None:
                length, repeated = system, system if index else 0
            else:
                length = ends[before]
                repeated = length - 1
            prompt, output = length + len(session.inputs[own]), len(session.outputs[own])
            after = None if before is None else _name(*before)
            yield Request(_name(index, turn), index, turn, prompt, output, repeated, after, delay)
            before = (index, turn)
            ends[before] = prompt + output
