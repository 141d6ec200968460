"""Expert parallelism: which rank computes which rows, how they get there and back, and what is computed."""

from k3jax.parallel.experts.load import Load, LoadMetrics, load_metrics
from k3jax.parallel.experts.mixture import best_exchange, run_experts
from k3jax.parallel.experts.planner import ExpertPlan, LocalPlan, plan, plan_local

__all__ = [
    "ExpertPlan",
    "Load",
    "LoadMetrics",
    "LocalPlan",
    "best_exchange",
    "load_metrics",
    "plan",
    "plan_local",
    "run_experts",
]
