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
# # Muon: whole matrices, one by one
#
# Muon replaces the momentum of a matrix by the nearest matrix with equal singular values, so that every direction learns at the
# same pace. That needs whole matrices, and knowing which of a leaf's axes form them. This notebook looks at the singular values,
# at heads as matrices of their own, at the size of updates, and at QK-clip, which caps attention logits in the weights.

# %%
import dataclasses

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from k3jax.optim import Group, group_table, muon, newton_schulz_flops, orthogonalize, parameter_groups, qk_clip
from k3jax.parallel.matrices import work
from k3jax.train.config import StepConfig
from k3jax.train.devices import abstract_mesh
from k3jax.train.plan import ownership_table
from k3jax.train.step import TrainStep
from meshes import MeshSpec

normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
singular = lambda x: np.linalg.svd(np.asarray(x), compute_uv=False)

# %% [markdown]
# ## Singular values before and after
#
# A gradient is mostly of low rank: a few directions are large, most are small. Five Newton–Schulz steps, each of three products
# of matrices, bring all of them near one. The iteration does not converge to one: its coefficients trade exactness for a steep
# start, and what begins above 1/500 of the norm ends between 0.68 and 1.20. What begins below has not arrived yet.

# %%
rows, columns = 96, 160
gradient = normal(0, rows, 12) @ normal(1, 12, columns) + 0.3 * normal(2, rows, columns)
before = singular(gradient)
figure, panels = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
panels[0].semilogy(before / np.linalg.norm(before), label="gradient / its norm")
for steps in (1, 3, 5):
    panels[0].semilogy(singular(orthogonalize(gradient, steps)), label=f"after {steps} step{'s' * (steps > 1)}")
panels[0].set(xlabel="singular value, by size", title="one matrix", ylim=(1e-4, 2))
panels[0].legend()
start = np.logspace(-4, 0, 400)
after = start
for _ in range(5):
    after = 3.4445 * after - 4.7750 * after**3 + 2.0315 * after**5
panels[1].semilogx(start, after)
panels[1].axhspan(0.68, 1.20, alpha=0.2)
panels[1].set(xlabel="before", ylabel="after five steps", title="what becomes of one value")
plt.show()
after = singular(orthogonalize(gradient))
print(f"before: largest / smallest = {before[0] / before[-1]:.0f}; after: {after.max():.2f} … {after.min():.2f}")

# %% [markdown]
# The scale of a gradient does not matter, however small or large: only its direction does. An expert that is rarely chosen
# learns as fast as others when it is.

# %%
for scale in (1e-20, 1e20):
    print(f"{scale:.0e}: differs by {float(jnp.abs(orthogonalize(gradient * scale) - orthogonalize(gradient)).max()):.1e}")

# %% [markdown]
# ## Which axes are a matrix
#
# A leaf with two or more dims is a stack of matrices in its last two axes; what stands in front, layers, heads, experts, is a
# batch. So Q, K and V are stored per head, [heads, in, out], and each head's block is orthogonalised alone: a head with small
# gradients is not drowned by others. Names that are known not to be such matrices are on AdamW.

# %%
params = {
    "attn": {"q_proj": jnp.zeros((4, 64, 16)), "out_proj": jnp.zeros((64, 64)), "norm": jnp.zeros(64)},
    "moe": {"expert_up": jnp.zeros((8, 64, 32)), "router": jnp.zeros((64, 8))},
    "embed": {"table": jnp.zeros((320, 64))},
}
print(group_table(params))

# %% [markdown]
# Four heads, the second with gradients a thousand times smaller. Per head all learn alike. As one matrix of 64 × 64 the second
# head gets next to nothing.

# %%
heads = normal(3, 4, 64, 16) * jnp.array([1, 1e-3, 1, 1])[:, None, None]
as_one = orthogonalize(heads.transpose(1, 0, 2).reshape(64, 64)).reshape(64, 4, 16).transpose(1, 0, 2)
norms = lambda x: ", ".join(f"{norm:.2f}" for norm in np.linalg.norm(x, axis=(1, 2)))
print("per head ", norms(orthogonalize(heads)))
print("as one   ", norms(as_one))

# %% [markdown]
# **Change it:** give groups by name, here the router to AdamW, and hand them to `muon(groups=…)`. A pattern that decides
# nothing is refused.

# %%
groups = parameter_groups(params, {"moe.router": Group("adamw")})
print(group_table(params, groups).splitlines()[-1])
try:
    parameter_groups(params, {"moe.ruoter": Group("adamw")})
except ValueError as error:
    print(str(error)[:60], "…")

# %% [markdown]
# ## The size of an update
#
# An orthogonal m × n matrix has elements of size 1/√max(m, n). Times 0.2·√max(m, n) they are about 0.2, whatever the shape,
# as those of AdamW are in training (on pure noise, as here, AdamW's are larger): one learning rate and one weight decay serve
# both. Five steps leave singular values a bit below one, so it is rather 0.17.

