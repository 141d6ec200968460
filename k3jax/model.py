"""The language model: one layer, a chunk of layers, embedding, head and loss.

The same code runs plain on one device (`Axes()`) and inside the sharded step (`Axes("pipe", "expert", "context")`).

B batch, T local tokens, D model, H heads, N residual blocks, W vocabulary rows of this rank, n dense layers. For S, V, J,
P see `k3jax.parallel.layout`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from k3jax.activations.history import scan_history
from k3jax.compat import vary_like
from k3jax.configs import KDA as KDA_KIND
from k3jax.configs import ModelConfig
from k3jax.layers.common import Axes, Draw, Placement, RMSNorm, Tokens, param, placements
from k3jax.layers.ffn import DenseFFN, LatentMoE, MoEStats, no_stats
from k3jax.layers.kda import KDA
from k3jax.layers.mla import MLA
from k3jax.layers.residual import DepthMix
from k3jax.parallel.layout import Flag, StackLayout
from k3jax.parallel.reports import Report

Params = dict[str, Any]


class Stream(NamedTuple):
    """What travels from layer to layer, and from chunk to chunk."""

    prefix: Float[Array, "B T D"]
    """Running sum of the current residual block (of all layers for plain residuals)."""
    blocks: Float[Array, "N B T D"] | None
    """Completed blocks, the embedding first; no matter what where not yet made. None for plain residuals."""

    def enter(self, layer: Any, flags: dict[str, Flag]) -> tuple[jax.Array, Stream]:
        """What a layer's attention sees; and the stream, in which the layer may have begun a block.

        The attention site mixes over the blocks made *before* this layer; only then may the entering prefix become a block.
        """
        prefix, blocks = self
        if blocks is None:
            return prefix, self
        h = layer.attn_mix(prefix, blocks, flags["attn_blocks"])
        blocks, prefix = begin_block(prefix, blocks, flags)
        return h, Stream(prefix, blocks)

    def plus(self, out: jax.Array) -> Stream:
        return self._replace(prefix=self.prefix + out)

    def for_ffn(self, layer: Any, flags: dict[str, Flag]) -> jax.Array:
        """What a layer's FFN sees."""
        return self.prefix if self.blocks is None else layer.ffn_mix(self.prefix, self.blocks, flags["ffn_blocks"])


@runtime_checkable
class Residual(Protocol):
    """What `run_layer` needs of a stream: `Stream`, or one that mixes the same sources in another way."""

    def enter(self, layer: Any, flags: dict[str, Flag]) -> tuple[jax.Array, Any]: ...

    def plus(self, out: jax.Array) -> Any: ...

    def for_ffn(self, layer: Any, flags: dict[str, Flag]) -> jax.Array: ...


class Batch(NamedTuple):
    """One microbatch of local tokens; leading dims may be added in front."""

    tokens: Int[Array, "*batch T"]
    """Token ids, −1 for padding."""
    targets: Int[Array, "*batch T"]
    """Next token, −1 where there is no loss."""
    segment_ids: Int[Array, "*batch T"]


# ---- modules -------------------------------------------------------------------------------------------------------------


class Layer(nnx.Module):
    """One layer of the given kind: mix, norm, attention, mix, norm, FFN. The dense FFN of first layers is kept apart."""

    def __init__(self, config: ModelConfig, kind: str, *, draw: Draw):
        D, eps = config.hidden_size, config.norm_eps
        if config.num_blocks:
            self.attn_mix = DepthMix(D, eps)
            self.ffn_mix = DepthMix(D, eps)
        self.attn_norm = RMSNorm(D, eps)
        self.attn = (KDA if kind == KDA_KIND else MLA)(config, draw=draw)
        self.ffn_norm = RMSNorm(D, eps)
        self.moe = LatentMoE(config, draw=draw)


class Embedding(nnx.Module):
    def __init__(self, config: ModelConfig, *, draw: Draw):
        self.table = param(draw.normal(config.init_range, config.vocab_size, config.hidden_size, alone=True))


