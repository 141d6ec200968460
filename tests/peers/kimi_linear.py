"""Random tiny Kimi Linear models of `transformers`, and the same models here."""

import contextlib
import functools
import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the peers are not installed: tests/peers/run")
transformers = pytest.importorskip("transformers", reason="the peers are not installed: tests/peers/run")

from k3jax import model as lm  # noqa: E402
from k3jax.interop.huggingface import Source, open_directory, write_directory  # noqa: E402
from k3jax.model import Batch  # noqa: E402
from k3jax.train.checkpoint import weights_form  # noqa: E402
from k3jax.train.config import StepConfig  # noqa: E402
from k3jax.train.step import TrainStep  # noqa: E402
from meshes import MeshSpec  # noqa: E402

K, M = "linear_attention", "full_attention"
BASE = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_attention_heads=2,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    num_local_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    linear_head_dim=8,
    layer_types=[K, K, M],
    dense=1,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
)
CONFIGS: dict[str, dict[str, Any]] = {
    "like the 48B": dict(layer_types=[K, K, K, M, K, K, M]),
    "three heads, no dense layer, no shared experts": dict(num_attention_heads=3, dense=0, n_shared_experts=0),
    "one head, two dense layers, two shared experts": dict(num_attention_heads=1, dense=2, n_shared_experts=2),
    "MLA's K is not V, low-rank queries": dict(qk_nope_head_dim=6, qk_rope_head_dim=2, v_head_dim=12, q_lora_rank=10),
    "KDA alone": dict(layer_types=[K, K], linear_head_dim=12, dense=0),
    "MLA alone": dict(layer_types=[M, M], num_attention_heads=4),
    "odd sizes, layers without a pattern": dict(
        layer_types=[M, K, K, K], hidden_size=36, linear_head_dim=20, linear_conv_kernel_dim=3, moe_intermediate_size=12,
        num_local_experts=7, num_experts_per_tok=3, routed_scaling_factor=1.5, rms_norm_eps=1e-6,
    ),
}  # fmt: skip


def make(name: str, seed: int = 0) -> Any:
    """The model with random values everywhere: norms, biases and router biases too, or a mistake there would not show."""
    fields = BASE | CONFIGS[name]
    layers, dense, heads = len(fields["layer_types"]), fields.pop("dense"), fields["num_attention_heads"]
    config = transformers.KimiLinearConfig(
        **fields,
        num_hidden_layers=layers,
        num_key_value_heads=heads,
        linear_num_heads=heads,
        mlp_layer_types=["dense"] * dense + ["sparse"] * (layers - dense),
    )
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        model = transformers.KimiLinearForCausalLM(config).eval()
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if key.endswith(("norm.weight", "layernorm.weight")):
                value.copy_(1 + 0.3 * torch.randn_like(value))
            elif key.endswith("e_score_correction_bias"):
                value.copy_(0.1 * torch.randn_like(value))
            elif not key.endswith(("A_log", "dt_bias")):
                value.copy_(torch.randn_like(value) * max(value.shape[-1], 1) ** -0.5)
    return model


def tokens(model: Any, T: int, cuts: Sequence[int] = ()) -> np.ndarray:
    """Random tokens [2, T] for which no router of theirs is near a tie, where either expert would be right.

    cuts: borders of documents, which run by themselves.
    """
    documents = list(itertools.pairwise(cuts or (0, T)))
    for seed in range(100):
        ids = np.random.default_rng((T, seed)).integers(0, model.config.vocab_size, (2, T))
        gaps = [smallest_gap(model, torch.from_numpy(ids[:, start:stop])) for start, stop in documents]
        if min(gaps) > 1e-5:  # scores differ by 1e-6
            return ids
    raise AssertionError("every batch has a near tie")


def smallest_gap(model: Any, ids: Any) -> float:
    """Least difference between the last chosen and the first other expert's biased score."""
    gaps = [1.0]

    def look(router, inputs, outputs):
        best = (outputs[0].sigmoid() + router.e_score_correction_bias).topk(router.top_k + 1).values
        gaps.append(float((best[:, -2] - best[:, -1]).min()))

    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [router.register_forward_hook(look) for router in routers]
    with torch.no_grad():
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return min(gaps)


class Ours(NamedTuple):
    """A Hugging Face directory opened here, on one device."""

    source: Source
    form: Any
    state: Any

    @classmethod
    def open(cls, directory: Path) -> "Ours":
        source = open_directory(directory)
        config = StepConfig(model=source.config, microbatches=1, global_batch=1)
        form = weights_form(TrainStep(config, MeshSpec.parse("data=1").build(jax.devices()[:1])))
        return cls(source, form, form.from_records(form.records_of(source.read)))

    def run(self, tokens: np.ndarray, segments: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, Any]:
        """Logits, mean loss of the next token, gradients of the loss."""
        segments = np.zeros_like(tokens) if segments is None else segments
        targets = np.concatenate([tokens[:, 1:], np.full_like(tokens[:, :1], -1)], 1)
        targets[:, :-1][segments[:, 1:] != segments[:, :-1]] = -1
        batch = Batch(*(jnp.asarray(a, jnp.int32) for a in (tokens, targets, segments)))
        (loss, logits), grads = evaluated(self.source.config)(self.state.params, self.state.balance, batch)
        return np.asarray(logits), np.asarray(loss), grads

    def write(self, directory: Path, params: Any) -> None:
        """Parameters, or their gradients, under the names and in the layouts of the directory that was opened."""
        records = self.form.to_records(self.state._replace(params=params))
        host = {name: np.asarray(record) for name, record in records.items()}
        arrays = ((name, place.take(host[place.record])) for name, place in self.form.index.items())
        directory.mkdir()
        write_directory(directory, self.source.config, arrays, record=self.source.record)


@functools.cache
def evaluated(config):
    """((loss, logits), gradients) from one pass through the layers: it is what takes long to compile."""

    def loss(params, bias, batch):
        stream, _ = lm.plain_stream(config, params, bias, batch, dtype=jnp.float32)
        total = jnp.maximum((batch.targets >= 0).sum(), 1)
        nats = lm.head_loss(config, params["head"], stream, batch, axes=lm.Axes()) / total
        return nats, lm.head_logits(config, params["head"], stream, axes=lm.Axes())

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@contextlib.contextmanager
def silent(caplog):
    """Neither transformers nor Python warns inside."""
    transformers.logging.enable_propagation()
    try:
        with warnings.catch_warnings(), caplog.at_level("WARNING"):
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")
            yield
        assert [record.getMessage() for record in caplog.records] == []
    finally:
        transformers.logging.disable_propagation()
