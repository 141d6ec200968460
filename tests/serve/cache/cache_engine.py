"""An engine without a model: pages hold the names of what a real one would compute, so foreign content cannot look right.

KV of token t and the state at b are functions of the whole prefix; here they are numbers that name it. What is freed is
poisoned. Every forward reads all that it stands on and compares.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from k3jax.serve.cache import CANARY, CacheKey, Copy, Geometry, Kind, PrefixCache

POISON = "poison"
KEY = CacheKey(model="toy", revision="r1", layout="whole", kv_dtype="bf16", state_dtype="fp32")


def toy(**changes) -> Geometry:
    """h = 2, pages of 4 tokens, one MLA and three KDA layers, a state of one page in each of the three groups."""
    sizes = dict(hash_unit=2, page_tokens=4, chunk_size=2, kv_layers=1, kda_layers=3, heads=2)
    sizes |= dict(kv_token_bytes=8, head_bytes=16, record_token_bytes=4, tail_bytes=0)
    return Geometry(**(sizes | changes))


class Engine:
    """Drives a cache as the package says, and checks every read. The order of copies is drawn anew each time."""

    def __init__(
        self, pages: int = 64, geometry: Geometry | None = None, seed: int = 0, key: CacheKey = KEY, **options
    ):
        self.cache = PrefixCache(geometry or toy(), pages, key, on_free=self._free, **options)
        self.memory: dict[int, object] = {page: POISON for page in range(pages)}
        self.tokens: dict[str, list[int]] = {}
        self.records_since: dict[str, int] = {}
        self.random = random.Random(seed)
        self.care = 1
        """One in how many operations is followed by the cache's self-check; contents are compared at every read."""
        self._operations = 0
        self._names: dict[tuple, int] = {}

    # What a real engine does

    def begin(self, id: str, tokens: Sequence[int], salt: str = "", **options):
        plan = self.cache.begin(id, self.cache.chain(tokens, salt=salt) if salt else tokens, **options)
        self.tokens[id] = list(tokens)
        self.records_since[id] = plan.start
        self.check()
        return plan

    def do_copies(self):
        copies = list(self.cache.take_copies())
        self.random.shuffle(copies)
        for copy in copies:
            self.do_copy(copy)
        self.random.shuffle(copies)
        self.cache.landed(copies)
        self.check()
        return copies

    def do_copy(self, copy: Copy) -> None:
        assert CANARY not in copy.pages
        if copy.kind is Kind.ZERO:
            content: list = [("S", i, 0) for i in range(len(copy.destination))]
        elif copy.kind is Kind.RECORD:
            assert self.records_since[copy.request] <= copy.start
            names = self.names(copy.request)
            content = [("R", i, names[copy.start], names[copy.end]) for i in range(len(copy.destination))]
        else:
            content = [self.memory[page] for page in copy.source]
            if POISON in content + [self.memory[page] for page in copy.records]:
                assert self.cache.requests[copy.request].broken, f"{copy} reads a page that was freed"
                return
            content = [list(x) if isinstance(x, list) else x for x in content]
        for i, page in enumerate(copy.records):
            start = content[0][2]
            kind, part, before, after = self.memory[page]
            assert (kind, part, before) == ("R", i, start), f"{copy} applies the records of other tokens"
            if page == copy.records[-1]:
                content = [("S", i, after) for i in range(len(content))]
        for page, x in zip(copy.destination, content, strict=True):
            self.memory[page] = x

    def forward(self, id: str, count: int, accept: int | None = None, records: bool = False) -> None:
        """A forward over `count` tokens, of which `accept` stay."""
        request = self.cache.requests[id]
        start, end = request.computed, request.computed + count
        table = self.cache.extend(id, count)
        self.check()
        self.do_copies()
        self.check_request(id)
        drafts = self.tokens[id] + [-1] * (end - len(self.tokens[id]))
        names = self.names(id, drafts)
        for t in range(start, end):
            if t < request.write_from:
                assert self.kv(id, t) == names[t + 1], f"{id}: replayed token {t} finds other KV"
            else:
                self.write_kv(table, t, names[t + 1])
        accepted = count if accept is None else accept
        for i, page in enumerate(request.state):
            self.memory[page] = ("S", i, names[start + accepted])
        try:
            self.cache.advance(id, accepted, records_since=self.records_since[id] if records else None)
        except RuntimeError:  # no pages for records, by a fault: nothing has changed, so it can be said again
            self.cache.advance(id, accepted)
        self.check()

    def prefill(self, id: str, records: bool = False) -> None:
        """All known tokens, split where states are kept."""
        while (computed := self.cache.requests[id].computed) < len(self.tokens[id]):
            end = min([*self.cache.stops(id), len(self.tokens[id])])
            self.forward(id, end - computed, records=records)

    def decode(self, id: str, tokens: Sequence[int], records: bool = False) -> None:
        for token in tokens:
            self.cache.append(id, [token])
            self.tokens[id].append(token)
            self.forward(id, 1, records=records)

    def lose(self, pages: Sequence[int]) -> None:
        """The device reports pages as broken."""
        self.memory |= dict.fromkeys(pages, POISON)
        self.cache.lose(pages)
        self.check()

    def end(self, id: str, how: str = "release") -> None:
        getattr(self.cache, how)(id)
        del self.tokens[id]
        self.check()

    def run(self, id: str, tokens: Sequence[int], **options):
        """A whole request."""
        plan = self.begin(id, tokens, **options)
        self.prefill(id)
        self.end(id)
        return plan

    def check(self) -> None:
        self._operations += 1
        if not self._operations % self.care:
            self.cache.check()

    # What pages must hold

    def names(self, id: str, tokens: Sequence[int] | None = None) -> list[int]:
        """Name of each prefix, from the empty one (0) on."""
        key, names = self.cache.requests[id].chain.key, [0]
        for token in self.tokens[id] if tokens is None else tokens:
            names.append(self._names.setdefault((names[-1], token, key), len(self._names) + 1))
        return names

    def kv(self, id: str, t: int):
        page = self.memory[self.cache.requests[id].table[t // self.cache.geometry.page_tokens]]
        return page[t % self.cache.geometry.page_tokens] if isinstance(page, list) else page

    def write_kv(self, table: Sequence[int], t: int, name: int) -> None:
        p = self.cache.geometry.page_tokens
        if not isinstance(self.memory[table[t // p]], list):
            self.memory[table[t // p]] = [POISON] * p
        self.memory[table[t // p]][t % p] = name

    def check_request(self, id: str) -> None:
        """What the next forward reads is exactly the content of the request's own tokens."""
        request, names = self.cache.requests[id], self.names(id)
        assert [self.kv(id, t) for t in range(request.computed)] == names[1 : request.computed + 1], f"{id}: foreign KV"
        states = [self.memory[page] for page in request.state]
        assert states == [("S", i, names[request.computed]) for i in range(len(states))], f"{id}: foreign state"

    def check_index(self, tokens: Sequence[int]) -> None:
        """What a lookup of these tokens finds is what they would compute."""
        key, chain = self.cache.key, self.cache.chain(tokens)
        match, names, p = self.cache.match(chain, limit=len(tokens)), [0], self.cache.geometry.page_tokens
        for token in tokens:
            names.append(self._names.get((names[-1], token, key), -2))
        for t in range(match.kv):
            assert self.memory[match.nodes[t // p].page][t % p] == names[t + 1], "the index leads to foreign KV"
        if (state := match.checkpoint) and not state.base:
            content = [self.memory[page] for page in state.pages]
            assert content == [("S", i, names[state.boundary]) for i in range(len(content))], (
                "the index leads to a foreign state"
            )

    def check_empty(self) -> None:
        """Nobody holds anything but the index, and the index can let go of all."""
        self.cache.check()
        assert not self.cache.requests and not self.cache.copies.open
        self.cache.evict(self.cache.pool.pages - 1)
        assert self.cache.pool.free == self.cache.pool.pages - 1
        assert not self.cache.index.checkpoints and not self.cache.index.providers and not self.cache.index.children
        self.cache.check()

    def _free(self, page: int) -> None:
        self.memory[page] = POISON


def hit(engine, tokens, **options):
    """(KV boundary, state boundary) of a prefix, with all its tokens usable."""
    chain = engine.cache.chain(tokens)
    match = engine.cache.match(chain, **({"limit": len(tokens)} | options))
    return match.kv, match.state
