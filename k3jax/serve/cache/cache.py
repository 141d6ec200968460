"""The prefix cache: one object that keeps pool, index, copies and ledgers in step. The package says how to drive it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack

from k3jax.serve.cache import audit, retention
from k3jax.serve.cache.copies import Copy, CopyQueue, Kind
from k3jax.serve.cache.geometry import Geometry, Grid
from k3jax.serve.cache.index import Checkpoint, Index, Match
from k3jax.serve.cache.keys import CacheKey, Chain, Tokens
from k3jax.serve.cache.ledger import Request
from k3jax.serve.cache.pool import Pool, PoolExhausted
from k3jax.serve.cache.restore import RestorePlan, plan_cold, plan_restore

_Records = tuple[Checkpoint, tuple[int, ...]]
"""A state, and pages for the records that start from it."""


class PrefixCache:
    """Pages, states and who may use them. Every method either does all of its work or raises and changes nothing.

    fault is called with the number of pages before each allocation, and may raise: for tests of what a failure leaves.
    """

    def __init__(
        self,
        geometry: Geometry,
        pages: int,
        key: CacheKey,
        *,
        policy: retention.Policy | None = None,
        on_free: Callable[[int], None] | None = None,
        fault: Callable[[int], None] | None = None,
    ):
        self.geometry, self.key, self.policy = geometry, key, policy or retention.Lineage()
        self.pool = Pool(pages, on_free=on_free)
        self.index = Index(geometry, self.pool)
        self.copies = CopyQueue(self.pool)
        self.columns = Grid("KV page", geometry.page_tokens, pages - 1)
        self.requests: dict[str, Request] = {}
        self.metrics: Counter[str] = Counter()
        self._waiting: dict[int, Checkpoint] = {}  # by the copy that it waits for
        self._fault = fault
        self._now = 0

    # Admission

    def match(self, chain: Chain, *, limit: int | None = None) -> Match:
        """What is cached of a prefix, for routing and admission. limit None: all tokens but the last. Changes nothing."""
        return self.index.lookup(chain, max(len(chain) - 1, 0) if limit is None else limit, self.copies.pending)

    def begin(
        self,
        id: str,
        tokens: Tokens | Chain,
        *,
        replay_budget: int = 0,
        turns: Iterable[int] = (),
        limit: int | None = None,
        salt: str | None = None,
    ) -> RestorePlan:
        """Admits a request: match, pin, allocate, order copies.

        turns: lengths of the prefix at ends of conversation turns. Raises ValueError for a request that is not well
        formed, PoolExhausted if it does not fit now.
        """
        if id in self.requests:
            raise ValueError(f"request {id!r} is running already")
        if not isinstance(tokens, Chain):
            key = self.key if salt is None else dataclasses.replace(self.key, salt=salt)
            tokens = Chain(key, self.geometry.hash_unit, tokens)
        if tokens.key.revision != self.key.revision:
            raise ValueError(f"request {id!r} is for revision {tokens.key.revision!r}, serving {self.key.revision!r}")
        if not len(tokens):
            raise ValueError(f"request {id!r} has no tokens")
        if replay_budget < 0:
            raise ValueError(f"request {id!r}: replay_budget={replay_budget} must be at least 0 tokens")
        match = self.match(tokens, limit=len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1))
        plan = plan_restore(match, self.geometry, tokens=len(tokens), replay_budget=replay_budget)
        try:
            request = self._admit(id, tokens, plan, tuple(turns))
        except PoolExhausted:
            # What matched takes room beside its copies; without it, all of the cache may go to make room.
            if not plan.pins:
                raise
            plan = plan_cold(match, self.geometry, tokens=len(tokens))
            request = self._admit(id, tokens, plan, tuple(turns))
        self.requests[id] = request
        self._now += 1
        if plan.checkpoint:
            self.policy.hit(self.index.path(tokens, plan.start), self._now)
        self.metrics.update([f"way.{plan.way}", *(f"miss.{reason.code}" for reason in plan.misses)])
        self.metrics.update(
            {"tokens": plan.tokens, "tokens.uncached": plan.uncached, "tokens.replayed": len(plan.replay)}
        )
        return plan

    def _admit(self, id: str, chain: Chain, plan: RestorePlan, turns: tuple[int, ...]) -> Request:
        with ExitStack() as undo:
            self.pool.hold(plan.pins)
            undo.callback(self.pool.drop, plan.pins)
            pages = self._allocate(plan.allocate)
            state, partial = pages[: self.geometry.state_pages], pages[self.geometry.state_pages :]
            checkpoint = plan.checkpoint
            if checkpoint is None:
                self.copies.add(id, Kind.ZERO, state)
            elif checkpoint.base is None:
                self.copies.add(id, Kind.STATE, state, source=checkpoint.pages, start=plan.start, end=plan.start)
            else:
                base, fields = checkpoint.base, {"start": checkpoint.base.boundary, "end": plan.start}
                self.copies.add(id, Kind.STATE, state, source=base.pages, records=checkpoint.pages, **fields)
            if plan.partial is not None:
                self.copies.add(id, Kind.KV, partial, source=(plan.partial,), end=plan.boundary)
            self.pool.hold(plan.shared)  # the request's own share; the pins end here, copies hold what they read
        return Request(id, chain, plan, turns, [*plan.shared, *partial], state, plan.start, plan.start)

    def fork(self, id: str, new: str) -> None:
        """A second request that continues like the first: whole pages shared, the page under way and the state copied."""
        parent = self._running(id)
        if new in self.requests:
            raise ValueError(f"request {new!r} is running already")
        if parent.reserved > parent.computed or not self.copies.pending.isdisjoint(parent.pages):
            raise ValueError(f"request {id!r} cannot fork during a forward or before its own copies have landed")
        here, boundary = parent.computed, parent.write_from
        whole, rest = divmod(boundary, self.geometry.page_tokens)
        pages = self._allocate(self.geometry.state_pages + bool(rest))
        state, partial = pages[: self.geometry.state_pages], pages[self.geometry.state_pages :]
        shared = parent.table[:whole]
        self.pool.hold(shared)
        self.copies.add(new, Kind.STATE, state, source=parent.state, start=here, end=here)
        if rest:
            self.copies.add(new, Kind.KV, partial, source=(parent.table[whole],), end=boundary)
        plan = dataclasses.replace(parent.plan, boundary=boundary)
        child = Request(new, parent.chain.copy(), plan, parent.turns, [*shared, *partial], state, here, here)
        self.requests[new] = child
        self.metrics["forks"] += 1

    # Forwards, and the copies before them

    def append(self, id: str, tokens: Tokens) -> None:
        """Tokens that were chosen; a later forward computes them."""
        self._running(id).chain.extend(tokens)

    def stops(self, id: str) -> tuple[int, ...]:
        """Boundaries ahead at which a forward should end, so that the state there can be kept."""
        request = self._running(id)
        return tuple(sorted(self._wanted(request, request.computed, len(request.chain))))

    def extend(self, id: str, count: int) -> tuple[int, ...]:
        """Before a forward over the next `count` tokens, drafts included: the request's page table.

        A state that the index shares with the request is copied out first, or given up if there is no room.
        """
        request = self._running(id)
        if count < 1:
            raise ValueError(f"request {id!r}: a forward over {count} tokens")
        upto = request.computed + count
        missing = self.columns.column(upto) + 1 - len(request.table)
        if missing > 0:
            request.table += self._allocate(missing)
        checkpoint = self._lent(request)
        if checkpoint and checkpoint not in self._waiting.values():
            self._copy_out(request, checkpoint)
        request.reserved = upto
        return tuple(request.table)

    def take_copies(self) -> tuple[Copy, ...]:
        """Copies to be done before the next forward, in any order; each goes back to `landed` or `failed`."""
        return self.copies.take()

    def landed(self, copies: Iterable[Copy]) -> None:
        """What they wrote is valid, and can be matched."""
        for copy in self.copies.under_way(copies):
            checkpoint = self._waiting.pop(copy.id, None)
            if copy.kind is Kind.KEEP and checkpoint and self.index.live(checkpoint):
                self.index.move_checkpoint(checkpoint, copy.destination)
            self.copies.close(copy)

    def failed(self, copies: Iterable[Copy]) -> None:
        """What they wrote is lost. A request whose start it was is broken; a state that was to be copied out stays where
        it is, and the next `extend` tries again.
        """
        for copy in self.copies.under_way(copies):
            self._undo(copy)
            request = self.requests.get(copy.request)
            if request and copy.kind is Kind.KEEP:
                request.reserved = request.computed
            elif request and not set(request.pages).isdisjoint(copy.destination):
                request.broken = f"its {copy.kind} copy failed"

    def advance(self, id: str, count: int, *, records_since: int | None = None) -> None:
        """After a forward: `count` more tokens are computed; their pages, and the state if it is wanted, can be found.

        count may be less than was reserved (drafts refused) as long as the live state is at computed + count.
        records_since: the request has the records of all tokens from there; they may be kept in place of the state.
        """
        request = self._running(id)
        upto = request.computed + count
        if not 0 < count <= request.reserved - request.computed or upto > len(request.chain):
            raise ValueError(
                f"request {id!r} cannot advance to {upto}: computed {request.computed}, reserved {request.reserved} by "
                f"extend, {len(request.chain)} tokens known"
            )
        if not self.copies.pending.isdisjoint(request.pages) or any(self.copies.sources[p] for p in request.state):
            raise ValueError(f"request {id!r} ran a forward before its copies had landed: abort it")
        if self._lent(request):
            raise ValueError(f"request {id!r} wrote over a state that the index shares: extend it again, or abort it")
        wanted = self._wanted(request, request.computed, upto)
        records = None
        if upto in wanted and records_since is not None:
            records = self._records(request, upto, records_since)
        self.metrics["stops.missed"] += len(wanted.keys() - {upto})
        request.computed = request.reserved = upto
        if self._register(request) and upto in wanted:
            self._keep(request, wanted[upto], records)
        if records:
            self.pool.drop(records[1])  # the index and the copy hold them, or nobody does

    # The end

    def release(self, id: str) -> None:
        """The request is done, which ends a turn: its pages and its state stay findable, all else is given back.

        Copies of its records that nobody took are withdrawn: take them before.
        """
        request = self._ledger(id)
        boundary = self.geometry.align(request.computed)
        settled = not request.broken and self.copies.pending.isdisjoint(request.pages)
        if settled and boundary and self._register(request):
            request.turns += (boundary,)
            reason = self._wanted(request, boundary - 1, boundary).get(boundary)
            if reason and boundary == request.computed and request.reserved == request.computed:
                self._keep(request, reason)
            elif reason and (checkpoint := self.index.checkpoints.get(request.chain.at(boundary))):
                checkpoint.kept.add(reason)
        self.abort(id)

    def abort(self, id: str) -> None:
        """Gives back all that the request holds. What it had made findable stays."""
        request = self._ledger(id)
        for copy in self.copies.untaken(id):
            self._undo(copy)
        if checkpoint := self._lent(request):
            checkpoint.lent = None
        if request.last:
            request.last.last_of.discard(id)
        del self.requests[id]
        self.pool.drop(request.pages)

    def lose(self, pages: Iterable[int]) -> None:
        """The content of pages is gone (a device error): entries go with all their groups, requests on them are broken."""
        lost = set(pages)
        self.index.drop_pages(lost)
        for copy in self.copies.open.values():
            if not lost.isdisjoint(copy.pages) and copy.request in self.requests:
                self.requests[copy.request].broken = "a page that its copies read or write was lost"
        for request in self.requests.values():
            if not lost.isdisjoint(request.pages):
                request.broken = "one of its pages was lost"

    def bump(self, revision: str) -> None:
        """New weights: nothing cached is valid for them. Running requests end under their old key and leave nothing."""
        if revision == self.key.revision:
            raise ValueError(f"revision {revision!r} is being served already")
        self.key = dataclasses.replace(self.key, revision=revision)
        self.index.clear()
        self.metrics["bumps"] += 1

    def evict(self, pages: int) -> None:
        """Makes at least this many pages free. Raises PoolExhausted, and evicts nothing, if that cannot be."""
        self.metrics["evicted.checkpoints"] += retention.evict(self.index, self.policy, pages, self._now)

    def check(self) -> None:
        """Raises AssertionError unless pool, index, copies and ledgers agree: run it after every operation in tests."""
        audit.check(self)

    # Inside

    def _allocate(self, n: int) -> tuple[int, ...]:
        if self._fault:
            self._fault(n)
        self.evict(n)
        return self.pool.allocate(n)

    def _ledger(self, id: str) -> Request:
        if id not in self.requests:
            raise ValueError(f"request {id!r} is not running")
        return self.requests[id]

    def _running(self, id: str) -> Request:
        request = self._ledger(id)
        if request.broken:
            raise ValueError(f"request {id!r} cannot go on, {request.broken}: abort it and begin again")
        return request

    def _wanted(self, request: Request, after: int, upto: int) -> dict[int, str]:
        branch = request.plan.kv if request.plan.kv > request.plan.start else 0
        return self.policy.stops(retention.Trail(after, upto, branch, request.turns), self.geometry)

    def _lent(self, request: Request) -> Checkpoint | None:
        """The checkpoint that still is the request's live state."""
        last = request.last
        return last if last and last.lent == request.id and self.index.live(last) else None

    def _register(self, request: Request) -> bool:
        """Makes the pages up to the last hash findable, and says whether they are."""
        if request.chain.key.revision != self.key.revision:
            return False
        chain, p, end, todo = request.chain, self.geometry.page_tokens, self.geometry.align(request.computed), []
        for start in range((end - 1) // p * p, -1, -p):
            todo.append(start)
            if not start or chain.at(start) in self.index.providers:
                break
        for start in reversed(todo):
            self.index.register(request.table[start // p], chain, start, min(end, start + p))
        return end > 0 and chain.at(end) in self.index.providers

    def _keep(self, request: Request, reason: str, records: _Records | None = None) -> None:
        """The live state becomes the checkpoint at `computed`, where it lies; or records do."""
        hash, boundary = request.chain.at(request.computed), request.computed
        checkpoint = self.index.checkpoints.get(hash)
        if checkpoint is None:
            if records:
                base, pages = records
                checkpoint = Checkpoint(hash, boundary, pages, base=base)
                copy = self.copies.add(request.id, Kind.RECORD, pages, start=base.boundary, end=boundary)
                self._waiting[copy.id] = checkpoint
                self.metrics["checkpoints.as_records"] += 1
            else:
                checkpoint = Checkpoint(hash, boundary, request.state, lent=request.id)
            checkpoint.used = self._now
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

    def _records(self, request: Request, boundary: int, since: int) -> _Records | None:
        """The state that records up to `boundary` can start from, and pages for them; None if they take no less room."""
        path = self.index.path(request.chain, self.geometry.align(request.computed))
        bases = [c for c in path if c.boundary >= since and not c.base and self.copies.pending.isdisjoint(c.pages)]
        if not bases or boundary <= bases[-1].boundary:
            return None
        need = self.geometry.record_pages(boundary - bases[-1].boundary)
        if need >= self.geometry.state_pages:
            return None
        self.pool.hold(bases[-1].pages)
        try:
            return bases[-1], self._allocate(need)
        except PoolExhausted:
            return None
        finally:
            self.pool.drop(bases[-1].pages)

    def _copy_out(self, request: Request, checkpoint: Checkpoint) -> None:
        """Orders the copy of a state that its request is about to write over; without room for it, the state goes."""
        try:
            pages = self._allocate(len(checkpoint.pages))
        except PoolExhausted:
            self.index.drop_checkpoint(checkpoint)
            self.metrics["checkpoints.given_up"] += 1
            return
        at = checkpoint.boundary
        copy = self.copies.add(request.id, Kind.KEEP, pages, source=checkpoint.pages, start=at, end=at)
        self._waiting[copy.id] = checkpoint
        self.pool.drop(pages)  # the copy holds them until the index does

    def _undo(self, copy: Copy) -> None:
        """A copy that will not be: the index keeps what it has, and drops records that were never written."""
        checkpoint = self._waiting.pop(copy.id, None)
        if checkpoint and copy.kind is Kind.RECORD and self.index.live(checkpoint):
            self.index.drop_checkpoint(checkpoint)
        self.copies.close(copy)
