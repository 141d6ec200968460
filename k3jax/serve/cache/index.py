"""The prefix index: fine hashes over coarse pages, and sparse KDA checkpoints that have boundaries of their own.

Three layers. Fine: a hash at every hash unit. Coarse: a `Node` is one KV page; it provides each fine hash whose tokens end
in it, so a page that is partly filled, or partly shared, is found at its last matching hash. Sparse: a `Checkpoint` is
the state at one hash, in all KDA groups or not at all.

Lineage: a node needs a live provider of the hash before it, a checkpoint a live provider of its own hash, records the
checkpoint they start from. What loses its ground goes in the same call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Sequence
from enum import StrEnum

from k3jax.serve.cache.geometry import Geometry
from k3jax.serve.cache.keys import CacheKey, Chain, block_hash
from k3jax.serve.cache.pool import Pool


class Miss(StrEnum):
    """Why a lookup did not reach further."""

    KEY = "key"
    """The tokens are cached under another key; the detail names the fields that differ."""
    KV_ABSENT = "kv_absent"
    STATE_ABSENT = "state_absent"
    """KV reaches this boundary, no checkpoint does."""
    STATE_PENDING = "state_pending"
    """A state is there, but a copy of it has not landed."""
    LIMIT = "limit"
    """More is cached than the request may use: at least one of its tokens has to be computed."""
    TAIL = "tail"
    """The tokens after the last whole hash block have no hash."""


@dataclasses.dataclass(frozen=True)
class Reason:
    code: Miss
    boundary: int
    """Where it stopped, or for LIMIT and TAIL where more is."""
    detail: str = ""


@dataclasses.dataclass(eq=False)
class Node:
    """One KV page in the index."""

    page: int
    start: int
    """Tokens before the page."""
    parent: bytes
    """The hash at `start`."""
    hashes: list[bytes]
    """At every hash unit of the page that is filled."""


@dataclasses.dataclass(eq=False)
class Checkpoint:
    """S at one boundary, read-only. With a base, its pages hold the records that lead from the base's state to it."""

    hash: bytes
    boundary: int
    pages: tuple[int, ...]
    """All groups': group g's part p is pages[g · pages_per_state + p]."""
    base: Checkpoint | None = None
    lent: str | None = None
    """The request whose live state this still is: it must be copied before that request goes on."""
    kept: set[str] = dataclasses.field(default_factory=set)
    """Why it stays when its request has gone on: a turn, a branch, an interval."""
    last_of: set[str] = dataclasses.field(default_factory=set)
    """Requests whose newest state it is."""
    hits: int = 0
    used: int = 0
    tails: list[Checkpoint] = dataclasses.field(default_factory=list)
    """Records that start from here."""

    @property
    def reads(self) -> tuple[int, ...]:
        """Pages that a restore reads."""
        return self.pages if self.base is None else self.base.pages + self.pages


@dataclasses.dataclass(frozen=True)
class Match:
    """What the index holds of a prefix. Nothing is pinned yet."""

    limit: int
    kv: int
    """KV is there for tokens[0:kv]."""
    nodes: tuple[Node, ...]
    """One per page column; the last may be used in part."""
    checkpoint: Checkpoint | None
    """The newest state at or before kv."""
    misses: tuple[Reason, ...]

    @property
    def state(self) -> int:
        """The boundary of the newest state; before the first token it is zero, always."""
        return self.checkpoint.boundary if self.checkpoint else 0


