"""What is worth keeping: where states are kept while a request runs, and what goes first when pages run out.

States are what is valued: without one, KV saves next to nothing, since every layer has to run again. So eviction weighs
checkpoints; KV pages behind the last checkpoint that needs them go with no further question.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from k3jax.serve.cache.geometry import Geometry, Grid
from k3jax.serve.cache.index import Checkpoint, Index, Node
from k3jax.serve.cache.pool import PoolExhausted

LAST, TURN, BRANCH, INTERVAL = "last", "turn", "branch", "interval"
"""Why a state is kept. A request's next state replaces one that only was its last."""


@dataclasses.dataclass(frozen=True)
class Trail:
    """A stretch of a request, the forward over (computed, upto], and the boundaries that the request knows of."""

    computed: int
    upto: int
    branch: int
    """Where its KV was shared and no state was found; 0: nowhere."""
    turns: tuple[int, ...]
    """Ends of conversation turns."""


@dataclasses.dataclass(frozen=True)
class Standing:
    """A checkpoint among the others."""

    checkpoint: Checkpoint
    saved: int
    """Tokens of prefill that it saves over the state before it on its chain."""
    bytes: int
    """What dropping it sets free, KV that nothing else needs included."""
    children: int
    """Next states on the chains that lead through it."""

    @property
    def interior(self) -> bool:
        """One chain passes through: whoever follows it finds a deeper state. Where chains part, it is no interior."""
        return self.children == 1 and not self.checkpoint.tails


@runtime_checkable
class Policy(Protocol):
    """What to keep, and in which order to let go."""

    def stops(self, trail: Trail, geometry: Geometry) -> dict[int, str]:
        """Boundaries of the stretch at which the state is to be kept, and why."""
        ...

    def hit(self, path: Sequence[Checkpoint], now: int) -> None:
        """The last checkpoint of the path was used; the path leads to it."""
        ...

    def rank(self, standing: Standing, now: int) -> tuple[Any, ...]:
        """The lowest goes first."""
        ...


@dataclasses.dataclass(frozen=True)
class Lru:
    """The least recently used state goes first, and a hit refreshes the whole path: what radix caches do."""

    def stops(self, trail: Trail, geometry: Geometry) -> dict[int, str]:
        last = geometry.align(trail.upto)
        return {last: LAST} if last > trail.computed else {}

    def hit(self, path: Sequence[Checkpoint], now: int) -> None:
        for checkpoint in path:
            checkpoint.hits, checkpoint.used = checkpoint.hits + 1, now

    def rank(self, standing: Standing, now: int) -> tuple[Any, ...]:
        return (standing.checkpoint.used,)


