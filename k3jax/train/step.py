"""The training step: gradients in one `shard_map` over (data, pipe, expert, context), then the optimizer.

Where weights and optimizer state lie, and how the optimizer works on them, is in `k3jax.train.masters`.

M microbatches, B local sequences of a microbatch, T local tokens. For S, V, J, P see `k3jax.parallel.layout`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax import model as lm
from k3jax.activations.leaves import tagged_names
from k3jax.activations.policy import RECOMPUTE
from k3jax.activations.stores import Traffic
from k3jax.configs import ModelConfig
from k3jax.layers.common import Axes
from k3jax.model import Batch
from k3jax.optim.groups import path_name
from k3jax.parallel import boxes, pipeline
from k3jax.parallel.experts import LoadMetrics, best_exchange, load_metrics
from k3jax.parallel.layout import StackLayout
from k3jax.parallel.pullback import HELD, STREAM, Pullback
from k3jax.parallel.routing import balanced_bias
from k3jax.parallel.schedules import WEIGHT, forward_only
from k3jax.train.config import StepConfig
from k3jax.train.devices import compiler_options, shape_of
from k3jax.train.masters import Masters, make_optimizer
from meshes import AXES

TOKENS = P(None, ("data", "expert"), "context")
STACKED = P("pipe")


class TrainState(NamedTuple):
    """All that a step changes."""

    step: jax.Array
    """Steps taken, skipped ones included."""
    params: Any
    """Weights to compute with: float32, and the master weights where there are no others; else in the compute dtype."""
    master: Any
    """Master weights, float32, each element on its owner alone; None where nothing is sharded over replicas."""
    opt_state: Any
    """Of the same elements as the master weights."""
    balance: Any
    """Quantile balancing's bias of every slot."""
    skipped: jax.Array
    """Steps whose update was dropped because of a non-finite loss or gradient."""


class Gradients(NamedTuple):
    """What the shard_map returns: everything summed over the batch."""

    loss: jax.Array
    """Mean cross entropy over the batch's targets, nats."""
    grads: Any
    """float32, like the master weights."""
    histograms: Any
    """Quantile balancing's counts of every slot, {p: [S, V, J, E, N]}."""
    max_logits: Any
    """Largest scaled attention logit of every head of MLA slots, {p: [S, V, J, H]}; −inf in inactive slots."""
    tokens: jax.Array
    """Real tokens of the batch."""
    experts: LoadMetrics
    misplaced: jax.Array
    """Operations that found something of another microbatch in their slot: never, unless a table is wrong."""
    traffic: Traffic
    """Bytes of activations that all ranks put away in the step, by place."""


def make_train_step(config: StepConfig, mesh: Mesh | AbstractMesh) -> TrainStep:
    """The step on this mesh; ValueError if configuration and mesh do not fit. Nothing is compiled yet.

    An abstract mesh is enough for shapes, shardings and tracing.
    """
    return TrainStep(config, mesh)


