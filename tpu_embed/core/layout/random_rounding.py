"""What a stack needs whose rows are rounded at random: slots of its own, and the rows' numbers.

Random bits depend on a seed, which the state must keep, and on which row of which table a local row
is (`kernels/stochastic.py`). Of a table without a map on the host, the row's place tells it. Of a
dynamic vocabulary, or a table on the host, the key or id of a row takes the place of its number, so
the state keeps it by row. Both are slots of the stack: so they are saved, moved and sharded as
slots are.

Input: a stack. Output: its slots, and the places of its rows.
"""

from __future__ import annotations

import zlib

import numpy as np

from tpu_embed._checks import refuse
from tpu_embed.core.layout.stacks import Stack
from tpu_embed.kernels.stochastic import RowPlaces
from tpu_embed.optimizers import SlotShape, TableOptimizer

SEED_SLOT = "rounding_seed"
"""The slot that all rows share: the seed, uint32 `[]`, equal in all stacks of a state."""

NUMBERS_SLOT = "rounding_numbers"
"""The slot with what stands for each row's key or id in the hash, uint32 `[V]`."""

ROUNDING_SLOTS = (SEED_SLOT, NUMBERS_SLOT)
"""The slots of a stack that are not its optimizer's."""


def rounding_slots(stack: Stack) -> dict[str, SlotShape]:
    """Return the slots that a stack has for rounding at random; none if it does not."""
    number = np.dtype(np.uint32)
    slots = {}
    if stack.rounds_at_random:
        slots[SEED_SLOT] = SlotShape((), number, per_row=False)
    if stack.keeps_numbers:
        slots[NUMBERS_SLOT] = SlotShape((), number)
    return slots


def table_crcs(stack: Stack) -> np.ndarray:
    """Return the CRC-32 of the name of each table, uint32 `[T]`."""
    return np.array([zlib.crc32(table.name.encode()) for table in stack.tables], np.uint32)


def row_places(stack: Stack) -> RowPlaces:
    """Return which rows of which tables the local rows of a shard are."""
    # The rows of 2 shards are 0 2 4 and 1 3 5 under MOD: 1 from shard to shard, and 2 from row to
    # row. Under DIV they are 0 1 2 and 3 4 5, so 3 and 1.
    sizes = [table.rows_per_shard for table in stack.tables]
    shard_steps = tuple(stack.logical_in(1, 0, size) for size in sizes)
    firsts = tuple(table.offset for table in stack.tables)
    return RowPlaces(firsts, shard_steps, stack.logical_in(0, 1, sizes[0]))


def check_slot_names(name: str, optimizer: TableOptimizer, dim: int) -> None:
    """Refuse an optimizer for a table that is rounded at random if its slots have the same names.

    Raises:
      ValueError: a slot has one of the names above.
    """
    taken = sorted(set(optimizer.slot_shapes(dim, np.float32)) & set(ROUNDING_SLOTS))
    if taken:
        refuse(
            f'table {name!r}: slots of an optimizer with rounding="stochastic"',
            expected=f"other names than {', '.join(ROUNDING_SLOTS)}",
            got=f"{taken}",
            remedy="give these slots other names",
        )
