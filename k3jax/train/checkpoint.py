"""Checkpoints: saved in the background, whole or invisible, opened on any mesh.

WORKDIR/checkpoints/N/checkpoint.json   configuration, what the caller adds, where every array is, digests of all files
WORKDIR/checkpoints/N/state/            records of `k3jax.train.canonical`, written by Orbax
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from k3jax.train import processes, step_directory
from k3jax.train.canonical import CanonicalForm, Place
from k3jax.train.config import StepConfig
from k3jax.train.owned import OwnedPlace
from k3jax.train.step import TrainState, TrainStep

# Orbax logs, with tracebacks, what it raises as well.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)

STATE = "state"
WEIGHTS = ("params", "master", "balance")
"""What a model computes with; the rest of a state is of its training."""
SPLIT_FROM_BYTES = 1 << 24
"""Replicas share the writing of larger records; for small ones the slicing costs more than it saves."""


class Checkpoints:
    """The checkpoints of one run. Nothing is created before the first save.

    directory: holds one directory a step. train_step: whose states are saved and restored. keep: how many of the newest
    steps to keep; an older one is deleted once the new one is whole. weights_only: states have None for all but `WEIGHTS`.
    """

    def __init__(self, directory: str | Path, train_step: TrainStep, *, keep: int = 3, weights_only: bool = False):
        if keep < 1:
            raise ValueError(f"keep={keep}: must be at least 1, the newest checkpoint")
        self.directory, self.keep = Path(directory).absolute(), keep
        self._step = train_step
        self.form = weights_form(train_step) if weights_only else form_of(train_step)
        processes = [{d.process_index for d in like.sharding.device_set} for like in self.form.records.values()]
        if jax.process_count() > 1 and min(map(len, processes)) == 1:
            raise ValueError(
                "a pipeline stage lies in one of several processes, and Orbax saves only arrays that two or more share: give "
                "data, expert or context more devices, so that each stage has some in two processes, or run one process"
            )
        self._checkpointer = ocp.AsyncCheckpointer(handler())
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: tuple[int, Future] | None = None
        self._checked: int | None = None

    # ---- save -----------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Any, extra: dict[str, Any]) -> None:
        """Save the state; returns when it is copied, the rest happens in the background.

        extra: anything JSON that `restore` shall give back, such as the position in the data.
        Raises OSError if this save cannot begin, if the one before it failed, or if the step is saved already.
        """
        self.wait()  # The save before may hold records still.
        self.save_records(step, self.form.to_records(state), extra)

    def save_records(self, step: int, records: dict[str, jax.Array], extra: dict[str, Any]) -> None:
        """`save`, of a state in the records of `form`."""
        self.wait()
        saved_as = lambda place: list(place) if isinstance(place, Place) else place._asdict()
        arrays = {name: saved_as(place) for name, place in self.form.index.items()}
        # As text and back: what is not JSON shows before anything is written, and the caller may change `extra` later.
        about = json.loads(json.dumps({**described(self._step.config), "extra": extra, "arrays": arrays}))
        if step_directory.problem(self.directory, step) is None:
            raise FileExistsError(f"step {step} is already saved in {self.directory}: resume from it")
        try:
            path = step_directory.incomplete(self.directory, step) / STATE
            if jax.process_index() == 0:
                step_directory.begin(self.directory, step)
            self._checkpointer.save(path, args=ocp.args.PyTreeSave(nested(records)))
        except Exception as error:
            raise self._failed(step, error) from error
        self._saving = step, self._thread.submit(self._finish, step, about)

    def wait(self) -> None:
        """Wait for the save in the background. OSError names the step if it failed; earlier steps are as they were."""
        if self._saving is None:
            return
        (step, future), self._saving = self._saving, None
        try:
            future.result()
        except Exception as error:
            raise self._failed(step, error) from error

    def _finish(self, step: int, about: dict[str, Any]) -> None:
        self._checkpointer.wait_until_finished()
        if jax.process_index() == 0:
            step_directory.complete(self.directory, step, about)
            step_directory.prune(self.directory, self.keep, step)

    def _failed(self, step: int, error: Exception) -> OSError:
        reason = str(error).partition(" [tensorstore_spec=")[0]
        return OSError(f"the checkpoint of step {step} could not be saved in {self.directory}: {reason}")

    # ---- restore --------------------------------------------------------------------------------------------------

    def latest_whole(self) -> tuple[int | None, list[str]]:
        """The newest step that is whole, None if there is none; and what was skipped, a line each."""
        self.wait()
        self._checked, skipped = step_directory.latest_whole(self.directory)
        return self._checked, skipped

    def restore(self, step: int) -> tuple[Any, dict[str, Any]]:
        """The state of a step, on this run's mesh whatever mesh saved it; and the `extra` of that save.

        Raises OSError if the step is not whole; ValueError if it is of another model or optimizer.
        """
        manifest = self._manifest(step)
        check_config(manifest, self._step.config)
        return self._step.with_params(self._read(step, manifest, self.form)), manifest["extra"]

    def restore_weights(self, step: int) -> TrainState:
        """A state of `WEIGHTS` alone, None for the rest, to start another run from; the optimizer may be another.

        Raises as `restore`. The router's bias is part of what the model computes: without it other experts are chosen.
        """
        manifest = self._manifest(step)
        check_config(manifest, self._step.config, weights_only=True)
        return self._step.with_params(self._read(step, manifest, weights_form(self._step)))

    def _manifest(self, step: int) -> dict[str, Any]:
        self.wait()
        digests = step != self._checked and processes.is_first()  # the others would read all of it too
        return step_directory.read_manifest(self.directory, step, digests=digests)

    def _read(self, step: int, manifest: dict[str, Any], form: CanonicalForm) -> Any:
        trees = {name.partition("/")[0] for name in form.index}
        saved = {name: place for name, place in places(manifest).items() if name.partition("/")[0] in trees}
        check_arrays(saved, form.index)
        if saved == form.index:
            how = {
                name: ocp.ArrayRestoreArgs(dtype=like.dtype, sharding=like.sharding, global_shape=like.shape)
                for name, like in form.records.items()
            }
            return form.from_records(read_records(self.directory / str(step), how))
        return form.from_records(form.records_of(Arrays(self.directory / str(step), saved).read))


def form_of(train_step: TrainStep, **replaced: Any) -> CanonicalForm:
    """The form of a step's states, with `replaced` fields. Weights that follow from master weights are not stored."""
    if train_step.masters.owners:
        replaced["params"] = None
    shapes, shardings = train_step.state_shapes._replace(**replaced), train_step.state_shardings._replace(**replaced)
    return CanonicalForm(shapes, shardings, train_step.layout, train_step.masters.owners)


