"""Which ids of tables on the host were touched, whatever rows of the devices they had then.

A batch has rows on the devices. Whose rows they were when it was placed follows from what the maps
did since. With row 4 given to id 70 at step 3 and to id 90 at step 5:

    a batch of step 3 or 4 touches id 70     also if it is recorded after step 5
    a batch of step 5      touches id 90     also if it is recorded before step 5 is admitted

Input: physical rows of batches, what maps did. Output: ids touched after a step.
"""

from __future__ import annotations

import collections
import itertools

import numpy as np

from tpu_embed._checks import message
from tpu_embed.core.layout import Layout, Stack
from tpu_embed.touched.marks import IdMarks
from tpu_embed.vocabulary import Moves, Vocabularies

_REMEMBERED = 64
"""How many admitted batches later a batch may still be recorded."""


class HostedMarks:
    """The last update of the ids of all tables on the host.

    Args:
      layout: the engine's layout.
      maps: its maps; None without living vocabularies and tables on the host.

    Attributes:
      marks: by table.
    """

    def __init__(self, layout: Layout, maps: Vocabularies | None) -> None:
        self._stacks = [stack for stack in layout.stacks if stack.is_on_host]
        self.marks = {table.name: IdMarks() for _, table in layout.on_host}
        # By stack: the id that each physical row belongs to, -1 for none, [S * R].
        self._ids = {s.name: np.full(s.physical_rows, -1, np.int64) for s in self._stacks}
        # Of each of the last batches, by stack: the physical rows that it gave to other ids, and
        # whom they belonged to before.
        self._before: collections.deque[dict[str, tuple[np.ndarray, np.ndarray]]]
        self._before = collections.deque(maxlen=_REMEMBERED)
        # By step of the maps: rows of batches that are recorded before they are admitted.
        self._waiting: dict[int, list[tuple[Stack, np.ndarray, int]]] = {}
        self._noted = 0
        if maps is not None:
            self._noted = maps.admitted
            for stack, table in layout.on_host:
                held = maps.held(table.name)
                at = stack.physical(held.rows.astype(stack.index_dtype), table)
                self._ids[stack.name][at] = held.keys.view(np.int64)

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
        if batch_step < self._noted - len(self._before):
            expected = f"a batch at most {_REMEMBERED} admitted batches old"
            got = f"one of step {batch_step}, {self._noted - batch_step} before the newest"
            remedy = "record each batch when it is placed or updated"
            raise ValueError(message("record", expected=expected, got=got, remedy=remedy))
        distinct = np.unique(rows)
        if batch_step > self._noted:
            self._waiting.setdefault(batch_step, []).append((stack, distinct, step))
            return
        ids = self._ids[stack.name][distinct]
        for owners in itertools.islice(reversed(self._before), self._noted - batch_step):
            if stack.name in owners:
                given, before = owners[stack.name]
                found = np.minimum(np.searchsorted(given, distinct), given.size - 1)
                same = given[found] == distinct
                ids[same] = before[found[same]]
        self._mark(stack, distinct, ids, step)

    def _mark(self, stack: Stack, rows: np.ndarray, ids: np.ndarray, step: int) -> None:
        local = rows % stack.num_rows  # on its shard, where each table has a range
        for table in stack.tables:
            mine = (local >= table.offset) & (local < table.offset + table.rows_per_shard)
            self.marks[table.name].mark(ids[mine & (ids >= 0)].view(np.uint64), step)

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
                before[stack.name] = rows, ids[rows]
            # Pairs of (evicted, new) rows by table; what is evicted may be given at once.
            for table, evicted, new in zip(stack.tables, changed[::2], changed[1::2], strict=True):
                ids[evicted] = -1
                ids[new] = moves.taken[table.name].new_keys.view(np.int64)
        self._before.append(before)
        self._noted = step
        for stack, rows, updated in self._waiting.pop(step, []):
            self._mark(stack, rows, self._ids[stack.name][rows], updated)

    def undo(self, step: int) -> None:
        """Forget what was recorded of batches after a step, which were never admitted."""
        self._waiting = {at: some for at, some in self._waiting.items() if at <= step}
