"""The prefix cache: one object that keeps pool, index, copies and ledgers in step. The package says how to drive it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack

from k3jax.serve.cache import audit, retention
from k3jax.serve.cache.copies import Copy, CopyQueue, Kind
from k3jax.serve.cache.geometry import Geometry, Grid
from k3jax.serve.cache.index import Index, Match
from k3jax.serve.cache.keeper import Keeper, lent
from k3jax.serve.cache.keys import CacheKey, Chain, Tokens
from k3jax.serve.cache.ledger import Request
from k3jax.serve.cache.pool import Pool, PoolExhausted
from k3jax.serve.cache.restore import RestorePlan, plan_cold, plan_restore

HEADROOM = 64
"""When pages run out, this fraction of the pool is freed at once."""


class PrefixCache:
    """Pages, states and who may use them. Every method does all of its work, or raises and leaves requests as they were.

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
        self.keeper = Keeper(self.index, self.copies, self._allocate, self.metrics)
        self._fault = fault
        self._now = 0

    # Admission

    def chain(self, tokens: Tokens, *, salt: str = "") -> Chain:
        """The hashes of tokens under the key that is served. salt: only requests with the same one share a prefix."""
        return Chain(dataclasses.replace(self.key, salt=salt), self.geometry.hash_unit, tokens)

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
    ) -> RestorePlan:
        """Admits a request: match, pin, allocate, order copies.

        tokens: a chain becomes the request's own. turns: lengths of the prefix at ends of conversation turns.
        Raises ValueError for a request that is not well formed, PoolExhausted if it does not fit now.
        """
        if id in self.requests:
            raise ValueError(f"request {id!r} is running already")
        chain = tokens if isinstance(tokens, Chain) else self.chain(tokens)
        differing = [f"{f}={getattr(chain.key, f)!r}" for f in chain.key.differing(self.key) if f != "salt"]
        if differing or chain.unit != self.geometry.hash_unit:
            raise ValueError(
                f"request {id!r} has a key of {', '.join(differing) or 'other fields'} and hash unit {chain.unit}: "
                f"serving {self.key} and {self.geometry.hash_unit}"
            )
        if not len(chain):
            raise ValueError(f"request {id!r} has no tokens")
        if replay_budget < 0:
            raise ValueError(f"request {id!r}: replay_budget={replay_budget} must be at least 0 tokens")
        match = self.match(chain, limit=len(chain) - 1 if limit is None else min(limit, len(chain) - 1))
        plan = plan_restore(match, self.geometry, tokens=len(chain), replay_budget=replay_budget)
        try:
            request = self._admit(id, chain, plan, tuple(turns))
        except PoolExhausted:
            # What matched takes room beside its copies. Without it, the request may fit where all of the cache was.
            if not plan.pins or self.room < self.geometry.state_pages + self.geometry.kv_pages(len(chain)):
                raise
            plan = plan_cold(match, self.geometry, tokens=len(chain))
            request = self._admit(id, chain, plan, tuple(turns))
        self.requests[id] = request
        self._now += 1
        if plan.checkpoint:
            self.policy.hit(self.index.path(chain, plan.start), self._now)
        self.metrics.update([f"way.{plan.way}", *(f"miss.{reason.code}" for reason in plan.misses)])
        self.metrics["tokens"] += plan.tokens
        self.metrics["tokens.uncached"] += plan.uncached
        self.metrics["tokens.replayed"] += len(plan.replay)
        return plan

    @property
    def room(self) -> int:
        """Pages that are free or could be."""
        return self.pool.free + len(retention.evictable(self.index))

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
        pages = self._allocate(max(0, self.columns.column(upto) + 1 - len(request.table)))
        with ExitStack() as undo:
            undo.callback(self.pool.drop, pages)
            self.keeper.copy_out(request)
            undo.pop_all()
        request.table += pages
        request.reserved = upto
        return tuple(request.table)

    def take_copies(self) -> tuple[Copy, ...]:
        """Copies to be done before the next forward, in any order; each goes back to `landed` or `failed`."""
        return self.copies.take()

    def landed(self, copies: Iterable[Copy]) -> None:
        """What they wrote is valid, and can be matched."""
        for copy in self.copies.under_way(copies):
            self.keeper.landed(copy)
            self.copies.close(copy)

    def failed(self, copies: Iterable[Copy]) -> None:
        """What they wrote is lost. A request whose start it was is broken; a state that was to be copied out stays where
        it is, and the next `extend` tries again.
        """
        for copy in self.copies.under_way(copies):
            self.keeper.lost(copy)
            self.copies.close(copy)
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
        wanted = self._wanted(request, request.computed, upto)
        records = None
        if upto in wanted and records_since is not None:
            records = self.keeper.records(request, upto, records_since)
        self.metrics["stops.missed"] += len(wanted.keys() - {upto})
        since, request.computed, request.reserved = request.computed, upto, upto
        if self._register(request, since) and upto in wanted:
            self.keeper.keep(request, wanted[upto], self._now, records)
        if records:
            self.pool.drop(records.pages)  # the index and the copy hold them, or nobody does

    # The end

    def release(self, id: str) -> None:
        """The request is done, which ends a turn: its pages and its state stay findable, all else is given back.

        Copies of its records that nobody took are withdrawn: take them before.
        """
        request = self._ledger(id)
        boundary = self.geometry.align(request.computed)
        settled = not request.broken and self.copies.pending.isdisjoint(request.pages)
        if settled and boundary and self._register(request, request.computed):
            request.turns += (boundary,)
            reason = self._wanted(request, boundary - 1, boundary).get(boundary)
            if reason and boundary == request.computed and request.reserved == request.computed:
                self.keeper.keep(request, reason, self._now)
            elif reason and (checkpoint := self.index.checkpoints.get(request.chain.at(boundary))):
                checkpoint.kept.add(reason)
        self.abort(id)

    def abort(self, id: str) -> None:
        """Gives back all that the request holds. What it had made findable stays."""
        request = self._ledger(id)
        for copy in self.copies.untaken(id):
            self.keeper.lost(copy)
            self.copies.close(copy)
        if checkpoint := lent(self.index, request):
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
            if not lost.isdisjoint(copy.pages):
                self.keeper.spoiled(copy)
                if copy.request in self.requests:
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
        self._evict(pages, 0)

    def check(self) -> None:
        """Raises AssertionError unless pool, index, copies and ledgers agree: run it after every operation in tests."""
        audit.check(self)

    # Inside

    def _allocate(self, n: int) -> tuple[int, ...]:
        if self._fault:
            self._fault(n)
        self._evict(n, self.pool.pages // HEADROOM)
        return self.pool.allocate(n)

    def _evict(self, need: int, headroom: int) -> None:
        went = retention.evict(self.index, self.policy, need, self._now, headroom)
        self.metrics["evicted.checkpoints"] += went

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

    def _register(self, request: Request, since: int) -> bool:
        """Makes the pages of tokens [since, computed) findable up to the last hash, and says whether they are."""
        if request.chain.key.revision != self.key.revision:
            return False
        chain, p, end, starts = request.chain, self.geometry.page_tokens, self.geometry.align(request.computed), []
        for start in range((end - 1) // p * p, -1, -p):
            starts.append(start)
            if start <= since and (not start or chain.at(start) in self.index.providers):
                break
        for start in reversed(starts):
            self.index.register(request.table[start // p], chain, start, min(end, start + p))
        return end > 0 and chain.at(end) in self.index.providers
