"""Which Hugging Face tensors a model has, and where each array of ours lies in them.

Everything is a view: an array of ours is a part of a tensor, seen in another shape and with its dims in another order.
Reading takes the part, writing fills it, and no tensor needs code of its own.

H heads, K key dim, V value dim, D model, E experts, F expert hidden, L latent, W conv width, N key dims per head,
P key dims that all heads share. A linear layer of theirs is [out, in], ours [in, out].
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from k3jax.configs import KDA, ModelConfig


class Part(NamedTuple):
    """One array of ours inside a tensor of theirs."""

    ours: str
    """Name as in checkpoints (`k3jax.train.canonical`)."""
    view: tuple[int, ...]
    """The tensor's values in this shape,"""
    take: tuple[Any, ...] = ()
    """of which this index,"""
    order: tuple[int, ...] | None = None
    """with its dims in this order, is the array;"""
    expert: int | None = None
    """or row number `expert` of the array."""

    def of(self, tensor: np.ndarray) -> np.ndarray:
        """The part, a view of the tensor."""
        part = tensor.reshape(self.view)[self.take]
        return part if self.order is None else part.transpose(self.order)


class Tensor(NamedTuple):
    """A tensor of theirs. One without parts holds nothing of ours: it is empty."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True)
class Style:
    """How a directory names and packs its tensors; the default is that of the released Kimi Linear."""

    prefix: str = ""
    """language_model. in K3's directories."""
    dense: str = "mlp"
    moe: str = "block_sparse_moe"
    """The modules that hold dense FFNs and mixtures."""
    fused_experts: bool = False
    """All experts of a layer in one tensor, gate and up together."""
    fused_conv: bool = False
    """The filters of q, k and v in one tensor."""
    forget_gate: str = ""
    """forget_gate. where the decay gate is a module of its own."""
    a_log_shape: tuple[int, ...] | None = None
    """None: [1, 1, H, 1]. K3 has one dim and pads it beyond the heads."""
    tied: bool = False
    """The head is the embedding and has no tensor."""
    empty: bool = True
    """A mixture without shared experts has tensors for them, without values."""

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]]) -> Style:
        """The style of a directory with these tensors."""
        some = lambda *ends: next((name for name in shapes if name.endswith(ends)), "")
        dense = some("layers.0.mlp.gate_proj.weight", "layers.0.block_sparse_moe.gate_proj.weight")
        a_log = some(".A_log")
        return cls(
            prefix="language_model." if any(name.startswith("language_model.") for name in shapes) else "",
            dense=dense.split(".")[-3] if dense else "mlp",
            moe="mlp" if some(".mlp.gate.weight") else "block_sparse_moe",
            fused_experts=bool(some(".experts.gate_up_proj", ".experts.down_proj")),
            fused_conv=bool(some(".self_attn.conv1d.weight")),
            forget_gate="forget_gate." if ".forget_gate." in a_log else "",
            a_log_shape=tuple(shapes[a_log]) if a_log else None,
            tied=not some("lm_head.weight"),
            empty=bool(some(".shared_experts.gate_proj.weight")),
        )

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Style:
        """From JSON."""
        shape = fields["a_log_shape"]
        return cls(**{**fields, "a_log_shape": None if shape is None else tuple(shape)})


def linear(name: str, ours: str, out: int, into: int, **part: Any) -> Tensor:
    """[out, in] there, [in, out] here."""
    return Tensor(name, (out, into), (Part(ours, (out, into), order=(1, 0), **part),))


def by_head(name: str, ours: str, H: int, width: int, into: int) -> Tensor:
    """[H · width, in] there, [H, in, width] here."""
    return Tensor(name, (H * width, into), (Part(ours, (H, width, into), order=(0, 2, 1)),))


def vector(name: str, ours: str, *shape: int) -> Tensor:
    return Tensor(name, (math.prod(shape),), (Part(ours, shape),))