def weights_form(train_step: TrainStep) -> CanonicalForm:
    """The form of states that are None but for `WEIGHTS`."""
    return form_of(train_step, **dict.fromkeys(set(TrainState._fields) - set(WEIGHTS)))


# ---- without a run ---------------------------------------------------------------------------------------------------


def places(manifest: dict[str, Any]) -> dict[str, Place | OwnedPlace]:
    """Where each array of a step is, by name."""

    def fixed(field: Any) -> Any:
        return tuple(field) if isinstance(field, list) else field

    def place(saved: list[Any] | dict[str, Any]) -> Place | OwnedPlace:
        if isinstance(saved, dict):
            return OwnedPlace(**{name: fixed(field) for name, field in saved.items()})
        return Place(*map(fixed, saved))

    return {name: place(saved) for name, saved in manifest["arrays"].items()}


class Arrays:
    """The arrays of a step by name, in host memory: of a packed record all that is in it, of owners' arrays what is asked for.

    The record that was read last is kept. where: as `places` gives it.
    """

    def __init__(self, directory: Path, where: Mapping[str, Place | OwnedPlace]):
        self.directory, self.where = directory, where
        self._last: tuple[str, Any] = "", None

    def read(self, name: str, index: tuple[Any, ...] = (...,)) -> np.ndarray:
        """Part of an array."""
        place = self.where[name]
        if self._last[0] != place.record:
            record = open_record(self.directory / STATE, place.record)
            self._last = place.record, np.asarray(record) if isinstance(place, Place) else record
        return np.asarray(place.take(self._last[1])[index])


