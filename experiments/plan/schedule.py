"""Pipeline tables side by side, for the same stages, virtual stages and microbatches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from k3jax.parallel.schedules import FORWARD, NAMES, RECIPES, Schedule, build, candidates
from k3jax.train.plan import runs
from meshes.command_line import at_least, parse
from meshes.tables import print_table

HEADER = ("schedule", "ticks", "time", "bubble in lock-step", "free-running", "mail slots", "in flight per rank")


@dataclasses.dataclass(frozen=True)
class PlanSchedule:
    """Each schedule's bubble, with ranks in lock-step as the executor runs them and with ranks that run freely; chunk
    activations each rank holds at most; slots of the mailbox. Times are in forwards of one chunk, in lock-step.
    """

    pipe: int = 8
    """Stages: size of the mesh's pipe axis."""
    virtual: int = 1
    """Chunks of layers on each stage."""
    microbatches: int = 32
    schedule: str = "all"
    """One schedule, or all that are made for so many virtual stages."""
    forward: float = 1.0
    """Time of a chunk's forward."""
    backward: float = 2.0
    """Time of its whole backward."""
    weight: float | None = None
    """The part of backward that weight gradients take where they run on their own; not given, half."""
    gantt: bool = False
    """Print the tables: F2.13 is the forward of chunk 2 for microbatch 13, a dot is idle."""
    picture: str = ""
    """Draw the tables beside what each stage holds, to this .png, .svg or .pdf file. Needs matplotlib."""

    def __post_init__(self) -> None:
        at_least(1, self, "pipe", "virtual", "microbatches")
        if self.schedule not in ("all", *NAMES):
            raise ValueError(f"--schedule={self.schedule} is not known: choose all or one of {', '.join(NAMES)}")
        if self.picture and not self.picture.endswith((".png", ".svg", ".pdf")):
            raise ValueError(f"--picture={self.picture} must end in .png, .svg or .pdf")

    def chosen(self) -> list[Schedule]:
        """The tables that are asked for; ValueError if there is none."""
        if self.schedule == "all":
            return candidates(self.pipe, self.virtual, self.microbatches)
        return [build(self.schedule, stages=self.pipe, virtual=self.virtual, microbatches=self.microbatches)]

    def part(self, schedule: Schedule) -> float | None:
        """Time of a weight gradient, where it is an operation."""
        return self.weight if len(schedule.kinds) == 3 else None


def main(argv: Sequence[str] | None, prog: str) -> None:
    """Print the comparison, and what else is asked for."""
    asked = parse(PlanSchedule, argv, prog=prog)
    schedules = asked.chosen()
    if asked.weight is not None and all(asked.part(schedule) is None for schedule in schedules):
        names = ", ".join(schedule.name for schedule in schedules)
        raise ValueError(f"--weight={asked.weight}: no weight gradients run on their own in {names}, leave it out")
    rows = [row(asked, schedule) for schedule in schedules]
    print(f"{asked.pipe} stages x {asked.virtual} virtual, {asked.microbatches} microbatches")
    print_table(HEADER, rows, HEADER[1:-1])
    others = [f"{name} (virtual={r.virtual})" for name, r in RECIPES.items() if r.virtual not in (None, asked.virtual)]
    if asked.schedule == "all" and others:
        print(f"made for other numbers of virtual stages: {', '.join(others)}")
    if asked.gantt:
        for schedule in schedules:
            print(f"\n{schedule.name}\n{schedule.gantt()}")
    if asked.picture:
        from k3jax.parallel.schedules.picture import draw

        figure = draw(schedules, forward=asked.forward, backward=asked.backward, weight=asked.weight)
        figure.savefig(asked.picture, dpi=110)
        print(f"\n{asked.picture}")


def row(asked: PlanSchedule, schedule: Schedule) -> tuple[str, ...]:
    """Cells under HEADER."""
    bubble = lambda lockstep: schedule.bubble_fraction(asked.forward, asked.backward, asked.part(schedule), lockstep)
    lockstep = bubble(True)
    busy = (asked.forward + asked.backward) * asked.virtual * asked.microbatches
    in_flight = schedule.alive(FORWARD, schedule.kinds[-1]).max(axis=0).tolist()
    return (
        schedule.name,
        str(schedule.num_ticks),
        f"{busy / (1 - lockstep):g}",
        f"{lockstep:.3f}",
        f"{bubble(False):.3f}",
        str(schedule.num_mail_slots),
        runs(in_flight),
    )
