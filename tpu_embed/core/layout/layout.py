"""Where every logical row lives: stacks of tables, MOD / DIV / replicated placement, padding.

Enters: the resolved tables, in table order. Leaves: one `Stack` a stack, computed once and never
written back into the configs. Called by `resolve.py` when an engine is made; everything after it
only reads the `Layout`.

A stack is one physical array `[S * R, D]`, sharded over its first axis in S contiguous blocks of R
rows; for a TPU its rows are packed (`kernels/formats.py`). Row r of a table whose
first local row is `offset`, and which owns rows_per_shard = ceil(V / S) local rows, lives at

    MOD:  (r mod S) * R + offset + r div S
    DIV:  (r div rows_per_shard) * R + offset + r mod rows_per_shard

A replicated table is a MOD table with S = 1.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib

from tpu_embed._checks import message
from tpu_embed.config import FeatureConfig
from tpu_embed.core.layout.mesh import MeshAxes
from tpu_embed.core.layout.stacks import Stack, TableSlice


@dataclasses.dataclass(frozen=True)
class FeatureLayout:
    """One feature and where its table lives.

    Attributes:
      path: its place in the feature structure, for messages.
      config: its declaration.
      table: its table's slice of the stack.
      stack: number of the stack.
    """

    path: str
    config: FeatureConfig
    table: TableSlice
    stack: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """Everything static about an engine: mesh, stacks, features.

    Attributes:
      axes: the mesh and its roles.
      stacks: the stacks.
      features: the features, in flattening order.
      sum_blocks: G, the number of blocks a global batch is summed in.
    """

    axes: MeshAxes
    stacks: tuple[Stack, ...]
    features: tuple[FeatureLayout, ...]
    sum_blocks: int

    @functools.cached_property
    def row_numbers(self) -> int:
        """A checksum of what the row numbers in a batch mean: alike where they mean the same."""
        features = [(f.path, self.stacks[f.stack].name, f.table.name) for f in self.features]
        return zlib.crc32(repr(features).encode())

    def features_of(self, stack: int) -> tuple[int, ...]:
        """Return the numbers of the features that look up tables of a stack, ascending."""
        return tuple(i for i, feature in enumerate(self.features) if feature.stack == stack)

    def blocks(self, batch: int) -> int:
        """Return G of a batch; example e is in block e · G // B.

        No fewer than the replicas, no more than the examples. A device's examples are whole blocks
        wherever the number of replicas divides G, also where G does not divide B.
        """
        return min(max(self.sum_blocks, self.axes.replicas), batch)

    def blocks_per_device(self, batch: int) -> int:
        """Return the largest number of blocks that one device's examples fall into."""
        local, blocks = batch // self.axes.replicas, self.blocks(batch)
        firsts = range(0, batch, local)
        return max((e + local - 1) * blocks // batch - e * blocks // batch + 1 for e in firsts)

    def table(self, name: str) -> tuple[Stack, TableSlice]:
        """Return the stack and the slice of a table.

        Raises:
          ValueError: no table has this name.
        """
        for stack in self.stacks:
            for table in stack.tables:
                if table.name == name:
                    return stack, table
        names = sorted(table.name for stack in self.stacks for table in stack.tables)
        raise ValueError(message("table", expected=f"one of {names}", got=repr(name)))
