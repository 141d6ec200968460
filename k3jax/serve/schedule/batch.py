"""Continuous batching: what one step of a worker computes, whom it admits, and who gives pages back.

A step has a token budget. Rows that decode come first, one token each; prefills share the rest, one chunk a row, oldest
row first; what is still left admits new requests. Age is the order of first admission and survives preemption, and only
younger rows give pages to older ones: so the oldest row always advances, hence every row finishes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Limits:
    """What a worker can do. Tokens: step, chunk, block, state_block, page. Counts: rows, state_pages, pool."""

    step: int  # tokens that a step computes at most, decode rows included
    rows: int  # requests that hold pages at once
    chunk: int  # tokens of one request's prefill in one step at most
    block: int  # the model's prefill unit: chunks end at its absolute multiples, or at the end of the prefill
    state_block: int  # every multiple of it is a chunk end, since only there can a state be kept
    page: int  # tokens of a page
    state_pages: int  # pages that the states of a running request take
    pool: int  # pages that requests can have in all

    def __post_init__(self) -> None:
        for name, least in {"rows": 1, "block": 1, "page": 1, "state_pages": 0, "pool": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least {least}.")
        if self.chunk < self.block:
            raise ValueError(
                f"chunk={self.chunk} is less than a prefill block of {self.block} tokens: no prefill can run."
            )
        if self.state_block < 1 or self.state_block % self.block:
            raise ValueError(f"state_block={self.state_block} must be a multiple of block={self.block}.")
        if self.step < self.rows + self.block:
            raise ValueError(
                f"step={self.step} tokens: with {self.rows} decode rows no prefill block of {self.block} fits; "
                f"take at least {self.rows + self.block}."
            )

    def pages(self, tokens: int) -> int:
        """Pages of a running request of so many tokens if it shares none."""
        return -(-tokens // self.page) + self.state_pages

    def unfit(self, prompt: int, output: int) -> str | None:
        """Why a request can never run, or None: ask before it is queued, one that never fits would block those behind."""
        if prompt < 1 or output < 1:
            return f"prompt of {prompt} and output of {output} tokens: both must be at least 1"
        if (needed := self.pages(prompt + output)) > self.pool:
            return f"{prompt} + {output} tokens need {needed} pages; the pool has {self.pool}"
        return None


@dataclass(frozen=True)
class Lookup:
    """What the cache has for a request now. Tokens: hit, replay. `pages` counts what the request takes from those available.

    hit: boundary at which keys, values and states are installed; less than the length, the last token is always computed.
    replay: tokens before it that must pass through the forward again, since the newest state lies at hit − replay.
    pages: new ones, and cached ones that no running request holds yet (they stop being evictable).
    """

    hit: int
    replay: int
    pages: int

    def __post_init__(self) -> None:
        if not 0 <= self.replay <= self.hit or self.pages < 0:
            raise ValueError(f"{self}: 0 <= replay <= hit and 0 <= pages must hold.")

    @property
    def start(self) -> int:
        """The first token that runs through the forward."""
        return self.hit - self.replay

    def cost(self, length: int) -> int:
        """Tokens that a prefill of this length runs through the forward."""
        if self.hit >= length:
            raise ValueError(f"A hit of {self.hit} in {length} tokens: the last token is always computed.")
        return length - self.start


@runtime_checkable
class Pool(Protocol):
    """What a plan asks of the cache: figures only, nothing moves."""

    def available(self) -> int:
        """Pages that are free or can be evicted."""
        ...

    def lookup(self, request: str) -> Lookup:
        """For a request that waits, all its known tokens (a preempted one has generated some)."""
        ...

    def owned(self, request: str) -> int:
        """Pages that become available when a running request lets go: those that no other one holds."""
        ...


@dataclass(frozen=True)
class Row:
    """A request that holds pages."""

    request: str
    age: int  # order of first admission
    done: int  # tokens whose keys, values and state are there
    goal: int  # tokens known at admission: its prefill ends there, and then it decodes
    capacity: int  # tokens that its pages hold

    @property
    def decoding(self) -> bool:
        # By where its prefill ended, not by how many tokens are left: a prefill of one token is still a prefill.
        return self.done >= self.goal

    @property
    def known(self) -> int:
        """Tokens to prefill if it must start again: a row that decodes knows one more than it has computed."""
        return self.done + 1 if self.decoding else self.goal


@dataclass(frozen=True)
class Waiting:
    """A request without pages. `length`: its known tokens. `age` is None if it never ran."""

    request: str
    length: int
    age: int | None = None


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, end) of one prefill; the first output token is sampled after the last chunk."""

    request: str
    start: int
    end: int
    last: bool


@dataclass(frozen=True)
class Admission:
    request: str
    length: int
    age: int
    found: Lookup


@dataclass(frozen=True)
class Step:
    """What to do, in this order: release, admit, give a page to each that grows, then compute.

    Pin the hits of all admitted ones before any page is allocated: allocation may evict.
    """

    preempted: tuple[str, ...]
    admitted: tuple[Admission, ...]
    taken: int  # how many of the waiting ones the admissions used; the others had been preempted
    grown: tuple[str, ...]
    decode: tuple[str, ...]
    prefill: tuple[Chunk, ...]

    @property
    def tokens(self) -> int:
        return len(self.decode) + sum(chunk.end - chunk.start for chunk in self.prefill)


