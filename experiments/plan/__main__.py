"""`python -m experiments.plan NAME …`: one plan; each has its own --help."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence

from meshes.command_line import refuse

PROG = "python -m experiments.plan"
PLANS = {
    "activations": "what a step stores for backward, name by name; chooses policies within a budget of bytes",
    "schedule": "pipeline tables side by side: bubbles, what is in flight, slots; as text and as a picture",
    "memory": "bytes of a rank over the ticks of a step, by what they are for",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Hand over to the plan that the first argument names. SystemExit: 2 for what cannot be, 1 for files that cannot."""
    argv = list(sys.argv[1:] if argv is None else argv)
    name = argv[0] if argv else "--help"
    if name in ("--help", "-h"):
        print(f"usage: {PROG} NAME [options]\n")
        for known, purpose in PLANS.items():
            print(f"  {known:12} {purpose}")
        return
    if name not in PLANS:
        refuse(PROG, f"unknown plan {name!r}: choose one of {', '.join(PLANS)}")
    prog = f"{PROG} {name}"
    try:
        importlib.import_module(f"experiments.plan.{name}").main(argv[1:], prog)
    except ValueError as mistake:
        refuse(prog, mistake)
    except OSError as failure:
        print(f"{prog}: error: {' '.join(str(failure).split())}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends a table quietly
    main()
