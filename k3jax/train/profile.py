"""A trace of some steps, for TensorBoard's profile plugin, XProf or Perfetto.

The program's named scopes are in it: "gradients", "optimizer", and the parts of a pipeline's tick (`parallel.pipeline`).
"""

from __future__ import annotations

import re
from pathlib import Path

import jax

from k3jax.train import processes


def steps_named(text: str) -> range:
    """The steps that FIRST:LAST means, both included; none for an empty text. ValueError if it is something else."""
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if text and not (found and 1 <= int(found[1]) <= int(found[2])):
        raise ValueError(f"profile={text}: write FIRST:LAST, the steps to trace, such as 10:12")
    return range(int(found[1]), int(found[2]) + 1) if found else range(0)


class Profile:
    """Traces the steps of a range, each by itself complete. One file a process."""

    def __init__(self, steps: range, directory: Path):
        self.steps = steps
        self.directory = directory / str(processes.index()) if processes.count() > 1 else directory
        self._open = False

    def before(self, step: int) -> bool:
        """Whether the steps until now must be done before this one starts."""
        return self._open and step not in self.steps or not self._open and step in self.steps

    def start(self, step: int) -> jax.profiler.StepTraceAnnotation:
        """Begin or end the trace where it has to; a context for the call that starts the step."""
        if step in self.steps and not self._open:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # calls of this program, most of them of the logging
            jax.profiler.start_trace(self.directory, profiler_options=options)
            self._open = True
        elif step not in self.steps:
            self.close()
        return jax.profiler.StepTraceAnnotation("step", step_num=step)

    def close(self) -> None:
        """End the trace, if there is one."""
        if self._open:
            self._open = False
            jax.profiler.stop_trace()
