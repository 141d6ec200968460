"""A training step of a small Kimi Linear model, beside the same step of the same model in transformers, on one CPU.

Both start from the same files, see the same batch, and do all of a step in float32: loss, gradients, clipping, AdamW.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.bench.timing import in_turns, ratio
from k3jax.configs import get
from k3jax.interop.huggingface import write_directory
from meshes.command_line import at_least, parse, refuse

PROG = "python -m experiments.bench hf"
MODEL = dataclasses.replace(
    get("kimi_linear_48b"),
    name="small kimi linear",
    vocab_size=2048,
    hidden_size=256,
    num_layers=4,
    num_heads=4,
    kda_key_dim=64,
    kda_value_dim=64,
    gate_rank=64,
    output_gate_rank=64,
    kv_lora_rank=128,
    qk_nope_dim=64,
    qk_rope_dim=32,
    v_head_dim=64,
    dense_width=1024,
    num_experts=16,
    experts_per_token=4,
    expert_width=128,
)


@dataclasses.dataclass(frozen=True)
class BenchHf:
    """Seconds of a training step here and in transformers, taken in turns, and their ratio."""

    batch: int = 2
    """Sequences."""
    seq_len: int = 256
    """Tokens of a sequence."""
    threads: int = 0
    """CPU threads of either; 0: all that this process may use."""
    rounds: int = 10
    """Both take a step a round."""
    json: bool = False
    """One JSON object on stdout."""

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("seq_len", 2), ("threads", 0), ("rounds", 1)):
            at_least(least, self, name)


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print; exit 2 for options that cannot be, or without transformers and PyTorch."""
    asked = parse(BenchHf, argv, prog=PROG)
    try:
        import torch  # pyright: ignore[reportMissingImports]
        import transformers  # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        refuse(PROG, f"{missing}: install the extra 'peers', as tests/peers/run does")
    try:
        threads = use_threads(asked.threads)
    except ValueError as mistake:
        refuse(PROG, mistake)
    torch.set_num_threads(threads)
    jax.config.update("jax_platforms", "cpu")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    ids = np.random.default_rng(0).integers(0, MODEL.vocab_size, (asked.batch, asked.seq_len))
    with tempfile.TemporaryDirectory() as directory:
        ours = our_step(asked, ids, Path(directory))
        theirs = their_step(ids, Path(directory))
    # Not yet trained, they agree; this also compiles.
    first = {"k3jax": float(ours()), "transformers": float(theirs())}
    seconds = in_turns({"k3jax": ours, "transformers": theirs}, asked.rounds)
    result = {
        "batch": asked.batch,
        "seq_len": asked.seq_len,
        "threads": threads,
        "jax": jax.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "first_loss": first,
        "median_seconds": {name: statistics.median(of) for name, of in seconds.items()},
        "tokens_per_second": {name: ids.size / statistics.median(of) for name, of in seconds.items()},
        "times_as_fast": ratio(seconds["transformers"], seconds["k3jax"]),
    }
    if asked.json:
        print(json.dumps(result))
        return
    print(f"batch {asked.batch} x {asked.seq_len} tokens, {threads} threads, float32, AdamW")
    for name, rate in result["tokens_per_second"].items():
        took = result["median_seconds"][name]
        print(f"{name:13} {1e3 * took:8.1f} ms a step  {rate:9,.0f} tokens/s  first loss {first[name]:.6f}")
    print(f"k3jax is {result['times_as_fast']:.2f} times as fast as transformers {transformers.__version__}")


def use_threads(count: int) -> int:
    """Confine this process to that many CPUs, before XLA makes one thread for each; returns how many there are."""
    if not hasattr(os, "sched_setaffinity"):
        if count:
            raise ValueError(f"--threads={count}: this system cannot confine a process to some CPUs, use 0")
        return os.cpu_count() or 1
    usable = sorted(os.sched_getaffinity(0))
    if count > len(usable):
        raise ValueError(f"--threads={count}: this process may use {len(usable)}")
    os.sched_setaffinity(0, usable[: count or len(usable)])
    return count or len(usable)


def our_step(asked: BenchHf, ids: np.ndarray, directory: Path) -> Callable[[], jax.Array]:
    """A step that returns its loss; the directory gets the initial weights."""
    from k3jax.model import Batch
    from k3jax.train.checkpoint import weights_form
    from k3jax.train.config import StepConfig
    from k3jax.train.step import TrainStep
    from meshes import MeshSpec

    config = StepConfig(
        model=MODEL, global_batch=asked.batch, seq_len=asked.seq_len, microbatches=1, optimizer="adamw", steps=1000
    )
    step = TrainStep(config, MeshSpec.parse("data=1").build(jax.devices()[:1]))
    state, form = step.init(), weights_form(step)
    weights = state._replace(step=None, opt_state=None, skipped=None)
    records = {name: np.asarray(record) for name, record in form.to_records(weights).items()}
    write_directory(directory, MODEL, ((name, at.take(records[at.record])) for name, at in form.index.items()))
    targets = np.concatenate([ids[:, 1:], np.full((asked.batch, 1), -1)], 1)
    arrays: list[Any] = [a.astype(np.int32) for a in (ids, targets, np.zeros_like(ids))]
    batch = step.place(Batch(*arrays))

    def run():
        nonlocal state
        state, metrics = step.step(state, batch)
        return metrics["loss"]

    return run


def their_step(ids: np.ndarray, directory: Path) -> Callable[[], float]:
    """A step of the model in the directory that returns its loss."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    model = transformers.KimiLinearForCausalLM.from_pretrained(directory).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    batch = torch.from_numpy(ids)

    def run():
        optimizer.zero_grad()
        loss = model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return run
