"""Names of prefixes: what a cached page or state is a function of, hashed in a chain over blocks of tokens.

The hash at boundary b names the cache key and tokens[0:b], so equal hashes mean equal contents. Every field is tagged
and length-prefixed, so no two keys or blocks share an encoding, and nothing depends on the process (Python's `hash` does).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from blake3 import blake3

Tokens = Sequence[int] | np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheKey:
    """All that S_b and KV(b) depend on besides the tokens.

    The sampler is no field: it chooses tokens, which the hash names, and changes no state.
    """

    model: str
    """Name or digest of the configuration."""
    revision: str
    """Which weights: a training step, a digest. `PrefixCache.bump` moves it."""
    layout: str
    """How arrays lie in a page: shards, order of layers and heads."""
    kv_dtype: str
    state_dtype: str
    positions: str = "nope"
    """How positions enter keys and queries; K3 has none."""
    numerics: str = ""
    """What decides the bits: chunk size, implementation of the ops."""
    salt: str = ""
    """Separates tenants that must not see each other's prefixes."""

    def __post_init__(self):
        for name, value in self.fields():
            if not value and name not in ("numerics", "salt"):
                raise ValueError(
                    f"cache key field {name!r} is empty: everything that a cached state depends on has a name"
                )

    def fields(self) -> list[tuple[str, str]]:
        return [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]

    def root(self, unit: int) -> bytes:
        """The hash at boundary 0 of chains with blocks of `unit` tokens."""
        return _digest("key", *(part.encode() for pair in self.fields() for part in pair), unit.to_bytes(8, "little"))

    def differing(self, other: CacheKey) -> tuple[str, ...]:
        """Names of the fields in which two keys differ."""
        return tuple(name for (name, a), (_, b) in zip(self.fields(), other.fields(), strict=True) if a != b)


class Chain:
    """Hashes of one request's prefixes at every multiple of `unit` tokens: each token is hashed once, as it comes."""

    def __init__(self, key: CacheKey, unit: int, tokens: Tokens = ()):
        if unit < 1:
            raise ValueError(f"hash unit {unit}: must be at least 1 token")
        self.key, self.unit = key, unit
        self._hashes = [key.root(unit)]
        self._rest = np.empty(0, np.int64)
        self.first = self._rest
        """Tokens of the first block: enough to see whether another key knows this prefix."""
        self.extend(tokens)

    def __len__(self) -> int:
        """Tokens known."""
        return (len(self._hashes) - 1) * self.unit + len(self._rest)

    @property
    def aligned(self) -> int:
        """The last boundary that has a hash."""
        return (len(self._hashes) - 1) * self.unit

    def extend(self, tokens: Tokens) -> None:
        """Appends tokens. Raises ValueError unless they are integers from 0 on."""
        new = np.asarray(tokens)
        if new.size and (new.dtype.kind not in "iu" or new.ndim != 1 or new.min() < 0):
            raise ValueError(f"tokens must be a flat sequence of integers >= 0, got {new.dtype} {new.shape} {new[:4]}")
        rest = np.concatenate([self._rest, new.astype(np.int64)])
        whole = len(rest) // self.unit
        for block in rest[: whole * self.unit].reshape(whole, self.unit):
            self._hashes.append(block_hash(self._hashes[-1], block))
        if len(self._hashes) > 1 and not len(self.first):
            self.first = rest[: self.unit]
        self._rest = rest[whole * self.unit :]

    def at(self, boundary: int) -> bytes:
        """The hash that names tokens[0:boundary]. Raises ValueError where there is none."""
        if boundary % self.unit or not 0 <= boundary <= self.aligned:
            raise ValueError(
                f"no hash at {boundary} tokens: the chain has one at every multiple of {self.unit} up to {self.aligned}"
            )
        return self._hashes[boundary // self.unit]

    def between(self, start: int, end: int) -> list[bytes]:
        """The hashes at the boundaries in (start, end]."""
        return self._hashes[start // self.unit + 1 : end // self.unit + 1]

    def copy(self) -> Chain:
        """A chain that goes its own way from here."""
        new = Chain(self.key, self.unit)
        new._hashes, new._rest, new.first = list(self._hashes), self._rest, self.first
        return new


def block_hash(parent: bytes, tokens: np.ndarray) -> bytes:
    """The hash after one more block of tokens."""
    return _digest("block", parent, np.ascontiguousarray(tokens, "<i8").tobytes())


def _digest(tag: str, *parts: bytes) -> bytes:
    return blake3(b"".join(len(part).to_bytes(8, "little") + part for part in (tag.encode(), *parts))).digest()
