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
# # The first step
#
# One training step of k3jax, taken apart: the mesh, the layers on it, the schedule, twenty steps, the checkpoint they
# leave, and which parameter is on which optimizer. Everything runs on eight fake CPU devices, in about a minute. Each
# section ends with something to change.
#
# The devices come first: JAX fixes their number when it starts. On a machine with accelerators this line checks that
# there are enough of them.

# %%
import meshes

meshes.require_devices(8)

# %%
import dataclasses
import tempfile
import time
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import display

from k3jax import configs
from k3jax.optim import Group, parameter_groups
from k3jax.parallel.layout import StackLayout
from k3jax.parallel.schedules import build
from k3jax.parallel.schedules.picture import draw
from k3jax.parameters import count, parameters
from k3jax.train import step_directory
from k3jax.train.checkpoint import Checkpoints, read_arrays
from k3jax.train.config import StepConfig
from k3jax.train.plan import plan, table
from k3jax.train.run import Run
from k3jax.train.run_config import RunConfig
from k3jax.train.step import make_train_step

# %% [markdown]
# ## The mesh: who is who
#
# A mesh has four named axes. Tokens are split over `data` and `expert` (sequences) and over `context` (parts of one
# sequence); layers over `pipe`; experts over `expert`. A rank's place follows from its number by arithmetic, so this
# table needs no devices: `python -m meshes --mesh=…` prints it for any mesh.
#
# The last two columns say where gradients are summed. A dense parameter is the same on all ranks of its stage, an
# expert's only on those that also own this expert.

# %%
spec = meshes.MeshSpec.parse("data=2,pipe=2,expert=2,context=1")
virtual = 2  # chunks of layers on each stage

print("rank  data pipe expert context  chunks  expert group  dense replicas  expert replicas")
for rank in range(spec.num_devices):
    who = meshes.membership(spec, rank, virtual)
    data, pipe, expert, context = who.coordinates
    print(
        f"{rank:4}  {data:4} {pipe:4} {expert:6} {context:7}  {str(who.chunks):7} {str(who.expert_group):13} "
        f"{str(who.dense_replicas):15} {who.expert_replicas}"
    )

# %%
mesh = spec.build()
assert [device.id for device in mesh.devices.flat] == [device.id for device in jax.devices()[: spec.num_devices]]
mesh

# %% [markdown]
# **Change it:** give `context` a 2 and `data` a 1. Groups keep their sizes and get other members: to a parameter, both
# axes are only more replicas.
#
# ## The model: layers in slots
#
# Any field of a preset can be replaced. This one is smaller than `nano`, so that the notebook is quick, and has every
# part of K3: KDA and MLA layers, a dense first layer, then mixtures of experts, and residual blocks of four layers.
#
# All ranks run the same program, so all chunks have the same shape: groups of slots in the order of `pattern`. Seven
# layers `KMKMKMM` fill four groups of `KM`, and one slot stays empty (−1): it is computed and discarded. What differs
# from slot to slot is told by integer tables.

# %%
model = dataclasses.replace(
    configs.get("nano"),
    name="notebook",
    num_layers=7,
    hidden_size=32,
    num_heads=2,
    gate_rank=8,
    q_lora_rank=16,
    kv_lora_rank=16,
    dense_width=64,
    expert_width=16,
    latent_size=16,
)
total, active = count(model)
print(f"layers {model.layer_kinds}; {total:,} parameters, {active:,} of them used by a token\n")

layout = StackLayout(model, stages=spec.pipe, virtual=virtual)
for chunk in range(layout.num_chunks):
    stage, v = chunk % spec.pipe, chunk // spec.pipe
    flags = {name: values[stage, v].tolist() for name, values in layout.flag_tables.items()}
    print(f"chunk {chunk} on stage {stage}: layers {layout.layer_table[stage, v].tolist()}")
    print("   ", "  ".join(f"{name} {values}" for name, values in flags.items()))

# %% [markdown]
# **Change it:** `num_layers=8` fills every slot. `pattern="KKKM"` needs two groups for seven layers, so two of the four
# chunks are empty: `layout.num_inactive` is the price. More stages than groups are refused, with the numbers.
#
# ## The schedule: a table
#
# A pipeline schedule is an integer array `[tick, stage, (kind, chunk, microbatch, slot)]`. The executor does nothing
# but run its rows, so what is printed here is what will happen. `F2.1` is the forward of chunk 2 for microbatch 1.

