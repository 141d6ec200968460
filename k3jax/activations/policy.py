"""Which named activations are kept for backward, and which are recomputed.

Model code only tags values with `checkpoint_name`; a policy is declared outside of it: "attn.*=recompute,*=keep".
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable

import jax

POLICIES = ("keep", "recompute")
ALWAYS_KEPT = frozenset({"moe.experts", "group.in"})
"""Routing choices, which could fall the other way when recomputed in another program, and what recomputation starts from."""


@dataclasses.dataclass(frozen=True)
class ActivationPolicy:
    """Ordered rules (glob pattern, policy); the first pattern that matches a name decides, and the last must be `*`."""

    rules: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: str) -> ActivationPolicy:
        """Parses "pattern=policy,…"; ValueError names the bad part and what is allowed."""
        rules = []
        for part in text.split(","):
            pattern, equals, policy = (s.strip() for s in part.partition("="))
            if not equals or not pattern or policy not in POLICIES:
                raise ValueError(
                    f"activations: {part.strip()!r} is not PATTERN=POLICY with a policy of {', '.join(POLICIES)}"
                )
            rules.append((pattern, policy))
        if rules[-1][0] != "*":
            rules.append(("*", "keep"))
        return cls(tuple(rules))

    def __str__(self) -> str:
        return ",".join(f"{pattern}={policy}" for pattern, policy in self.rules)

    def of(self, name: str) -> str:
        if name in ALWAYS_KEPT:
            return "keep"
        return next(policy for pattern, policy in self.rules if fnmatch.fnmatchcase(name, pattern))

    def check(self, names: Iterable[str]) -> None:
        """ValueError if a rule decides nothing: no name matches, earlier rules take them all, or they are always kept."""
        free = sorted(set(names) - ALWAYS_KEPT)
        decided = {next(pattern for pattern, _ in self.rules if fnmatch.fnmatchcase(n, pattern)) for n in free}
        for pattern, _ in self.rules:
            if pattern not in decided and pattern != "*":
                raise ValueError(
                    f"activations: pattern {pattern!r} matches no name that is left to it; names are {', '.join(free)} "
                    f"(always kept: {', '.join(sorted(ALWAYS_KEPT))})"
                )

    def checkpoint(self, function: Callable, names: Iterable[str]) -> Callable:
        """The function, whose pullback holds its inputs and the kept names, and recomputes everything else."""
        kept = [name for name in names if self.of(name) == "keep"]
        # Forward and backward are different branches of the executor's loop, so nothing can be merged between them.
        return jax.checkpoint(function, policy=jax.checkpoint_policies.save_only_these_names(*kept), prevent_cse=False)
