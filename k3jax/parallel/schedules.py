"""Pipeline schedules as pure data: tables that an executor runs row by row, checked and timed without devices.

A chunk is a run of layers; chunk c lives on stage c % stages, as that stage's virtual stage c // stages. A tick is one
row of a table. All ranks run one program and every tick ends in a permute over the pipe axis, so a tick lasts as long
as its slowest rank. A row therefore holds one kind of operation for all stages: mixed rows would cost the longer kind.

A rank keeps what belongs to one (chunk, microbatch) in a numbered slot, from the arrival of its input until its
backward has run. The tables name the slot of every operation and of every message, so no address travels with it.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Int32

IDLE, FORWARD, BACKWARD = 0, 1, 2
NAMES = ("forward", "1f1b", "interleaved_1f1b")


@dataclass(frozen=True, eq=False)
class Schedule:
    """A pipeline schedule (K3 report, pre-training: interleaved 1F1B), ready for an executor.

    table [tick, stage, (kind, chunk, microbatch, slot)]; kind is IDLE, FORWARD or BACKWARD; idle is (0, -1, -1, -1).
    arrivals [tick, stage, (forward, backward)]: the slot for the message that stage - 1 resp. stage + 1 (in a ring)
    sent in the tick before, to be written before the operation of this tick runs; -1: nothing arrives.
    Chunk 0's input (the embedding) and the last chunk's cotangent (the head) do not arrive: they are made in the tick
    of that chunk's forward, for the slot of that operation.
    """

    name: str
    stages: int
    virtual: int
    microbatches: int
    table: Int32[np.ndarray, "ticks stages 4"]
    arrivals: Int32[np.ndarray, "ticks stages 2"]

    @property
    def chunks(self) -> int:
        """Chunks of the whole model: stages * virtual."""
        return self.stages * self.virtual

    @property
    def num_ticks(self) -> int:
        """Rows of the table."""
        return len(self.table)

    @property
    def num_slots(self) -> int:
        """Slots a rank needs, the most over all stages, because all run one program."""
        return int(self.table[:, :, 3].max()) + 1

    @property
    def kinds(self) -> tuple[int, ...]:
        """Kinds of operations every (chunk, microbatch) goes through, in order."""
        return (FORWARD,) if self.name == "forward" else (FORWARD, BACKWARD)

    @property
    def embed_forward(self) -> Int32[np.ndarray, " ticks"]:
        """Microbatch whose chunk 0 runs forward in this tick (on stage 0), or -1: embed it before the operation."""
        return self._microbatch_of(FORWARD, 0)

    @property
    def head(self) -> Int32[np.ndarray, " ticks"]:
        """Microbatch whose last chunk runs forward in this tick (on the last stage), or -1: the head runs after it."""
        return self._microbatch_of(FORWARD, self.chunks - 1)

    @property
    def embed_backward(self) -> Int32[np.ndarray, " ticks"]:
        """Microbatch whose chunk 0 runs backward in this tick (on stage 0), or -1: embedding's backward follows."""
        return self._microbatch_of(BACKWARD, 0)

    def _microbatch_of(self, kind: int, chunk: int) -> Int32[np.ndarray, " ticks"]:
        row = self.table[:, chunk % self.stages]
        return np.where((row[:, 0] == kind) & (row[:, 1] == chunk), row[:, 2], np.int32(-1))

    def operations(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """All (tick, stage, kind, chunk, microbatch, slot) that are not idle, tick by tick."""
        for tick, stage in np.argwhere(self.table[:, :, 0] != IDLE).tolist():
            yield tick, stage, *self.table[tick, stage].tolist()

    def in_flight(self) -> Int[np.ndarray, " stages"]:
        """Most chunk activations each stage holds at once, from a forward until its backward has run.

        Under 1F1B in lock-step 2 (stages - s) - 1 + (virtual - 1) stages on stage s, given enough microbatches; 1 when
        there is no backward.
        """
        begun = np.cumsum(self.table[:, :, 0] == FORWARD, axis=0)
        ended = np.cumsum(self.table[:, :, 0] == self.kinds[-1], axis=0)
        ended_before = np.concatenate([np.zeros_like(ended[:1]), ended[:-1]])
        return (begun - ended_before).max(axis=0)

    def bubble_fraction(
        self,
        forward: float | int = 1.0,
        backward: float | int = 2.0,
        weight: float | int | None = None,
        lockstep: bool = False,
    ) -> float:
        """Share of the step that a rank idles; forward and backward are the times of one chunk, in any one unit.

        lockstep=False: each rank runs its own order as soon as its inputs exist; True: every row waits for its slowest
        rank. weight is the part of backward that a table with separate weight gradients moves; other tables raise
        ValueError. If p stages divide m microbatches, or virtual is 1, both are (p - 1) / (virtual m + p - 1).
        """
        if weight is not None:
            raise ValueError(f"{self.name} runs backward whole: got weight={weight}, pass weight=None")
        if not (forward > 0 and backward > 0):
            raise ValueError(f"times must be positive: got forward={forward}, backward={backward}")
        cost = {FORWARD: forward, BACKWARD: backward}
        busy = sum(cost[kind] for kind in self.kinds) * self.virtual * self.microbatches
        if lockstep:
            return 1 - busy / float(np.array([0.0, forward, backward])[self.table[:, :, 0]].max(axis=1).sum())
        free, end = [0.0] * self.stages, {}
        for _, stage, kind, chunk, microbatch, _ in self.operations():
            upstream = (kind, chunk - 1 if kind == FORWARD else chunk + 1, microbatch)
            free[stage] = max(free[stage], end.get(upstream, 0.0)) + cost[kind]
            end[kind, chunk, microbatch] = free[stage]
        return 1 - busy / max(free)

    def gantt(self) -> str:
        """The table as text, a line a stage: F2.13 is the forward of chunk 2 for microbatch 13, a dot is idle."""
        cells = [
            [f"{'.FB'[kind]}{chunk}.{microbatch}" if kind else "." for kind, chunk, microbatch, _ in row]
            for row in self.table.transpose(1, 0, 2).tolist()
        ]
        width = max(len(cell) for row in cells for cell in row)
        label = len(str(self.stages - 1))
        return "\n".join(
            f"stage {stage:>{label}} | " + " ".join(cell.ljust(width) for cell in row).rstrip()
            for stage, row in enumerate(cells)
        )

    def validate(self) -> None:
        """Replay the tables; raise ValueError at the first thing an executor would get wrong.

        Every operation runs exactly once, on its stage, in a row of its kind, after what it needs has arrived; every
        message is received, in the right slot; no slot is written while it holds something that is still needed.
        """
        stages, last = self.stages, self.chunks - 1
        if self.table.shape[1] != stages or self.arrivals.shape[:2] != self.table.shape[:2]:
            shapes = f"table {self.table.shape}, arrivals {self.arrivals.shape}"
            raise ValueError(f"{self.name} is not valid: {shapes} do not fit {stages} stages")
        live: list[dict[int, tuple[int, int]]] = [{} for _ in range(stages)]  # slot -> (chunk, microbatch)
        state: dict[tuple[int, int], str] = {}  # what the slot of a (chunk, microbatch) holds
        sent: dict[tuple[int, int], tuple[int, int]] = {}  # (stage, direction) -> (chunk, microbatch) under way
        for tick, row in enumerate(self.table.tolist()):
            arrived, sent = sent, {}
            for stage, slots in enumerate(self.arrivals[tick].tolist()):
                for direction, slot in enumerate(slots):
                    key = arrived.get((stage, direction))
                    if key is None and slot == -1:
                        continue
                    if key is None:
                        raise self._invalid(tick, stage, f"slot {slot} waits for a message that nobody sent")
                    if slot < 0:
                        raise self._invalid(tick, stage, f"the message for (chunk, microbatch) {key} is not received")
                    if direction == 0:
                        if slot in live[stage]:
                            raise self._invalid(tick, stage, f"input {key} overwrites live slot {slot}")
                        live[stage][slot], state[key] = key, "input"
                    else:
                        if live[stage].get(slot) != key or state[key] != "residual":
                            raise self._invalid(tick, stage, f"slot {slot} holds no residual for cotangent {key}")
                        state[key] = "residual and cotangent"

            if len({kind for kind, *_ in row} - {IDLE}) > 1:
                raise self._invalid(tick, 0, "a row must hold one kind for all stages")
            for stage, (kind, chunk, m, slot) in enumerate(row):
                if (kind, chunk, m, slot) == (IDLE, -1, -1, -1):
                    continue
                key, operation = (chunk, m), f"operation (kind {kind}, chunk {chunk}, microbatch {m}, slot {slot})"
                known = kind in self.kinds and 0 <= chunk <= last and 0 <= m < self.microbatches and slot >= 0
                if not known or chunk % stages != stage:
                    raise self._invalid(tick, stage, f"{operation} does not belong here")
                if kind == FORWARD and chunk == 0:  # the embedding writes its input now
                    if key in state:
                        raise self._invalid(tick, stage, f"{operation} runs a second time")
                    if slot in live[stage]:
                        raise self._invalid(tick, stage, f"{operation} overwrites a live slot")
                    live[stage][slot], state[key] = key, "input"
                needs = "input" if kind == FORWARD else "residual and cotangent"
                if live[stage].get(slot) != key or state[key] != needs:
                    raise self._invalid(tick, stage, f"{operation} does not find its {needs} in its slot")
                if kind == FORWARD:  # the head makes the last chunk's cotangent in this same tick
                    state[key] = "residual" if chunk < last else "residual and cotangent"
                    if chunk < last:
                        sent[(stage + 1) % stages, 0] = (chunk + 1, m)
                elif chunk > 0:
                    sent[(stage - 1) % stages, 1] = (chunk - 1, m)
                if kind == self.kinds[-1]:
                    state[key] = "nothing more"
                    del live[stage][slot]
        done, wanted = sum(s == "nothing more" for s in state.values()), self.chunks * self.microbatches
        if done != wanted:
            raise ValueError(f"{self.name} is not valid: it finishes {done} of {wanted} (chunk, microbatch)")

    def _invalid(self, tick: int, stage: int, what: str) -> ValueError:
        return ValueError(f"{self.name} is not valid at tick {tick}, stage {stage}: {what}")


def build(name: str, *, stages: int, virtual: int = 1, microbatches: int) -> Schedule:
    """The schedule of that name for `stages` pipe ranks with `virtual` chunks each; any number of microbatches works.

    "1f1b" and "interleaved_1f1b" (PipeDream-Flush; Megatron-LM, arXiv:2104.04473; K3 report, pre-training) train,
    "forward" only evaluates. Raises ValueError for an unknown name, a count below 1, and "1f1b" with virtual > 1.
    """
    if name not in NAMES:
        raise ValueError(f"unknown schedule {name!r}: choose one of {', '.join(NAMES)}")
    got = f"{name} got microbatches={microbatches}, stages (pipe)={stages}, virtual={virtual}"
    if min(stages, virtual, microbatches) < 1:
        raise ValueError(f"{got}: each must be at least 1")
    if name == "1f1b" and virtual > 1:
        raise ValueError(f"{got}: it needs virtual=1; choose interleaved_1f1b for several chunks a stage")
    rows = _rows(stages, virtual, microbatches, train=name != "forward")
    table, arrivals = _with_slots(rows, stages, virtual)
    table.flags.writeable = arrivals.flags.writeable = False
    return Schedule(name, stages, virtual, microbatches, table, arrivals)


Row = list[tuple[int, int, int] | None]  # per stage (kind, chunk, microbatch), or None where it idles


def _rows(stages: int, virtual: int, microbatches: int, train: bool) -> list[Row]:
    """Each stage follows its own order of work and runs an operation in the first row of its kind that can hold it.

    Work goes in rounds of at most `stages` microbatches: a round passes one virtual stage before it takes the next.
    Nothing can wait in a circle, whatever the counts: all stages share one order, and its k-th backward needs no
    forward beyond position k + (virtual - 1) * stages, so the limit makes a forward wait only for what needs earlier
    forwards.
    """
    starts = range(0, microbatches, stages)
    order = [(v, m) for a in starts for v in range(virtual) for m in range(a, min(a + stages, microbatches))]
    last = stages * virtual - 1
    # Forwards a stage may be ahead of its backwards: two a stage, to fill the way to the last stage and back while rows
    # of both kinds alternate, and a round for each further virtual stage. Fewer would cost time, more only memory.
    limit = [2 * (stages - s) - 1 + (virtual - 1) * stages for s in range(stages)]
    begun, ended = [0] * stages, [0] * stages  # positions in the order
    forward: set[tuple[int, int]] = set()  # finished (chunk, microbatch)
    backward: set[tuple[int, int]] = set()
    rows: list[Row] = []
    while min(ended if train else begun) < len(order):
        row: Row = [None] * stages
        for s in range(stages):
            if begun[s] < len(order) and not (train and begun[s] - ended[s] == limit[s]):
                v, m = order[begun[s]]
                chunk = v * stages + s
                if chunk == 0 or (chunk - 1, m) in forward:
                    row[s] = (FORWARD, chunk, m)
        _finish(row, rows, forward, begun)
        row = [None] * stages
        for s in range(stages):
            if train and ended[s] < len(order):
                v, m = order[ended[s]]
                chunk = (virtual - 1 - v) * stages + s
                if (chunk + 1, m) in backward if chunk < last else (chunk, m) in forward:
                    row[s] = (BACKWARD, chunk, m)
        _finish(row, rows, backward, ended)
    return rows


def _finish(row: Row, rows: list[Row], done: set[tuple[int, int]], count: list[int]) -> None:
    """Append a row, unless all stages idle, and note what it finished: only the next row may build on it."""
    for s, operation in enumerate(row):
        if operation:
            done.add(operation[1:])
            count[s] += 1
    if any(row):
        rows.append(row)


def _with_slots(rows: list[Row], stages: int, virtual: int) -> tuple[np.ndarray, np.ndarray]:
    """The table and its arrivals: each (chunk, microbatch) gets the lowest slot that is free during its life."""
    when = {operation: t for t, row in enumerate(rows) for operation in row if operation}
    table = np.full((len(rows), stages, 4), -1, np.int32)
    table[:, :, 0] = IDLE
    arrivals = np.full((len(rows), stages, 2), -1, np.int32)
    lives: list[list[tuple[int, int, int, int]]] = [[] for _ in range(stages)]
    for (kind, chunk, m), t in when.items():
        if kind == FORWARD:
            born = when[FORWARD, chunk - 1, m] + 1 if chunk else t
            lives[chunk % stages].append((born, when.get((BACKWARD, chunk, m), t), chunk, m))
    for s in range(stages):
        free: list[int] = []
        used: list[tuple[int, int]] = []  # (last tick, slot) of the living
        for born, dies, chunk, m in sorted(lives[s]):
            while used and used[0][0] < born:
                heapq.heappush(free, heapq.heappop(used)[1])
            slot = heapq.heappop(free) if free else len(used)
            heapq.heappush(used, (dies, slot))
            if chunk:
                arrivals[born, s, 0] = slot
            if (BACKWARD, chunk + 1, m) in when:
                arrivals[when[BACKWARD, chunk + 1, m] + 1, s, 1] = slot
            for kind in (FORWARD, BACKWARD):
                if (kind, chunk, m) in when:
                    table[when[kind, chunk, m], s] = kind, chunk, m, slot
    return table, arrivals
