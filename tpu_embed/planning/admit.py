"""Compile what `admit` runs for tables on the host: which memory do rows that move take?

Two programs, for each stack of such tables:

    write     draws rows that were never seen before, and writes them in their places
    exchange  copies the displaced rows, and writes those from home in their places

Input: an engine, the shapes of its state, rows by table. Output: an `AdmitProgram` for each.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.layout import Parcels, Stack
from tpu_embed.core.state import NewRowWriter, RowMover, Sent, StackShard, TableState, row_fields
from tpu_embed.planning.host import HostPlan
from tpu_embed.planning.costs import readable


@dataclasses.dataclass(frozen=True)
class AdmitProgram:
    """The compiler's figures for a program of `admit`.

    Attributes:
      name: "write" or "exchange".
      tables: the tables on the host that it is for, which share a stack.
      rows: the rows that each device has room for, padding included.
      seconds: how long compiling took.
      arguments: bytes per device of tables and slots of the stack, and of the rows.
      results: bytes per device of results that are not updated in place.
      temporaries: bytes per device of everything else.
      aliased: bytes per device of arguments that are updated in place.
    """

    name: str
    tables: tuple[str, ...]
    rows: int
    seconds: float
    arguments: int
    results: int
    temporaries: int
    aliased: int

    def explain(self) -> str:
        """Return the figures as a line of text."""
        sizes = self.arguments, self.results, self.temporaries
        words = zip(map(readable, sizes), ("arguments", "results", "temporaries"), strict=True)
        parts = ", ".join(f"{size} {what}" for size, what in words)
        return f"  admit {self.name:8} {self.rows:>11,} rows a device: {parts}"


def compile_admit(
    engine: EmbeddingEngine, state: TableState, plans: Mapping[str, HostPlan]
) -> tuple[AdmitProgram, ...]:
    """Compile the programs of `admit` that move rows of tables on the host.

    Args:
      engine: an engine on a mesh whose devices need not exist.
      state: the shapes and shardings of its state.
      plans: of the tables on the host. "write" is compiled for a first batch, in which all rows are
        new; "exchange" for as many rows as a step moves, or for those of a whole batch where that
        is not known.
    """
    found = []
    for stack in dict.fromkeys(stack for stack, _ in engine.layout.on_host):
        found += [_compiled(*one, stack) for one in _lowered(engine, state, stack, plans)]
    return tuple(found)


def _lowered(
    engine: EmbeddingEngine, state: TableState, stack: Stack, plans: Mapping[str, HostPlan]
) -> Iterator[tuple[str, int, Any]]:
    """Yield the name of each program of a stack, its rows on a device, and the lowered program."""
    held = StackShard(state.tables[stack.name], state.slots[stack.name])
    mine = [(table.name, plans[table.name]) for table in stack.tables]
    mover, writer = RowMover(engine.layout), NewRowWriter(engine.layout)
    sharding = engine.layout.axes.sharding(stack.shard_axes)

    def array(*shape: int, dtype: Any = np.uint32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((stack.num_shards, *shape), dtype, sharding=sharding)

    first = _room(stack, {name: one.batch_rows for name, one in mine})
    yield "write", first, writer.lower(stack, held, state.vocabulary, array(5, first))
    # A row leaves for each that comes, from home or drawn.
    moved = _room(stack, {name: _known(one.rows_out, one) for name, one in mine})
    fields = row_fields(stack).items()
    values: dict[str, Any] = {n: array(moved, *one.shape, dtype=one.dtype) for n, one in fields}
    places: Any = array(2, moved)
    sent = Sent(places, places, values)
    yield "exchange", moved, mover.lower(stack, held, sent)


def _known(rows: int | None, plan: HostPlan) -> int:
    return plan.batch_rows if rows is None else rows


def _room(stack: Stack, rows: Mapping[str, int]) -> int:
    """Return the rows that a device's parcel has room for, if rows are even over the shards."""
    sizes = {table.name: table.vocabulary_size for table in stack.tables}
    spread = {n: np.arange(min(count, sizes[n]), dtype=np.int64) for n, count in rows.items()}
    return Parcels(stack, spread).size


def _compiled(name: str, rows: int, lowered: Any, stack: Stack) -> AdmitProgram:
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds, memory = time.perf_counter() - start, compiled.memory_analysis()
    assert memory is not None, "libtpu analyses memory"
    return AdmitProgram(
        name=name,
        tables=tuple(table.name for table in stack.tables),
        rows=rows,
        seconds=seconds,
        arguments=memory.argument_size_in_bytes,
        results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
    )