class TrainStep:
    """`init`, `step`, `evaluate` and `gradients` for one configuration on one mesh."""

    def __init__(
        self, config: StepConfig, mesh: Mesh | AbstractMesh, platform: str | None = None, memory: int | None = None
    ):
        """platform, memory: of the devices that the mesh stands for, where there are none to ask; bytes of one device.

        Not given, JAX's platform here, and memory without end.
        """
        self.config, self.mesh = config, mesh
        self.resolved = config.resolve(shape_of(mesh))
        self.why_schedule = "asked for"
        """Why the step has the schedule that it has."""
        if config.schedule == "auto":
            from k3jax.train.choice import choose  # which traces steps itself

            schedule, self.why_schedule = choose(config, mesh, platform, memory)
            self.resolved = config.resolve(shape_of(mesh), schedule)
        self.layout = self.resolved.layout
        here: str = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else jax.default_backend()
        self.platform = platform or here
        self.jit = functools.partial(jax.jit, compiler_options=compiler_options(self.platform))
        self.axes = Axes("pipe", "expert", "context", exchange=best_exchange(self.platform))
        self.learning_rate = learning_rate_schedule(config)
        shapes = lm.init_shapes(config.model, self.layout)
        self.masters = Masters(config, mesh, shapes)
        self.specs = self.masters.param_specs
        self.optimizer = make_optimizer(config, self.learning_rate, self.masters)
        self.state_shapes = jax.eval_shape(self._state_of, shapes)
        self.state_shardings = self._shardings(self.state_shapes)
        self.param_names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(self.specs)]
        self.activation_names = activation_names(config.model)
        held = {HELD} if WEIGHT in self.resolved.schedule.kinds else set()
        self.resolved.policy.check(self.activation_names | {STREAM} | held)
        self._pullbacks: dict[bool, Pullback] = {}  # tracing a chunk takes most of the time of a plan

    def changed(self, **changes: Any) -> TrainStep:
        """The step of a changed configuration, for plans: a chunk that is the same is not traced again."""
        other = TrainStep(dataclasses.replace(self.config, **changes), self.mesh, self.platform)
        if other._of_chunk == self._of_chunk:
            other._pullbacks = self._pullbacks
        return other

    @property
    def _of_chunk(self) -> tuple:
        """What the program of a chunk depends on, on this mesh."""
        c, policy = self.config, self.resolved.policy
        recomputed = frozenset(name for name in self.activation_names if policy.of(name) == RECOMPUTE)
        return self.layout, recomputed, c.dtype, c.microbatches, c.global_batch, c.seq_len

    # ---- public -------------------------------------------------------------------------------------------------------

    def init(self) -> TrainState:
        """The state before the first step, placed on the mesh."""
        return jax.jit(self._init, out_shardings=self.state_shardings)()

    def init_params(self) -> Any:
        """The initial master weights, whole, float32; traced or under `jax.eval_shape`."""
        return lm.init(self.config.model, self.layout, self.config.seed)

    @functools.cached_property
    def step(self):
        """(state, batch) -> (state, metrics), compiled on first use; the state given is consumed."""
        everywhere = NamedSharding(self.mesh, P())  # every process reads the metrics
        return self.jit(self._step, donate_argnums=0, out_shardings=(self.state_shardings, everywhere))

    @functools.cached_property
    def evaluate(self):
        """(state, batch) -> (sum of losses, targets): a forward-only schedule that changes nothing."""
        return self.jit(self._evaluate)

    @functools.cached_property
    def gradients(self):
        """(params, balance, batch) -> Gradients, before clipping and optimizer; like the parameters, whoever owns them."""

        def whole(*operands):
            out = self._gradients(*operands)
            return out._replace(grads=self.masters.gather(out.grads))

        return self.jit(whole)

    def with_params(self, state: TrainState) -> TrainState:
        """The state with the weights that its master weights come to, whatever it has for `params`."""
        return state._replace(params=self._params_of(state.master)) if self.masters.owners else state

    @functools.cached_property
    def _params_of(self):
        return jax.jit(self.masters.params, out_shardings=self.state_shardings.params)

    @functools.cached_property
    def own_rows(self) -> np.ndarray:
        """Which sequences of a batch the devices of this process need, ascending; of every microbatch the same ones."""
        c = self.config
        rows = np.arange(c.global_batch).reshape(c.microbatches, -1)
        return rows[:, self._own_sequences].ravel()

    @functools.cached_property
    def _own_sequences(self) -> np.ndarray:
        """The same within a microbatch."""
        B = self.config.global_batch // self.config.microbatches
        indices: Any = NamedSharding(self.mesh, TOKENS).addressable_devices_indices_map(
            (self.config.microbatches, B, self.config.seq_len)
        )
        return np.unique([i for _, at, _ in indices.values() for i in range(*at.indices(B))])

    def place(self, batch: Batch) -> Batch:
        """A host batch as [M, global_batch / M, seq_len] arrays on the mesh; each process gives its `own_rows`, [R, seq_len]."""
        M, T = self.config.microbatches, self.config.seq_len
        shape, own = (M, self.config.global_batch // M, T), self._own_sequences

        def placed(rows):
            rows = np.asarray(rows).reshape(M, len(own), T)

            def part(index):
                microbatch, at, tokens = index
                start, stop, _ = at.indices(shape[1])
                return rows[microbatch, np.searchsorted(own, start) : np.searchsorted(own, stop), tokens]

            return jax.make_array_from_callback(shape, NamedSharding(self.mesh, TOKENS), part)

        return Batch(*map(placed, batch))

    def operands(self) -> tuple[TrainState, Batch]:
        """What `step` is called with, as shapes; with shardings on a mesh of devices."""
        c = self.config
        tokens = jax.ShapeDtypeStruct((c.microbatches, c.global_batch // c.microbatches, c.seq_len), jnp.int32)
        if isinstance(self.mesh, AbstractMesh):
            return self.state_shapes, Batch._make([tokens] * 3)
        placed = lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
        tokens = placed(tokens, NamedSharding(self.mesh, TOKENS))
        return jax.tree.map(placed, self.state_shapes, self.state_shardings), Batch._make([tokens] * 3)

    def on_one_rank(self, function: Callable[[pipeline.Program, Any], Any]) -> Any:
        """function(program, params) as one rank would run it, traced, also on an abstract mesh; nothing is compiled.

        Its result must hold no arrays but their shapes.
        """
        found = []

        def local(*operands):
            found.append(function(*self._program(*operands)))
            return jnp.zeros(())

        state, batch = self.operands()
        jax.eval_shape(self._sharded(local, P()), state.params, state.balance, self._flags(), batch)
        return found[0]

    # ---- what is compiled ---------------------------------------------------------------------------------------------

    def _init(self) -> TrainState:
        return self._state_of(self.init_params())

    def _state_of(self, params: Any) -> TrainState:
        """The state before the first step, of whole parameters."""
        masters = self.masters.own(params)
        balance = lm.init_balance(self.config.model, self.layout)
        zero = lambda: jnp.zeros((), jnp.int32)
        return self._state(zero(), masters, self.optimizer.init(masters), balance, zero())

    def _state(self, step, masters, opt_state, balance, skipped) -> TrainState:
        """With the weights that master weights come to."""
        master = masters if self.masters.owners else None
        return TrainState(step, self.masters.params(masters), master, opt_state, balance, skipped)

    def _step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        with jax.named_scope("gradients"):
            out = self._gradients(state.params, state.balance, batch)
        return jax.named_scope("optimizer")(self._updated)(state, out)

    def _updated(self, state: TrainState, out: Gradients) -> tuple[TrainState, dict[str, Any]]:
        norm = global_norm(out.grads)
        clipped = clip_by_norm(out.grads, norm, self.config.clip_norm)
        masters = state.master if self.masters.owners else state.params
        lie = jax.tree.map(lambda s: s.spec, self.state_shardings.opt_state)
        updates, opt_state = self.masters.update(self.optimizer, clipped, state.opt_state, lie, masters, out.max_logits)
        new_bias = functools.partial(balanced_bias, k=self.config.model.experts_per_token)
        balance = {
            "chunks": {
                p: jax.vmap(jax.vmap(jax.vmap(new_bias)))(counts, state.balance["chunks"][p])
                for p, counts in out.histograms.items()
            }
        }
        right = out.misplaced == 0
        # From finite gradients follow finite updates; to look at these too would make every owner wait for all others.
        finite = jnp.isfinite(out.loss) & jnp.isfinite(norm)
        keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite & right, a, b), new, old)
        new_state = self._state(
            state.step + 1,
            keep(optax.apply_updates(masters, updates), masters),
            keep(opt_state, state.opt_state),
            keep(balance, state.balance),
            state.skipped + jnp.where(finite & right, 0, 1),
        )
        metrics = dict(
            loss=out.loss,
            grad_norm=norm,
            learning_rate=self.learning_rate(optimizer_count(state)),
            qk_clipped=sum((top > self.config.qk_clip).sum() for top in out.max_logits.values()),
            max_logit=functools.reduce(jnp.maximum, map(jnp.max, out.max_logits.values()), -jnp.inf),
            tokens=out.tokens,
            **{f"moe_{name}": value for name, value in out.experts._asdict().items()},
            finite=finite,
            misplaced=out.misplaced,
            **{f"activations_{place}_bytes": size for place, size in out.traffic._asdict().items()},
            grad_finite=jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(out.grads)]),
        )
        return new_state, metrics

    def _gradients(self, params: Any, balance: Any, batch: Batch) -> Gradients:
        specs = Gradients._make([P(), self.masters.specs, STACKED, STACKED, P(), P(), P(), P()])
        local = functools.partial(self._local_gradients, schedule=self.resolved.schedule)
        return self._sharded(local, specs)(params, balance, self._flags(), batch)

    def _evaluate(self, state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array]:
        forward = forward_only(self.resolved.schedule)

        def local(params, balance, flags, batch):
            one = jnp.ones(())
            outcome = pipeline.run(forward, *self._program(params, balance, flags, batch), one)
            targets = (batch.targets >= 0).sum()
            return lax.psum(outcome.loss, pipeline.REPLICAS), lax.psum(targets, pipeline.REPLICAS)

        return self._sharded(local, (P(), P()))(state.params, state.balance, self._flags(), batch)

    def _sharded(self, function, out_specs):
        in_specs = (self.specs, {"chunks": STACKED}, STACKED, Batch._make([TOKENS] * 3))
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)

    def _flags(self) -> dict[str, jax.Array]:
        return {name: jnp.asarray(table) for name, table in self.layout.flag_tables.items()}

    # ---- on one rank --------------------------------------------------------------------------------------------------

    def _local_gradients(self, params, balance, flags, batch: Batch, *, schedule) -> Gradients:
        total = lax.psum((batch.targets >= 0).sum(), pipeline.REPLICAS)
        cotangent = 1.0 / jnp.maximum(total, 1)
        program, params = self._program(params, balance, flags, batch)
        outcome = pipeline.run(
            schedule, program, params, cotangent, self.resolved.policy, self.masters.local_chunk_owners
        )
        grads = outcome.grads | {"chunks": jax.tree.map(lambda a: a[None], outcome.grads["chunks"])}
        with jax.named_scope("reduce"):
            grads = self.masters.reduce_local(grads)
        stats, max_logits = outcome.report
        loads = jax.tree.map(lambda *layers: jnp.stack(layers), *(layer.load for layer in stats.values()))
        tokens = lax.psum((batch.tokens >= 0).sum(), pipeline.REPLICAS)
        return Gradients(
            lax.psum(outcome.loss, pipeline.REPLICAS) * cotangent,
            grads,
            {p: lax.psum(layer.histogram_EN, pipeline.REPLICAS)[None] for p, layer in stats.items()},
            jax.tree.map(lambda top: lax.pmax(top, pipeline.REPLICAS)[None], max_logits),
            tokens,
            load_metrics(loads),
            outcome.misplaced,
            jax.tree.map(lambda n: lax.psum(n, AXES), outcome.traffic),
        )

    def _program(self, params, balance, flags, batch: Batch) -> tuple[pipeline.Program, Any]:
        """The model as the executor's program, over this rank's parameters in the compute dtype."""
        config, dtype = self.config.model, jnp.dtype(self.config.dtype)
        params = self.masters.cast(params)
        mine = lambda tree: jax.tree.map(lambda a: a[0], tree)
        params = params | {"chunks": mine(params["chunks"])}
        balance, flags = mine(balance["chunks"]), mine(flags)
        checkpoint = functools.partial(self.resolved.policy.checkpoint, names=self.activation_names)
        microbatch = lambda m: boxes.take(batch, m)

        def embed(params, m):
            tokens = microbatch(m).tokens
            return lm.embed(params, tokens, num_blocks=config.num_blocks, axes=self.axes, dtype=dtype).prefix

        def whole(stream):
            return lm.Stream(*stream) if config.num_blocks else lm.Stream(stream, None)

        def chunk(weights, stream, extras):
            bias, slot_flags, tokens = extras
            stream, report = lm.chunk(
                config,
                self.layout,
                weights,
                whole(stream),
                bias,
                slot_flags,
                tokens,
                axes=self.axes,
                checkpoint=checkpoint,
            )
            return (tuple(stream) if config.num_blocks else stream.prefix), report

        def extras(v, m):
            return boxes.take((balance, flags), v) + (microbatch(m),)

        def head(params, stream, m, is_last):
            return lm.head_loss(config, params, whole(stream), microbatch(m), axes=self.axes, is_last=is_last)

        return pipeline.Program(embed, chunk, extras, head, self.layout.blocks_begun, self._pullbacks), params

    def _shardings(self, state: TrainState) -> TrainState:
        """Shardings of a state: optimizer leaves lie like the master weight whose path theirs ends with."""
        by_path = lambda tree: {
            tuple(path): spec
            for path, spec in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, P))
        }
        specs = by_path(self.masters.specs)

        def spec_of(path, leaf):
            tails = (specs.get(tuple(path[i:])) for i in range(len(path)))
            return next((spec for spec in tails if spec is not None), P())

        shardings = jax.tree_util.tree_map_with_path(lambda p, a: NamedSharding(self.mesh, spec_of(p, a)), state)
        stacked = jax.tree.map(lambda _: NamedSharding(self.mesh, STACKED), state.balance)
        params = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs)
        return shardings._replace(params=params, balance=stacked)


