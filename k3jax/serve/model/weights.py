"""Weights for serving, from checkpoints of training on any mesh and from Hugging Face directories.

Arrays come by their names in checkpoints, layer after layer, and are cast on the way: host memory holds the model once, in
the compute dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax import model as lm
from k3jax.configs import ModelConfig
from k3jax.interop.huggingface import open_directory
from k3jax.layers.common import Placement
from k3jax.parallel.layout import StackLayout
from k3jax.serve.model.forward import Weights
from k3jax.serve.model.serving import check_mesh, weight_specs
from k3jax.train import step_directory
from k3jax.train.canonical import STACK_DIMS, LayerName, readable_names
from k3jax.train.checkpoint import read_arrays


def from_checkpoint(
    directory: str | Path, step: int | None = None, *, dtype: str = "float32", mesh: Mesh | None = None
) -> tuple[ModelConfig, Weights]:
    """The model of a run's directory of checkpoints; step None: the newest whole one. The optimizer's state is not read.

    Raises OSError if the step is missing or not whole, ValueError if it lacks an array of its model.
    """
    directory = Path(directory)
    if step is None:
        step, skipped = step_directory.latest_whole(directory)
        if step is None:
            raise FileNotFoundError(f"{directory} has no whole checkpoint{''.join(f'; {line}' for line in skipped)}")
    manifest = step_directory.read_manifest(directory, step)
    config = ModelConfig(**manifest["model"])
    ours = {name: place for name, place in manifest["arrays"].items() if name.startswith(("params/", "balance/"))}
    return config, assemble(config, read_arrays(directory, step, manifest | {"arrays": ours}), dtype=dtype, mesh=mesh)


def from_huggingface(
    directory: str | Path, *, dtype: str = "float32", mesh: Mesh | None = None
) -> tuple[ModelConfig, Weights]:
    """The model of a directory with config.json and safetensors files. Raises as `interop.huggingface.open_directory`."""
    source = open_directory(directory, name=Path(directory).resolve().name)
    config, targets = source.config, targets_of(source.config)

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        for name, (leaf, index) in targets.of_name.items():
            shape = targets.leaves[leaf].shape[len(index) :]
            yield name, source.read(name, tuple(slice(0, size) for size in shape))

    return config, assemble(config, arrays(), dtype=dtype, mesh=mesh)


def assemble(
    config: ModelConfig, arrays: Iterable[tuple[str, np.ndarray]], *, dtype: str = "float32", mesh: Mesh | None = None
) -> Weights:
    """Weights from a model's arrays by their names in checkpoints, in any order; others are ignored.

    dtype: of all but what is used in float32. mesh: where they lie as `serving.weight_specs` says; None: on one device.
    Raises ValueError if one is missing or of another shape.
    """
    if mesh is not None:
        check_mesh(config, mesh)
    targets = targets_of(config)
    leaves = zip(targets.leaves, targets.fp32, strict=True)
    filled = [np.zeros(leaf.shape, leaf.dtype if fp32 else dtype) for leaf, fp32 in leaves]
    missing = dict(targets.of_name)
    for name, array in arrays:
        if name not in missing:
            continue
        leaf, index = missing.pop(name)
        place = filled[leaf][index]
        if place.shape != array.shape:
            raise ValueError(f"{name} is {list(array.shape)}; {config.name} has {list(place.shape)}")
        filled[leaf][index] = array.astype(place.dtype)
    if missing:
        some = ", ".join(list(missing)[:3]) + (", ..." if len(missing) > 3 else "")
        raise ValueError(f"{len(missing)} arrays of {config.name} are missing: {some}")
    weights = jax.tree.unflatten(targets.tree, filled)
    if mesh is None:
        return jax.tree.map(jax.numpy.asarray, weights)
    specs = Weights(weight_specs(config), jax.tree.map(lambda _: P(), weights.bias))
    return jax.tree.map(lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)), weights, specs)


class Targets(NamedTuple):
    """The leaves of a model's `Weights`, and which part of which leaf each array of a checkpoint is."""

    tree: Any
    leaves: list[jax.ShapeDtypeStruct]
    fp32: list[bool]
    """Used in float32 whatever the compute dtype."""
    of_name: dict[str, tuple[int, tuple[int, ...]]]
    """Number of the leaf, and index in it, by the array's name; layer after layer."""


def abstract_weights(config: ModelConfig) -> Weights:
    """Shapes and dtypes, before any cast."""
    stacked = StackLayout(config).layer_table.shape[:3]

    def stack(part: str, *dims: int) -> lm.Params:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct((*dims, *a.shape), a.dtype), lm.shapes(config, part))

    slots = {str(p): kind for p, kind in enumerate(config.pattern)}
    params = {
        "embed": stack("embed"),
        "chunks": {p: stack(kind, *stacked) for p, kind in slots.items()},
        "dense": stack("dense", config.dense_layers) if config.dense_layers else {},
        "head": stack("head"),
    }
    bias = jax.ShapeDtypeStruct((*stacked, config.num_experts), np.dtype("float32"))
    return Weights(params, {"chunks": dict.fromkeys(slots, bias)})


def targets_of(config: ModelConfig) -> Targets:
    layout = StackLayout(config)
    abstract = abstract_weights(config)
    places = Weights(lm.placement_tree(config), jax.tree.map(lambda _: Placement(fp32=True), abstract.bias))
    paths, tree = jax.tree_util.tree_flatten_with_path(abstract)
    of_name: dict[str, tuple[int, tuple[int, ...]]] = {}
    for leaf, name in enumerate(readable_names([path for path, _ in paths])):
        name = name.replace("bias/", "balance/", 1) if name.startswith("bias/") else name
        kind = name.split("/")[1]
        if kind not in STACK_DIMS:
            of_name[name] = leaf, ()
            continue
        layer = LayerName.of(name, kind)
        for index, number in np.ndenumerate(layout.stored_layers(kind, layer.p, layer.moe)):
            if number >= 0:
                of_name[layer.format.format(number)] = leaf, index
    fp32 = [place.fp32 for place in jax.tree.leaves(places, is_leaf=lambda x: isinstance(x, Placement))]
    return Targets(tree, [leaf for _, leaf in paths], fp32, of_name)