def tensors(config: ModelConfig, style: Style) -> Iterator[Tensor]:
    """All tensors of the model, in the order of its layers."""
    c, model = config, f"{style.prefix}model."
    D, W = c.hidden_size, c.vocab_size
    table = Part("params/embed/table", (W, D))
    head = Part("params/head/weight", (W, D), order=(1, 0))
    yield Tensor(f"{model}embed_tokens.weight", (W, D), (table, head) if style.tied else (table,))
    for layer, kind in enumerate(c.layer_kinds):
        at, ours = f"{model}layers.{layer}.", f"params/layers/{layer}/"
        yield vector(f"{at}input_layernorm.weight", f"{ours}attn_norm/weight", D)
        yield vector(f"{at}post_attention_layernorm.weight", f"{ours}ffn_norm/weight", D)
        if c.num_blocks:
            yield from mix(f"{at}self_attention_res", f"{ours}attn_mix", D)
            yield from mix(f"{at}mlp_res", f"{ours}ffn_mix", D)
        attention = kda if kind == KDA else mla
        yield from attention(c, style, f"{at}self_attn.", f"{ours}attn/")
        if layer < c.dense_layers:
            yield from ffn(f"{at}{style.dense}.", f"{ours}dense/", D, c.dense_width)
        else:
            yield from mixture(c, style, f"{at}{style.moe}.", f"{ours}moe/", f"balance/layers/{layer}/bias")
    if c.num_blocks:
        yield from mix(f"{model}output_attn_res", "params/head/mix", D)
    yield vector(f"{model}norm.weight", "params/head/norm/weight", D)
    if not style.tied:
        yield Tensor(f"{style.prefix}lm_head.weight", (W, D), (head,))


def mix(name: str, ours: str, D: int) -> Iterator[Tensor]:
    yield vector(f"{name}_norm.weight", f"{ours}/norm/weight", D)
    yield Tensor(f"{name}_proj.weight", (1, D), (Part(f"{ours}/query", (D,)),))


def kda(c: ModelConfig, style: Style, at: str, ours: str) -> Iterator[Tensor]:
    D, H, K, V, W = c.hidden_size, c.num_heads, c.kda_key_dim, c.kda_value_dim, c.conv_width
    for x, width in zip("qkv", (K, K, V), strict=True):
        yield by_head(f"{at}{x}_proj.weight", f"{ours}{x}_proj", H, width, D)
    if style.fused_conv:
        view = (3, H, K, W)  # K = V in this style
        parts = (Part(f"{ours}{x}_conv", view, (n,), (2, 0, 1)) for n, x in enumerate("qkv"))
        yield Tensor(f"{at}conv1d.weight", (3 * H * K, 1, W), tuple(parts))
    else:
        for x, width in zip("qkv", (K, K, V), strict=True):
            part = Part(f"{ours}{x}_conv", (H, width, W), order=(2, 0, 1))
            yield Tensor(f"{at}{x}_conv1d.weight", (H * width, 1, W), (part,))
    gate = f"{at}{style.forget_gate}"
    yield linear(f"{gate}f_a_proj.weight", f"{ours}gate_down", c.gate_rank, D)
    yield linear(f"{gate}f_b_proj.weight", f"{ours}gate_up", H * K, c.gate_rank)
    yield vector(f"{gate}dt_bias", f"{ours}gate_bias", H, K)
    shape = (1, 1, H, 1) if style.a_log_shape is None else style.a_log_shape
    yield Tensor(f"{gate}A_log", shape, (Part(f"{ours}a_log", (math.prod(shape),), (slice(H),)),))
    yield linear(f"{at}b_proj.weight", f"{ours}beta_proj", H, D)
    if c.output_gate_rank is None:
        yield linear(f"{at}g_proj.weight", f"{ours}out_gate", H * V, D)
    else:
        yield linear(f"{at}g_a_proj.weight", f"{ours}out_gate_down", c.output_gate_rank, D)
        yield linear(f"{at}g_b_proj.weight", f"{ours}out_gate_up", H * V, c.output_gate_rank)
    yield vector(f"{at}o_norm.weight", f"{ours}out_norm/weight", V)
    yield linear(f"{at}o_proj.weight", f"{ours}out_proj", D, H * V)


