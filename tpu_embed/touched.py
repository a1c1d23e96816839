"""Record which rows every update touched, so that only changed rows need to be exported.

For every row, the host keeps the number of the last update that touched it: 4 bytes per row.

Input: every batch that is applied, with the number of its update. Output: the row ids that changed
since a step, by table; and the `Version` of a state, which orders exports and deltas in time.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tpu_embed._checks import check_int, message
from tpu_embed._types import PADDING_ID, ArrayLike, PyTree, Tracer
from tpu_embed.core.batch import Batch, StackView, fields_of, line_of, view_stacks
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.layout import Stack, TableSlice
from tpu_embed.core.state import TableState, check_own

_NEVER = -1
# Steps are kept as int32, and `record_rows` marks rows with the step after the given one.
_LAST = 2**31 - 2
_FULL = "publish a full export"


class Version(NamedTuple):
    """A moment of a training run.

    Attributes:
      run: the unique name of the `TouchedRows` that recorded the run.
      step: `state.step`, the number of updates applied.
      edits: how often `record_rows` was called; it orders what was published at the same step.
    """

    run: str
    step: int
    edits: int = 0


class TouchedRows:
    """Keep, for every row, the number of the last update that touched it.

    An update touches the row of every valid id that its batch keeps, even if the id's weight or
    gradient is zero. So a row that is reported may be unchanged, but every changed row is reported.
    An optimizer that changes every row, such as `Adam(lazy_adam=False)`, touches whole tables.
    Several threads may record at the same time.

    Args:
      engine: the engine of the tables.
      step: the current `state.step`; updates before it are unknown.

    Example:
      >>> import jax, tpu_embed
      >>> table = tpu_embed.TableConfig(vocabulary_size=8, dim=2, name="item")
      >>> feature = tpu_embed.FeatureConfig(table)
      >>> engine = EmbeddingEngine(feature, tpu_embed.optimizers.SGD(0.1))
      >>> touched = TouchedRows(engine)
      >>> touched.record(np.array([[3, 5], [5, -1]]), 1)
      >>> touched.record(np.array([[7, 3], [7, -1]]), 2)
      >>> touched.since(1)["item"].tolist(), touched.since(0)["item"].tolist(), touched.never()
      ([3, 7], [3, 5, 7], {'item': 5})
    """

    def __init__(self, engine: EmbeddingEngine, *, step: int = 0) -> None:
        if engine.vocabularies is not None:
            expected, got = "tables whose ids are row numbers", "keys, or tables on the host"
            remedy = "save whole tables with io.save; a delta cannot say yet whose row a row is"
            raise ValueError(message("TouchedRows", expected=expected, got=got, remedy=remedy))
        self._engine, self.layout = engine, engine.layout
        self._run = uuid.uuid4().hex
        self._start = self._through = check_int("step", step, minimum=0)
        self._edits = 0
        # All steps up to `_through` are recorded; `_ahead` has later ones, which threads may record
        # first: with 1, 2 and 4 recorded, _through is 2 and _ahead is {4}.
        self._ahead: set[int] = set()
        # By stack: the last step of every physical row, int32 [S * R]; made at the first mark.
        self._last: dict[str, np.ndarray] = {}
        # By table: the last step that touched all of its rows.
        self._whole: dict[str, int] = {}
        self._lock = threading.Lock()

    def record(self, batch: PyTree, step: int) -> None:
        """Record that a batch was applied, or will be.

        Args:
          batch: what `place` returned, or features as `place` takes them; weights do not matter.
            With several processes, each gives its own part.
          step: `state.step` after the batch's update, 1 for the first update.

        Raises:
          ValueError: what `place` refuses; a step before the last one that is known.
          TypeError: what `place` refuses.
        """
        row_ids = self._physical_row_ids(batch)
        with self._lock:
            step = self._checked_step(step)
            for stack, mine in zip(self.layout.stacks, row_ids, strict=True):
                if stack.optimizer is None:
                    continue
                if stack.optimizer.updates_every_row:
                    for table in stack.tables:
                        self._mark_all(table, step)
                else:
                    self._mark(stack, mine[mine >= 0], step)
            self._count(step)

    def record_rows(self, name: str, rows: ArrayLike | None, step: int) -> None:
        """Record that rows were set by `set_rows`, or that a whole table was loaded.

        With several processes, all must call this, because each counts the edits.

        Args:
          name: the table, trainable or not.
          rows: row ids, integers `[n]`; None: all of them.
          step: `state.step` when they were set; they count as touched by the next update.

        Raises:
          ValueError: an unknown name, a bad row id, or a step before this object's first.
        """
        stack, table = self.layout.table(name)
        check_int("step", step, minimum=self._start)
        chosen = None if rows is None else _checked(table, np.asarray(rows), stack)
        with self._lock:
            self._edits += 1
            if chosen is None:
                self._mark_all(table, step + 1)
            else:
                self._mark(stack, stack.physical(chosen, table), step + 1)

    def since(self, step: int) -> dict[str, np.ndarray]:
        """Return the row ids touched after a step, int64 `[n]` ascending, by table.

        With several processes, each returns the rows of its own batches. For a table that is not
        trainable, these are the rows given to `record_rows`.

        Raises:
          ValueError: a step before this object's first.
        """
        step = check_int("step", step, minimum=0)
        if step < self._start:
            expected, got = f"a step from {self._start} on, where recording began", f"{step}"
            raise ValueError(message("step", expected=expected, got=got, remedy=_FULL))
        with self._lock:
            return {table.name: self._after(stack, table, step) for stack, table in self._tables()}

    def never(self) -> dict[str, int]:
        """Return, by table, how many rows were not touched since recording began."""
        with self._lock:
            return {
                table.name: table.vocabulary_size - self._after(stack, table, _NEVER).size
                for stack, table in self._tables()
            }

    def version(self, state: TableState) -> Version:
        """Return the version of a state, after a check that all of its updates were recorded.

        Raises:
          ValueError: an update between this object's first step and the state's was not recorded,
            or the state is from before the first step.
        """
        check_own(state, self.layout)
        step = int(state.step)
        if step < self._start:
            expected, got = f"a state of step {self._start} or later", f"{step}"
            remedy = f"make another TouchedRows with step={step}, and {_FULL}"
            raise ValueError(message("TouchedRows", expected=expected, got=got, remedy=remedy))
        with self._lock:
            through, edits = self._through, self._edits
        if step > through:
            expected = f"every update from {self._start + 1} to {step} recorded"
            remedy = "record each batch with the step that state.step is after it"
            got = f"none for step {through + 1}"
            raise ValueError(message("TouchedRows", expected=expected, got=got, remedy=remedy))
        return Version(self._run, step, edits)

    # -- batches -------------------------------------------------------------------------------

    def _physical_row_ids(self, batch: PyTree) -> list[np.ndarray]:
        """Return the physical rows of this process's ids, one array per stack.

        Padding has `PADDING_ID`.
        """
        layout = self.layout
        if isinstance(batch, Batch):
            batch.check(layout)
            lines, numbers = _lines(batch)
            views = zip(view_stacks(batch.spec, layout), line_of(batch.spec, layout), strict=True)
            return [_rows_of(fields_of(lines, fields), view, numbers) for view, fields in views]
        # Features that were not placed: find the physical rows here, several features per stack.
        # The empty array is for a stack without features, since nothing cannot be concatenated.
        found: list[list[np.ndarray]] = [[np.zeros(0, np.int32)] for _ in layout.stacks]
        for f, host in zip(layout.features, self._engine.host_ids(batch), strict=True):
            stack = layout.stacks[f.stack]
            valid = host.ids[host.ids >= 0].astype(stack.index_dtype, copy=False)
            found[f.stack].append(stack.physical(valid, f.table))
        return [np.concatenate(mine) for mine in found]

    def _checked_step(self, step: int) -> int:
        step = check_int("step", step, minimum=self._start + 1)
        if step < self._through:
            remedy = f"after a return to an earlier state, make another TouchedRows and {_FULL}"
            expected = f"a step from {self._through} on"
            raise ValueError(message("step", expected=expected, got=f"{step}", remedy=remedy))
        if step > _LAST:
            raise ValueError(message("step", expected=f"at most {_LAST}", got=f"{step}"))
        return step

    def _count(self, step: int) -> None:
        """Note that a step is recorded: all of its rows are marked."""
        if step > self._through:
            self._ahead.add(step)
        # With _through = 2 and _ahead = {4}, step 3 moves _through to 4.
        while self._through + 1 in self._ahead:
            self._through += 1
            self._ahead.remove(self._through)

    # -- marks ---------------------------------------------------------------------------------

    def _tables(self) -> Iterator[tuple[Stack, TableSlice]]:
        return ((stack, table) for stack in self.layout.stacks for table in stack.tables)

    def _mark(self, stack: Stack, row_ids: np.ndarray, step: int) -> None:
        if row_ids.size and stack.name not in self._last:
            self._last[stack.name] = np.full(stack.physical_rows, _NEVER, np.int32)
        if row_ids.size:
            last = self._last[stack.name]
            # A maximum, because threads may record a later step first.
            last[row_ids] = np.maximum(last[row_ids], step)

    def _mark_all(self, table: TableSlice, step: int) -> None:
        self._whole[table.name] = max(step, self._whole.get(table.name, _NEVER))

    def _after(self, stack: Stack, table: TableSlice, step: int) -> np.ndarray:
        """Return the logical ids of the rows that were touched after `step`, ascending."""
        if self._whole.get(table.name, _NEVER) > step:
            return np.arange(table.vocabulary_size)
        if stack.name not in self._last:
            return np.zeros(0, np.int64)
        # The positions in the flattened view are logical row ids. Padding is never touched.
        return np.flatnonzero(stack.logical_view(self._last[stack.name], table) > step)


def _lines(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return the packed lines on this process's devices, and the devices' numbers in the mesh."""
    if isinstance(batch.packed, Tracer):
        remedy = "record outside the jitted function"
        raise ValueError(message("batch", expected="a Batch", got="a tracer", remedy=remedy))
    # By first line; without a split of the lines all devices hold the same.
    pieces = {s.index[0].start or 0: s.data for s in batch.packed.addressable_shards}
    numbers = [first + np.arange(len(piece)) for first, piece in pieces.items()]
    return np.concatenate([np.asarray(p) for p in pieces.values()]), np.concatenate(numbers)


