"""The exchange along the plan on GPUs: every stretch of rows is sent once, straight to where it is computed.

N local tokens, k experts a token, R expert ranks, C = N·k rows of a rank, H home experts, U slots of a rank, P parts.

A stretch: the rows that one rank has for one expert slot of another. They lie together in the sender's list of
assignments and in the other's row buffer: one update of `lax.ragged_all_to_all`, which writes them where the products read
them. A token that several experts of one rank want is sent to it once. The row buffer comes in parts, so that one part
travels while another is computed. CPU has no such collective: there `exchange.AllGather` does the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from k3jax.compat import vary_like
from k3jax.parallel.experts.exchange import Part
from k3jax.parallel.experts.planner import Placement, counts, destinations, home_experts, place


class Stretches(NamedTuple):
    """Between this rank and each other one, for each slot of the rank that computes; [R, U]."""

    here: Int[Array, "R U"]
    """Where a stretch begins on this rank, …"""
    there: Int[Array, "R U"]
    """… and on the other."""
    rows: Int[Array, "R U"]
    new: Int[Array, "R U"]
    """How many rows, from the first one, bring a token that no earlier slot brings."""


class RaggedPlan(NamedTuple):
    """What a rank has to know to send and to receive."""

    group_sizes: Int[Array, " U"]
    replicas: Int[Array, "R H"]
    """Of every rank, as in `Placement`."""
    listed: Int[Array, "N k"]
    """Each assignment's place in this rank's list; C for padding."""
    copy_of: Int[Array, "N k"]
    """The row, where it is computed, of the first assignment that brings the token there."""
    sent: Stretches
    """This rank's assignments: here in its list, there in row buffers."""
    computed: Stretches
    """This rank's rows: here in its row buffer, there in lists."""


