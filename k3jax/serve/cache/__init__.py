"""The prefix cache of a hybrid model: which pages hold what, who may use them, what is kept. Numbers only, no arrays.

An engine drives one `PrefixCache`, and does on the device what it says:

    cache = PrefixCache(Geometry.for_model(config), pages, CacheKey(model=…, revision=…, layout=…, …))

    plan = cache.begin(id, tokens, replay_budget=…, turns=…)     admit: match, pin, allocate, order copies
    while the request runs:
        end = the first of cache.stops(id), or the end of what the scheduler grants
        table = cache.extend(id, end - computed)                 reserve pages; also before every decode step
        copies = cache.take_copies()                             of all requests of the batch, in any order
        … do them … ; cache.landed(copies)   or cache.failed(copies)
        … forward over tokens [computed, end) …                  KV of tokens before cache.requests[id].write_from is not
                                                                 written: others read it (those tokens are a replay)
        cache.advance(id, end - computed)                        now they can be found, and the state where it is wanted
        cache.append(id, [next token])                           decode
    cache.release(id)   or cache.abort(id)

The forward starts from S(computed) in the pages `cache.requests[id].state` and leaves S(end) there; page i of a state is
part i % pages_per_state of group i // pages_per_state. After a draft, it leaves the state of the accepted tokens, and
`advance` takes their count. "landed" may be said when the copies are queued on the device, if the forward is queued behind
them. A method that raises leaves requests as they were: the engine may try again, or abort the request.

`match` looks without pinning, for routers and admission; of a plan, `uncached` is what admission charges. `bump` changes
weights; `lose` reports broken pages. `metrics` counts ways, misses and what became of checkpoints; `check` is the
self-check for tests. Pad page tables with page 0, the canary.

Files: keys (names of prefixes), geometry (sizes), pool (pages), index (what can be found), restore (how to start), copies
(what has to be moved), ledger (what a request owns), keeper (how states are kept), retention (which are kept), cache (all
of it in step), audit (the self-check).
"""

from k3jax.serve.cache.audit import Census, census
from k3jax.serve.cache.cache import PrefixCache
from k3jax.serve.cache.copies import Copy, Kind
from k3jax.serve.cache.geometry import Geometry, Grid
from k3jax.serve.cache.index import Checkpoint, Index, Match, Miss, Reason
from k3jax.serve.cache.keys import CacheKey, Chain
from k3jax.serve.cache.ledger import Request
from k3jax.serve.cache.pool import CANARY, Pool, PoolExhausted
from k3jax.serve.cache.restore import RestorePlan, Way, plan_restore
from k3jax.serve.cache.retention import Interval, Lineage, Lru, Policy, Standing, policy

__all__ = [
    "CANARY", "CacheKey", "Census", "Chain", "Checkpoint", "Copy", "Geometry", "Grid", "Index", "Interval", "Kind", "Lineage",
    "Lru", "Match", "Miss", "Policy", "Pool", "PoolExhausted", "PrefixCache", "Reason", "Request", "RestorePlan", "Standing",
    "Way", "census", "plan_restore", "policy",
]  # fmt: skip