@functools.lru_cache
def activation_names(model: ModelConfig) -> frozenset[str]:
    """Names that the model's chunks tag, whatever the mesh."""
    layout = StackLayout(model)
    only = lambda tree: jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[2:], a.dtype), tree)
    params = lm.init_shapes(model, layout)
    balance = jax.eval_shape(lambda: lm.init_balance(model, layout))
    flags = {name: jax.ShapeDtypeStruct(table.shape[2:], jnp.int32) for name, table in layout.flag_tables.items()}
    batch = Batch._make([jax.ShapeDtypeStruct((1, 2), jnp.int32)] * 3)
    embed = functools.partial(lm.embed, num_blocks=model.num_blocks, axes=Axes(), dtype=jnp.float32)
    stream = jax.eval_shape(embed, params["embed"], batch.tokens)
    weights = {"chunk": only(params["chunks"]), "dense": params["dense"]}
    run = functools.partial(lm.chunk, model, layout, axes=Axes())
    return tagged_names(run, weights, stream, only(balance["chunks"]), flags, batch)


def global_norm(grads: Any) -> jax.Array:
    """Euclidean norm over all elements of logical arrays: each counts once, however it is sharded or replicated."""
    return optax.tree.norm(grads)


def clip_by_norm(grads: Any, norm: jax.Array, limit: float) -> Any:
    """The gradients, scaled down to `limit` if their norm exceeds it."""
    return jax.tree.map(lambda g: jnp.where(norm > limit, g * (limit / norm), g), grads)


def learning_rate_schedule(config: StepConfig) -> optax.Schedule:
    """Linear warm-up over a share of the steps, then a cosine to a tenth of the peak."""
    warmup = min(int(np.ceil(config.warmup * config.steps)), config.steps)
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / max(warmup, 1),
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(config.steps, warmup + 1),
        end_value=0.1 * config.learning_rate,
    )


def optimizer_count(state: TrainState) -> jax.Array:
    """Updates applied so far: what the learning rate depends on."""
    return state.step - state.skipped
