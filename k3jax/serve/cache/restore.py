"""From what the index holds to how a request starts: a plan, made of numbers, that moves nothing.

A request starts with S(start) in its live state and computes tokens from `start` on. KV exists for tokens[0:boundary] and
is shared; the forward over (start, boundary] replays them (KDA's inputs pass through the MLA layers, so all layers run),
without writing KV. Only a state that was computed at `start` is ever installed at `start`: S_c is never taken for S_b.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum

from k3jax.serve.cache.geometry import Geometry
from k3jax.serve.cache.index import Checkpoint, Match, Reason


class Way(StrEnum):
    """How a request got its first state; metrics count them."""

    COLD = "cold"
    """Nothing of it was cached."""
    EXACT = "exact"
    """A checkpoint at the boundary that KV reaches."""
    RECORDS = "records"
    """A checkpoint before it, and the records of each token between."""
    REPLAY = "replay"
    """The forward runs again from the newest state to the boundary, within the budget."""
    STEP_DOWN = "step_down"
    """The boundary is the newest state's, though KV reaches further."""


@dataclasses.dataclass(frozen=True)
class RestorePlan:
    """How a request starts. Pages are physical, boundaries and counts are in tokens."""

    way: Way
    tokens: int
    """Of the request."""
    start: int
    """The first token to compute; the live state is S(start)."""
    boundary: int
    """The first token whose KV is to be written; start ≤ boundary."""
    kv: int
    """How far KV was found. Where it is deeper than the state, requests branch: a state is worth keeping there."""
    shared: tuple[int, ...]
    """Whole pages taken over as they are, by column."""
    partial: int | None
    """A page to be copied, since this request goes on inside it."""
    checkpoint: Checkpoint | None
    """The state at start; None: zeros."""
    allocate: int
    """Pages needed at once: the live state, and the copy of the partial page."""
    misses: tuple[Reason, ...]

    @property
    def uncached(self) -> int:
        """Tokens that the forward has to run over: what admission charges."""
        return self.tokens - self.start

    @property
    def replay(self) -> range:
        """Tokens that are computed again for the state alone."""
        return range(self.start, self.boundary)

    @property
    def pins(self) -> tuple[int, ...]:
        """Pages that must be held before anything is allocated."""
        partial = () if self.partial is None else (self.partial,)
        return self.shared + partial + (self.checkpoint.reads if self.checkpoint else ())


def plan_restore(match: Match, geometry: Geometry, *, tokens: int, replay_budget: int) -> RestorePlan:
    """Replays if the gap between state and KV is within the budget, else starts at the state.

    Both compute the same tokens; a replay shares the gap's pages, and holds the request back until it is through.
    """
    state, gap = match.state, match.kv - match.state
    boundary = match.kv if gap <= replay_budget else state
    if boundary > state:
        way = Way.REPLAY
    elif gap:
        way = Way.STEP_DOWN
    elif match.checkpoint:
        way = Way.RECORDS if match.checkpoint.base else Way.EXACT
    else:
        way = Way.COLD
    whole, rest = divmod(boundary, geometry.page_tokens)
    return RestorePlan(
        way=way,
        tokens=tokens,
        start=state,
        boundary=boundary,
        kv=match.kv,
        shared=tuple(node.page for node in match.nodes[:whole]),
        partial=match.nodes[whole].page if rest else None,
        checkpoint=match.checkpoint,
        allocate=geometry.state_pages + bool(rest),
        misses=match.misses,
    )


def plan_cold(match: Match, geometry: Geometry, *, tokens: int) -> RestorePlan:
    """The start that pins nothing, for when the pool is too small to hold what matched and the request."""
    nothing = dataclasses.replace(match, kv=0, nodes=(), checkpoint=None)
    return plan_restore(nothing, geometry, tokens=tokens, replay_budget=0)