def mla(c: ModelConfig, style: Style, at: str, ours: str) -> Iterator[Tensor]:
    D, H, L, N, P, V = c.hidden_size, c.num_heads, c.kv_lora_rank, c.qk_nope_dim, c.qk_rope_dim, c.v_head_dim
    if c.q_lora_rank is None:
        yield by_head(f"{at}q_proj.weight", f"{ours}q_proj", H, N + P, D)
    else:
        yield linear(f"{at}q_a_proj.weight", f"{ours}q_down", c.q_lora_rank, D)
        yield vector(f"{at}q_a_layernorm.weight", f"{ours}q_norm/weight", c.q_lora_rank)
        yield by_head(f"{at}q_b_proj.weight", f"{ours}q_up", H, N + P, c.q_lora_rank)
    yield linear(f"{at}kv_a_proj_with_mqa.weight", f"{ours}kv_down", L + P, D)
    yield vector(f"{at}kv_a_layernorm.weight", f"{ours}kv_norm/weight", L)
    view, every = (H, N + V, L), slice(None)
    k = Part(f"{ours}k_up", view, (every, slice(N)), (0, 2, 1))
    v = Part(f"{ours}v_up", view, (every, slice(N, None)), (0, 2, 1))
    yield Tensor(f"{at}kv_b_proj.weight", (H * (N + V), L), (k, v))
    if c.mla_output_gate:
        yield linear(f"{at}g_proj.weight", f"{ours}out_gate", H * V, D)
    yield linear(f"{at}o_proj.weight", f"{ours}out_proj", D, H * V)


def ffn(at: str, ours: str, D: int, width: int) -> Iterator[Tensor]:
    yield linear(f"{at}gate_proj.weight", f"{ours}gate", width, D)
    yield linear(f"{at}up_proj.weight", f"{ours}up", width, D)
    yield linear(f"{at}down_proj.weight", f"{ours}down", D, width)


def mixture(c: ModelConfig, style: Style, at: str, ours: str, bias: str) -> Iterator[Tensor]:
    D, E, L, F = c.hidden_size, c.num_experts, c.expert_dim, c.expert_width
    yield linear(f"{at}gate.weight", f"{ours}router", E, D)
    yield vector(f"{at}gate.e_score_correction_bias", bias, E)
    if c.latent_size is not None:
        yield linear(f"{at}routed_expert_down_proj.weight", f"{ours}latent_down", L, D)
        yield vector(f"{at}routed_expert_norm.weight", f"{ours}latent_norm/weight", L)
        yield linear(f"{at}routed_expert_up_proj.weight", f"{ours}latent_up", D, L)
    if style.fused_experts:
        view, every = (E, 2, F, L), slice(None)
        pair = (Part(f"{ours}expert_{x}", view, (every, n), (0, 2, 1)) for n, x in enumerate(("gate", "up")))
        yield Tensor(f"{at}experts.gate_up_proj", (E, 2 * F, L), tuple(pair))
        yield Tensor(f"{at}experts.down_proj", (E, L, F), (Part(f"{ours}expert_down", (E, L, F), order=(0, 2, 1)),))
    else:
        for e in range(E):
            yield linear(f"{at}experts.{e}.w1.weight", f"{ours}expert_gate", F, L, expert=e)
            yield linear(f"{at}experts.{e}.w2.weight", f"{ours}expert_down", L, F, expert=e)
            yield linear(f"{at}experts.{e}.w3.weight", f"{ours}expert_up", F, L, expert=e)
    shared = ffn(f"{at}shared_experts.", f"{ours}shared/", D, c.shared_width)
    if c.shared_experts:
        yield from shared
    elif style.empty:
        yield from (tensor._replace(parts=()) for tensor in shared)
