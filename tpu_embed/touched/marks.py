"""The last step that touched each row: by place in the stacks on the devices, or by 64-bit id.

A step only ever grows, so rows touched after a step are those with a later mark.

Input: rows, ids and steps. Output: the rows or ids touched after a step.
"""

from __future__ import annotations

import itertools

import numpy as np

from tpu_embed.core.layout import Stack, TableSlice
from tpu_embed.storage import HostRows, RowField

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
