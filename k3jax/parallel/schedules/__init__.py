"""Pipeline schedules as pure data."""

from k3jax.parallel.schedules.build import NAMES, RECIPES, build, forward_only
from k3jax.parallel.schedules.choice import best, candidates, ranked
from k3jax.parallel.schedules.kinds import BACKWARD, FORWARD, IDLE, WEIGHT
from k3jax.parallel.schedules.placement import DOWN, STAY, UP, Placement, route, stage_of
from k3jax.parallel.schedules.slots import Life, assign
from k3jax.parallel.schedules.table import Schedule

__all__ = [
    "BACKWARD", "DOWN", "FORWARD", "IDLE", "NAMES", "RECIPES", "STAY", "UP", "WEIGHT",
    "Life", "Placement", "Schedule", "assign", "best", "build", "candidates", "forward_only", "ranked", "route", "stage_of",
]  # fmt: skip