def read_arrays(directory: Path, step: int, manifest: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Every array of a step by name, layer after layer; no more than one record at a time is in host memory."""
    arrays = Arrays(directory / str(step), places(manifest))
    together = lambda name: place.record if isinstance(place := arrays.where[name], Place) else name
    for name in sorted(arrays.where, key=lambda name: natural_order(together(name))):
        yield name, arrays.read(name)


def check_config(manifest: dict[str, Any], config: StepConfig, *, weights_only: bool = False) -> None:
    """ValueError if a step is of another model, or unless `weights_only` of another optimizer, than `config` says."""
    saved, here = manifest, json.loads(json.dumps(described(config)))
    models = [{field: value for field, value in m["model"].items() if field != "name"} for m in (saved, here)]
    fields = sorted(set(models[0]) | set(models[1]))
    differing = [field for field in fields if models[0].get(field) != models[1].get(field)]
    if differing:
        values = ", ".join(f"{f} is {models[0].get(f)!r} there and {models[1].get(f)!r} here" for f in differing)
        raise ValueError(f"the checkpoint is of another model, {saved['model']['name']}: {values}")
    for field in ("optimizer", "momentum_dtype"):
        mine = here["config"][field]
        there = saved["config"].get(field, mine)  # a step that was saved before there was such a choice
        if there != mine and not weights_only:
            raise ValueError(
                f"the checkpoint's {field} is {there}, this run's is {mine}: use --{field.replace('_', '-')}={there}, "
                "or start a new run from the weights alone with --init-from"
            )


def check_arrays(saved: dict[str, Place | OwnedPlace], here: dict[str, Place | OwnedPlace]) -> None:
    """ValueError if names, shapes or types of a step are not those that this program expects."""
    kind = lambda place: f"{place.dtype}{list(place.shape)}"
    missing, unexpected = [name for name in here if name not in saved], [name for name in saved if name not in here]
    both = [(name, kind(saved[name]), kind(here[name])) for name in here if name in saved]
    other = [f"{name} as {there}, not {mine}" for name, there, mine in both if there != mine]
    said = [
        f"{what} {len(names)}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
        for what, names in (("lacks", missing), ("has besides", unexpected), ("stores otherwise", other))
        if names
    ]
    if said:
        raise ValueError(f"the checkpoint does not hold the arrays that this program expects; it {'; it '.join(said)}")


def described(config: StepConfig) -> dict[str, Any]:
    """The configuration as a manifest has it: the model and the rest."""
    rest = dataclasses.asdict(config)
    return {"model": rest.pop("model"), "config": rest}


# ---- Orbax -----------------------------------------------------------------------------------------------------------


def handler() -> ocp.PyTreeCheckpointHandler:
    arrays = ocp.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=SPLIT_FROM_BYTES, enable_write_sharding_file=False
    )
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def read_records(path: Path, how: Mapping[str, ocp.RestoreArgs]) -> dict[str, Any]:
    """Some records of a step, in the way that their restore arguments say."""
    tree = nested(how)
    with contextlib.closing(ocp.Checkpointer(handler())) as reader:
        args = ocp.args.PyTreeRestore(item=tree, restore_args=tree, partial_restore=True)
        read = reader.restore((path / STATE).absolute(), args=args)
    return {name: functools.reduce(lambda at, key: at[key], name.split("/"), read) for name in how}


def open_record(path: Path, record: str) -> Any:
    """A record of a step as Orbax wrote it; slices of it are read when they become arrays."""
    kvstore = {"driver": "ocdbt", "base": f"file://{path.absolute()}", "path": f"{record.replace('/', '.')}/"}
    return tensorstore.open({"driver": "zarr", "kvstore": kvstore}, open=True, read=True).result()


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a/b": x} as {"a": {"b": x}}, for Orbax's own names."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *above, last = name.split("/")
        functools.reduce(lambda at, key: at.setdefault(key, {}), above, tree)[last] = value
    return tree


def natural_order(name: str) -> list[tuple[int, str]]:
    """A sort key by which layer 2 comes before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
