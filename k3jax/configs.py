"""What a model is: one frozen configuration that expresses both K3 and Kimi Linear, and the presets.

Sizes are counts; widths are elements. Values of the presets `k3` and `kimi_linear_48b` are those of the released configurations.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

KDA, MLA = "K", "M"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A hybrid KDA-MLA language model.

    Raises ValueError for contradictory fields, naming them. Sources: K3 report section 2, Kimi Linear (arXiv:2510.26692).
    """

    name: str = "custom"
    """Name shown in logs and stored in checkpoints."""
    vocab_size: int = 320
    """Rows of the embedding and columns of the head (untied). The pipe axis must divide it."""
    hidden_size: int = 64
    num_layers: int = 15
    num_heads: int = 4
    """Heads of KDA and of MLA."""
    norm_eps: float = 1e-5
    init_range: float = 0.02
    """Standard deviation of normal initialisation."""

    pattern: str = "KKKM"
    """Kinds of the layer slots of one group: K for KDA, M for MLA. Layers repeat it; the last layer is always MLA."""
    layers: str = ""
    """Explicit kinds of all layers, for models that do not follow the pattern; empty: the pattern's rule."""

    kda_key_dim: int = 16
    kda_value_dim: int = 16
    conv_width: int = 4
    gate_lower_bound: float | None = -5.0
    """K3's bounded gate, bound * sigmoid(exp(A) (z + b)); None: Kimi Linear's -exp(A) softplus(z + b)."""
    gate_rank: int = 16
    """Width of the low-rank projection that makes the decay gate."""
    output_gate_rank: int | None = None
    """Width of KDA's low-rank output gate; None: full rank."""

    q_lora_rank: int | None = 32
    """Width of MLA's query latent; None: one full projection."""
    kv_lora_rank: int = 32
    qk_nope_dim: int = 16
    qk_rope_dim: int = 8
    """Key dims shared by all heads. The name is historic: they are never rotated."""
    v_head_dim: int = 16
    mla_output_gate: bool = True
    latent_norm_eps: float = 1e-6
    """Epsilon of the two MLA latent norms (public Kimi Linear code; not public for K3)."""

    dense_layers: int = 1
    """How many of the first layers have a dense FFN in place of the mixture."""
    dense_width: int = 192
    activation: Literal["situ", "swiglu"] = "situ"
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0

    num_experts: int = 8
    experts_per_token: int = 2
    shared_experts: int = 2
    """Shared experts form one MLP of width shared_experts * expert_width on the full hidden size."""
    expert_width: int = 32
    latent_size: int | None = 32
    """Width in which routed experts work (Stable LatentMoE); None: the hidden size, without projections and norm."""
    routed_scaling: float = 1.0
    balance_bins: int = 1000
    """Histogram bins of quantile balancing."""

    attn_res_block: int | None = 4
    """Layers of one attention-residual block; None: plain residuals."""

    def __post_init__(self):
        positive = [f.name for f in dataclasses.fields(self) if f.type in ("int", "int | None")]
        for field in positive:
            value = getattr(self, field)
            minimum = 0 if field in ("dense_layers", "shared_experts", "qk_rope_dim") else 1
            if value is not None and value < minimum:
                raise ValueError(f"model.{field}={value}: must be at least {minimum}")
        for field in ("norm_eps", "latent_norm_eps", "init_range", "situ_beta", "situ_linear_beta", "routed_scaling"):
            if not 0 < getattr(self, field) < float("inf"):
                raise ValueError(f"model.{field}={getattr(self, field)}: must be positive and finite")
        if self.gate_lower_bound is not None and not -1e4 < self.gate_lower_bound < 0:
            raise ValueError(f"model.gate_lower_bound={self.gate_lower_bound}: must be negative (log decay), or None")
        for field, text in (("pattern", self.pattern), ("layers", self.layers)):
            if set(text) - {KDA, MLA}:
                raise ValueError(f"model.{field}={text!r}: may only hold K (KDA) and M (MLA)")
        if not self.pattern:
            raise ValueError("model.pattern is empty: name at least one slot kind, K or M")
        if set(self.layer_kinds) - set(self.pattern):
            raise ValueError(
                f"model.pattern={self.pattern!r} has no slot for kind {set(self.layer_kinds) - set(self.pattern)}"
            )
        if self.layers and len(self.layers) != self.num_layers:
            raise ValueError(f"model.layers names {len(self.layers)} layers but model.num_layers={self.num_layers}")
        if self.dense_layers > self.num_layers:
            raise ValueError(f"model.dense_layers={self.dense_layers} exceeds model.num_layers={self.num_layers}")
        if self.experts_per_token + 1 > self.num_experts:
            raise ValueError(
                f"model.experts_per_token={self.experts_per_token} needs at least {self.experts_per_token + 1} experts "
                f"(quantile balancing reads the next score too); model.num_experts={self.num_experts}"
            )
        if self.activation not in ("situ", "swiglu"):
            raise ValueError(f"model.activation={self.activation!r}: must be situ or swiglu")

    @property
    def layer_kinds(self) -> str:
        """Kind of each layer, one letter a layer."""
        if self.layers:
            return self.layers
        repeated = self.pattern * (self.num_layers // len(self.pattern) + 1)
        last = MLA if MLA in self.pattern else KDA
        return repeated[: self.num_layers - 1] + last

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.dense_layers

    @property
    def shared_width(self) -> int:
        return self.shared_experts * self.expert_width

    @property
    def expert_dim(self) -> int:
        """Width of what routed experts read and write."""
        return self.latent_size or self.hidden_size

    @property
    def num_blocks(self) -> int:
        """Attention-residual blocks, the embedding's included; 0 for plain residuals."""
        return 0 if self.attn_res_block is None else -(-self.num_layers // self.attn_res_block)


PRESETS = {
    # Its last two layers are MLA, as K3's. init_range 0.2 spreads the router's scores as K3's are (0.02 · √7168 =
    # 0.2 · √64), and depth adds rounding to them: docs/notes/balancing.md says why both matter.
    "nano": ModelConfig(name="nano", num_layers=7, pattern="KM", init_range=0.2),
    "mini": ModelConfig(
        name="mini",
        vocab_size=512,
        hidden_size=384,
        num_layers=17,
        num_heads=6,
        kda_key_dim=64,
        kda_value_dim=64,
        gate_rank=64,
        q_lora_rank=192,
        kv_lora_rank=128,
        qk_nope_dim=64,
        qk_rope_dim=32,
        v_head_dim=64,
        dense_width=1536,
        num_experts=32,
        experts_per_token=4,
        expert_width=128,
        latent_size=192,
        attn_res_block=4,
    ),
    "kimi_linear_48b": ModelConfig(
        name="kimi_linear_48b",
        vocab_size=163840,
        hidden_size=2304,
        num_layers=27,
        num_heads=32,
        kda_key_dim=128,
        kda_value_dim=128,
        gate_lower_bound=None,
        gate_rank=128,
        output_gate_rank=128,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_dim=128,
        qk_rope_dim=64,
        v_head_dim=128,
        mla_output_gate=False,
        dense_width=9216,
        activation="swiglu",
        num_experts=256,
        experts_per_token=8,
        shared_experts=1,
        expert_width=1024,
        latent_size=None,
        routed_scaling=2.446,
        attn_res_block=None,
    ),
    "k3": ModelConfig(
        name="k3",
        vocab_size=163840,
        hidden_size=7168,
        num_layers=93,
        num_heads=96,
        kda_key_dim=128,
        kda_value_dim=128,
        gate_rank=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_dim=128,
        qk_rope_dim=64,
        v_head_dim=128,
        dense_width=33792,
        num_experts=896,
        experts_per_token=16,
        shared_experts=2,
        expert_width=3072,
        latent_size=3584,
        attn_res_block=12,
    ),
}


def get(name: str) -> ModelConfig:
    """The preset of that name; ValueError lists the valid ones."""
    if name not in PRESETS:
        raise ValueError(f"unknown model {name!r}: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
