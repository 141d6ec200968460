"""Policies of serving, as plain Python: what a worker computes next, whom it serves, and which worker gets a request.

Nothing here holds an array or moves a page. An engine joins these policies with a cache and a model. On a worker:

    queues, batch = ClassQueues(budgets), Batch(limits)

    when a request comes    why = limits.unfit(prompt, output)          never fits: refuse
                            refusal = queues.offer(request, kind, pool.lookup(request).cost(prompt))
    each step               waiting = (Waiting(t.request, length of t.request) for t in queues.order())
                            step = plan(batch, waiting, pool)           figures only; then, in this order:
                            release step.preempted; queues.take() step.taken times; pin the hits of step.admitted;
                            allocate for step.admitted, and a page for each of step.grown;
                            run step.prefill and step.decode; sample one token for each of step.decode and of the last chunks
                            batch = advance(batch, step); batch = without(batch, finished)
    an abort                queues.drop(request), batch = without(batch, [request]), release its pages

The cache answers as a `Pool`: `available()`, `lookup(request) -> Lookup(hit, replay, pages)`, `owned(request)`. An admitted
prefill starts at hit − replay: tokens before `hit` have their keys and values already and only carry the state forward.
The model gets chunks that end at absolute multiples of its block, at every state boundary, and at the end of the prompt;
that a chunk has one token does not make it a decode row.

Before the workers, a `Router`: `route(request, Prompt(session, tokens, names, unit))` chooses; `started(request, hit)` at
admission, `prefilled`, `finished` keep its account; `promises.observe(worker, Event(…))` follows the caches, and where it
says False the worker is asked for all its names (`promises.resync`); `health` and `leave` take workers out, `join` adds one.

`trace` makes sessions to serve, `fleet` serves them in simulated time with these same policies (`worker`: the loop above).
"""

from k3jax.serve.schedule.batch import (
    Admission,
    Batch,
    Chunk,
    Limits,
    Lookup,
    Pool,
    Row,
    Step,
    Waiting,
    advance,
    chunk_end,
    plan,
    without,
)
from k3jax.serve.schedule.budgets import ClassBudget, ClassQueues, Refusal, Ticket
from k3jax.serve.schedule.promises import Event, Promises
from k3jax.serve.schedule.ring import Ring
from k3jax.serve.schedule.router import Choice, Load, Prompt, Router
from k3jax.serve.schedule.trace import Trace, TraceSpec, generate

__all__ = [
    "Admission", "Batch", "Choice", "Chunk", "ClassBudget", "ClassQueues", "Event", "Limits", "Load", "Lookup", "Pool",
    "Promises", "Prompt", "Refusal", "Ring", "Router", "Row", "Step", "Ticket", "Trace", "TraceSpec", "Waiting",
    "advance", "chunk_end", "generate", "plan", "without",
]  # fmt: skip
