"""What becomes of each named activation between forward and backward.

Model code only tags values with `checkpoint_name`; a policy is declared outside of it, atoms joined by "+":
"kda.*=recompute,moe.dispatch_in=quantize+local-offload,*=keep". K3 report, unified activation manager.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable

import jax

STORAGES = ("keep", "recompute", "local-offload", "remote-offload")
"""On the device, nowhere, in host memory, in the memory of another pipeline rank."""
ALWAYS_KEPT = frozenset({"moe.experts", "group.in", "chunk.in", "backward.held"})
"""Routing choices, which could fall the other way when recomputed in another program, what recomputation starts from, and
what backward makes for weight gradients: stored exactly, wherever that is."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """Where a value waits for backward, and whether as block-wise fp8 (leaves that are not quantizable stay as they are).

    Raises ValueError for an unknown storage, and for a value that is recomputed and quantized: nothing is stored.
    """

    storage: str = "keep"
    quantized: bool = False

    def __post_init__(self):
        if self.storage not in STORAGES or (self.quantized and self.storage == "recompute"):
            raise ValueError(f"{str(self)!r} is not a policy: choose one of {listed(POLICIES)}")

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Parses atoms joined by "+": one storage at most (keep is the default), and "quantize"; ValueError otherwise."""
        atoms = [atom.strip() for atom in text.split("+")]
        storages = [atom for atom in atoms if atom != "quantize"] or ["keep"]
        if len(storages) > 1 or len(set(atoms)) < len(atoms):
            raise ValueError(f"{text.strip()!r} is not a policy: choose one of {listed(POLICIES)}")
        return cls(storages[0], "quantize" in atoms)

    def __str__(self) -> str:
        if not self.quantized:
            return self.storage
        return "quantize" if self.storage == "keep" else f"quantize+{self.storage}"


def listed(policies: Iterable[Policy]) -> str:
    return ", ".join(map(str, policies))


KEEP, RECOMPUTE = Policy("keep"), Policy("recompute")
POLICIES = (*map(Policy, STORAGES), *(Policy(storage, True) for storage in STORAGES if storage != "recompute"))
"""All there are."""


@dataclasses.dataclass(frozen=True)
class ActivationPolicy:
    """Ordered rules (glob pattern, policy); the first pattern that matches a name decides, and the last must be `*`."""

    rules: tuple[tuple[str, Policy], ...]

    @classmethod
    def parse(cls, text: str) -> ActivationPolicy:
        """Parses "pattern=policy,…"; ValueError names the bad part and what is allowed."""
        rules = []
        for part in text.split(","):
            pattern, _, atoms = (s.strip() for s in part.partition("="))
            try:
                policy = Policy.parse(atoms)
            except ValueError:
                policy = None
            if not pattern or policy is None:
                raise ValueError(
                    f"activations: {part.strip()!r} is not PATTERN=POLICY with a policy of {listed(POLICIES)}"
                )
            rules.append((pattern, policy))
        if rules[-1][0] != "*":
            rules.append(("*", KEEP))
        return cls(tuple(rules))

    def __str__(self) -> str:
        return ",".join(f"{pattern}={policy}" for pattern, policy in self.rules)

    def of(self, name: str) -> Policy:
        """The policy of a name; of those always kept, offload rules decide where, and the rest is keep."""
        policy = self.rules[self._first(name)][1]
        if name not in ALWAYS_KEPT:
            return policy
        return KEEP if policy == RECOMPUTE else Policy(policy.storage)

    def of_leaf(self, names: Iterable[str]) -> Policy:
        """The policy of a stored leaf; one that has a name in each branch is kept if their policies differ."""
        policies = {self.of(name) for name in names} - {RECOMPUTE}
        return policies.pop() if len(policies) == 1 else KEEP

    def _first(self, name: str) -> int:
        return next(i for i, (pattern, _) in enumerate(self.rules) if fnmatch.fnmatchcase(name, pattern))

    def check(self, names: Iterable[str]) -> None:
        """ValueError if a rule decides nothing: no name matches, earlier rules take them all, or they are always kept."""
        names = sorted(names)
        decided = set()
        for name in names:
            index = self._first(name)
            if self.rules[index][1] == KEEP or self.of(name) != KEEP:
                decided.add(index)
        default = next(i for i, (pattern, _) in enumerate(self.rules) if pattern == "*")
        for index, (pattern, policy) in enumerate(self.rules):
            if index not in decided | {default}:
                raise ValueError(
                    f"activations: {pattern}={policy}: {pattern!r} matches no name that is left to it; names are "
                    f"{', '.join(names)} (never recomputed nor quantized: {', '.join(sorted(ALWAYS_KEPT))})"
                )

    def stored(self, names: Iterable[str]) -> list[str]:
        """The names whose values are put away for backward, wherever that is; the others are recomputed."""
        return [name for name in names if self.of(name) != RECOMPUTE]

    def checkpoint(self, function: Callable, names: Iterable[str]) -> Callable:
        """The function, whose pullback holds its inputs and the stored names, and recomputes everything else."""
        policy = jax.checkpoint_policies.save_only_these_names(*self.stored(names))
        # Forward and backward are different branches of the executor's loop, so nothing can be merged between them.
        return jax.checkpoint(function, policy=policy, prevent_cse=False)
