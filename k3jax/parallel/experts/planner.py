"""MoonEP's plan: which rank computes which rows, so that every rank computes equally many whatever the routing.

R ranks, S tokens of a rank, k experts of a token, E experts, H = ⌈E/R⌉ home experts of a rank, N rows in all.

Every expert has a home: rank e // H. A rank with too few rows computes rows of one other home's experts as well, on copies of
their weights (replicas). Everything follows, in integers, from how many rows each rank sends to each expert, so all ranks
make the same plan without talking. The functions take numpy or JAX arrays alike. K3 report, MoonEP.

Why it works: let a rank that has too few rows take exactly what it lacks from the rank that has most. It is done for good, so
R − 1 such fills do, and what it took came from one home: at most H experts.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax

State = TypeVar("State")


class Placement(NamedTuple):
    """Who computes how much of which expert; the same on every rank."""

    replicas: Any
    """[R, H]: foreign experts that each rank computes too, in ascending order, −1 for unused slots; [1, 0] for one rank."""
    group_sizes: Any
    """[R, 2H]: rows of each slot: home experts, then replicas."""
    offsets: Any
    """[R, 2H]: first row of each slot; slots begin at multiples of the tile."""
    slots: Any
    """[E, R]: the slot of an expert on a rank (of no meaning where the rank computes nothing of it)."""
    ends: Any
    """[E, R]: rows of an expert are numbered by source rank, then position; rank r computes those from the end of rank
    r − 1 to its own."""
    before: Any
    """[R, E]: rows of an expert that earlier source ranks send."""


class ExpertPlan(NamedTuple):
    """The plan of all ranks."""

    rows_per_rank: Any
    """[R]: N/R, rounded up on the first ranks and down on the others."""
    replicas: Any
    group_sizes: Any
    offsets: Any
    """[R, slots], as in `Placement`."""
    destination: Any
    """[R, S, k]: rank · static_rows + row on it; −1 for padding."""


class LocalPlan(NamedTuple):
    """What one rank runs of it."""

    destination: Any
    """[S, k]: of its own assignments."""
    group_sizes: Any
    replicas: Any
    """[2H] and [H] of this rank."""


def plan(expert_ids, *, num_experts: int, tile: int = 1) -> ExpertPlan:
    """The plan for all ranks, from all their assignments [R, S, k], int32, distinct experts a token, −1 for padding.

    tile: the rows of each expert begin at a multiple of it. Raises ValueError for sizes below 1. A rank of a mesh needs
    less than this: `plan_local`.
    """
    R, S, k = expert_ids.shape
    if min(R, S, k, num_experts, tile) < 1:
        raise ValueError(
            f"expert_ids {expert_ids.shape}, num_experts={num_experts}, tile={tile}: all must be at least 1"
        )
    xp = module_of(expert_ids)
    placement = place(xp.stack([counts(ids, num_experts) for ids in expert_ids]), tile=tile)
    rows = static_rows(S * k, num_experts, R, tile)
    found = xp.stack([destinations(placement, ids, r, rows=rows) for r, ids in enumerate(expert_ids)])
    sizes = placement.group_sizes
    return ExpertPlan(sizes.sum(1), placement.replicas, sizes, placement.offsets, found)


def plan_local(counts, own_ids, rank, *, tile: int = 1) -> LocalPlan:
    """What rank `rank` of the plan runs, from how many assignments each rank has to each expert, [R, E], and its own [S, k].

    Memory is linear in S·k and in R·E.
    """
    R, E = counts.shape
    placement = place(counts, tile=tile)
    return LocalPlan(
        destinations(placement, own_ids, rank, rows=static_rows(own_ids.size, E, R, tile)),
        placement.group_sizes[rank],
        placement.replicas[rank],
    )


def validate(plan: ExpertPlan, expert_ids: np.ndarray, *, num_experts: int, tile: int = 1) -> None:
    """AssertionError unless the plan (numpy) computes every assignment exactly once, evenly, within the reserved room."""
    (R, S, k), H = expert_ids.shape, home_experts(num_experts, expert_ids.shape[0])
    rows, real, home = static_rows(S * k, num_experts, R, tile), expert_ids >= 0, np.arange(R * H).reshape(R, H)
    assert plan.rows_per_rank.sum() == real.sum(), "rows are lost or made up"
    assert plan.rows_per_rank.max() - plan.rows_per_rank.min() <= 1, "ranks compute unequally many rows"
    assert (plan.offsets % tile == 0).all() and (plan.offsets + plan.group_sizes <= rows).all(), "rows leave the buffer"
    used = plan.replicas >= 0
    foreign = plan.replicas // H
    assert (used == (plan.group_sizes[:, H:] > 0)).all(), "a replica without rows, or rows without a replica"
    assert (~used | (foreign != np.arange(R)[:, None])).all(), "an expert is twice on its home"
    assert all(
        len(set(e[u])) == u.sum() and len(set(h[u])) <= 1 for e, u, h in zip(plan.replicas, used, foreign, strict=True)
    ), "replicas of a rank are not distinct experts of one home"
    assert (plan.destination[~real] == -1).all(), "padding has a row"
    rank, row = np.divmod(plan.destination[real], rows)
    assert len(np.unique(plan.destination[real])) == real.sum(), "two assignments share a row"
    slots = np.concatenate([home, plan.replicas], 1)
    slot = (slots[rank] == expert_ids[real][:, None]).argmax(1)
    assert (slots[rank, slot] == expert_ids[real]).all(), "a row goes to a rank without its expert"
    inside = row - plan.offsets[rank, slot]
    assert ((inside >= 0) & (inside < plan.group_sizes[rank, slot])).all(), "a row lies outside its expert's group"


def static_rows(assignments: int, num_experts: int, ranks: int, tile: int) -> int:
    """Rows that a rank reserves for `assignments` = S·k of each rank: enough for any routing."""
    slots = 2 * home_experts(num_experts, ranks)
    return -(-(assignments + (tile - 1) * min(slots, assignments)) // tile) * tile


def home_experts(num_experts: int, ranks: int) -> int:
    return -(-num_experts // ranks)


def counts(expert_ids, num_experts: int):
    """How many assignments [S, k] go to each expert, [E]; −1 counts nowhere."""
    xp = module_of(expert_ids)
    ids = xp.where(expert_ids < 0, num_experts, expert_ids).reshape(-1)
    length = {"length": num_experts + 1} if xp is jnp else {"minlength": num_experts + 1}
    return xp.bincount(ids, **length)[:num_experts].astype(xp.int32)


def place(table, *, tile: int = 1) -> Placement:
    """From the rows that each source rank sends to each expert, [R, E]."""
    xp = module_of(table)
    R, E = table.shape
    H = home_experts(E, R)
    load = xp.pad(table.sum(0), (0, R * H - E)).reshape(R, H)
    total = load.sum()
    capacity = total // R + (xp.arange(R) < total % R)
    kept, moved = split_quotas(xp, load, fills(xp, load.sum(1) - capacity))
    rank = xp.arange(R)
    # [home, expert of it, rank]: rows of the expert that the rank computes.
    rows = xp.where(rank[:, None, None] == rank, kept[:, :, None], moved)

    used = moved > 0
    slot = xp.where(rank[:, None, None] == rank, xp.arange(H)[:, None], H + xp.cumsum(used, 1) - 1)
    # All replicas of a rank are of one home; a column of `used` holds them in order.
    home = xp.argmax(used.any(1), 0)
    used_here = used[home, :, rank]
    order = xp.argsort(~used_here, axis=1, stable=True)
    taken = xp.take_along_axis(used_here, order, 1)
    slots = H if R > 1 else 0
    replicas = xp.where(taken, home[:, None] * H + order, -1)[:, :slots]
    replica_rows = xp.where(taken, xp.take_along_axis(moved[home, :, rank], order, 1), 0)[:, :slots]
    group_sizes = xp.concatenate([kept, replica_rows], 1)
    tiled = -(-group_sizes // tile) * tile
    whole = lambda x: x.reshape(R * H, R)[:E].astype(xp.int32)
    return Placement(
        replicas=replicas.astype(xp.int32),
        group_sizes=group_sizes.astype(xp.int32),
        offsets=(xp.cumsum(tiled, 1) - tiled).astype(xp.int32),
        slots=whole(slot),
        ends=whole(xp.cumsum(rows, 2)),
        before=(xp.cumsum(table, 0) - table).astype(xp.int32),
    )


def fills(xp: ModuleType, balance):
    """Rows [home, rank] that ranks take over, from how many rows each home has too many, [R]."""
    R = len(balance)
    ranks = xp.arange(R)

    def fill(_, state):
        balance, taken = state
        most, least = xp.argmax(balance), xp.argmin(balance)
        lacking = -balance[least]
        balance = balance - xp.where(ranks == most, lacking, 0) + xp.where(ranks == least, lacking, 0)
        return balance, taken + xp.where((ranks[:, None] == most) & (ranks == least), lacking, 0)

    nothing = 0 * (balance[:, None] + balance)  # Inside shard_map a loop's state must vary like what is added to it.
    return repeat(xp, R - 1, fill, (balance, nothing))[1]


def split_quotas(xp: ModuleType, load, quotas):
    """Which rows each home gives away: (rows it keeps of each of its experts [R, H], rows given [home, expert, rank]).

    The largest quota takes from the largest expert, again and again: few experts are copied.
    """
    (R, H), ranks, experts = load.shape, xp.arange(len(load)), xp.arange(load.shape[1])

    def give(_, state):
        load, quotas, given = state
        to, of = xp.argmax(quotas, 1), xp.argmax(load, 1)
        rows = xp.minimum(quotas.max(1), load.max(1))
        at_expert, at_rank = experts == of[:, None], ranks == to[:, None]
        given = given + xp.where(at_expert[:, :, None] & at_rank[:, None], rows[:, None, None], 0)
        return load - xp.where(at_expert, rows[:, None], 0), quotas - xp.where(at_rank, rows[:, None], 0), given

    # Each turn ends a quota or an expert.
    nothing = 0 * (load[:, :, None] + quotas[:, None])
    load, _, given = repeat(xp, R - 1 + H, give, (load, quotas, nothing))
    return load, given


def destinations(placement: Placement, expert_ids, source, *, rows: int):
    """rank · rows + row of each assignment [S, k] of rank `source`, −1 for padding; rows: `static_rows`.

    Rows of one expert from one source lie together. First come those that bring a token to the rank, then those of tokens
    that an expert in an earlier slot brings there: a token need be sent to a rank but once.
    """
    xp = module_of(expert_ids)
    ids = expert_ids.reshape(-1)
    real, expert = ids >= 0, xp.maximum(ids, 0)
    E, R = placement.ends.shape
    before = placement.before[source][expert]
    number = before + position_in_group(xp, xp.where(real, ids, E), E)
    rank = ranks_passed(xp, placement.ends, expert, number)
    slot = placement.slots[expert, rank]
    begin = xp.where(rank > 0, placement.ends[expert, xp.maximum(rank - 1, 0)], 0)

    in_token = lambda x: x.reshape(expert_ids.shape)
    brought = first_slots(xp, in_token(xp.where(real, rank, -1)), in_token(slot)).reshape(-1)
    segment = xp.where(real, expert * R + rank, E * R)
    firsts = counts(xp.where(brought, segment, -1), E * R + 1)
    position = position_in_group(xp, 2 * segment + ~brought, 2 * E * R + 2) + xp.where(brought, 0, firsts[segment])
    row = placement.offsets[rank, slot] + xp.maximum(before - begin, 0) + position
    return xp.where(real, rank * rows + row, -1).reshape(expert_ids.shape).astype(xp.int32)


def first_slots(xp: ModuleType, rank_Sk, slot_Sk):
    """Whether no other expert of the token has an earlier slot on the same rank."""
    same_rank = rank_Sk[:, :, None] == rank_Sk[:, None, :]
    return ~(same_rank & (slot_Sk[:, None, :] < slot_Sk[:, :, None])).any(-1)


def ranks_passed(xp: ModuleType, ends, expert, number):
    """How many ranks end at or before `number` in the numbering of `expert`: a binary search in its row of `ends`."""
    R = ends.shape[1]
    passed = xp.zeros_like(number)
    for step in reversed([1 << i for i in range((R - 1).bit_length())]):
        further = passed + step
        ended = (further < R) & (ends[expert, xp.minimum(further, R - 1) - 1] <= number)
        passed = xp.where(ended, further, passed)
    return passed


def position_in_group(xp: ModuleType, ids, E: int):
    """How many earlier entries are equal, for each of the ids [n] in 0..E."""
    n = len(ids)
    order = xp.argsort(ids, stable=True)
    ordered = ids[order]
    first = xp.searchsorted(ordered, xp.arange(E + 1))
    return scattered(xp, order, xp.arange(n) - first[ordered])


def scattered(xp: ModuleType, to, values):
    """`values` in the places `to`, a permutation."""
    if xp is jnp:
        return jnp.zeros_like(values).at[to].set(values, unique_indices=True)
    result = np.empty_like(values)
    result[to] = values
    return result


def repeat(xp: ModuleType, times: int, body: Callable[[Any, State], State], state: State) -> State:
    if xp is jnp:
        return lax.fori_loop(0, times, body, state)
    for i in range(times):
        state = body(i, state)
    return state


def module_of(array) -> ModuleType:
    return np if isinstance(array, np.ndarray) else jnp
