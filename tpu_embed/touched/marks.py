"""The last step that touched each row: by place in the stacks on the devices, or by 64-bit id.

A step only ever grows, so rows touched after a step are those with a later mark.

Of tables on the host, ids are marked, whatever rows of the devices they had. A batch has rows on
the devices. Whose rows they were when it was placed follows from what the maps did since. With row
4 given to id 70 at step 3 and to id 90 at step 5:

    a batch of step 3 or 4 touches id 70     also if it is recorded after step 5
    a batch of step 5      touches id 90     also if it is recorded before step 5 is admitted

Input: rows, ids and steps; what maps did. Output: the rows or ids touched after a step.
"""

from __future__ import annotations

import collections
import itertools

import numpy as np

from tpu_embed._checks import message
from tpu_embed.core.layout import Layout, Stack, TableSlice
from tpu_embed.storage import HostRows, RowField
from tpu_embed.vocabulary import Moves, Vocabularies

NEVER = -1
"""The step of what was not touched since recording began."""


class PlaceMarks:
    """The last step of numbers below a bound, 4 bytes for each, from the first mark on.

    Args:
      size: the bound.

    Attributes:
      last: the last step of each number, int32 `[size]`; None before the first mark.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.last: np.ndarray | None = None

    def mark(self, numbers: np.ndarray, steps: int | np.ndarray) -> None:
        """Mark numbers, integers `[n]`, with one step, or each with its own, int32 `[n]`."""
        if numbers.size:
            if self.last is None:
                self.last = np.full(self._size, NEVER, _STEP)
            # A maximum, because threads may record a later step first.
            self.last[numbers] = np.maximum(self.last[numbers], steps)

    def after(self, step: int) -> np.ndarray:
        """Return the numbers whose mark is after a step, uint64 `[n]` ascending."""
        if self.last is None:
            return np.zeros(0, np.uint64)
        return np.flatnonzero(self.last > step).astype(np.uint64)

    def steps(self, numbers: np.ndarray) -> np.ndarray:
        """Return the step of each number, integers `[n]`, int32 `[n]`; `NEVER` without a mark."""
        if self.last is None:
            return np.full(numbers.size, NEVER, _STEP)
        return self.last[numbers]


class RowMarks:
    """The last step of every row of a table on the devices.

    Args:
      stack: the stack of the table.
      table: the table.
      places: the marks of the stack's physical rows.
    """

    def __init__(self, stack: Stack, table: TableSlice, places: PlaceMarks) -> None:
        self._stack, self._table, self._places = stack, table, places
        self._whole = NEVER  # the last step that touched all of its rows

    def mark(self, rows: np.ndarray, steps: int | np.ndarray) -> None:
        """Mark rows, integers `[n]`, with one step, or each with its own, int32 `[n]`."""
        self._places.mark(self._physical(rows), steps)

    def mark_all(self, step: int) -> None:
        """Mark all rows."""
        self._whole = max(step, self._whole)

    def after(self, step: int) -> np.ndarray:
        """Return the rows that were touched after a step, uint64 `[n]` ascending."""
        if self._whole > step:
            return np.arange(self._table.vocabulary_size, dtype=np.uint64)
        if self._places.last is None:
            return np.zeros(0, np.uint64)
        # The positions in the flattened view are logical row ids. Padding is never touched.
        last = self._stack.logical_view(self._places.last, self._table)
        return np.flatnonzero(last > step).astype(np.uint64)

    def steps(self, rows: np.ndarray) -> np.ndarray:
        """Return the last step of rows, integers `[n]`, int32 `[n]`; `NEVER` without a mark."""
        return np.maximum(self._places.steps(self._physical(rows)), self._whole)

    def _physical(self, rows: np.ndarray) -> np.ndarray:
        return self._stack.physical(rows.astype(self._stack.index_dtype), self._table)


class IdMarks:
    """The last step of ids of 64 bits, about 23 bytes for each id that was ever marked.

    A mark that is made late, after one of a greater step, gets the greater step: then an id may
    seem to be touched later than it was, but never earlier.

    Example:
      >>> marks = IdMarks()
      >>> marks.mark(np.array([7, 2**40], np.uint64), 1)
      >>> marks.mark(np.array([7], np.uint64), 2)
      >>> marks.after(1).tolist(), marks.after(0).tolist(), len(marks)
      ([7], [7, 1099511627776], 2)
    """

    def __init__(self) -> None:
        self._steps = HostRows({"step": RowField((), _STEP)})
        self._newest = NEVER

    def __len__(self) -> int:
        """Return how many ids have a mark."""
        return len(self._steps)

    def mark(self, ids: np.ndarray, steps: int | np.ndarray) -> None:
        """Mark ids, uint64 `[n]`, of which some may be equal, with one step, or each with its own.

        Args:
          ids: see above.
          steps: integers, one or `[n]`; of equal ids the greatest one counts.
        """
        steps = np.broadcast_to(steps, ids.shape)
        order = np.argsort(steps, kind="stable")
        # Steps 1 1 4 are two runs: where a step differs from the one before, a run begins.
        begins = np.flatnonzero(np.diff(steps[order], prepend=NEVER - 1))
        for first, last in itertools.pairwise([*begins.tolist(), ids.size]):
            some = np.unique(ids[order[first:last]])
            self._newest = max(self._newest, int(steps[order[first]]))
            newest = {"step": np.full(some.size, self._newest, _STEP)}
            self._steps.write(some, newest, mark=self._newest + 1)  # those of rows begin at 1

    def remove(self, ids: np.ndarray) -> None:
        """Forget the marks of ids, uint64 `[n]`."""
        self._steps.remove(ids)

    def after(self, step: int) -> np.ndarray:
        """Return the ids whose mark is after a step, uint64 `[n]` ascending."""
        return self._steps.ids(max(step, NEVER) + 2)

    def steps(self, ids: np.ndarray) -> np.ndarray:
        """Return the step of each id, uint64 `[n]`, int32 `[n]`; `NEVER` without a mark."""
        steps = np.full(ids.size, NEVER, _STEP)
        self._steps.read_into({"step": steps}, None, ids)
        return steps

    def keep_latest(self, count: int) -> int:
        """Forget all marks but those of the latest steps, at most `count`.

        Returns:
          The latest step of those that were forgotten; `NEVER` if there were not so many.
        """
        if len(self) <= count:
            return NEVER
        ids = self.after(NEVER)
        steps = self.steps(ids)
        # The first step with at most `count` marks after it.
        last = int(np.sort(steps)[-count - 1])
        self.remove(ids[steps <= last])
        return last


_STEP = np.dtype(np.int32)


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
