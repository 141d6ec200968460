"""Where each layer lives: global layers to uniform chunks of slots, and between stacked and per-layer parameters.

All ranks run one program, so every chunk has the same slots: J groups of the model's pattern (K,K,K,M), P slots a group.
Stacked parameters are one tree a slot position p, leaves [S, V, J, ...]: stage, virtual chunk, group in the chunk.

S stages, V virtual chunks a stage, J groups a chunk, P slots a group. Chunk c holds the groups c·J … c·J + J − 1; it is the
virtual chunk c // S of the stage that the schedule's placement gives it.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import numpy as np

from k3jax.configs import ModelConfig
from k3jax.parallel.schedules.placement import Placement, stage_of

Flag = int | jax.Array


@dataclasses.dataclass(frozen=True)
class StackLayout:
    """The layers of a model on `stages` ranks with `virtual` chunks each.

    Raises ValueError if there are more stages than groups of layers, or more virtual chunks than groups.
    """

    config: ModelConfig
    stages: int = 1
    virtual: int = 1
    placement: Placement = "ring"

    def __post_init__(self):
        if self.stages > self.num_groups:
            c = self.config
            raise ValueError(
                f"pipe={self.stages} is more stages than {c.name} has groups of layers: {c.num_layers} layers in groups of "
                f"{c.pattern} make {self.num_groups}; use pipe<={self.num_groups} or more layers"
            )
        if self.virtual > self.num_groups:
            raise ValueError(
                f"virtual={self.virtual} chunks a stage is more than the model's {self.num_groups} groups of layers: most "
                f"would be empty"
            )

    @functools.cached_property
    def slots(self) -> np.ndarray:
        """Global layer in each slot, −1 for an inactive one; [groups, P]. Layers keep their order."""
        pattern = self.config.pattern
        filled: list[int] = []
        for layer, kind in enumerate(self.config.layer_kinds):
            while pattern[len(filled) % len(pattern)] != kind:
                filled.append(-1)
            filled.append(layer)
        filled += [-1] * (-len(filled) % len(pattern))
        return np.array(filled).reshape(-1, len(pattern))

    @property
    def num_groups(self) -> int:
        return len(self.slots)

    @property
    def num_chunks(self) -> int:
        return self.stages * self.virtual

    @property
    def groups_per_chunk(self) -> int:
        return math.ceil(self.num_groups / self.num_chunks)

    @property
    def num_inactive(self) -> int:
        """Slots that hold no layer: computed and discarded."""
        return int((self.layer_table < 0).sum())

    @functools.cached_property
    def layer_table(self) -> np.ndarray:
        """Global layer of every slot, −1 for inactive; [S, V, J, P]."""
        J, P = self.groups_per_chunk, len(self.config.pattern)
        padded = np.full((self.num_chunks * J, P), -1)
        padded[: self.num_groups] = self.slots
        by_chunk = padded.reshape(self.num_chunks, J, P)
        place = [(stage_of(c, self.stages, self.placement), c // self.stages) for c in range(self.num_chunks)]
        table = np.empty((self.stages, self.virtual, J, P), by_chunk.dtype)
        table[tuple(zip(*place, strict=True))] = by_chunk
        return table

    @functools.cached_property
    def flag_tables(self) -> dict[str, np.ndarray]:
        """What each slot does, as integers; every table is [S, V, J, P].

        active: holds a layer. dense: 1 + index of its dense FFN, 0 for a mixture. starts: begins a residual block.
        attn_blocks, ffn_blocks: residual blocks that exist at its attention and its FFN.
        """
        layer = self.layer_table
        active = (layer >= 0).astype(np.int32)
        dense = np.where((layer >= 0) & (layer < self.config.dense_layers), layer + 1, 0)
        size = self.config.attn_res_block
        if size is None:
            zero = np.zeros_like(active)
            return dict(active=active, dense=dense, starts=zero, attn_blocks=zero, ffn_blocks=zero)
        starts = (layer >= 0) & (layer % size == 0)
        attn_blocks = np.where(layer >= 0, -(-layer // size), 0)
        ffn_blocks = np.where(layer >= 0, layer // size + 1, 0)
        tables = dict(active=active, dense=dense, starts=starts, attn_blocks=attn_blocks, ffn_blocks=ffn_blocks)
        return {name: table.astype(np.int32) for name, table in tables.items()}

    @property
    def blocks_begun(self) -> tuple[int, ...]:
        """How many residual blocks begin in each chunk, in the order of chunks; () for plain residuals."""
        if self.config.attn_res_block is None:
            return ()
        begun = self.flag_tables["starts"].sum((2, 3))
        chunks = range(self.num_chunks)
        return tuple(int(begun[stage_of(c, self.stages, self.placement), c // self.stages]) for c in chunks)

    def flags(self, p: int, traced: dict[str, jax.Array]) -> dict[str, Flag]:
        """The flags of slot p in a group: Python integers where all groups agree, else the traced values.

        traced: the group's tables, [P] each. A static flag costs nothing: K3 starts blocks only at p = 0.
        """
        result: dict[str, Flag] = {}
        used = self.layer_table[..., p] >= 0
        for name, table in self.flag_tables.items():
            values = table[..., p]
            if name != "active":  # whatever an inactive slot makes is discarded
                values = values[used]
            static = values.size == 0 or (values == values.flat[0]).all()
            result[name] = (int(values.flat[0]) if values.size else 0) if static else traced[name][p]
        return result

    def stored_layers(self, kind: str, p: int = 0, moe: bool = False) -> np.ndarray:
        """Global layer of each stacked place of a parameter, −1 where there is none to keep.

        kind: "chunks" ([S, V, J], slot p of a group) or "dense" ([layers]). moe: of a mixture, which layers with a dense FFN
        do without.
        """
        dense = self.config.dense_layers
        if kind == "dense":
            return np.arange(dense)
        layers = self.layer_table[..., p]
        return np.where(layers >= (dense if moe else 0), layers, -1)

    def position(self, layer: int) -> tuple[int, int, int, int]:
        """(s, v, j, p) of a global layer."""
        s, v, j, p = (int(i[0]) for i in np.nonzero(self.layer_table == layer))
        return s, v, j, p
