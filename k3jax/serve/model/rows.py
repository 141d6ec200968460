"""A call's sequences as a list, checked and laid out as the arrays of `forward.Rows`.

R ranks, B rows of all ranks, T tokens, n pages of latents, G groups of KDA layers, m pages of a state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from k3jax.serve.model.forward import Rows
from k3jax.serve.model.pages import PageLayout


@dataclasses.dataclass(frozen=True)
class Row:
    """The next tokens of one sequence, and the pages that are its own or that it reads."""

    tokens: Sequence[int]
    start: int
    """Position of the first token."""
    latents: Sequence[int]
    """Pages of latents of positions from 0 on, this call's included; more may be given."""
    states: Sequence[Sequence[int]]
    """Of each group of KDA layers, the pages of its state: S(start), or at start 0 anything; afterwards S(end)."""
    writes: int | None = None
    """First position whose latents are written: None: all of this call's. Those of earlier tokens, which run again for the
    state alone, are in pages that others may read."""
    rank: int = 0
    """Whose part of the pool the pages are in, and who computes."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def blocks(start: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Tokens [start, end) of a prompt, cut at absolute multiples of the block size. ValueError if start is none."""
    if start % size:
        raise ValueError(f"start={start} is no multiple of the block of {size} tokens: a prefill begins at one")
    for first in range(start, end, size):
        yield first, min(first + size, end)


def arrange(
    layout: PageLayout, rows: Sequence[Row], *, T: int, per_rank: int, ranks: int, width: int, pool_pages: int
) -> tuple[Rows, np.ndarray]:
    """The arrays, with `per_rank` rows for each rank and `width` pages of latents, and where in the batch each row is.

    Raises ValueError for a row that does not fit the model, the pool or the shapes, and for pages that two would write.
    """
    B, at = per_rank * ranks, np.zeros(len(rows), np.int32)
    tokens_BT, latents_Bn = np.full((B, T), -1, np.int32), np.full((B, width), -1, np.int32)
    starts_B, writes_B = np.zeros((2, B), np.int32)
    states_BGm = np.full((B, layout.groups, layout.pages_per_state), -1, np.int32)
    filled: list[int] = [0] * ranks
    written: dict[tuple[int, int], int] = {}
    for i, row in enumerate(rows):
        _check(layout, row, f"row {i}", T=T, ranks=ranks, width=width, pool_pages=pool_pages)
        if filled[row.rank] == per_rank:
            raise ValueError(f"row {i}: rank {row.rank} has its {per_rank} rows already")
        at[i] = row.rank * per_rank + filled[row.rank]
        filled[row.rank] += 1
        writes = row.start if row.writes is None else row.writes
        used = row.latents[: layout.pages_for(row.end)]
        changed = [] if writes >= row.end else used[max(row.start, writes) // layout.tokens :]
        for page in (*changed, *(page for group in row.states for page in group)):
            if (row.rank, page) in written:
                other = written[row.rank, page]
                raise ValueError(f"row {i}: page {page} of rank {row.rank} is written by row {other} too")
            written[row.rank, page] = i
        tokens_BT[at[i], : len(row.tokens)] = row.tokens
        starts_B[at[i]], writes_B[at[i]] = row.start, writes
        latents_Bn[at[i], : len(used)] = used
        states_BGm[at[i]] = row.states
    return Rows(*map(jnp.asarray, (tokens_BT, starts_B, writes_B, latents_Bn, states_BGm))), at


def _check(layout: PageLayout, row: Row, what: str, *, T: int, ranks: int, width: int, pool_pages: int) -> None:
    vocabulary = layout.config.vocab_size
    if not 1 <= len(row.tokens) <= T:
        raise ValueError(f"{what} has {len(row.tokens)} tokens; a call takes 1 to {T}")
    if not all(0 <= token < vocabulary for token in row.tokens):
        raise ValueError(f"{what}: tokens must be ids from 0 to {vocabulary - 1}")
    if row.start < 0:
        raise ValueError(f"{what}: start={row.start} is before the first token")
    if not 0 <= row.rank < ranks:
        raise ValueError(f"{what}: rank={row.rank}; there are {ranks}")
    needed = layout.pages_for(row.end)
    if not needed <= min(len(row.latents), width):
        raise ValueError(
            f"{what}: {row.end} tokens need {needed} pages of {layout.tokens}; got {len(row.latents)}, room for {width}"
        )
    shape = layout.groups, layout.pages_per_state
    if len(row.states) != shape[0] or any(len(group) != shape[1] for group in row.states):
        got = [len(group) for group in row.states]
        raise ValueError(f"{what}: states need {shape[0]} groups of {shape[1]} pages; got groups of {got}")
    pages = (*row.latents[:needed], *(page for group in row.states for page in group))
    if not all(0 <= page < pool_pages for page in pages):
        raise ValueError(
            f"{what}: pages must be from 0 to {pool_pages - 1}, those of the pool of its rank; got {pages}"
        )
