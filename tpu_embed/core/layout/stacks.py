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
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import message
from tpu_embed.config import QuantizationConfig, TableConfig
from tpu_embed.core.layout.rounding import round_up
from tpu_embed.core.layout.stack_names import stack_name
from tpu_embed.kernels.formats import PACKED_ROWS, Packing, RowFormat
from tpu_embed.optimizers import TableOptimizer

INT32_ROWS = 2**31 - 1
"""Physical rows a stack may have before its row numbers need 64 bits."""


@dataclasses.dataclass(frozen=True)
class TableSlice:
    """One logical table inside its stack.

    Attributes:
      name: the table's name.
      vocabulary_size: V, logical rows.
      offset: the table's first local row, the same on every shard.
      rows_per_shard: ceil(V / S) local rows.
      initializer: what fills the rows, resolved (never None).
    """

    name: str
    vocabulary_size: int
    offset: int
    rows_per_shard: int
    initializer: Any = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Stack:
    """One stack: tables of one dim, dtype, optimizer and placement in one array `[S * R, D]`.

    Attributes:
      name: key of the stack in `TableState`; it says what the rows are (`stack_names.py`).
      tables: its tables, in table order.
      dim: D.
      dtype: the logical dtype of the stored rows.
      optimizer: the update rule; None when the tables are looked up only.
      placement: "mod", "div" or "replicated".
      shard_axes: mesh axes that split the rows, in mesh order; () when replicated.
      num_shards: S.
      num_rows: R, local rows of one shard.
      quantization: how looked-up rows are quantized, or None.
      packing: what its rows are packed for.
    """

    name: str
    tables: tuple[TableSlice, ...]
    dim: int
    dtype: str
    optimizer: TableOptimizer | None
    placement: str
    shard_axes: tuple[str, ...]
    num_shards: int
    num_rows: int
    quantization: QuantizationConfig | None
    packing: Packing = "none"

    @property
    def label(self) -> str:
        """The first part of its name, for profiles: XLA cuts names of operations at an @."""
        return self.name.partition("@")[0]

    @property
    def row_format(self) -> RowFormat:
        """How its rows lie in its array."""
        return RowFormat((self.dim,), jnp.dtype(self.dtype), self.packing)

    @property
    def sums_format(self) -> RowFormat:
        """How sums of gradients of its rows lie when they are sent."""
        return RowFormat((self.dim,), self.compute_dtype, self.packing)

    @property
    def physical_rows(self) -> int:
        """S * R."""
        return self.num_shards * self.num_rows

    @property
    def index_dtype(self) -> np.dtype:
        """int32, or int64 for a stack of more than 2^31 - 1 physical rows."""
        return np.dtype(np.int32 if self.physical_rows <= INT32_ROWS else np.int64)

    @property
    def compute_dtype(self) -> np.dtype:
        """The dtype of activations, gradients, slots and rule arithmetic."""
        return np.dtype(np.float64 if self.dtype == "float64" else np.float32)

    def physical(self, ids: Any, table: TableSlice) -> Any:
        """Return the physical rows of valid logical ids (NumPy or jax integers of any shape).

        Args:
          ids: integers in [0, V); a value outside gives a meaningless row that the caller masks.
          table: the table.
        """
        return self.physical_in(ids, table.offset, table.rows_per_shard)

    def physical_in(self, ids: Any, offset: Any, rows_per_shard: Any) -> Any:
        """Return `physical(ids, table)` of tables that may differ from id to id.

        Args:
          ids: as for `physical`.
          offset: of the table; or of each id's, integers that broadcast to the ids' shape.
          rows_per_shard: likewise.
        """
        if self.num_shards == 1:
            return ids + offset
        if self.placement == "div":
            shard = ids // rows_per_shard
            return shard * self.num_rows + offset + (ids - shard * rows_per_shard)
        local = ids // self.num_shards
        return (ids - local * self.num_shards) * self.num_rows + offset + local


@dataclasses.dataclass(frozen=True)
class ResolvedTable:
    """A declared table with nothing left open.

    Attributes:
      name: unique.
      config: its declaration.
      optimizer: its update rule, None for a table that is never updated.
      initializer: what fills its rows.
      shard_axes: mesh axes that split its rows, in mesh order.
      shards: S, the product of their sizes.
    """

    name: str
    config: TableConfig
    optimizer: TableOptimizer | None
    initializer: Any
    shard_axes: tuple[str, ...]
    shards: int

    @property
    def rows_per_shard(self) -> int:
        """Local rows on one shard, ceil(V / S)."""
        return -(-self.config.vocabulary_size // self.shards)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What tables of one stack have in common."""
        config, optimizer = self.config, self.optimizer
        rule = None if optimizer is None else (type(optimizer), optimizer)
        form = (config.dim, config.dtype, config.placement, config.quantization_config)
        return (*form, self.shard_axes, rule)


def make_stacks(
    tables: Sequence[ResolvedTable], *, stack_tables: bool = True, packing: Packing = "none"
) -> tuple[Stack, ...]:
    """Stack the tables and lay every stack out over the mesh.

    Args:
      tables: in table order.
      stack_tables: False gives every table a stack of its own.
      packing: what their rows are packed for.

    Returns:
      The stacks, in order of their first table; none has more rows than int32 can number, unless
      a single table has.

    Raises:
      ValueError: a table has more, and x64 is off.
    """
    stacks: dict[Any, list[ResolvedTable]] = {}
    for table in tables:
        key: Any = (table.kind, None if stack_tables else table.name)
        while key in stacks and _too_many_rows([*stacks[key], table], packing):
            key = (key, "next")
        stacks.setdefault(key, []).append(table)
    return tuple(_make_stack(members, packing) for members in stacks.values())


def _too_many_rows(members: Sequence[ResolvedTable], packing: Packing) -> bool:
    return _rows(members, packing) * members[0].shards > INT32_ROWS


def _rows(members: Sequence[ResolvedTable], packing: Packing) -> int:
    """Return R of a stack."""
    rows = sum(table.rows_per_shard for table in members)
    return rows if packing == "none" else round_up(rows, PACKED_ROWS)


def _make_stack(members: Sequence[ResolvedTable], packing: Packing) -> Stack:
    if _too_many_rows(members, packing) and not jax.config.read("jax_enable_x64"):
        what, remedy = f"table {members[0].name!r}", "set jax_enable_x64, or split the table"
        expected = f"at most {INT32_ROWS} rows, padding included, while x64 is off"
        got = f"{members[0].config.vocabulary_size}"
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))
    slices, offset = [], 0
    for table in members:
        size, own = table.config.vocabulary_size, table.rows_per_shard
        slices.append(TableSlice(table.name, size, offset, own, table.initializer))
        offset += own
    first, rows = members[0], _rows(members, packing)
    return Stack(
        name=stack_name(
            [(table.name, table.vocabulary_size) for table in slices],
            placement=first.config.placement,
            shards=first.shards,
            rows=rows,
            kind=(first.config.dim, first.config.dtype, packing),
        ),
        tables=tuple(slices),
        dim=first.config.dim,
        dtype=first.config.dtype,
        optimizer=first.optimizer,
        placement=first.config.placement,
        shard_axes=first.shard_axes,
        num_shards=first.shards,
        num_rows=rows,
        quantization=first.config.quantization_config,
        packing=packing,
    )
