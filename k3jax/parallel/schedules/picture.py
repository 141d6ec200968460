"""Pictures of tables: who works when, beside how much waits. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from k3jax.parallel.schedules.kinds import BACKWARD, FORWARD, WEIGHT
from k3jax.parallel.schedules.table import Schedule
from k3jax.parallel.schedules.timing import Time, costs

COLOURS = {FORWARD: "tab:blue", BACKWARD: "tab:orange", WEIGHT: "tab:green"}
WORDS = {FORWARD: "forward blue", BACKWARD: "backward orange", WEIGHT: "weight gradients green"}


def draw(
    schedules: Sequence[Schedule],
    *,
    forward: Time = 1.0,
    backward: Time = 2.0,
    weight: Time | None = None,
    held: Sequence[np.ndarray] | None = None,
    unit: str = "chunk activations",
) -> Any:
    """A matplotlib figure, for each table a row: its operations in lock-step, and what each stage holds meanwhile.

    Every tick ends in a permute over the pipe axis and so lasts as long as its slowest rank; white is the bubble. held: of
    each table [ticks, stages] amounts in `unit`; by default how many (chunk, microbatch) wait for their last operation.
    Raises ValueError where matplotlib is not installed, and for times that mean nothing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("pictures need matplotlib, which is not installed: pip install matplotlib") from None
    height = sum(1.2 + 0.35 * schedule.stages for schedule in schedules)
    figure = Figure(figsize=(14, max(height, 2.5)), layout="constrained")
    sides = figure.subplots(
        len(schedules), 2, squeeze=False,
        gridspec_kw={"width_ratios": (3, 1), "height_ratios": [1.2 + 0.35 * s.stages for s in schedules]},
    )  # fmt: skip
    for i, (schedule, (left, right)) in enumerate(zip(schedules, sides, strict=True)):
        split = len(schedule.kinds) == 3
        start = starts(schedule, forward, backward, weight if split else None)
        _gantt(left, schedule, start, costs(schedule, forward, backward, weight if split else None))
        waiting = schedule.alive(FORWARD, schedule.kinds[-1]) if held is None else held[i]
        _memory(right, schedule, start, waiting, unit)
    return figure


def starts(schedule: Schedule, forward: Time, backward: Time, weight: Time | None) -> Float[np.ndarray, " ends"]:
    """When each tick begins in lock-step, and when the last one ends."""
    longest = np.array(costs(schedule, forward, backward, weight), float)[schedule.table[:, :, 0]].max(axis=1)
    return np.concatenate([[0.0], np.cumsum(longest)])


def _gantt(axes: Any, schedule: Schedule, start: np.ndarray, cost: Sequence[Time]) -> None:
    for kind in schedule.kinds:
        of_kind = [o for o in schedule.operations() if o[2] == kind]
        # Later virtual stages are darker; one call a shade, because a bar at a time takes minutes for large tables.
        for v in range(schedule.virtual):
            bars = [(start[tick], stage) for tick, stage, _, chunk, _, _ in of_kind if chunk // schedule.stages == v]
            if bars:
                left, bottom = np.array(bars).T
                shade = 0.35 + 0.6 * (v + 1) / schedule.virtual
                axes.barh(bottom, cost[kind], left=left, color=COLOURS[kind], alpha=min(shade, 1.0), edgecolor="white")
    if schedule.num_ticks <= 64:
        for tick, stage, kind, _, m, _ in schedule.operations():
            axes.text(start[tick] + cost[kind] / 2, stage, str(m), ha="center", va="center", fontsize=8)
    axes.set(xlim=(0, start[-1]), yticks=range(schedule.stages), ylabel="stage", xlabel="time (forwards of one chunk)")
    axes.invert_yaxis()
    words = ", ".join(WORDS[kind] for kind in schedule.kinds)
    darker = ", later virtual stages darker" if schedule.virtual > 1 else ""
    axes.set_title(f"{schedule.name}: {words}{darker}", fontsize=9)


def _memory(axes: Any, schedule: Schedule, start: np.ndarray, waiting: np.ndarray, unit: str) -> None:
    for stage in range(schedule.stages):
        axes.stairs(waiting[:, stage], start, label=str(stage), baseline=None)
    axes.set(xlim=(0, start[-1]), ylim=(0, None), xlabel="time", ylabel=unit)
    axes.set_title("held by each stage", fontsize=9)
    if schedule.stages <= 8:
        axes.legend(fontsize=7, ncols=2, title="stage", title_fontsize=7)
