"""Slots by lifetime: what lives at the same time on a rank gets different numbers, as few as possible."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple


class Life(NamedTuple):
    """Something that a stage holds from the beginning of tick `born` to the end of tick `dies`."""

    stage: int
    born: int
    dies: int
    key: tuple[int, ...]
    """Its name, given once."""


def assign(lives: Iterable[Life], stages: int) -> dict[tuple[int, ...], int]:
    """Slot of each key: the lowest number that is free on its stage. As many slots are used as live at once."""
    slot_of: dict[tuple[int, ...], int] = {}
    free: list[list[int]] = [[] for _ in range(stages)]
    used: list[list[tuple[int, int]]] = [[] for _ in range(stages)]  # (last tick, slot) of the living
    for stage, born, dies, key in sorted(lives):
        while used[stage] and used[stage][0][0] < born:
            heapq.heappush(free[stage], heapq.heappop(used[stage])[1])
        slot = heapq.heappop(free[stage]) if free[stage] else len(used[stage])
        heapq.heappush(used[stage], (dies, slot))
        slot_of[key] = slot
    return slot_of