@dataclass(frozen=True)
class Batch:
    """Rows that run, and requests that lost their pages; both oldest first."""

    limits: Limits
    running: tuple[Row, ...] = ()
    preempted: tuple[Waiting, ...] = ()
    ages: int = 0  # requests ever admitted


def chunk_end(start: int, length: int, most: int, *, block: int, state_block: int) -> int:
    """Where a chunk from `start` ends if it may have `most` tokens; `start` itself if not even a block fits.

    Ends lie at absolute multiples of the block wherever the chunk began, so that a state never depends on how a prefill
    was split; and no chunk crosses a multiple of `state_block`.
    """
    end = min(start + most, length, (start // state_block + 1) * state_block)
    return end if end == length else max(end // block * block, start)


def plan(batch: Batch, waiting: Iterable[Waiting], pool: Pool) -> Step:
    """The next step. `waiting`: new requests in the order in which they are to be admitted; read only as far as needed.

    A row that needs a page and finds none takes those of the youngest row, if that is younger than itself; else it waits
    with what it holds. Preempted requests come back before new ones start, in order of age. An admission must find all
    pages of its prefill and leave one for each running row: else it would take what they ask for next. Nobody overtakes
    a request that does not fit.
    """
    limits, free = batch.limits, pool.available()
    decode: dict[str, bool] = {}  # does it take a page?
    victims: dict[str, None] = {}
    for row in batch.running:
        if not row.decoding or row.request in victims:
            continue
        full = row.done >= row.capacity
        if full and free == 0:
            for victim in reversed(batch.running):
                if free or victim.age <= row.age:
                    break
                if victim.request not in victims and (back := pool.owned(victim.request)):
                    victims[victim.request] = None
                    free += back  # younger ones have their turn later: nothing given to it has to be undone
            if free == 0:
                continue
        free -= full
        decode[row.request] = full
    left = limits.step - len(decode)
    chunks: list[Chunk] = []
    rows = [row for row in batch.running if row.request not in victims]
    for row in rows:
        if not row.decoding and (chunk := _chunk(limits, row.request, row.done, row.goal, left)):
            chunks.append(chunk)
            left -= chunk.end - chunk.start

    admitted: list[Admission] = []
    taken = 0
    for request in () if victims else chain(batch.preempted, waiting):
        if len(rows) + len(admitted) >= limits.rows:
            break
        found = pool.lookup(request.request)
        found.cost(request.length)  # refuses a hit of everything
        chunk = _chunk(limits, request.request, found.start, request.length, left)
        if chunk is None or free - found.pages < len(rows) + len(admitted):
            break
        chunks.append(chunk)
        left -= chunk.end - chunk.start
        free -= found.pages
        age = batch.ages + taken if request.age is None else request.age
        taken += request.age is None
        admitted.append(Admission(request.request, request.length, age, found))
    return Step(
        preempted=tuple(victims),
        admitted=tuple(admitted),
        taken=taken,
        grown=tuple(request for request, full in decode.items() if full),
        decode=tuple(decode),
        prefill=tuple(chunks),
    )


def _chunk(limits: Limits, request: str, start: int, length: int, left: int) -> Chunk | None:
    """The next chunk of a prefill, if what is left of the budget allows one."""
    most = min(limits.chunk, left)
    end = chunk_end(start, length, most, block=limits.block, state_block=limits.state_block)
    return Chunk(request, start, end, last=end == length) if end > start else None


def advance(batch: Batch, step: Step) -> Batch:
    """The batch after a step was computed."""
    limits = batch.limits
    ends = {chunk.request: chunk.end for chunk in step.prefill}
    capacity = lambda tokens: -(-tokens // limits.page) * limits.page
    rows = [row for row in batch.running if row.request not in step.preempted]
    rows += [Row(one.request, one.age, one.found.start, one.length, capacity(one.length)) for one in step.admitted]
    rows = [
        replace(
            row,
            done=ends.get(row.request, row.done + (row.request in step.decode)),
            capacity=row.capacity + limits.page * (row.request in step.grown),
        )
        for row in rows
    ]
    back = [Waiting(row.request, row.known, row.age) for row in batch.running if row.request in step.preempted]
    readmitted = {one.request for one in step.admitted}
    waiting = [one for one in batch.preempted if one.request not in readmitted] + back
    by_age = lambda one: one.age
    return Batch(limits, tuple(sorted(rows, key=by_age)), tuple(sorted(waiting, key=by_age)), batch.ages + step.taken)


def without(batch: Batch, requests: Iterable[str]) -> Batch:
    """The batch without requests that have finished or were aborted."""
    gone = set(requests)
    return replace(
        batch,
        running=tuple(row for row in batch.running if row.request not in gone),
        preempted=tuple(one for one in batch.preempted if one.request not in gone),
    )