class Head(nnx.Module):
    """Exit mix, final norm and the untied output projection."""

    def __init__(self, config: ModelConfig, *, draw: Draw):
        if config.num_blocks:
            self.mix = DepthMix(config.hidden_size, config.norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.weight = param(draw.normal(config.init_range, config.hidden_size, config.vocab_size, alone=True))

    def project(self, h: Float[Array, "*batch D"]) -> Float[Array, "*batch W"]:
        """Logits of what is normed already, at least float32."""
        return jnp.matmul(h, self.weight[...], preferred_element_type=jnp.promote_types(h.dtype, jnp.float32))


MODULES = {
    "K": lambda config, draw: Layer(config, "K", draw=draw),
    "M": lambda config, draw: Layer(config, "M", draw=draw),
    "dense": lambda config, draw: DenseFFN(config, config.dense_width, sharded=True, name="dense", draw=draw),
    "embed": lambda config, draw: Embedding(config, draw=draw),
    "head": lambda config, draw: Head(config, draw=draw),
}


@functools.cache
def abstract(config: ModelConfig, part: str) -> nnx.Module:
    """A module of MODULES without values: its structure, shapes and placements."""
    return nnx.eval_shape(lambda: MODULES[part](config, Draw()))


def bind(config: ModelConfig, part: str, params: Params, *, inside: str | None = None) -> Any:
    """The module with these values, or the one that it has under the name `inside`."""
    module = abstract(config, part)
    return nnx.merge(nnx.graphdef(module if inside is None else getattr(module, inside)), params)


def init_part(config: ModelConfig, part: str, key: jax.Array) -> Params:
    """Initial values of one module as a nested dict."""
    return nnx.to_pure_dict(nnx.state(MODULES[part](config, Draw(key, count_draws(config, part)))))


@functools.cache
def count_draws(config: ModelConfig, part: str) -> int:
    """Random numbers that a module takes from the common stream."""
    draw = Draw()
    jax.eval_shape(lambda: nnx.state(MODULES[part](config, draw)))
    return draw.taken


def shapes(config: ModelConfig, part: str) -> Params:
    """Shapes and dtypes of one module's parameters."""
    return nnx.to_pure_dict(nnx.state(abstract(config, part)))


# ---- initial values ------------------------------------------------------------------------------------------------------


def init(config: ModelConfig, layout: StackLayout, seed: int) -> Params:
    """Stacked parameters, float32: {"embed", "chunks": {p: [S, V, J, ...]}, "dense": [n, ...], "head"}.

    Keys depend on the global layer alone, so values do not depend on the mesh. Inactive slots and the unused mixtures of
    dense layers are zeros.
    """
    root = jax.random.key(seed)
    layer_key = lambda layer: jax.random.fold_in(jax.random.fold_in(root, 1), layer)

    def slot(kind: str, layer: Int[Array, ""]) -> Params:
        where = lambda used, tree: jax.tree.map(lambda a: jnp.where(used, a, 0), tree)
        values = init_part(config, kind, layer_key(layer))
        return where(layer >= 0, values | {"moe": where(layer >= config.dense_layers, values["moe"])})

    chunks = {}
    for p, kind in enumerate(config.pattern):
        make = functools.partial(slot, kind)
        for _ in range(3):
            make = jax.vmap(make)
        chunks[str(p)] = make(jnp.asarray(layout.layer_table[..., p]))
    dense_key = lambda layer: jax.random.fold_in(layer_key(layer), 1)
    dense = jax.vmap(lambda layer: init_part(config, "dense", dense_key(layer)))(jnp.arange(config.dense_layers))
    return {
        "embed": init_part(config, "embed", jax.random.fold_in(root, 2)),
        "chunks": chunks,
        "dense": dense if config.dense_layers else {},
        "head": init_part(config, "head", jax.random.fold_in(root, 3)),
    }


def init_shapes(config: ModelConfig, layout: StackLayout) -> Params:
    """Shapes and dtypes of what `init` makes, without tracing it."""
    stack = lambda tree, *dims: jax.tree.map(lambda a: jax.ShapeDtypeStruct((*dims, *a.shape), a.dtype), tree)
    dims = layout.layer_table.shape[:3]
    return {
        "embed": shapes(config, "embed"),
        "chunks": {str(p): stack(shapes(config, kind), *dims) for p, kind in enumerate(config.pattern)},
        "dense": stack(shapes(config, "dense"), config.dense_layers) if config.dense_layers else {},
        "head": shapes(config, "head"),
    }


def init_balance(config: ModelConfig, layout: StackLayout) -> dict[str, Any]:
    """Quantile balancing's selection bias of every slot, zeros; {"chunks": {p: [S, V, J, E]}}."""
    shape = (*layout.layer_table.shape[:3], config.num_experts)
    return {"chunks": {str(p): jnp.zeros(shape) for p in range(len(config.pattern))}}


def placement_tree(config: ModelConfig) -> dict[str, Any]:
    """`Placement` of every parameter, a tree like the parameters; its dims are a module's own, without stacked ones."""
    tree = {part: placements(abstract(config, part)) for part in ("embed", "dense", "head")}
    tree["chunks"] = {str(p): placements(abstract(config, kind)) for p, kind in enumerate(config.pattern)}
    if not config.dense_layers:
        tree["dense"] = {}
    return tree


def cast_for_compute(config: ModelConfig, params: Params, dtype: jax.typing.DTypeLike) -> Params:
    """Parameters in the compute dtype, except those that are used in float32."""
    cast = lambda place, a: a if place.fp32 else a.astype(dtype)
    return jax.tree.map(cast, placement_tree(config), params, is_leaf=lambda x: isinstance(x, Placement))


# ---- forward -------------------------------------------------------------------------------------------------------------


def embed(
    params: Params, tokens_BT: Int[Array, "B T"], *, num_blocks: int, axes: Axes, dtype: jax.typing.DTypeLike
) -> Stream:
    """The stream that enters layer 0. Vocabulary rows live on their pipe rank: local lookup, sum over pipe."""
    table_WD = params["table"]
    rows = table_WD.shape[0]
    local_BT = tokens_BT
    if axes.pipe is not None:
        local_BT = tokens_BT - lax.axis_index(axes.pipe) * rows
    mine_BT = (local_BT >= 0) & (local_BT < rows) & (tokens_BT >= 0)
    x_BTD = jnp.where(mine_BT[..., None], table_WD[jnp.clip(local_BT, 0, rows - 1)], 0).astype(dtype)
    if axes.pipe is not None:
        x_BTD = lax.psum(x_BTD, axes.pipe)
    return Stream(x_BTD, jnp.zeros((num_blocks, *x_BTD.shape), dtype) if num_blocks else None)


def head_logits(
    config: ModelConfig, params: Params, stream: Stream, *, axes: Axes, is_last: bool | jax.Array = True
) -> Float[Array, "B T W"]:
    """Logits of this rank's part of the vocabulary, at least float32.

    With a pipe axis the stream counts on the last stage only; every rank then holds columns, which are never gathered.
    """
    head = bind(config, "head", params)
    on_last = lambda x: x if axes.pipe is None else jnp.where(is_last, x, 0)  # elsewhere it is leftovers: keep it out
    prefix, blocks = jax.tree.map(on_last, stream)
    h_BTD = head.mix(prefix, blocks, config.num_blocks) if config.num_blocks else prefix
    h_BTD = on_last(head.norm(h_BTD))
    if axes.pipe is not None:
        h_BTD = lax.psum(h_BTD, axes.pipe)
    return head.project(h_BTD)


def head_loss(
    config: ModelConfig, params: Params, stream: Stream, batch: Batch, *, axes: Axes, is_last: bool | jax.Array = True
) -> Float[Array, ""]:
    """Sum of cross entropies (nats) over this rank's targets. Softmax in float32. For a pipe axis see `head_logits`."""
    logits_BTW = head_logits(config, params, stream, axes=axes, is_last=is_last)
    W = logits_BTW.shape[-1]
    top_BT = lax.stop_gradient(logits_BTW).max(-1)
    local_BT = batch.targets
    if axes.pipe is not None:
        top_BT = lax.pmax(top_BT, axes.pipe)
        local_BT = batch.targets - lax.axis_index(axes.pipe) * W
    total_BT = jnp.exp(logits_BTW - top_BT[..., None]).sum(-1)
    hit_BT = jnp.take_along_axis(logits_BTW, jnp.clip(local_BT, 0, W - 1)[..., None], -1)[..., 0]
    hit_BT = jnp.where((local_BT >= 0) & (local_BT < W), hit_BT, 0)
    if axes.pipe is not None:
        total_BT, hit_BT = lax.psum((total_BT, hit_BT), axes.pipe)
    return jnp.where(batch.targets >= 0, top_BT + jnp.log(total_BT) - hit_BT, 0).sum()


def chunk(
    config: ModelConfig,
    layout: StackLayout,
    weights: Params,
    stream: Stream,
    bias: dict[str, jax.Array],
    flags: dict[str, jax.Array],
    batch: Batch,
    *,
    axes: Axes,
    checkpoint: Callable[[Callable], Callable] = lambda function: function,
) -> tuple[Stream, Report]:
    """All layers of one chunk, and what they report, stacked over J: see `run_group`.

    weights: {"chunk": {p: [J, ...]}, "dense": [n, ...]}. bias: {p: [J, E]}. flags: the chunk's tables, [J, P] each.
    checkpoint: wraps one group of layers, the unit of recomputation; groups are scanned, so that the program does not
    grow with depth. Backward is given the blocks as they are in the end, so that a group stores its prefix alone: later
    blocks mean nothing to a mix, which is told how many exist.
    """
    wrapped = checkpoint(functools.partial(run_group, config, layout))

    def group(prefix, blocks, weights, inputs, dense, tokens):
        stream = Stream(checkpoint_name(prefix, "group.in"), blocks)
        (prefix, blocks), report = wrapped(stream, weights, *inputs, dense, Tokens(*tokens, axes=axes))
        return prefix, blocks, report

    prefix, blocks, report = scan_history(
        group,
        *stream,
        weights=weights["chunk"],
        inputs=(bias, flags),
        shared_weights=weights["dense"],
        shared_inputs=(batch.segment_ids, batch.tokens),
    )
    return Stream(prefix, blocks), report


def run_group(
    config: ModelConfig,
    layout: StackLayout,
    stream: Stream,
    weights: Params,
    bias: dict[str, jax.Array],
    flags: dict[str, jax.Array],
    dense: Params,
    tokens: Tokens,
) -> tuple[Stream, Report]:
    """One layer of every slot of the pattern; an inactive slot passes the stream through and reports nothing.

    Reported: counts of the mixtures, {p: MoEStats}, and of MLA the largest logits, {p: [H]}, −inf of an inactive slot.
    """
    report = Report({}, {})
    for p, kind in enumerate(config.pattern):
        slot = layout.flags(p, flags)
        layer = bind(config, kind, weights[str(p)])
        after, stats, max_logit_H = run_layer(config, layer, dense, stream, bias[str(p)], slot, tokens)
        stream = select(slot["active"], after, stream)
        report.sums[str(p)] = jax.tree.map(lambda n, on=slot["active"]: n * on, stats)
        if max_logit_H is not None:
            report.maxima[str(p)] = select(slot["active"], max_logit_H, jnp.full_like(max_logit_H, -jnp.inf))
    return stream, report


def select(flag: Flag, yes: Any, no: Any) -> Any:
    """yes if the flag is set, else no; without a trace of the other if the flag is static."""
    if isinstance(flag, int):
        return yes if flag else no
    return jax.tree.map(lambda a, b: jnp.where(flag > 0, a, b), yes, no)


def run_layer(
    config: ModelConfig,
    layer: Any,
    dense: Params,
    stream: Residual,
    bias_E: Float[Array, " E"],
    flags: dict[str, Flag],
    tokens: Tokens,
    attend: Callable[..., tuple[jax.Array, Any]] = lambda attn, x_BTD, tokens: attn(x_BTD, tokens),
) -> tuple[Any, MoEStats, Any]:
    """One layer, in the exact order of block attention residuals (spec: K3 report section 2.3).

    Beside the stream: counts of its mixture, and what `attend` tells beside attention's output: by default the largest logit
    of each head of MLA, None for KDA.
    """
    h, stream = stream.enter(layer, flags)
    out, told = attend(layer.attn, layer.attn_norm(h), tokens)
    stream = stream.plus(checkpoint_name(out, "attn.out"))
    h = stream.for_ffn(layer, flags)
    out, stats = feed_forward(config, layer, dense, layer.ffn_norm(h), bias_E, flags["dense"], tokens)
    return stream.plus(checkpoint_name(out, "ffn.out")), stats, told


def begin_block(prefix: jax.Array, blocks: jax.Array, flags: dict[str, Flag]) -> tuple[jax.Array, jax.Array]:
    """If the layer starts a block, store the entering prefix as a block and begin a new sum."""
    begun = lax.dynamic_update_index_in_dim(blocks, prefix, flags["attn_blocks"], 0), jnp.zeros_like(prefix)
    return select(flags["starts"], begun, (blocks, prefix))


def feed_forward(
    config: ModelConfig,
    layer: Any,
    dense: Params,
    x_BTD: Float[Array, "B T D"],
    bias_E: Float[Array, " E"],
    which: Flag,
    tokens: Tokens,
) -> tuple[Float[Array, "B T D"], MoEStats]:
    """The mixture (which = 0), or dense FFN number which − 1."""

    def run_dense(x):
        values = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, jnp.maximum(which - 1, 0), 0, False), dense)
        return bind(config, "dense", values)(x, tokens), jax.tree.map(lambda n: vary_like(n, x), no_stats(config))

    def run_moe(x):
        return layer.moe(x, bias_E, tokens)

    if isinstance(which, int):
        return run_dense(x_BTD) if which else run_moe(x_BTD)
    return lax.cond(which > 0, run_dense, run_moe, x_BTD)


