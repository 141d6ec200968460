"""Expert parallelism: where rows of routed tokens are computed, and how they get there and back."""

from k3jax.parallel.experts.exchange import local_experts, run_experts
from k3jax.parallel.experts.planner import ExpertPlan, plan

__all__ = ["ExpertPlan", "local_experts", "plan", "run_experts"]
