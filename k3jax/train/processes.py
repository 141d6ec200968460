"""The processes of one run: how they find each other, and what they tell each other beside what the step exchanges.

The first process (0) is the coordinator: it keeps the words of all, and is the one that writes and prints what a run has
once. All of it goes without JAX's devices. With one process everything here does nothing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from jax._src import distributed  # its words between processes have no public form; 0.10 to 0.12 have this one

Result = TypeVar("Result")

AUTO = "auto"
_LONG_MS = 7 * 24 * 3600 * 1000
"""No limit for an answer: what ends the wait for a process that is gone are its missing signs of life."""
_AHEAD = 2
"""Steps that another process can have begun beyond the last one that this process has."""
_DONE, _FAILED = "done", "failed"
"""Last signs of life."""

_calls = itertools.count()
_watch: _Watch | None = None


def join(coordinator: str, process_id: int | None, processes: int | None, *, peer_timeout: int) -> None:
    """Make this process one of several; before JAX's first computation. No coordinator: it stays alone.

    coordinator: HOST:PORT of process 0, the same for all; or "auto", with neither number: as SLURM, Open MPI, Kubernetes or
    TPUs tell. A SLURM task that is alone on its node takes all its GPUs, else each task one. peer_timeout: after so many
    seconds without a sign of life of one process the others end. Raises ValueError if something is missing or cannot be,
    OSError if the others do not come within five minutes.
    """
    global _watch
    how = _checked(coordinator, process_id, processes)
    if how is None:
        return
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    try:
        # JAX's own watch comes later than the one here, which says in a line what happened.
        jax.distributed.initialize(**how, heartbeat_timeout_seconds=2 * peer_timeout + 10)
    except ValueError as mistake:
        if coordinator != AUTO:
            raise
        raise ValueError(
            f"--coordinator={AUTO} finds no SLURM, Open MPI, Kubernetes or TPUs ({mistake}): start it with srun or mpirun, or "
            "give --coordinator=HOST:PORT --process-id=N --processes=N"
        ) from None
    except jax.errors.JaxRuntimeError as failure:
        raise OSError(f"the processes did not find each other: {str(failure).splitlines()[0]}") from None
    if count() > 1:
        _watch = _Watch(peer_timeout)
        _watch.start()


def _checked(coordinator: str, process_id: int | None, processes: int | None) -> dict[str, Any] | None:
    """Arguments of `jax.distributed.initialize`; None for a process alone."""
    numbers = {"--process-id": process_id, "--processes": processes}
    given = [name for name, value in numbers.items() if value is not None]
    if not coordinator and not given:
        return None
    if coordinator == AUTO:
        if given:
            raise ValueError(
                f"--coordinator={AUTO} finds the numbers of processes itself: leave out {', '.join(given)}"
            )
        # JAX gives every SLURM task one GPU; an empty list leaves it all that it sees.
        alone = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").partition("(")[0] == "1"
        return {"local_device_ids": []} if alone else {}
    missing = [
        name for name in ("--coordinator", *numbers) if name not in (*given, *["--coordinator"] * bool(coordinator))
    ]
    if missing or process_id is None or processes is None:
        raise ValueError(
            f"several processes need --coordinator=HOST:PORT, --process-id=N and --processes=N; not given: {', '.join(missing)}"
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"--coordinator={coordinator}: write the first process's address as HOST:PORT, or {AUTO}")
    if not 0 <= process_id < processes:
        raise ValueError(f"--process-id={process_id} of --processes={processes}: ids are 0 to one less than there are")
    return {
        "coordinator_address": coordinator,
        "num_processes": processes,
        "process_id": process_id,
        "cluster_detection_method": "deactivate",
    }


def count() -> int:
    """How many there are. Unlike jax.process_count it starts no backend."""
    return distributed.global_state.num_processes


def index() -> int:
    """Which one this is."""
    return distributed.global_state.process_id


def is_first() -> bool:
    """Whether this one writes what a run has once."""
    return index() == 0


# ---- what they tell each other ---------------------------------------------------------------------------------------


def by_first(function: Callable[[], Result]) -> Result:
    """On all processes what `function` gives on the first, or the ValueError or OSError that it raises there."""
    if count() == 1:
        return function()
    key = f"k3jax/{next(_calls)}"
    if is_first():
        try:
            outcome: Any = function()
        except (ValueError, OSError) as mistake:
            outcome = mistake
        _client().key_value_set_bytes(key, pickle.dumps(outcome))
    outcome = pickle.loads(_client().blocking_key_value_get_bytes(key, _LONG_MS))
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def agree(facts: dict[str, Any]) -> None:
    """Wait for all processes. ValueError, on all, if one has other facts (JSON, perhaps nested) than the first."""
    if count() == 1:
        return
    key = f"k3jax/{next(_calls)}"
    _client().key_value_set(f"{key}/{index()}", json.dumps(facts))
    told = [json.loads(_client().blocking_key_value_get(f"{key}/{i}", _LONG_MS)) for i in range(count())]
    for i, other in enumerate(told):
        for name in difference(told[0], other):
            first, here = (functools.reduce(lambda at, part: at[part], name, facts) for facts in (told[0], other))
            raise ValueError(
                f"{'.'.join(name)} is {first} in process 0 and {here} in process {i}: give all processes the same options, "
                "data and kind of devices"
            )


def difference(first: Any, other: Any) -> Iterator[tuple[str, ...]]:
    """Where two nested dicts with the same keys differ."""
    if isinstance(first, dict) and isinstance(other, dict):
        for key in first:
            yield from ((key, *rest) for rest in difference(first[key], other[key]))
    elif first != other:
        yield ()


def told_to_stop(step: int, reason: str | None) -> tuple[int, str] | None:
    """The step after which all processes end, and why; None: go on.

    Each calls it before it begins the step after `step`, with a reason if it was asked to end. A process begins a step only
    when the one before the last is done, which takes all processes: so none is further ahead than `_AHEAD` says.
    """
    if count() == 1:
        return (step, reason) if reason else None
    if reason:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another was quicker
            _client().key_value_set("k3jax/stop/first", f"{step + _AHEAD} {reason}")
    for _, told in _client().key_value_dir_get("k3jax/stop/"):
        last, _, why = told.partition(" ")
        return int(last), why
    return None


@contextlib.contextmanager
def together() -> Iterator[None]:
    """What processes that joined do together: all reach the end of it, or one ends early and so do the others."""
    if count() == 1:
        yield
        return
    try:
        with first_alone_prints():
            yield
    except SystemExit as end:
        leave(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        leave(1)
    else:
        leave(0)


@contextlib.contextmanager
def first_alone_prints() -> Iterator[None]:
    """On stdout, and of that one only what Python prints: Gloo would tell there whom it has met."""
    sys.stdout.flush()
    out, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    with os.fdopen(out if is_first() else nowhere, "w") as prints, contextlib.redirect_stdout(prints):
        yield


@contextlib.contextmanager
def losses_told() -> Iterator[None]:
    """OSError, of one line, for what JAX raises where several processes exchange something and one is gone."""
    try:
        yield
    except jax.errors.JaxRuntimeError as failure:
        if count() == 1:
            raise
        raise OSError(f"process {index()} of {count()}, perhaps because another is gone: {failure}") from None


def leave(status: int) -> None:
    """End of this process's part: with status 0 return when all have come here, else tell the others and exit at once."""
    if status == 0:
        agree({})
    if _watch:
        _watch.stop(_FAILED if status else _DONE)
    if status == 0:
        jax.distributed.shutdown()
        return
    sys.stdout.flush()
    sys.stderr.flush()
    if is_first() and _watch:
        _watch.wait_for_others()  # what they say to each other is kept here
    os._exit(status)  # an orderly end would wait for the others, who wait for this one