# ---- the plain program ---------------------------------------------------------------------------------------------------


def plain_stream(
    config: ModelConfig, params: Params, bias: dict[str, Any], batch: Batch, *, dtype: jax.typing.DTypeLike
) -> tuple[Stream, Report]:
    """What leaves the last layer, and what all layers report, on one device; parameters are cast already."""
    layout = StackLayout(config)
    only = lambda tree: jax.tree.map(lambda a: a[0, 0], tree)
    flags = {name: jnp.asarray(table[0, 0]) for name, table in layout.flag_tables.items()}
    stream = embed(params["embed"], batch.tokens, num_blocks=config.num_blocks, axes=Axes(), dtype=dtype)
    weights = {"chunk": only(params["chunks"]), "dense": params["dense"]}
    return chunk(
        config, layout, weights, stream, only(bias["chunks"]), flags, batch, axes=Axes(), checkpoint=jax.checkpoint
    )


def plain_logits(
    config: ModelConfig,
    params: Params,
    bias: dict[str, Any],
    batch: Batch,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> Float[Array, "B T W"]:
    """Logits on one device, without schedule or sharding; arguments as of `plain_loss`, targets are not read."""
    params = cast_for_compute(config, params, dtype)
    stream, _ = plain_stream(config, params, bias, batch, dtype=dtype)
    return head_logits(config, params["head"], stream, axes=Axes())


def plain_loss(
    config: ModelConfig,
    params: Params,
    bias: dict[str, Any],
    batch: Batch,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> tuple[Float[Array, ""], Report]:
    """Mean cross entropy of a batch on one device, without schedule or sharding; what all layers report.

    params and bias in the layout of one chunk, `StackLayout(config)`.
    """
    params = cast_for_compute(config, params, dtype)
    stream, report = plain_stream(config, params, bias, batch, dtype=dtype)
    total = jnp.maximum((batch.targets >= 0).sum(), 1)
    return head_loss(config, params["head"], stream, batch, axes=Axes()) / total, report
