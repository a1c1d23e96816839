"""The last step that touched each row: by place in the stacks on the devices, or by 64-bit id.

A step only ever grows, so rows touched after a step are those with a later mark.

Input: rows, ids and steps. Output: the rows or ids touched after a step.
"""

from __future__ import annotations

import numpy as np

from tpu_embed.core.layout import Stack, TableSlice
from tpu_embed.storage import HostRows, RowField

NEVER = -1
"""The step of what was not touched since recording began."""


class RowMarks:
    """The last step of every row on the devices, 4 bytes per row, from the first mark on."""

    def __init__(self) -> None:
        # By stack: the last step of every physical row, int32 [S * R]; made at the first mark.
        self._last: dict[str, np.ndarray] = {}
        # By table: the last step that touched all of its rows.
        self._whole: dict[str, int] = {}

    def mark(self, stack: Stack, physical_rows: np.ndarray, step: int | np.ndarray) -> None:
        """Mark rows of a stack, int `[n]`, with one step, or each with its own, int32 `[n]`."""
        if physical_rows.size and stack.name not in self._last:
            self._last[stack.name] = np.full(stack.physical_rows, NEVER, np.int32)
        if physical_rows.size:
            last = self._last[stack.name]
            # A maximum, because threads may record a later step first.
            last[physical_rows] = np.maximum(last[physical_rows], step)

    def mark_all(self, table: TableSlice, step: int) -> None:
        """Mark all rows of a table."""
        self._whole[table.name] = max(step, self._whole.get(table.name, NEVER))

    def after(self, stack: Stack, table: TableSlice, step: int) -> np.ndarray:
        """Return the rows of a table that were touched after a step, int64 `[n]` ascending."""
        if self._whole.get(table.name, NEVER) > step:
            return np.arange(table.vocabulary_size)
        if stack.name not in self._last:
            return np.zeros(0, np.int64)
        # The positions in the flattened view are logical row ids. Padding is never touched.
        return np.flatnonzero(stack.logical_view(self._last[stack.name], table) > step)

    def steps(self, stack: Stack, table: TableSlice, rows: np.ndarray) -> np.ndarray:
        """Return the last step of some rows of a table, int32 `[n]` as the rows."""
        steps = np.full(rows.shape, self._whole.get(table.name, NEVER), np.int32)
        if stack.name in self._last:
            physical = stack.physical(rows.astype(stack.index_dtype), table)
            steps = np.maximum(steps, self._last[stack.name][physical])
        return steps

    def load(self, stack: Stack, table: TableSlice, rows: np.ndarray, steps: np.ndarray) -> None:
        """Mark some rows of a table, int64 `[n]`, each with its step, int32 `[n]`."""
        physical = stack.physical(rows.astype(stack.index_dtype), table)
        self.mark(stack, physical, steps)


class PlaceMarks:
    """The last step of numbers below a bound, 4 bytes for each, from the first mark on.

    Args:
      size: the bound.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._last: np.ndarray | None = None

    def mark(self, numbers: np.ndarray, step: int) -> None:
        """Mark numbers, uint64 `[n]`; steps come in ascending order."""
        self.load(numbers, np.full(numbers.size, step, _STEP))

    def load(self, numbers: np.ndarray, steps: np.ndarray) -> None:
        """Mark different numbers, uint64 `[n]`, each with its step, integers `[n]`."""
        if numbers.size and self._last is None:
            self._last = np.full(self._size, NEVER, _STEP)
        if self._last is not None:
            self._last[numbers.astype(np.int64)] = steps

    def after(self, step: int) -> np.ndarray:
        """Return the numbers whose mark is after a step, uint64 `[n]` ascending."""
        if self._last is None:
            return np.zeros(0, np.uint64)
        return np.flatnonzero(self._last > step).astype(np.uint64)

    def steps(self, numbers: np.ndarray) -> np.ndarray:
        """Return the step of each number, uint64 `[n]`, int32 `[n]`; `NEVER` without a mark."""
        if self._last is None:
            return np.full(numbers.size, NEVER, _STEP)
        return self._last[numbers.astype(np.int64)]


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

    def mark(self, ids: np.ndarray, step: int) -> None:
        """Mark ids, uint64 `[n]`, of which some may be equal."""
        self._newest = max(self._newest, step)
        distinct = np.unique(ids)
        steps = np.full(distinct.size, self._newest, _STEP)
        self._steps.write(distinct, {"step": steps}, mark=self._newest + 1)  # they begin at 1

    def load(self, ids: np.ndarray, steps: np.ndarray) -> None:
        """Mark ids, uint64 `[n]`, each with its step, integers `[n]`; the greatest one counts."""
        order = np.argsort(steps, kind="stable")
        ids, steps = ids[order], steps[order]
        # Steps 1 1 4 are two runs: where a step differs from the one before, a run begins.
        begins = np.flatnonzero(np.diff(steps)) + 1
        for some, at in zip(np.split(ids, begins), np.split(steps, begins), strict=True):
            if some.size:
                self.mark(some, int(at[0]))

    def remove(self, ids: np.ndarray) -> None:
        """Forget the marks of ids, uint64 `[n]`."""
        self._steps.remove(ids)

    def after(self, step: int) -> np.ndarray:
        """Return the ids whose mark is after a step, uint64 `[n]` ascending."""
        return self._steps.ids(max(step, NEVER) + 2)

    def steps(self, ids: np.ndarray) -> np.ndarray:
        """Return the step of each id, int32 `[n]`; `NEVER` without a mark."""
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
