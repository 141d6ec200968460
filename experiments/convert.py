"""Weights between Hugging Face directories and checkpoints; local directories, no network.

`python -m experiments.convert hf-to-orbax SRC DST` and `python -m experiments.convert orbax-to-hf SRC DST`
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from experiments.inspect_checkpoint import locate
from k3jax.configs import PRESETS, ModelConfig
from k3jax.interop.huggingface import config_from_hf, open_directory, write_directory
from k3jax.train import step_directory
from k3jax.train.checkpoint import WEIGHTS, Checkpoints, read_arrays
from meshes.command_line import choose, parse, refused

PROG = "python -m experiments.convert"
MODEL = "model.json"


@dataclasses.dataclass(frozen=True)
class HfToOrbax:
    """Make a checkpoint, to start training from, of a directory with config.json and safetensors files.

    DST gets step 0 with parameters and router biases, and model.json for --model of experiments.train.
    """

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SRC")]
    """The Hugging Face directory."""
    destination: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DST")]
    """A directory to be made."""
    mesh: str = "data=1"
    """Where the weights lie on the way, each device holding its part; on CPU fake devices, hence host memory."""


@dataclasses.dataclass(frozen=True)
class OrbaxToHf:
    """Make a directory with config.json and safetensors files of a checkpoint.

    A checkpoint that hf-to-orbax made gives back the names, layouts and dtypes it came with; others get float32 and the
    released names, of kimi_linear where that can express the model.
    """

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SRC")]
    """A run's work directory, or its directory of checkpoints."""
    destination: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DST")]
    """A directory to be made."""
    step: int | None = None
    """Which step; not given, the newest whole one."""

    def __post_init__(self) -> None:
        if self.step is not None and self.step < 0:
            raise ValueError(f"--step={self.step}: a step is 0 or more")


def hf_to_orbax(asked: HfToOrbax) -> None:
    from k3jax.train.config import StepConfig
    from k3jax.train.devices import build_mesh, resolve_mesh
    from k3jax.train.step import TrainStep

    with whole_or_absent(asked.destination) as directory:
        source = open_directory(asked.source, name=asked.source.resolve().name)
        config = named(source.config)
        spec = resolve_mesh(asked.mesh)
        ranks, pipe = spec.sizes["data"] * spec.sizes["expert"], spec.sizes["pipe"]
        # A step is asked for shapes and shardings alone: the smallest that the mesh takes.
        smallest = StepConfig(
            model=config, microbatches=pipe, global_batch=pipe * ranks, seq_len=spec.sizes["context"], steps=1
        )
        checkpoints = Checkpoints(directory, TrainStep(smallest, build_mesh(spec)), weights_only=True)
        checkpoints.save_records(0, checkpoints.form.records_of(source.read), {"huggingface": source.record})
        checkpoints.wait()
        (directory / MODEL).write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    print(f"{asked.destination}: {config.name}, {len(source.stored):,} tensors")
    model = config.name if config.name in PRESETS else asked.destination / MODEL
    print(shlex.join(("python", "-m", "experiments.train", f"--model={model}", f"--init-from={asked.destination}")))


def orbax_to_hf(asked: OrbaxToHf) -> None:
    with whole_or_absent(asked.destination) as directory:
        checkpoints, step = locate(asked.source, asked.step)
        manifest = step_directory.read_manifest(checkpoints, step)
        config, record = ModelConfig(**manifest["model"]), manifest["extra"].get("huggingface")
        if record and config_from_hf(record["config"], name=config.name) != config:
            raise ValueError(f"{checkpoints / str(step)}: its model is not that of the config.json kept with it")
        trees = tuple(f"{tree}/" for tree in WEIGHTS)
        weights = {name: place for name, place in manifest["arrays"].items() if name.startswith(trees)}
        arrays = read_arrays(checkpoints, step, manifest | {"arrays": weights})
        write_directory(directory, config, arrays, record=record)
    print(f"{asked.destination}: {config.name}, step {step} of {asked.source}")


def named(config: ModelConfig) -> ModelConfig:
    """With the name of the preset that it is, if it is one."""
    return next((p for p in PRESETS.values() if dataclasses.replace(config, name=p.name) == p), config)


@contextlib.contextmanager
def whole_or_absent(destination: Path) -> Iterator[Path]:
    """A directory to fill, that becomes `destination` when the block ends well and is gone if it does not."""
    if destination.exists() or destination.is_symlink():
        raise FileExistsError(f"{destination} exists: name a directory to be made")
    if not destination.absolute().parent.is_dir():
        raise NotADirectoryError(f"{destination.absolute().parent} is not a directory")
    building = destination.with_name(f".{destination.name}.incomplete")
    shutil.rmtree(building, ignore_errors=True)  # of one that was killed
    building.mkdir()
    try:
        yield building
        for file in sorted(building.rglob("*")):
            step_directory.sync_folder(file) if file.is_dir() else step_directory.digest(file)
        building.rename(destination)
        step_directory.sync_folder(destination.absolute().parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


COMMANDS = {"hf-to-orbax": (HfToOrbax, hf_to_orbax), "orbax-to-hf": (OrbaxToHf, orbax_to_hf)}


def main(argv: Sequence[str] | None = None) -> None:
    """Convert. SystemExit after one line on stderr: 2 for what cannot be, 1 for what cannot be read or written."""
    purposes = {name: (options.__doc__ or "").splitlines()[0] for name, (options, _) in COMMANDS.items()}
    name, rest = choose(PROG, "SRC DST [options]", purposes, argv)
    options, run = COMMANDS[name]
    prog = f"{PROG} {name}"
    asked = parse(options, rest, prog=prog)
    with refused(prog):
        run(asked)


if __name__ == "__main__":
    main()
