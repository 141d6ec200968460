"""What one request owns: every page that has to be given back, whatever becomes of it."""

from __future__ import annotations

import dataclasses

from k3jax.serve.cache.index import Checkpoint
from k3jax.serve.cache.keys import Chain
from k3jax.serve.cache.restore import RestorePlan


@dataclasses.dataclass(eq=False)
class Request:
    """A running request. It holds each page of its table and of its live state once."""

    id: str
    chain: Chain
    """Of all its tokens, computed or not."""
    plan: RestorePlan
    turns: tuple[int, ...]
    table: list[int]
    """KV page of each column of page_tokens tokens."""
    state: tuple[int, ...]
    """Pages of its live state, all groups in order; no other request's, and written in place."""
    computed: int
    """The one visible boundary: KV(computed) and S(computed) are there."""
    reserved: int
    """The forward under way may compute up to here; equal to `computed` between forwards."""
    last: Checkpoint | None = None
    """Its newest own checkpoint."""
    broken: str = ""
    """Why it cannot go on."""

    @property
    def pages(self) -> list[int]:
        return [*self.table, *self.state]

    @property
    def left(self) -> int:
        """Tokens that are known and not computed."""
        return len(self.chain) - self.computed

    @property
    def write_from(self) -> int:
        """The first token whose KV the next forward writes; earlier ones lie in pages that others read."""
        return max(self.computed, self.plan.boundary)