def _rows_of(fields: dict[str, np.ndarray], view: StackView, devices: np.ndarray) -> np.ndarray:
    """Return the physical rows of one stack in packed lines, with duplicates; absent ones are -1.

    Args:
      fields: the stack's fields, `[devices, …]`.
      view: the stack.
      devices: the number of each line's device in the mesh.
    """
    stack, axes = view.stack, view.layout.axes
    if "row_ids" in fields:
        return fields["row_ids"]
    if stack.num_shards == 1:
        return fields["index"]
    # Local rows that are asked for: of this owner, where one host knows all; else of each shard.
    asked = fields["asked"]
    owner = np.arange(stack.num_shards)[:, None]
    if axes.one_process:
        owner = axes.parts_of_devices(stack.shard_axes)[devices][:, None, None]
    return np.where(asked < 0, PADDING_ID, owner * stack.num_rows + asked)


def _checked(table: TableSlice, row_ids: np.ndarray, stack: Stack) -> np.ndarray:
    """Return row ids in the stack's index dtype.

    Raises:
      ValueError: they are not integers `[n]` in [0, V).
    """
    what, size = f"table {table.name!r}: rows", table.vocabulary_size
    if row_ids.ndim != 1 or (row_ids.dtype.kind not in "iu" and row_ids.size):
        got = f"{row_ids.dtype} of shape {row_ids.shape}"
        raise ValueError(message(what, expected="integers of shape (n,)", got=got))
    outside = row_ids[(row_ids < 0) | (row_ids >= size)]
    if outside.size:
        raise ValueError(message(what, expected=f"rows in [0, {size})", got=f"row {outside[0]}"))
    return row_ids.astype(stack.index_dtype)
