"""Which stage runs a chunk, and which way a message between neighbouring chunks goes."""

from __future__ import annotations

from typing import Literal

Placement = Literal["ring", "zigzag"]
"""ring: chunks go round the stages in order. zigzag: every second round runs back, so that the chunks at a turn share a
stage; with two rounds this is the V of zero-bubble schedules."""

UP, DOWN, STAY = 0, 1, 2
"""Routes of a message: to the next stage in the ring, to the one before, to the stage itself."""


def stage_of(chunk: int, stages: int, placement: Placement) -> int:
    """Stage of a chunk; it is that stage's virtual chunk number chunk // stages."""
    turn, place = divmod(chunk, stages)
    return stages - 1 - place if placement == "zigzag" and turn % 2 else place


def route(source: int, destination: int, stages: int) -> int:
    """Of a message between two stages that are the same or neighbours in the ring."""
    return {0: STAY, 1: UP}.get((destination - source) % stages, DOWN)


def destination(source: int, route: int, stages: int) -> int:
    """The stage at the other end."""
    return (source + {UP: 1, DOWN: -1, STAY: 0}[route]) % stages