class RaggedAllToAll(NamedTuple):
    """As `exchange.AllGather`, with messages that hold what is needed and nothing else."""

    axis: str
    num_experts: int
    parts: int = 2
    """Of the row buffer; one travels while another is computed. More of them read and sum the weights more often."""

    @property
    def size(self) -> int:
        return lax.axis_size(self.axis)

    @jax.named_scope("moe.plan")
    def plan(self, experts_Nk: Int[Array, "N k"]) -> RaggedPlan:
        """Collectives: an all-gather of counts, R·E integers, and an all-to-all of R·U."""
        C, R = experts_Nk.size, self.size
        rank = lax.axis_index(self.axis)
        table = lax.all_gather(counts(experts_Nk, self.num_experts), self.axis)
        placement = place(table)
        destination = destinations(placement, experts_Nk, rank, rows=C)
        real, expert = experts_Nk >= 0, jnp.maximum(experts_Nk, 0)
        to, row = destination // C, destination % C
        slot = placement.slots[expert, to]
        same = real[:, :, None] & real[:, None, :] & (to[:, :, None] == to[:, None, :])
        copy_of = jnp.where(same, row[:, None, :], C).min(-1)
        U = placement.group_sizes.shape[1]
        brings = jnp.where(real & (copy_of == row), to * U + slot, -1)
        new = counts(brings, R * U).reshape(R, U)
        here, there, rows = stretches(placement, table, rank, jnp.arange(R))
        sent = Stretches(here, there, rows, new)
        there, here, rows = stretches(placement, table, jnp.arange(R), rank)
        computed = Stretches(here, there, rows, lax.all_to_all(new, self.axis, 0, 0, tiled=True))
        listed = jnp.where(real, sent.here[to, slot] + row - sent.there[to, slot], C)
        return RaggedPlan(placement.group_sizes[rank], placement.replicas, listed, copy_of, sent, computed)

    def own_replicas(self, plan: RaggedPlan) -> Int[Array, " H"]:
        """Experts of this rank's replica slots, −1 for unused ones."""
        return plan.replicas[lax.axis_index(self.axis)]

    @jax.named_scope("moe.dispatch")
    def dispatch(
        self, plan: RaggedPlan, weights_Nk: Float[Array, "N k"], *tokens: Float[Array, "N D"], beside: Any = None
    ) -> list[Part]:
        """Every row's weight and tokens, in parts. All-to-alls: of 8 bytes a row, and for each part of its tokens.

        The first part's rows can be used when `beside` is there: XLA has to make it while they travel.
        """
        N, k = plan.listed.shape
        C = N * k
        in_list = lambda values, absent: absent.at[plan.listed.reshape(-1)].set(values.reshape(C, -1), mode="drop")
        labels = jnp.stack([plan.copy_of, weights_Nk.astype(jnp.float32).view(jnp.int32)], -1)
        nothing = jnp.broadcast_to(jnp.array([C, 0], jnp.int32), (C, 2))
        every = plan.sent.rows, plan.computed.rows
        labels = self._send(in_list(labels, nothing), nothing, plan.sent.here, plan.sent.there, *every)
        copy_of, weights_C = labels[:, 0], labels[:, 1:].view(jnp.float32)[:, 0]

        token_of = jnp.broadcast_to(jnp.arange(N)[:, None], (N, k))
        token_C = in_list(token_of, jnp.full((C, 1), N))[:, 0]
        list_CD = jnp.concatenate(tokens, 1).at[token_C].get(mode="fill", fill_value=0)
        ends = jnp.cumsum(plan.group_sizes)
        arrived, parts, sent = [], [], None
        for i, (begin, end) in enumerate(self._bounds(C)):
            there, rows = clipped(plan.sent.there, plan.sent.new, begin, end)
            _, expected = clipped(plan.computed.here, plan.computed.new, begin, end)
            own, here = slice(begin, end), plan.sent.here + there - plan.sent.there
            with jax.named_scope(f"moe.dispatch.part{i}"):
                if sent is not None:  # What is computed first travels first.
                    list_CD = after(list_CD, sent)
                sent = self._send(list_CD, jnp.zeros_like(list_CD[own]), here, there - begin, rows, expected)
                # Read in one operation, two parts would wait for both messages.
                arrived.append(after(sent, parts[-1].tokens if parts else beside))
                x_CD = jnp.concatenate(arrived).at[copy_of[own]].get(mode="fill", fill_value=0)
            _, sizes = clipped(ends - plan.group_sizes, plan.group_sizes, begin, end)
            split = jnp.split(x_CD, len(tokens), 1)
            parts.append(Part((begin, end), weights_C[own], tuple(split), sizes))
        return parts

    @jax.named_scope("moe.combine")
    def combine(
        self,
        plan: RaggedPlan,
        parts: Sequence[Part],
        y_CD: Sequence[Float[Array, "_ D"]],
        *numbers: Sequence[Float[Array, " _"]],
    ) -> tuple[Float[Array, "N ..."], ...]:
        """Sums over each own token's rows, [N, D], and numbers at their assignments, [N, k]; float32.

        An all-to-all for each part of the rows, and one of all numbers.
        """
        N, k = plan.listed.shape
        C = N * k
        returned = vary_like(jnp.zeros((C, y_CD[0].shape[1]), y_CD[0].dtype), y_CD[0])
        for i, (part, y) in enumerate(zip(parts, y_CD, strict=True)):
            begin, end = part.origin
            here, rows = clipped(plan.computed.here, plan.computed.rows, begin, end)
            _, expected = clipped(plan.sent.there, plan.sent.rows, begin, end)
            there = plan.computed.there + here - plan.computed.here
            with jax.named_scope(f"moe.combine.part{i}"):
                returned = self._send(y, returned, here - begin, there, rows, expected)
        at_token = lambda x: x.at[plan.listed].get(mode="fill", fill_value=0).astype(jnp.float32)
        back = [at_token(returned).sum(1)]
        for of_parts in numbers:
            x_C = jnp.concatenate(of_parts)[:, None]
            every = plan.computed.rows, plan.sent.rows
            x_C = self._send(x_C, jnp.zeros_like(x_C), plan.computed.here, plan.computed.there, *every)
            back.append(at_token(x_C)[..., 0])
        return tuple(back)

    @jax.named_scope("moe.replicas")
    def with_replicas(self, plan: RaggedPlan, *weights: Float[Array, "H ..."]) -> tuple[Float[Array, "U ..."], ...]:
        """Of each: the home experts', then those of the replica slots, sent by their homes; zeros in unused slots."""
        H, rank = plan.replicas.shape[1], lax.axis_index(self.axis)
        home = jnp.where(plan.replicas < 0, -1, plan.replicas // H)
        from_rank = (home[rank] == jnp.arange(self.size)[:, None]).astype(jnp.int32)
        slot = jnp.broadcast_to(jnp.arange(H), home.shape)
        fetch = lambda x: self._send(
            x, jnp.zeros_like(x), plan.replicas % H, slot, (home == rank).astype(jnp.int32), from_rank
        )
        return tuple(jnp.concatenate([x, fetch(x)]) for x in weights)

    @jax.named_scope("moe.to_owners")
    def to_owners(self, plan: RaggedPlan, *grads: Float[Array, "U ..."]) -> tuple[Float[Array, "H ..."], ...]:
        """Each owner's gradients and those of all its replicas.

        Replicas of one rank are of one home, so R − 1 rounds of at most one sender an owner need room for one rank's
        replicas only.
        """
        H, R, rank = plan.replicas.shape[1], self.size, lax.axis_index(self.axis)
        home = jnp.where(plan.replicas < 0, -1, plan.replicas // H)
        ranks = jnp.arange(R)[:, None]

        def add_round(distance, sums):
            to, sender = (rank + distance) % R, (rank - distance) % R
            rows = ((ranks == to) & (home[rank] == to)).astype(jnp.int32)
            expected = ((ranks == sender) & (home == rank)).astype(jnp.int32)
            here = jnp.broadcast_to(jnp.arange(H), (R, H))
            there = jnp.broadcast_to(plan.replicas[rank] % H, (R, H))
            send = lambda g: self._send(g[H:], jnp.zeros_like(g[H:]), here, there, rows, expected)
            return tuple(s + send(g) for s, g in zip(sums, grads, strict=True))

        return lax.fori_loop(1, R, add_round, tuple(g[:H] for g in grads))

    def _bounds(self, C: int) -> list[tuple[int, int]]:
        """First row and end of each part."""
        size = -(-C // self.parts)
        return [(begin, min(begin + size, C)) for begin in range(0, C, size)]

    def _send(self, operand, output, here, there, rows, expected):
        """`output` with the stretches that were sent to it: `rows` from `here` to each rank's `there`."""
        flat = lambda x: x.reshape(-1).astype(jnp.int32)
        return lax.ragged_all_to_all(
            operand, output, flat(here), flat(rows), flat(there), flat(expected), axis_name=self.axis
        )


def stretches(placement: Placement, table, source, rank):
    """Where stretches begin in the list of `source` and in the row buffer of `rank`, and their rows; [..., U].

    One of the two is an array [R], the other an integer.
    """
    (R, E), H = table.shape, home_experts(table.shape[1], len(table))
    home = jnp.arange(R)[:, None] * H + jnp.arange(H)
    expert = jnp.concatenate([home, placement.replicas], 1)[rank]
    source = jnp.reshape(source, (-1, 1))
    passed = jnp.reshape(jnp.asarray(rank) - 1, (-1, 1))
    there = (expert >= 0) & (expert < E)
    expert = jnp.where(there, expert, 0)
    begin = jnp.where(passed < 0, 0, placement.ends[expert, jnp.maximum(passed, 0)])
    before = placement.before[source, expert]
    first = jnp.maximum(begin, before)
    last = jnp.minimum(placement.ends[expert, passed + 1], before + table[source, expert])
    rows = jnp.where(there, jnp.maximum(last - first, 0), 0)
    in_list = (jnp.cumsum(table, 1) - table)[source, expert] + first - before
    return in_list, placement.offsets[rank] + first - begin, rows


def clipped(begin, rows, low: int, high: int):
    """The part of stretches [begin, begin + rows) that lies between low and high: begin, rows."""
    first, last = jnp.clip(begin, low, high), jnp.clip(begin + rows, low, high)
    return first, last - first


def after(x: Any, earlier: Any) -> Any:
    """x, for those who may begin when `earlier` is there: XLA can neither merge the two nor turn their order round."""
    return lax.optimization_barrier((x, earlier))[0]