# %%
schedule = build("interleaved_1f1b", stages=spec.pipe, virtual=virtual, microbatches=4)
schedule.validate()
print(schedule.gantt())
print(f"\n{schedule.num_ticks} ticks; bubble {schedule.bubble_fraction(lockstep=True):.3f} of the step;", end=" ")
print(f"at most {schedule.in_flight().tolist()} chunk activations at once on the stages")

# %% [markdown]
# Drawn to time, with a backward twice as long as a forward. Every tick ends in a permute over `pipe` and so lasts as
# long as its slowest rank; that is why a row never mixes forward and backward. White is the bubble. On the right, how
# many (chunk, microbatch) wait on each stage for their backward. `python -m experiments.plan schedule` compares tables.

# %%
draw([schedule])

# %% [markdown]
# **Change it:** four stages with eight microbatches, and no virtual stages against three: the bubble shrinks from
# 3 / 11 to 3 / 27, and a stage holds more activations.

# %%
for chunks_per_stage in (1, 3):
    larger = build("interleaved_1f1b", stages=4, virtual=chunks_per_stage, microbatches=8)
    print(f"virtual={chunks_per_stage}: bubble {larger.bubble_fraction(lockstep=True):.3f}", end=", ")
    print(f"in flight {larger.in_flight().tolist()}")
    display(draw([larger]))

# %% [markdown]
# ## Twenty steps
#
# `StepConfig` is what the compiled step depends on, `RunConfig` the run around it: data, work directory, checkpoints.
# Making a `Run` checks all of it and compiles nothing. The data is the source text of Python's own standard library,
# as bytes; the unigram entropy is the loss of the best model that looks at nothing.
#
# A work directory outlives its run, so this one is below a temporary directory that the last cell removes.

# %%
temporary = tempfile.TemporaryDirectory()
config = RunConfig(
    mesh=str(spec),
    step=StepConfig(
        model=model, virtual=virtual, global_batch=16, seq_len=64, microbatches=4, steps=20, learning_rate=0.02
    ),
    workdir=str(Path(temporary.name, "run")),
)
run = Run(config)
print(table(plan(run.train_step)))
print("data:", run.corpus.describe())

# %% [markdown]
# `load` makes the state (or restores it, with `resume=True`), `compile` compiles the one program of a step, `train`
# runs it and calls back with the metrics of each step. `k3jax.train.run.run(config)` is all of it in one call, and
# `python -m experiments.train` is that call with a command line.

# %%
run.load()
traced, compiled = run.compile()
print(f"traced in {traced:.1f} s, compiled in {compiled:.1f} s")


def show(metrics):
    if metrics["step"] % 5 == 0:
        print(f"step {metrics['step']:2}  loss {metrics['loss']:.4f}  grad norm {metrics['grad_norm']:.3f}")


begun = time.perf_counter()
result = run.train(show)
print(f"{result.step} steps in {time.perf_counter() - begun:.1f} s")
assert result.losses[-1] < result.unigram_entropy, "twenty steps are enough to beat a model that ignores its input"

# %%
figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
axes.plot([metrics["step"] for metrics in result.metrics], result.losses, marker="o", markersize=3)
axes.axhline(np.log(model.vocab_size), linestyle=":", color="grey", label="uniform over the vocabulary")
axes.axhline(result.unigram_entropy, linestyle="--", color="grey", label="unigram entropy of the data")
axes.set(xlabel="step", ylabel="loss (nats)")
axes.set_xticks(range(0, result.step + 1, 5))
axes.legend()
plt.show()
result.metrics[-1]

# %% [markdown]
# **Change it:** another mesh with the same seed, batch and microbatches gives the same first losses, to rounding. Later
# ones drift apart, because a rounding error can flip a near tie in the router. `activations="*=recompute"`, which stores
# only what recomputation starts from, changes nothing. These are the names that a policy can address;
# `"kda.*=recompute"` recomputes some of them.

