"""Which ids of tables on the host were touched, whatever rows of the devices they had then.

A batch has rows on the devices. Whose rows they were when it was placed follows from what the maps
did since. With row 4 given to id 70 at step 3 and to id 90 at step 5:

    a batch of step 3 or 4 touches id 70     also if it is recorded after step 5
    a batch of step 5      touches id 90     also if it is recorded before step 5 is admitted

Input: physical rows of batches, what maps did. Output: ids touched after a step.
"""

from __future__ import annotations

import collections
from typing import NamedTuple

import numpy as np

from tpu_embed._checks import message
from tpu_embed.core.layout import Layout, Stack
from tpu_embed.touched.marks import IdMarks
from tpu_embed.vocabulary import Moves

_REMEMBERED = 64
"""How many admitted batches later a batch may still be recorded."""


class _Owners(NamedTuple):
    """Whom the rows of a stack belonged to before a step: physical rows, and ids, int64 `[n]`."""

    rows: np.ndarray
    ids: np.ndarray


class _Waiting(NamedTuple):
    """Rows of a batch that is recorded before it is admitted."""

    stack: Stack
    rows: np.ndarray
    step: int


class HostedMarks:
    """The last update of the ids of all tables on the host.

    Args:
      layout: the engine's layout.

    Attributes:
      marks: by table.
    """

    def __init__(self, layout: Layout) -> None:
        self._stacks = [stack for stack in layout.stacks if stack.is_on_host]
        self.marks = {table.name: IdMarks() for _, table in layout.on_host}
        # By stack: the id that each physical row belongs to, -1 for none, and the number of its
        # table in the stack; both [S * R].
        self._ids = {s.name: np.full(s.physical_rows, -1, np.int64) for s in self._stacks}
        self._tables = {s.name: _tables_of_rows(s) for s in self._stacks}
        self._before: collections.deque[tuple[int, dict[str, _Owners]]] = collections.deque(
            maxlen=_REMEMBERED
        )
        self._waiting: dict[int, list[_Waiting]] = {}
        self._noted = self._forgotten = 0

    def begin(self, step: int, held: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
        """Begin, or begin anew, at a step of the maps.

        Args:
          step: that was admitted.
          held: by table, the ids on the devices, uint64 `[n]`, and their rows, int64 `[n]`.
        """
        self._noted = self._forgotten = step
        self._before.clear()
        self._waiting.clear()
        for stack in self._stacks:
            self._ids[stack.name].fill(-1)
            for table in stack.tables:
                ids, rows = held[table.name]
                at = stack.physical(rows.astype(stack.index_dtype), table)
                self._ids[stack.name][at] = ids.view(np.int64)

    def touch(self, stack: Stack, rows: np.ndarray, batch_step: int, step: int) -> None:
        """Mark the ids of physical rows of a batch.

        Args:
          stack: the stack.
          rows: int `[n]`, of which some may be equal.
          batch_step: the step of the maps that the batch is, or whose rows it has.
          step: of its update.

        Raises:
          ValueError: the batch was admitted too long ago.
        """
        if not rows.size:
            return
        if batch_step < self._forgotten:
            expected = f"a batch at most {_REMEMBERED} admitted batches old"
            got = f"one of step {batch_step}, {self._noted - batch_step} before the newest"
            remedy = "record each batch when it is placed or updated"
            raise ValueError(message("record", expected=expected, got=got, remedy=remedy))
        distinct = np.unique(rows)
        if batch_step > self._noted:
            waiting = self._waiting.setdefault(batch_step, [])
            waiting.append(_Waiting(stack, distinct, step))
            return
        ids = self._ids[stack.name][distinct]
        for at, owners in reversed(self._before):
            if at <= batch_step:
                break
            before = owners.get(stack.name)
            if before is not None:
                found = np.minimum(np.searchsorted(before.rows, distinct), before.rows.size - 1)
                same = before.rows[found] == distinct
                ids[same] = before.ids[found[same]]
        self._mark(stack, distinct, ids, step)

    def _mark(self, stack: Stack, rows: np.ndarray, ids: np.ndarray, step: int) -> None:
        numbers = self._tables[stack.name][rows]
        for t, table in enumerate(stack.tables):
            mine = ids[(numbers == t) & (ids >= 0)]
            self.marks[table.name].mark(mine.view(np.uint64), step)

    def note(self, step: int, moves: Moves) -> None:
        """Note which rows the training batch of a step gave to other ids."""
        before = {}
        for stack in self._stacks:
            changed = []
            for table in stack.tables:
                taken = moves.taken[table.name]
                for rows in (taken.evicted_rows, taken.new_rows):
                    changed.append(stack.physical(rows.astype(stack.index_dtype), table))
            ids, rows = self._ids[stack.name], np.unique(np.concatenate(changed))
            if rows.size:
                before[stack.name] = _Owners(rows, ids[rows])
            # Pairs of (evicted, new) rows by table; what is evicted may be given at once.
            for table, evicted, new in zip(stack.tables, changed[::2], changed[1::2], strict=True):
                ids[evicted] = -1
                ids[new] = moves.taken[table.name].new_keys.view(np.int64)
        if len(self._before) == _REMEMBERED:
            self._forgotten = self._before[0][0]
        self._before.append((step, before))
        self._noted = step
        for stack, rows, updated in self._waiting.pop(step, []):
            self._mark(stack, rows, self._ids[stack.name][rows], updated)

    def undo(self, step: int) -> None:
        """Forget what was recorded of batches after a step, which were never admitted."""
        self._waiting = {at: some for at, some in self._waiting.items() if at <= step}


def _tables_of_rows(stack: Stack) -> np.ndarray:
    """Return which table of a stack each physical row belongs to, int32 `[S * R]`."""
    numbers = np.full(stack.physical_rows, -1, np.int32)
    for t, table in enumerate(stack.tables):
        rows = np.arange(table.vocabulary_size, dtype=stack.index_dtype)
        numbers[stack.physical(rows, table)] = t
    return numbers
