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
# # Schedules and memory: tables, and where activations wait
#
# A pipeline schedule is a table: which operation each stage runs in each tick. The same table says how long a step takes and
# how much every stage holds at every moment. So time and memory can be read off, drawn and changed without any device. This
# notebook draws every schedule beside its memory, then moves activations elsewhere and draws again.

# %%
from k3jax.activations.hosting import host
from k3jax.activations.parking import park
from k3jax.activations.planner import Activation, Planner
from k3jax.activations.residency import by_tick, resident
from k3jax.parallel.schedules import BACKWARD, FORWARD, NAMES, RECIPES, best, build, candidates
from k3jax.parallel.schedules.picture import draw

# %% [markdown]
# ## Every table, and what it holds
#
# Four stages, eight microbatches. A backward takes twice as long as a forward; where weight gradients are operations of their
# own (green) they take half of it. White is the bubble. On the right is how many chunk activations a stage holds, from a forward
# until the last operation that needs them.
#
# GPipe holds everything. 1F1B bounds it. Interleaving cuts the bubble by the number of chunks on a stage and holds a little
# more. `zb1p` and `zbv` fill the bubble with weight gradients.

# %%
STAGES, MICROBATCHES = 4, 8
virtual = lambda name: RECIPES[name].virtual or (2 if name == "interleaved_1f1b" else 1)
tables = [build(name, stages=STAGES, virtual=virtual(name), microbatches=MICROBATCHES) for name in NAMES]
draw(tables)

# %%
for table in tables:
    free, locked = table.bubble_fraction(), table.bubble_fraction(lockstep=True)
    print(
        f"{table.name:18} bubble {locked:.3f} in lock-step, {free:.3f} free-running; "
        f"in flight {table.in_flight().tolist()} of {table.virtual} a stage"
    )

# %% [markdown]
# `plain_1f1b` is the table of the textbooks: it holds the least, and in lock-step it costs the most, because a row with a
# forward and a backward lasts as long as the backward. Ranks that run freely would not pay that: both figures are printed.
#
# The table itself is readable. F2.3 is the forward of chunk 2 for microbatch 3.

# %%
print(build("zbv", stages=3, virtual=2, microbatches=3).gantt())

# %% [markdown]
# ## The fastest that fits
#
# Memory decides. `best` asks the fastest first whether it fits.

# %%
for room in (4, 8, 16):
    fits = lambda table, room=room: table.in_flight().max() <= room
    chosen = best(candidates(STAGES, 1, MICROBATCHES), fits)
    print(f"room for {room:2} contents: {chosen.name}, bubble {chosen.bubble_fraction(lockstep=True):.3f}")

# %% [markdown]
# ## Early stages hold more: parking
#
# Under interleaved 1F1B the first stage holds most, the last one least. Stage r is paired with stage P − 1 − r, and parks there
# what it needs last. Both pairs then hold the same, and one buffer for what is on its way.

# %%
schedule = build("interleaved_1f1b", stages=4, virtual=2, microbatches=16)
plan = park(schedule, FORWARD, BACKWARD)
print("alone ", schedule.in_flight().tolist())
print("parked", plan.resident.max(axis=0).tolist(), f"and a buffer; {len(plan.moves)} moves")
for move in plan.moves[:4]:
    chunk, m = move.key
    print(f"tick {move.tick:2}: stage {move.pair[0]} sends chunk {chunk}, microbatch {m} to stage {move.pair[1]}")

# %%
span = FORWARD, BACKWARD
where = ("keep", "remote-offload", "local-offload")
draw([schedule] * 3, held=[by_tick(resident(schedule, *span, storage).device) for storage in where])

# %% [markdown]
# From above: kept, parked on other ranks, in host memory. What a host holds leaves two or three contents on the device: what is
# read in the next tick never leaves.

# %%
hosting = host(schedule, FORWARD, BACKWARD)
print(f"{hosting.num_slots} slots on the device, {hosting.num_host_slots} on the host")

# %% [markdown]
# ## A budget decides name by name
#
# Activations have names, and each name its price: some are large and cheap to compute again, others small and dear. The planner
# takes bytes, seconds and a budget, and solves a small integer program. Below: a large element-wise output, an attention output,
# and what was dispatched to experts.

# %%
MB = 10**6
names = [
    Activation("ffn.act", 64 * MB, 33 * MB, recompute=20e-6, codec=40e-6),
    Activation("attn.out", 16 * MB, 9 * MB, recompute=900e-6, codec=10e-6),
    Activation("moe.dispatch_in", 32 * MB, 17 * MB, recompute=1500e-6, codec=20e-6),
]
planner = Planner(schedule, names, host_bandwidth=50e9, remote_bandwidth=100e9)
everything = schedule.num_slots * sum(a.bytes for a in names)
for share in (1.0, 0.6, 0.3, 0.1):
    found = planner.plan(int(share * everything))
    print(f"{share:4.0%} of keeping all: {found.activations}")

# %% [markdown]
# `python -m experiments.plan activations` does this for a real model and mesh: it traces the step, finds every stored leaf and
# its bytes, and prints the text that `--activations` takes.
