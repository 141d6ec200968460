"""`python -m experiments.plan [NAME] …`: one plan; each has its own --help. Without a name, that of a whole step."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence

from meshes.command_line import choose, refused

PROG = "python -m experiments.plan"
PLANS = {
    "step": "a step on a cluster: does it fit, what it sends, how long it takes; what is meant without a name",
    "activations": "what a step stores for backward, name by name; chooses policies within a budget of bytes",
    "schedule": "pipeline tables side by side: bubbles, what is in flight, slots; as text and as a picture",
    "traffic": "what a step sends over each axis of the mesh, and how long a cluster's links take for it",
    "memory": "bytes of a rank over the ticks of a step, by what they are for",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Hand over to the plan that the first argument names. SystemExit: 2 for what cannot be, 1 for files that cannot."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0].startswith("--") and argv[0] != "--help":
        argv = ["step", *argv]
    name, rest = choose(PROG, "[options]", PLANS, argv)
    prog = f"{PROG} {name}"
    with refused(prog):
        importlib.import_module(f"experiments.plan.{name}").main(rest, prog)


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends a table quietly
    main()
