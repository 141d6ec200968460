# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # MoonEP: every rank computes equally many rows
#
# Experts are spread over ranks, and a router sends tokens where it likes. Some ranks get many rows, others few, and all wait
# for the slowest. MoonEP lets ranks with few rows compute rows of other ranks' experts, on copies of their weights, so that
# every rank computes exactly as many rows as every other: no row is dropped and no shape depends on the routing.
#
# First the plan, which is integers, step by step; then experts on a mesh that follow it.

# %%
import meshes

meshes.require_devices(4)

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import PartitionSpec as P

from k3jax.parallel.experts import plan, run_experts
from k3jax.parallel.experts.planner import counts, fills, home_experts, place, split_quotas, static_rows, validate

# %% [markdown]
# ## A routing
#
# Four ranks of 32 tokens, twelve experts, three experts a token. Expert `e` lives on rank `e // 3`. The router likes the
# experts of rank 1.

# %%
R, S, k, E = 4, 32, 3, 12
H = home_experts(E, R)
liking = np.array([0.0, 0, 0, 3, 2, 1, 0, 0, 0, -1, -2, -3])
noise = np.random.default_rng(0).gumbel(size=(R, S, E))
expert_ids = np.argsort(-(liking + noise), -1)[..., :k].astype(np.int32)

table = np.stack([counts(ids, E) for ids in expert_ids])  # rows that each rank sends to each expert
load = table.sum(0).reshape(R, H).sum(1)
print("rows sent to each expert:\n", table)
share = load.sum() // R + (np.arange(R) < load.sum() % R)  # S · k for every rank, unless there is padding
print("rows of each home:", load, " fair share:", share)

# %% [markdown]
# **Change it:** `liking = np.zeros(E)` is a fair router, and still not even. `liking[4] = 50` sends every token to one expert.
#
# ## The fills
#
# Take the rank that lacks most and the rank that has most over its share, and move exactly what the first lacks. The first is
# then exact and is never touched again. After at most R − 1 such fills all are exact. Each rank is filled once, so all its
# foreign rows come from **one** home, and touch at most that home's experts: H copies of weights are always enough room.

# %%
balance = load - share
steps = [balance.copy()]
moved = np.zeros((R, R), int)  # [home, rank that takes over]
for turn in range(R - 1):
    most, least = balance.argmax(), balance.argmin()
    lacking = -balance[least]
    moved[most, least] += lacking
    balance[most] -= lacking
    balance[least] += lacking
    steps.append(balance.copy())
    print(f"fill {turn + 1}: rank {least} takes {lacking} rows of rank {most}; balance {balance}")
assert not balance.any()
assert (moved == fills(np, load - share)).all()  # what the planner does
assert ((moved > 0).sum(0) <= 1).all()  # one home a rank

# %%
figure, panels = plt.subplots(1, len(steps), figsize=(3 * len(steps), 2.6), sharey=True)
for panel, state, title in zip(panels, steps, ["before", *(f"fill {n + 1}" for n in range(R - 1))]):
    panel.bar(range(R), state + share)
    panel.axhline(share[0], color="black", linewidth=0.8)
    panel.set(title=title, xlabel="rank", xticks=range(R))
panels[0].set_ylabel("rows")
plt.show()

# %% [markdown]
# ## Which experts, which rows
#
# A home gives what it owes from its largest experts first, so that few are copied. Each rank has slots: its own experts,
# then up to H replicas.

# %%
kept, given = split_quotas(np, table.sum(0).reshape(R, H), moved)
for home, expert, rank in np.argwhere(given):
    print(f"rank {rank} computes {given[home, expert, rank]} rows of expert {home * H + expert} (home {home})")

placement = place(table)
print("\nreplica slots (−1: unused):\n", placement.replicas)
print("rows of each slot:\n", placement.group_sizes, "->", placement.group_sizes.sum(1))

# %% [markdown]
# All ranks see the same table of counts, so each makes this plan alone, and finds where its own assignments go:
# `destination` is rank · rows + row. Rows of one expert from one source lie together. Those that bring a token to a rank come
# first, so that a token which several experts of a rank want travels there once.

# %%
made = plan(expert_ids, num_experts=E)
validate(made, expert_ids, num_experts=E)
rows = static_rows(S * k, E, R, tile=1)
print("rows a rank:", made.rows_per_rank, "in buffers of", rows)
token = expert_ids[0, 0], made.destination[0, 0]
print("first token of rank 0: experts", token[0], "on ranks", token[1] // rows, "in rows", token[1] % rows)

# %% [markdown]
# ## How tight is the bound?
#
# Nearly. If the experts of one rank are idle and all others equally loaded, that rank must hold ⌈E(R−1)/R²⌉ replicas. For
# K3's 896 experts on 32 ranks that is every one of its 28 slots.

# %%
for ranks in (8, 16, 32, 64):
    home = 896 // ranks
    idle = np.zeros((ranks, 896), np.int32)
    idle[:, home:] = ranks * home
    used = (place(idle).replicas[0] >= 0).sum()
    print(f"{ranks:3} ranks: {used:3} replicas needed of {home:3} slots, by the formula {-(-896 * (ranks - 1) // ranks**2)}")

# %% [markdown]
# ## On a mesh
#
# `run_experts` follows the plan inside `shard_map`: the same sums as one device computes, and equally many rows on each rank.

# %%
L, F = 16, 24
keys = jax.random.split(jax.random.key(0), 5)
kernels = tuple(jax.random.normal(key, shape) for key, shape in zip(keys, [(E, L, F), (E, L, F), (E, F, L)]))
z, weights = jax.random.normal(keys[3], (R * S, L)), jax.nn.softmax(jax.random.normal(keys[4], (R * S, k)))
betas = 4.0, 25.0  # of SiTU
ids = jnp.asarray(expert_ids.reshape(R * S, k))


def on_each_rank(z, ids, weights, kernels):
    sums, load = run_experts(z, ids, weights, kernels, betas=betas, num_experts=E, axis_name="expert")
    return sums, load.computed[None], load.replicas[None]


mesh = meshes.MeshSpec.parse(f"expert={R}").build(jax.devices()[:R])
shard = P("expert")
sums, computed, replicas = jax.jit(jax.shard_map(on_each_rank, mesh=mesh, in_specs=shard, out_specs=shard))(
    z, ids, weights, kernels
)
alone, _ = jax.jit(lambda *a: run_experts(*a, betas=betas, num_experts=E, axis_name=None))(z, ids, weights, kernels)
np.testing.assert_allclose(sums, alone, atol=1e-3, rtol=1e-4)
print("rows of each home:    ", load)
print("rows of each rank:    ", computed, "with", replicas, "replicas")
assert (computed == share).all() and (replicas == (placement.replicas >= 0).sum(1)).all()

# %%
plt.figure(figsize=(4, 2.6))
plt.bar(np.arange(R) - 0.2, load, 0.4, label="at home")
plt.bar(np.arange(R) + 0.2, computed, 0.4, label="planned")
plt.xticks(range(R))
plt.xlabel("rank")
plt.ylabel("rows")
plt.legend()
plt.show()

# %% [markdown]
# **Change it:** set some of `expert_ids` to −1 (padding): totals need not divide, and ranks then differ by one row.
# `python -m experiments.bench moe` compares rows, drops, bytes and times with exchanges that have no plan.