@dataclasses.dataclass(frozen=True)
class Interval(Lru):
    """States at multiples of a fixed interval alone. Raises ValueError, in `stops`, if hash units do not divide it."""

    interval: int

    def grid(self, width: int) -> Grid:
        """Columns of the checkpoints of one request: column i holds the state at (i + 1) · interval."""
        return Grid("checkpoint", self.interval, width)

    def stops(self, trail: Trail, geometry: Geometry) -> dict[int, str]:
        if self.interval < 1 or self.interval % geometry.hash_unit:
            raise ValueError(
                f"checkpoint interval {self.interval} is no multiple of hash_unit={geometry.hash_unit}: "
                f"only boundaries that have a hash can be found again"
            )
        return dict.fromkeys(self.grid(trail.upto // self.interval).boundaries(trail.computed, trail.upto), INTERVAL)


@dataclasses.dataclass(frozen=True)
class Lineage:
    """Keeps the last aligned state, the ends of turns, and where requests branched; lets go by lineage and cost.

    States that one chain only passes through go before those that end a chain or stand where chains part. Within both,
    first the one that saves the fewest tokens per byte, times its expected reuse: uses over age. A hit refreshes only
    the state that was used.
    """

    def stops(self, trail: Trail, geometry: Geometry) -> dict[int, str]:
        wanted = {geometry.align(trail.upto): LAST, geometry.align(trail.branch): BRANCH}
        wanted |= {geometry.align(turn): TURN for turn in trail.turns}
        return {b: wanted[b] for b in sorted(wanted) if trail.computed < b <= trail.upto}

    def hit(self, path: Sequence[Checkpoint], now: int) -> None:
        if path:
            path[-1].hits, path[-1].used = path[-1].hits + 1, now

    def rank(self, standing: Standing, now: int) -> tuple[Any, ...]:
        checkpoint = standing.checkpoint
        reuse = (1 + checkpoint.hits) / (1 + now - checkpoint.used)
        return (not standing.interior, standing.saved / standing.bytes * reuse, checkpoint.used)


def policy(name: str, *, interval: int | None = None) -> Policy:
    """A policy by name: "lru", "interval" (needs the interval, in tokens) or "lineage"."""
    if name not in ("lru", "interval", "lineage"):
        raise ValueError(f"retention policy {name!r}: must be lru, interval or lineage")
    if (interval is not None) != (name == "interval"):
        raise ValueError(
            f"retention policy {name!r} with interval={interval}: interval needs one, the others take none"
        )
    return Interval(interval) if interval is not None else Lru() if name == "lru" else Lineage()


def survey(index: Index) -> list[Standing]:
    """Every checkpoint with its place in the lineage. One walk over all pages, parents first."""
    before: dict[bytes, Checkpoint | None] = {}  # the newest state at or before a page's end
    parents: dict[bytes, Checkpoint | None] = {}
    children: dict[bytes, int] = {}
    for node in sorted(index.nodes.values(), key=lambda node: node.start):
        newest = before.get(node.parent)
        for hash in node.hashes:
            checkpoint = index.checkpoints.get(hash)
            if checkpoint and hash not in parents:
                parents[hash] = newest
                if newest:
                    children[newest.hash] = children.get(newest.hash, 0) + 1
            newest = checkpoint or newest
        before[node.hashes[-1]] = newest
    standings = []
    for hash, parent in parents.items():
        checkpoint, start = index.checkpoints[hash], parent.boundary if parent else 0
        pages = len(checkpoint.pages)
        if hash not in children:
            pages += index.geometry.kv_pages(checkpoint.boundary) - index.geometry.kv_pages(start)
        size = pages * index.geometry.page_bytes
        standings.append(Standing(checkpoint, checkpoint.boundary - start, size, children.get(hash, 0)))
    return standings


def pinned(index: Index, checkpoint: Checkpoint) -> bool:
    """Somebody besides the index holds it, or records that start from it."""
    held = any(index.pool.counts[page] > 1 for page in checkpoint.pages)
    return held or any(pinned(index, tail) for tail in checkpoint.tails)


def evictable(index: Index) -> set[int]:
    """Pages that could be freed. A pin keeps all that it stands on: pages before it, and the page under a state."""
    pages, needed = set(), set()
    for hash, checkpoint in index.checkpoints.items():
        if pinned(index, checkpoint):
            needed.add(hash)
        else:
            pages.update(checkpoint.pages)
    for node in sorted(index.nodes.values(), key=lambda node: -node.start):
        if index.pool.counts[node.page] > 1 or not needed.isdisjoint(node.hashes):
            needed.add(node.parent)
        else:
            pages.add(node.page)
    return pages


def evict(index: Index, policy: Policy, need: int, now: int, headroom: int = 0) -> int:
    """Drops entries until `need` pages are free, and `headroom` more where they can be had: ranking all entries is dear,
    so it is worth doing for many pages. Returns how many checkpoints went.

    Raises PoolExhausted, and drops nothing, if `need` cannot be met.
    """
    pool = index.pool
    if pool.free >= need:
        return 0
    pages = evictable(index)
    if pool.free + len(pages) < need:
        raise PoolExhausted(need, pool.free, len(pages))
    goal = min(need + headroom, pool.free + len(pages))
    dead = [node for node in index.nodes.values() if _dead(index, node, pages)]
    ranked = [(policy.rank(s, now), i, s.checkpoint) for i, s in enumerate(survey(index))]
    ranked = [entry for entry in ranked if not pinned(index, entry[2])]
    heapq.heapify(ranked)
    went = len(index.checkpoints)
    while pool.free < goal:
        if dead:
            node = dead.pop()
            index.drop_node(node)
            dead += [parent for parent in index.providers.get(node.parent, ()) if _dead(index, parent, pages)]
        else:
            checkpoint = heapq.heappop(ranked)[2]
            if index.live(checkpoint):
                bared = [c.hash for c in (checkpoint, *checkpoint.tails)]
                index.drop_checkpoint(checkpoint)
                dead += [node for hash in bared for node in index.providers[hash] if _dead(index, node, pages)]
    return went - len(index.checkpoints)


def _dead(index: Index, node: Node, pages: set[int]) -> bool:
    """Nothing stands on the page, or others provide all that it does."""
    if node.page not in pages:
        return False
    if all(len(index.providers[hash]) > 1 for hash in node.hashes):
        return True
    return not any(hash in index.checkpoints or hash in index.children for hash in node.hashes)