class Index:
    """Holds every page it names. Registering and dropping keep the pool's counts right."""

    def __init__(self, geometry: Geometry, pool: Pool):
        self.geometry, self.pool = geometry, pool
        self.nodes: dict[int, Node] = {}
        """By page."""
        self.providers: dict[bytes, list[Node]] = {}
        """By each fine hash."""
        self.children: dict[bytes, list[Node]] = {}
        """By the hash before them."""
        self.checkpoints: dict[bytes, Checkpoint] = {}
        self.keys: dict[bytes, CacheKey] = {}
        """Keys by their root, of all chains that were registered."""

    def lookup(self, chain: Chain, limit: int, pending: Container[int] = ()) -> Match:
        """The deepest KV boundary ≤ limit and the newest state at or before it. Changes nothing.

        Whole pages first, then the fine hashes inside the first page that is missing. States in `pending` pages do not match;
        KV pages are registered only when all copies into them have landed.
        """
        h, p = self.geometry.hash_unit, self.geometry.page_tokens
        last = min(self.geometry.align(limit), chain.aligned)
        nodes, kv, misses = [], 0, []
        while kv < last:
            ends = range(min(last, kv + p), kv, -h)
            found = next(((end, n) for end in ends if (n := self._provider(chain.at(end)))), None)
            if found is None:
                break
            kv, node = found
            nodes.append(node)
            if kv % p:
                break
        if kv < last:
            misses.append(self._why_no_kv(chain, kv))
        elif last < chain.aligned and chain.at(last + h) in self.providers:
            misses.append(Reason(Miss.LIMIT, last + h))
        if limit % h and last == chain.aligned:
            misses.append(Reason(Miss.TAIL, limit))
        checkpoint, held_back = None, 0
        for boundary in range(kv, 0, -h):
            checkpoint = self.checkpoints.get(chain.at(boundary))
            if checkpoint and not any(page in pending for page in checkpoint.reads):
                break
            held_back = held_back or (boundary if checkpoint else 0)
            checkpoint = None
        match = Match(limit, kv, tuple(nodes), checkpoint, ())
        if held_back:
            misses.append(Reason(Miss.STATE_PENDING, held_back))
        if match.state < kv and held_back != kv:
            misses.append(Reason(Miss.STATE_ABSENT, kv))
        return dataclasses.replace(match, misses=tuple(misses))

    def _provider(self, hash: bytes) -> Node | None:
        return next(iter(self.providers.get(hash, ())), None)

    def _why_no_kv(self, chain: Chain, kv: int) -> Reason:
        if not kv:
            for root, key in self.keys.items():
                if root != chain.at(0) and block_hash(root, chain.first) in self.providers:
                    return Reason(Miss.KEY, 0, ",".join(key.differing(chain.key)))
        return Reason(Miss.KV_ABSENT, kv)

    def register(self, page: int, chain: Chain, start: int, end: int) -> bool:
        """A page's tokens [start, end) can be found from now on; a page that has grown is registered again.

        It takes the place of pages that hold no more of the same and that nobody uses. Nothing happens (False) if others
        provide all of it, or if the hash before it has no provider.
        """
        hashes, parent = chain.between(start, end), chain.at(start)
        if not hashes or (start and parent not in self.providers):
            return False
        twins = self.providers.get(hashes[-1], ())
        if any(len(twin.hashes) > len(hashes) or self.pool.counts[twin.page] > 1 for twin in twins):
            return False
        node = self.nodes.get(page)
        if node is None:
            self.pool.hold([page])
            node = self.nodes[page] = Node(page, start, parent, [])
            self.children.setdefault(parent, []).append(node)
            self.keys.setdefault(chain.at(0), chain.key)
        elif (node.start, node.parent, node.hashes) != (start, parent, hashes[: len(node.hashes)]):
            raise ValueError(
                f"page {page} is registered for other tokens, at {node.start}: it was reused while indexed"
            )
        for hash in hashes[len(node.hashes) :]:
            node.hashes.append(hash)
            self.providers.setdefault(hash, []).append(node)
        for twin in list(self.providers[node.hashes[0]]):
            covered = twin is not node and twin.hashes == node.hashes[: len(twin.hashes)]
            if covered and self.pool.counts[twin.page] == 1:
                self.drop_node(twin)
        return True

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Takes a share of the pages. Raises ValueError without KV up to its boundary, or if the hash has a state."""
        if checkpoint.hash not in self.providers:
            raise ValueError(f"a state at {checkpoint.boundary} needs KV up to there in the index")
        if checkpoint.hash in self.checkpoints:
            raise ValueError(f"there is a state at {checkpoint.boundary} of this prefix already")
        self.pool.hold(checkpoint.pages)
        self.checkpoints[checkpoint.hash] = checkpoint
        if checkpoint.base:
            checkpoint.base.tails.append(checkpoint)

    def move_checkpoint(self, checkpoint: Checkpoint, pages: tuple[int, ...]) -> None:
        """The state lies in other pages from now on, in nobody's use."""
        self.pool.hold(pages)
        self.pool.drop(checkpoint.pages)
        checkpoint.pages, checkpoint.lent = pages, None

    def live(self, checkpoint: Checkpoint) -> bool:
        return self.checkpoints.get(checkpoint.hash) is checkpoint

    def drop_checkpoint(self, checkpoint: Checkpoint) -> None:
        """All groups at once, and the records that start from it."""
        for tail in list(checkpoint.tails):
            self.drop_checkpoint(tail)
        del self.checkpoints[checkpoint.hash]
        if checkpoint.base:
            checkpoint.base.tails.remove(checkpoint)
        self.pool.drop(checkpoint.pages)

    def drop_node(self, node: Node) -> None:
        """The page, and every page and checkpoint that it leaves without ground."""
        doomed = [node]
        while doomed:
            node = doomed.pop()
            if self.nodes.get(node.page) is not node:
                continue
            del self.nodes[node.page]
            _remove(self.children, node.parent, node)
            for hash in node.hashes:
                _remove(self.providers, hash, node)
                if hash not in self.providers:
                    doomed += self.children.get(hash, ())
                    if hash in self.checkpoints:
                        self.drop_checkpoint(self.checkpoints[hash])
            self.pool.drop([node.page])

    def drop_pages(self, pages: Iterable[int]) -> None:
        """Drops what lies in any of these pages: for a state that is all its groups."""
        lost = set(pages)
        for checkpoint in list(self.checkpoints.values()):
            if self.live(checkpoint) and lost.intersection(checkpoint.pages):
                self.drop_checkpoint(checkpoint)
        for page in lost & self.nodes.keys():
            if page in self.nodes:
                self.drop_node(self.nodes[page])

    def clear(self) -> None:
        for node in [n for n in self.nodes.values() if not n.start]:
            self.drop_node(node)
        self.keys.clear()

    def path(self, chain: Chain, boundary: int) -> Sequence[Checkpoint]:
        """The checkpoints of a prefix, up to a boundary."""
        return [self.checkpoints[hash] for hash in chain.between(0, boundary) if hash in self.checkpoints]


def _remove(lists: dict[bytes, list[Node]], hash: bytes, node: Node) -> None:
    lists[hash].remove(node)
    if not lists[hash]:
        del lists[hash]
