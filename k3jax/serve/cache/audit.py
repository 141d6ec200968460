"""The self-check: what has to hold between any two operations, recounted from the owners and not from the counts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

from k3jax.serve.cache import retention
from k3jax.serve.cache.index import Index

if TYPE_CHECKING:
    from k3jax.serve.cache.cache import PrefixCache


@dataclasses.dataclass(frozen=True)
class Census:
    """Pages by what may become of them; with the canary they are all there are."""

    free: int
    referenced: int
    """Held by requests and copies alone."""
    pinned: int
    """In the index, and something that somebody holds stands on them."""
    evictable: int


def census(cache: PrefixCache) -> Census:
    """Counts pages. Each is in one class."""
    evictable = retention.evictable(cache.index)
    indexed = set(cache.index.nodes) | {page for c in cache.index.checkpoints.values() for page in c.pages}
    held = sum(cache.pool.counts[page] > 0 for page in range(cache.pool.pages))
    return Census(cache.pool.free, held - len(indexed), len(indexed - evictable), len(evictable))


def check(cache: PrefixCache) -> None:
    """Raises AssertionError that says which rule is broken."""
    cache.pool.check()
    cache.copies.check()
    _check_counts(cache)
    _check_index(cache.index)
    assert cache.copies.pending.isdisjoint(cache.index.nodes), "KV can be found before a copy into its page has landed"
    _check_requests(cache)
    counts = dataclasses.astuple(census(cache))
    assert 1 + sum(counts) == cache.pool.pages, (
        f"free + referenced + pinned + evictable = {counts} of {cache.pool.pages}"
    )


def _check_counts(cache: PrefixCache) -> None:
    owners = Counter(page for request in cache.requests.values() for page in request.pages)
    owners.update(cache.index.nodes.keys())
    owners.update(page for checkpoint in cache.index.checkpoints.values() for page in checkpoint.pages)
    owners.update(page for copy in cache.copies.open.values() for page in copy.pages)
    for page in range(cache.pool.pages):
        assert cache.pool.counts[page] == owners[page], (
            f"page {page}: {cache.pool.counts[page]} counted, {owners[page]} own it"
        )


def _check_index(index: Index) -> None:
    h, p = index.geometry.hash_unit, index.geometry.page_tokens
    provided = Counter()
    for page, node in index.nodes.items():
        assert node.page == page and node.hashes and not node.start % p and len(node.hashes) <= p // h, f"page {page}"
        assert not node.start or node.parent in index.providers, (
            f"page {page} at {node.start}: the page before it is gone"
        )
        assert any(n is node for n in index.children[node.parent]), f"page {page} is missing under its parent"
        for i, hash in enumerate(node.hashes):
            provided[hash] += 1
            assert any(n is node for n in index.providers[hash]), f"page {page} does not provide its hash {i}"
            assert all(n.start == node.start and n.hashes[i] == hash for n in index.providers[hash]), (
                "one hash, two places"
            )
    ends = Counter(node.hashes[-1] for node in index.nodes.values())
    assert all(n == 1 for n in ends.values()), "two pages hold the same tokens, and end there"
    assert provided == Counter({hash: len(nodes) for hash, nodes in index.providers.items()}), (
        "providers that are no nodes"
    )
    assert sum(map(len, index.children.values())) == len(index.nodes), "children that are no nodes"
    places = Counter(page for checkpoint in index.checkpoints.values() for page in checkpoint.pages)
    places.update(index.nodes.keys())
    assert not [page for page, n in places.items() if n > 1], "a page has two entries"
    for hash, checkpoint in index.checkpoints.items():
        assert checkpoint.hash == hash and hash in index.providers, f"no KV under the state at {checkpoint.boundary}"
        node = index.providers[hash][0]
        boundary = node.start + (node.hashes.index(hash) + 1) * h
        assert boundary == checkpoint.boundary, f"a state of {checkpoint.boundary} tokens is filed at {boundary}"
        base = checkpoint.base
        size = index.geometry.record_pages(boundary - base.boundary) if base else index.geometry.state_pages
        assert len(checkpoint.pages) == size, f"the state at {boundary} has {len(checkpoint.pages)} pages of {size}"
        assert base is None or (index.live(base) and checkpoint in base.tails), (
            f"records at {boundary} start from nothing"
        )
        assert all(index.live(tail) and tail.base is checkpoint for tail in checkpoint.tails), "tails that are gone"


def _check_requests(cache: PrefixCache) -> None:
    writable, p = Counter(), cache.geometry.page_tokens
    states = Counter(page for request in cache.requests.values() for page in request.state)
    lent = {page: c for c in cache.index.checkpoints.values() if c.lent for page in c.pages}
    for id, request in cache.requests.items():
        assert request.id == id and request.computed <= request.reserved, f"ledger of {id!r}"
        assert len(request.table) * p >= max(request.reserved, request.plan.boundary), f"{id!r} has too few pages"
        writable.update(request.table[request.write_from // p :])
        for page in request.state:
            owner = lent[page].lent if page in lent else id
            assert owner == id, f"the live state of {id!r} is lent by {owner!r}"
    assert not [page for page, n in (writable + states).items() if n > 1], "two requests write the same page"
    indexed = {page for c in cache.index.checkpoints.values() for page in c.pages}
    assert all(page in lent for page in indexed & states.keys()), "a checkpoint is written over"
    for checkpoint in cache.index.checkpoints.values():
        if checkpoint.lent:
            request = cache.requests.get(checkpoint.lent)
            assert request and request.state == checkpoint.pages, (
                f"the state at {checkpoint.boundary} is lent to nobody"
            )
            if request.reserved > request.computed:
                waits = any(c is checkpoint for c in cache.keeper.waiting.values())
                assert waits, f"{request.id!r} may write over the state at {checkpoint.boundary}"
            assert request.computed == checkpoint.boundary, "a live state has left the boundary that it is filed under"
