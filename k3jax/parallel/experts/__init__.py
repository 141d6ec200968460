"""Expert parallelism: which rank computes which rows, how they get there and back, and what is computed."""

from k3jax.parallel.experts.mixture import run_experts
from k3jax.parallel.experts.planner import ExpertPlan, plan

__all__ = ["ExpertPlan", "plan", "run_experts"]
