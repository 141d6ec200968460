"""Which tokens a program takes and where it writes them: integers, for numpy, JAX and inside the kernel alike.

N local tokens, k experts a token, R ranks, C rows of a rank's buffer. A target is rank · C + row, as planned, or −1.
"""

from __future__ import annotations

from typing import Any

from jax import lax


def first_copies(destination: Any, copy_of: Any, *, rows: int) -> Any:
    """Targets [N, k] of the assignments that bring a token to a rank, −1 for its others there and for padding.

    destination: rank · rows + row of each assignment, −1 for padding. copy_of: the first row that holds the token there.
    """
    brings = (destination >= 0) & (destination % rows == copy_of)
    return destination * brings - ~brings  # −1 where it brings nothing.


def address(target: Any, rows: int) -> tuple[Any, Any]:
    """Rank and row of a target that is not −1."""
    return lax.div(target, rows), lax.rem(target, rows)


def share(program: Any, tokens: int, programs: int) -> Any:
    """How many tokens a program takes: program, program + programs, …"""
    return lax.div(tokens - program + (programs - 1), programs)
