"""Where a rank's device memory goes over the ticks of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from experiments.plan.step_options import StepOptions, said_schedule
from k3jax.train.memory import Part, compiled_temporaries, memory
from k3jax.train.plan import in_bytes
from meshes.command_line import parse
from meshes.tables import print_table

PICTURES = (".png", ".svg", ".pdf")
BARS = " ▁▂▃▄▅▆▇█"


@dataclasses.dataclass(frozen=True)
class PlanMemory(StepOptions):
    """Bytes on each rank's device, by what they are for: allocated for the whole step, and in use over its ticks.

    Predicted from shapes and the schedule; the workspace of operations themselves is not in it.
    """

    compile: bool = False
    """Compile the step too, on fake devices, and print what XLA sets aside: to compare sets of policies with."""
    picture: str = ""
    """Draw the schedule beside what each stage holds, to this .png, .svg or .pdf file. Needs matplotlib."""

    def __post_init__(self) -> None:
        if self.picture and not self.picture.endswith(PICTURES):
            raise ValueError(f"--picture={self.picture} must end in {', '.join(PICTURES)}")


def main(argv: Sequence[str] | None, prog: str) -> None:
    """Print the table and the timeline of each rank, and draw the picture if there is to be one."""
    asked = parse(PlanMemory, argv, prog=prog)
    step = asked.train_step(on_devices=asked.compile)
    print(f"{said_schedule(step)}\n")
    parts = memory(step)
    header = ("bytes for", "place", "allocated", "in use, most", "in use, mean")
    print_table(header, [row(part) for part in parts] + [row(total(parts))], header[2:])
    everything = total(parts).alive
    print(f"\nin use over {len(everything)} ticks, of {in_bytes(total(parts).reserved)} allocated:")
    for stage in range(everything.shape[1]):
        print(
            f"stage {stage} |{bars(everything[:, stage], total(parts).reserved)}| {in_bytes(int(everything[:, stage].max()))}"
        )
    if asked.compile:
        size = in_bytes(compiled_temporaries(step))
        print(
            f"\nXLA sets aside {size} beside arguments (parameters, optimizer state) and results, host memory included"
        )
    if asked.picture:
        from k3jax.parallel.schedules.picture import draw

        gib = np.asarray(everything / 2**30)
        draw([step.resolved.schedule], held=[gib], unit="GiB").savefig(asked.picture, dpi=110)
        print(f"\n{asked.picture}")


def row(part: Part) -> tuple[str, ...]:
    """Cells of a part: the most on any rank, and the mean over ranks of their peaks."""
    peaks = part.alive.max(axis=0)
    return (
        part.name,
        part.place,
        in_bytes(part.reserved),
        in_bytes(int(peaks.max())),
        in_bytes(round(float(peaks.mean()))),
    )


def total(parts: Sequence[Part]) -> Part:
    """Of the device."""
    here = [part for part in parts if part.place == "device"]
    return Part("total", sum(part.reserved for part in here), np.sum([part.alive for part in here], axis=0))


def bars(values: np.ndarray, most: int, width: int = 96) -> str:
    """Values as characters of eight heights, neighbours joined by their maximum where there are too many."""
    groups = np.array_split(values, min(width, len(values)))
    return "".join(BARS[min(round(8 * float(group.max()) / max(most, 1)), 8)] for group in groups)
