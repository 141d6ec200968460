"""`python -m experiments.plan NAME …`: one plan; each has its own --help."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Sequence

from meshes.command_line import choose, refused

PROG = "python -m experiments.plan"
PLANS = {
    "activations": "what a step stores for backward, name by name; chooses policies within a budget of bytes",
    "schedule": "pipeline tables side by side: bubbles, what is in flight, slots; as text and as a picture",
    "traffic": "what a step sends over each axis of the mesh, and how long a cluster's links take for it",
    "memory": "bytes of a rank over the ticks of a step, by what they are for",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Hand over to the plan that the first argument names. SystemExit: 2 for what cannot be, 1 for files that cannot."""
    name, rest = choose(PROG, "[options]", PLANS, argv)
    prog = f"{PROG} {name}"
    with refused(prog):
        importlib.import_module(f"experiments.plan.{name}").main(rest, prog)


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends a table quietly
    main()
