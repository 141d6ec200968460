"""How a live state becomes a checkpoint, and stays one when its request goes on.

A state that is to be kept is not copied: the index names the live pages, and they are lent. Only when the request is about
to write is the state copied out, and the index moves to the copy when it has landed. A request that ends leaves its pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from k3jax.serve.cache import retention
from k3jax.serve.cache.copies import Copy, CopyQueue, Kind
from k3jax.serve.cache.index import Checkpoint, Index
from k3jax.serve.cache.ledger import Request
from k3jax.serve.cache.pool import PoolExhausted


class Records(NamedTuple):
    """A state, and pages for the records that start from it."""

    base: Checkpoint
    pages: tuple[int, ...]


def lent(index: Index, request: Request) -> Checkpoint | None:
    """The checkpoint that still is the request's live state."""
    last = request.last
    return last if last and last.lent == request.id and index.live(last) else None


class Keeper:
    """Makes checkpoints, copies them out, recycles those that nothing speaks for."""

    def __init__(
        self, index: Index, copies: CopyQueue, allocate: Callable[[int], tuple[int, ...]], metrics: Counter[str]
    ):
        self.index, self.copies, self.metrics = index, copies, metrics
        self._allocate = allocate
        self.waiting: dict[int, Checkpoint] = {}
        """Checkpoints by the copy that they wait for."""

    def keep(self, request: Request, reason: str, now: int, records: Records | None = None) -> None:
        """The live state becomes the checkpoint at `computed`, where it lies; or records do."""
        hash, boundary = request.chain.at(request.computed), request.computed
        checkpoint = self.index.checkpoints.get(hash)
        if checkpoint is None:
            if records:
                base, pages = records
                checkpoint = Checkpoint(hash, boundary, pages, base=base)
                copy = self.copies.add(request.id, Kind.RECORD, pages, start=base.boundary, end=boundary)
                self.waiting[copy.id] = checkpoint
                self.metrics["checkpoints.as_records"] += 1
            else:
                checkpoint = Checkpoint(hash, boundary, request.state, lent=request.id)
            checkpoint.used = now
            self.index.add_checkpoint(checkpoint)
            self.metrics[f"checkpoints.{reason}"] += 1
        if reason == retention.LAST:
            checkpoint.last_of.add(request.id)
        else:
            checkpoint.kept.add(reason)
        previous, request.last = request.last, checkpoint
        if previous and previous is not checkpoint:
            previous.last_of.discard(request.id)
            self._recycle(previous)

    def _recycle(self, checkpoint: Checkpoint | None) -> None:
        """Drops a state that nothing speaks for any more, and then the one that its records start from."""
        while checkpoint and self.index.live(checkpoint) and not retention.pinned(self.index, checkpoint):
            if checkpoint.kept or checkpoint.last_of or checkpoint.hits or checkpoint.tails:
                return
            self.index.drop_checkpoint(checkpoint)
            self.metrics["checkpoints.recycled"] += 1
            checkpoint = checkpoint.base

    def records(self, request: Request, boundary: int, since: int) -> Records | None:
        """The state that records up to `boundary` can start from, and pages for them; None if they take no less room.

        Short tails only: a token's records are 2K + V numbers where a state has K · V.
        """
        path = self.index.path(request.chain, self.index.geometry.align(request.computed))
        bases = [c for c in path if c.boundary >= since and not c.base and self.copies.pending.isdisjoint(c.pages)]
        if not bases or boundary <= bases[-1].boundary:
            return None
        base = bases[-1]
        need = self.index.geometry.record_pages(boundary - base.boundary)
        if need >= self.index.geometry.state_pages:
            return None
        self.index.pool.hold(base.pages)
        try:
            return Records(base, self._allocate(need))
        except PoolExhausted:
            return None
        finally:
            self.index.pool.drop(base.pages)

    def copy_out(self, request: Request) -> None:
        """Before a request writes: orders the copy of a state that it lends. Without room for it, the state goes."""
        checkpoint = lent(self.index, request)
        if checkpoint is None or any(waiting is checkpoint for waiting in self.waiting.values()):
            return
        try:
            pages = self._allocate(len(checkpoint.pages))
        except PoolExhausted:
            self.index.drop_checkpoint(checkpoint)
            self.metrics["checkpoints.given_up"] += 1
            return
        at = checkpoint.boundary
        copy = self.copies.add(request.id, Kind.KEEP, pages, source=checkpoint.pages, start=at, end=at)
        self.waiting[copy.id] = checkpoint
        self.index.pool.drop(pages)  # the copy holds them until the index does

    def landed(self, copy: Copy) -> None:
        """The index names the copy from now on."""
        checkpoint = self.waiting.pop(copy.id, None)
        if checkpoint and copy.kind is Kind.KEEP and self.index.live(checkpoint):
            self.index.move_checkpoint(checkpoint, copy.destination)

    def lost(self, copy: Copy) -> None:
        """A copy that will not be: a state stays where it is, records that were never written go."""
        checkpoint = self.waiting.pop(copy.id, None)
        if checkpoint and copy.kind is Kind.RECORD and self.index.live(checkpoint):
            self.index.drop_checkpoint(checkpoint)

    def spoiled(self, copy: Copy) -> None:
        """A copy whose pages are lost: what waits for it goes."""
        checkpoint = self.waiting.pop(copy.id, None)
        if checkpoint and self.index.live(checkpoint):
            self.index.drop_checkpoint(checkpoint)
