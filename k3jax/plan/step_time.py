"""How long a step takes on a target, as a range, and the share of its products that train the model.

A tick lasts as long as the longest operation in its row, for messages tie the ranks together. What stands beside the
operations (embedding, head, messages between stages, sums, the optimizer) follows one after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from k3jax.configs import MLA, ModelConfig
from k3jax.parallel.schedules import BACKWARD, FORWARD, WEIGHT, Schedule
from k3jax.parameters import count
from k3jax.plan.links import Seconds
from k3jax.plan.roofline import Roofline

OPERATIONS = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "weight gradients"}
"""Parts of a step that are operations of its table."""


class StepTime(NamedTuple):
    operations: dict[int, Seconds]
    """Of one operation of each kind."""
    pipeline: Seconds
    """All ticks, in lock-step."""
    bubble: Seconds
    """Share of `pipeline` in which a rank waits."""
    rest: Seconds
    """Everything beside the operations."""

    @property
    def total(self) -> Seconds:
        return Seconds(self.pipeline.best + self.rest.best, self.pipeline.worst + self.rest.worst)


def step_time(parts: list[Roofline], schedule: Schedule) -> StepTime:
    """Of a step with these parts."""
    of = {one.work.part: one.seconds for one in parts}
    runs = schedule.virtual * schedule.microbatches
    nothing = Seconds(0.0, 0.0)
    each = {kind: Seconds(*(s / runs for s in of.get(OPERATIONS[kind], nothing))) for kind in schedule.kinds}
    pipeline, bubble = [], []
    for end in range(2):
        cost = np.zeros(1 + len(OPERATIONS))
        cost[list(each)] = [seconds[end] for seconds in each.values()]
        pipeline.append(float(cost[schedule.table[:, :, 0]].max(axis=1).sum()))
        bubble.append(1 - runs * float(cost.sum()) / pipeline[-1] if pipeline[-1] else 0.0)
    others = [s for part, s in of.items() if part not in OPERATIONS.values()]
    rest = Seconds(sum(s.best for s in others), sum(s.worst for s in others))
    return StepTime(each, Seconds(*pipeline), Seconds(*bubble), rest)


def model_flops(config: ModelConfig, sequences: int, length: int) -> float:
    """Floating-point operations that training on these sequences cannot do without, forward and backward.

    Six for each active parameter and token; of MLA the scores and means of what a token sees, half of all pairs; of KDA what
    its recurrence does to the state in a token. Recomputation is not among them.
    """
    tokens, (_, active) = sequences * length, count(config)
    mla = config.layer_kinds.count(MLA)
    scores = 2 * (config.qk_nope_dim + config.qk_rope_dim + config.v_head_dim) * config.num_heads * length / 2
    state = 6 * config.kda_key_dim * config.kda_value_dim * config.num_heads  # decay and read, correct, read again
    attention = mla * scores + (config.num_layers - mla) * state
    return tokens * (6.0 * active + 3 * attention)