class _Watch(threading.Thread):
    """Gives signs of life, and ends this process when another one gives none, or has failed."""

    def __init__(self, timeout: float):
        super().__init__(name="signs of life", daemon=True)
        self.timeout, self.interval = timeout, min(2.0, timeout / 5)
        self._end = threading.Event()

    def run(self) -> None:
        seen: dict[str, tuple[str, float]] = {}
        for sign in itertools.count():
            try:
                _client().key_value_set(f"k3jax/life/{index()}", str(sign), allow_overwrite=True)
                signs = {key.rpartition("/")[2]: value for key, value in _client().key_value_dir_get("k3jax/life/")}
            except jax.errors.JaxRuntimeError:
                if not self._end.wait(self.interval):
                    self._gone("process 0, which coordinates the others, cannot be reached")
                return
            now = time.monotonic()
            for process in map(str, range(count())):
                value = signs.get(process, "")
                if value == _FAILED:
                    self._gone(f"process {process} has failed, its own output says why")
                if seen.get(process, ("none", now))[0] != value:
                    seen[process] = value, now
                elif value != _DONE and now - seen[process][1] > self.timeout:
                    self._gone(f"process {process} has given no sign of life for {self.timeout:g} s")
            if self._end.wait(self.interval):
                return

    def stop(self, last: str) -> None:
        """No more signs but a last one."""
        self._end.set()
        if self is not threading.current_thread():
            self.join()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            _client().key_value_set(f"k3jax/life/{index()}", last, allow_overwrite=True)

    def wait_for_others(self) -> None:
        """Until each has given its last sign, or has had time enough to see the one of this process."""
        for _ in range(30):
            signs = dict(_client().key_value_dir_get("k3jax/life/"))
            if sum(sign in (_DONE, _FAILED) for sign in signs.values()) == count():
                return
            time.sleep(self.interval / 10)

    def _gone(self, what: str) -> None:
        if self._end.is_set():  # this process is leaving already
            return
        print(f"process {index()} of {count()}: error: {what}", file=sys.stderr, flush=True)
        leave(1)


def _client() -> Any:
    return distributed.global_state.client