# %%
optimizer = muon(1.0)
shapes = {"wide": (32, 256), "tall": (256, 32), "square": (64, 64), "heads": (4, 64, 16), "embed": (64, 32)}
gradients = {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
state = optimizer.init(gradients)
step = jax.jit(optimizer.update)
for seed in range(8):
    gradients = {name: normal(10 * seed + i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    updates, state = step(gradients, state, gradients)
for name, update in updates.items():
    where = "adamw" if name == "embed" else "muon"
    print(f"{name:7} {str(update.shape):12} {where:6} root mean square {float(jnp.sqrt((update**2).mean())):.3f}")

# %% [markdown]
# The price: products of matrices. Of the shapes above, and of one of K3's query heads and one of its experts.

# %%
for name, rows, columns in (("square", 64, 64), ("a head of K3", 7168, 128), ("an expert of K3", 3584, 3072)):
    flops = newton_schulz_flops(rows, columns)
    print(f"{name:16} {rows:5} x {columns:4}: {flops:.2e} operations, {flops / (rows * columns):,.0f} for a parameter")

# %% [markdown]
# ## Who computes: owners
#
# With `--zero=1` the elements of every matrix are shared out over its replicas. To orthogonalise it, one of them fetches the
# slices that it lacks and sends back what others own. Of which matrices that is who, `experiments.train --dry-run` prints; here
# for a small model on eight ranks, four of which hold the same experts.

# %%
step = TrainStep(StepConfig(zero=1), abstract_mesh(MeshSpec.parse("data=4,expert=2")))
print(ownership_table(step))

# %% [markdown]
# The work of each rank, min(m, n)² · max(m, n) summed over its matrices. Shapes of fewer matrices than owners begin with
# different ranks; if all began with the first, it would have the most.

# %%
deals = list(step.masters.deals.values())
in_order = [dataclasses.replace(deal, first=0) for deal in deals]
for name, each in (("spread", deals), ("all from the first rank on", in_order)):
    load = work(each).ravel()
    print(f"{name:27} {' '.join(f'{x / load.mean():5.2f}' for x in load)}  of the mean")

# %% [markdown]
# ## QK-clip
#
# Logits grow with the product of query and key weights, and Muon moves all directions of both. QK-clip looks at the largest
# logit S of each head in the batch. Where it exceeds the threshold τ, the head's weights are scaled after the step: queries and
# keys each by √(τ/S). Where keys are shared by all heads, the query takes all of it, τ/S. Other heads keep their bits.

# %%
H, D, K, T = 4, 32, 8, 24
x = normal(0, T, D)
head_gains = jnp.array([1.0, 1.5, 2.0, 4.0])[:, None, None]
attention = {"q": 0.5 * head_gains * normal(1, H, D, K), "k": 0.5 * normal(2, H, D, K), "v": normal(3, H, D, K)}
causal = jnp.tril(jnp.ones((T, T), bool))


@jax.jit
def largest_logits(weights):
    q, k = (jnp.einsum("td,hdk->htk", x, weights[name]) for name in "qk")
    return jnp.where(causal, jnp.einsum("htk,hsk->hts", q, k) * K**-0.5, -jnp.inf).max((1, 2))


# %% [markdown]
# The threshold is an argument of the transformation, the logits of its update. `powers` says how each weight takes part; for
# this repository's attention it is `k3jax.layers.mla.qk_powers(config)`. For training stand gradients that let weights grow.

# %%
def train(optimizer, weights, clip, steps=60):
    state, seen = optimizer.init(weights), []
    update = jax.jit(optimizer.update)
    for seed in range(steps):
        logits = largest_logits(weights)
        seen.append(logits)
        grads = jax.tree.map(lambda w, n: -w + n, weights, {name: normal(seed, H, D, K) for name in weights})
        given = {"max_logits": logits} if clip else {}
        updates, state = update(grads, state, weights, **given)
        weights = optax.apply_updates(weights, updates)
    return np.stack(seen)


TAU = 30.0
free = train(muon(0.05), attention, clip=False)
capped = train(optax.chain(muon(0.05), qk_clip(TAU, powers={"q": 0.5, "k": 0.5})), attention, clip=True)
figure, panels = plt.subplots(1, 2, figsize=(10, 3), sharey=True, layout="constrained")
for panel, logits, title in zip(panels, (free, capped), ("without", "with QK-clip"), strict=True):
    panel.semilogy(logits, label=[f"head {h}" for h in range(H)])
    panel.axhline(TAU, color="black", linestyle=":")
    panel.set(xlabel="step", title=title)
panels[0].set_ylabel("largest logit")
panels[0].legend()
plt.show()
listed = lambda logits: ", ".join(f"{logit:.2f}" for logit in np.asarray(logits))
print("without:", listed(free[-1]), "\nwith:   ", listed(capped[-1]))

# %% [markdown]
# The cap is exact for the weights that the logits were measured with; the step that is taken at the same time comes on top, so
# the lines lie a little above the threshold. With a step of zero the cap is seen alone.

# %%
only_clip = optax.chain(muon(0.0), qk_clip(TAU, powers={"q": 0.5, "k": 0.5}))
measured = largest_logits(attention)
updates, _ = only_clip.update(attention, only_clip.init(attention), attention, max_logits=measured)
clipped = optax.apply_updates(attention, updates)
print("before:", listed(measured), "\nafter: ", listed(largest_logits(clipped)))
same = [bool((clipped["q"][h] == attention["q"][h]).all()) for h in range(H)]
print("same bits:", same)
assert same == (measured <= TAU).tolist() and largest_logits(clipped).max() <= TAU * (1 + 1e-3)