# %%
print(*sorted(run.train_step.activation_names))

# %% [markdown]
# ## The checkpoint, by name
#
# A run ends with a checkpoint. It stores arrays by global layer and name, not by stage, together with the configuration
# and the position in the data. Reading it needs neither a mesh nor the model;
# `python -m experiments.inspect_checkpoint DIR` prints all of it.

# %%
directory = result.workdir / "checkpoints"
step, skipped = step_directory.latest_whole(directory)
manifest = step_directory.read_manifest(directory, step)
arrays = dict(read_arrays(directory, step, manifest))
print(f"step {step}: {len(arrays)} arrays; position in the data: {manifest['extra']['position']} sequences\n")
for name, array in arrays.items():
    if name.startswith("params/layers/2/") or name.startswith("balance/"):
        print(f"{name:42} {str(array.shape):16} {array.dtype}  norm {np.linalg.norm(array):.4f}")

# %% [markdown]
# The same checkpoint on a mesh of another shape, with one chunk instead of four. Nothing is compiled for that, and
# every bit is as it was: layer 2 is now group 1, slot 0, of the only chunk.

# %%
elsewhere = dataclasses.replace(config.step, virtual=1)
other = make_train_step(elsewhere, meshes.MeshSpec.parse("expert=4,context=2").build())
state, extra = Checkpoints(directory, other).restore(step)
moved = state.params["chunks"]["0"]["attn"]["q_proj"]
s, v, j, p = other.layout.position(2)
assert p == 0 and np.array_equal(np.asarray(moved)[s, v, j], arrays["params/layers/2/attn/q_proj"])
print("q_proj of layer 2 is at", dict(stage=s, virtual=v, group=j, slot=p), "of", moved.shape)
print("an expert's weights lie as", state.params["chunks"]["0"]["moe"]["expert_up"].sharding.spec)

# %% [markdown]
# **Change it:** continue on that mesh: `Run(dataclasses.replace(config, mesh="expert=4,context=2", resume=True,
# step=dataclasses.replace(elsewhere, steps=25)))`, then `load`, `compile` and `train`. (A longer run has another
# learning rate schedule; with the same `steps` an interrupted run repeats the losses of an unbroken one.)
#
# ## Parameter groups
#
# Muon takes matrices: a leaf with two or more dims is a stack of matrices in its last two axes, and all axes before
# them (layers, heads, experts) are independent. That is why projections are stored per head. Known names that are no
# such matrices are on AdamW. The rule is one regular expression in `k3jax/optim/groups.py`.

# %%
print(f"{'parameter':24} {'layers':>6}  {'shape in a layer':18} {'optimizer':9} decay  matrices")
for parameter in parameters(model):
    group = parameter.group
    matrices = "x".join(map(str, parameter.shape[-2:])) if group.matrix_axes else ""
    stack = parameter.shape[:-2] if group.matrix_axes else ()
    print(
        f"{parameter.name:24} {parameter.layers:6}  {str(parameter.shape):18} {group.optimizer:9} {str(group.decay):6}"
        f" {' of '.join(filter(None, ['x'.join(map(str, stack)), matrices]))}"
    )

# %% [markdown]
# **Change it:** `parameter_groups` takes groups for names, and `k3jax.optim.muon(groups=…)` what it returns; here the
# router leaves Muon.

# %%
params = other.state_shapes.params
groups = parameter_groups(params, {"moe.router": Group("adamw")})
router = [tree["chunks"]["0"]["moe"]["router"] for tree in (parameter_groups(params), groups)]
print(*router, sep="\n")

# %% [markdown]
# ## Where to change what
#
# | to change | start in |
# | --- | --- |
# | a schedule | `k3jax/parallel/schedules/build.py`: a new recipe; the executor stays |
# | a layer | `k3jax/layers/`; tag what backward needs with `checkpoint_name` |
# | where a parameter lies | its `Placement` in the layer, `k3jax/sharding.py` |
# | what is stored for backward | `k3jax/activations/policy.py` |
# | an optimizer | `k3jax/optim/`: any Optax transformation, it sees whole arrays |
#
# [docs/step.md](../docs/step.md) says how the parts fit together.

# %%
temporary.cleanup()
