"""What a run starts from: data, and a checkpoint to continue or to take weights from; checked, nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from k3jax.train import step_directory, workdir
from k3jax.train.checkpoint import check_config, described
from k3jax.train.data import Corpus, open_corpus
from k3jax.train.run_config import RunConfig


class Found(NamedTuple):
    """The newest whole checkpoint in a directory."""

    directory: Path
    step: int | None
    """None: there is no whole one."""
    skipped: list[str]
    """Why newer ones do not count."""
    position: int = 0
    """Samples of the training data consumed until then."""
    changed: tuple[str, ...] = ()
    """Options that were others when it was saved."""


def open_data(config: RunConfig) -> Corpus:
    """The corpus. ValueError if it cannot be used, or holds less than a batch; OSError if it cannot be read."""
    step = config.step
    corpus = open_corpus(
        config.data,
        vocab_size=step.model.vocab_size,
        seq_len=step.seq_len,
        seed=step.seed,
        tokenizer=config.tokenizer or None,
    )
    if corpus.train.num_sequences < step.global_batch:
        raise ValueError(
            f"data {config.data!r} has {corpus.train.num_sequences} training sequences of {step.seq_len} tokens, fewer "
            f"than global_batch={step.global_batch}: give more data, a smaller batch or shorter sequences"
        )
    if config.eval_every and not corpus.held_out.num_sequences:
        raise ValueError(f"data {config.data!r} is too small to hold anything out: eval_every must be 0")
    return corpus


def to_resume(config: RunConfig, corpus: Corpus) -> Found:
    """The checkpoint to continue. ValueError if it is of another model, optimizer or data."""
    directory = Path(config.workdir) / workdir.CHECKPOINTS
    step, skipped = step_directory.latest_whole(directory)
    if step is None:
        return Found(directory, None, skipped)
    manifest = step_directory.read_manifest(directory, step, digests=False)
    check_config(manifest, config.step)
    saved = manifest["extra"]
    if saved["fingerprint"] != corpus.fingerprint:
        raise ValueError(
            f"the checkpoint's data is {saved['data']} of fingerprint {saved['fingerprint']}, this run's is "
            f"{config.data} of {corpus.fingerprint}: give the same data, tokenizer, seed and seq_len, or start a new "
            f"run from the weights alone with --init-from"
        )
    now = described(config.step)["config"]
    was = {name: manifest["config"].get(name) for name in now}
    changed = tuple(f"{name} was {was[name]}, is {now[name]}" for name in now if was[name] != now[name])
    return Found(directory, step, skipped, saved["position"], changed)


def to_start_from(config: RunConfig) -> Found:
    """The checkpoint whose weights to take. OSError if there is none, ValueError if it is of another model."""
    given = Path(config.init_from)
    directory = given / workdir.CHECKPOINTS if (given / workdir.CHECKPOINTS).is_dir() else given
    step, skipped = step_directory.latest_whole(directory)
    if step is None:
        raise FileNotFoundError(f"init_from {given} holds no whole checkpoint{''.join(f'; {why}' for why in skipped)}")
    check_config(step_directory.read_manifest(directory, step, digests=False), config.step, weights_only=True)
    return Found(directory, step, skipped)
