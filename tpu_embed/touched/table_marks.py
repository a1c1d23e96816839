"""What is known of all tables of an engine: which rows were touched, who got them, who lost them.

A table is of one of three kinds: its ids are row numbers; they are keys of a dynamic vocabulary,
which have rows for a time; or it is on the host, where ids keep their rows for ever, and have
places on the devices for a time. Who got or lost a row is noted by the steps of the maps, which are
training batches that were admitted:

    step 3    key 7 gets row 0                 given: row 0 at 3
    step 5    key 7 loses row 0 to key 9       given: row 0 at 5     lost: key 7 at 5
    step 8    key 7 gets row 4                 given: row 4 at 8     lost: -

What is known of a row or id is the last step that touched it. A step only ever grows, so rows
touched after a step are those with a later mark. Of tables on the host, ids are marked, whatever
rows of the devices they had. Whose rows they were when a batch was placed follows from what the
maps did since. With row 4 given to id 70 at step 3 and to id 90 at step 5:

    a batch of step 3 or 4 touches id 70     also if it is recorded after step 5
    a batch of step 5      touches id 90     also if it is recorded before step 5 is admitted

A run that is restored from a checkpoint goes on from the moment of the checkpoint (`Version`). What
the first run did after that moment is not part of the second one, even if both have steps of these
numbers:

    run a    step 0 ─── 900 ─── 1000        a model of step 1000 was exported, then the run ended
    run b               900 ───────── 1100  restored from the checkpoint of step 900

So a delta of run b fits a model of run a up to step 900, and no later one (`Lineage`). A checkpoint
keeps what is known since when: by key or id, whatever rows these have (`SavedRecord`).

Input: rows that updates touched, what maps did. Output: what changed since a version; the order of
moments, or that they have none; arrays by key.
"""

from __future__ import annotations

import array
import bisect
import collections
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tpu_embed._checks import refuse
from tpu_embed.core.layout import Layout, Stack, TableSlice
from tpu_embed.storage import HostRows, RowField
from tpu_embed.vocabulary import Moves, Vocabularies


class Version(NamedTuple):
    """A moment of a training run.

    Attributes:
      run: the unique name of the run, from the making of its `TouchedRows`, or from its restoring;
        all processes of the run have the same one.
      step: `state.step`, the number of updates applied.
      edits: how often `record_rows` was called; it orders what was published at the same step.
      keys: the number of training batches that dynamic vocabularies, or tables on the host, have
        admitted; 0 without any.
    """

    run: str
    step: int
    edits: int = 0
    keys: int = 0

    def is_up_to(self, later: Version) -> bool:
        """Return whether this moment is not after another one of the same run."""
        # Each number only grows, so the earlier moment has no greater one.
        pairs = zip(self[1:], later[1:], strict=True)
        return self.run == later.run and all(mine <= other for mine, other in pairs)


class Lineage(NamedTuple):
    """A run, and the moments of earlier runs that it goes on from.

    Attributes:
      run: the name of the run.
      ancestors: by earlier run, its last moment that is part of this run's history.
    """

    run: str
    ancestors: tuple[Version, ...] = ()

    def has(self, version: Version) -> bool:
        """Return whether a moment is one of this run, or of what it goes on from."""
        return version.run == self.run or any(
            version.is_up_to(one) for one in self.ancestors
        )


class SavedMarks(NamedTuple):
    """What is known of one table.

    Attributes:
      keys: uint64 `[n]`: of a dynamic vocabulary, all keys that have rows; otherwise the row ids,
        or ids, that were touched.
      touched: int32 `[n]`, the last update of each; -1: none.
      given: int32 `[n]`, the step of the maps at which each got its row; -1: before recording.
      lost: uint64 `[m]`, keys that lost their rows.
      lost_at: int32 `[m]`, the step of the maps at which each lost it.
      lost_since: the first step of the maps after which all lost keys are known.
      shared: the last update of the row that unseen keys share; -1: none.
    """

    keys: np.ndarray
    touched: np.ndarray
    given: np.ndarray
    lost: np.ndarray
    lost_at: np.ndarray
    lost_since: int = 0
    shared: int = -1


class SavedRecord(NamedTuple):
    """What a record of touched rows keeps.

    Attributes:
      version: the moment of the state beside which this is kept.
      start: the first moment since which changes are known.
      ancestors: see `Lineage`.
      known: by `state.step` of earlier versions, their `keys`.
      tables: by table.
    """

    version: Version
    start: Version
    ancestors: tuple[Version, ...]
    known: Mapping[int, int]
    tables: Mapping[str, SavedMarks]


def merge_records(records: Sequence[SavedRecord]) -> SavedRecord:
    """Return what several processes have recorded of one run, with the latest step of each row."""
    first = records[0]
    tables = {
        name: _merge([one.tables[name] for one in records]) for name in first.tables
    }
    return first._replace(tables=tables)


def _merge(marks: Sequence[SavedMarks]) -> SavedMarks:
    # All processes have the same maps, so of keys they differ only in what they touched.
    keys, at = np.unique(
        np.concatenate([one.keys for one in marks]), return_inverse=True
    )
    latest = {}
    for part in ("touched", "given"):
        latest[part] = np.full(keys.size, -1, np.int32)
        np.maximum.at(
            latest[part], at, np.concatenate([getattr(one, part) for one in marks])
        )
    return marks[0]._replace(
        keys=keys, **latest, shared=max(one.shared for one in marks)
    )


_STEP = np.dtype(np.int32)

NEVER = -1
"""The step of what was not touched since recording began."""


class RowMarks:
    """The last step of rows, 4 bytes for each, which the system provides with the first marks.

    Args:
      marks: int32 zeros of any shape, perhaps a view: row r is place r of it, flattened.
      size: V, the number of rows; padding follows them. None: all places are rows.
    """

    def __init__(self, marks: np.ndarray, size: int | None = None) -> None:
        # A step is kept as ~step, of which `NEVER` is 0. So a later step is a smaller number.
        self._marks, self._size = marks, marks.size if size is None else size
        self._whole = NEVER  # the last step that touched all rows

    def mark(self, rows: np.ndarray, steps: int | np.ndarray) -> None:
        """Mark rows, integers `[n]`, with one step, or each with its own, int32 `[n]`."""
        at = self._places(rows)
        # A later step stays, because threads may record it first.
        self._marks[at] = np.minimum(self._marks[at], ~steps)

    def mark_all(self, step: int) -> None:
        """Mark all rows."""
        self._whole = max(step, self._whole)

    def after(self, step: int) -> np.ndarray:
        """Return the rows that were touched after a step, uint64 `[n]` ascending."""
        if self._whole > step:
            return np.arange(self._size, dtype=np.uint64)
        return np.flatnonzero(self._marks < ~step).astype(np.uint64)

    def steps(self, rows: np.ndarray) -> np.ndarray:
        """Return the last step of rows, integers `[n]`, int32 `[n]`; `NEVER` without a mark."""
        return np.maximum(~self._marks[self._places(rows)], self._whole)

    def _places(self, rows: np.ndarray) -> tuple[np.ndarray, ...]:
        return np.unravel_index(rows.astype(np.int64), self._marks.shape)


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
            # Those of rows begin at 1.
            self._steps.write(some, newest, mark=self._newest + 1)

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


_REMEMBERED = 64
"""How many admitted batches later a batch may still be recorded."""


class HostedMarks:
    """The last update of the ids of all tables on the host.

    Args:
      layout: the engine's layout.
      maps: its maps; None without dynamic vocabularies and tables on the host.

    Attributes:
      marks: by table.
    """

    def __init__(self, layout: Layout, maps: Vocabularies | None) -> None:
        self._stacks = [stack for stack in layout.stacks if stack.is_on_host]
        self.marks = {table.name: IdMarks() for _, table in layout.on_host}
        # By stack: the id that each physical row belongs to, -1 for none, [S * R].
        self._ids = {
            s.name: np.full(s.physical_rows, -1, np.int64) for s in self._stacks
        }
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
            refuse(
                "record",
                expected=f"a batch at most {_REMEMBERED} admitted batches old",
                got=f"one of step {batch_step}, {self._noted - batch_step} before the newest",
                remedy="record each batch when it is placed or updated",
            )
        distinct = np.unique(rows)
        if batch_step > self._noted:
            self._waiting.setdefault(batch_step, []).append((stack, distinct, step))
            return
        ids = self._ids[stack.name][distinct]
        for owners in itertools.islice(
            reversed(self._before), self._noted - batch_step
        ):
            if stack.name in owners:
                given, before = owners[stack.name]
                found = np.minimum(np.searchsorted(given, distinct), given.size - 1)
                same = given[found] == distinct
                ids[same] = before[found[same]]
        self._mark(stack, distinct, ids, step)

    def _mark(self, stack: Stack, rows: np.ndarray, ids: np.ndarray, step: int) -> None:
        local = rows % stack.num_rows  # on its shard, where each table has a range
        for table in stack.tables:
            mine = (local >= table.offset) & (
                local < table.offset + table.rows_per_shard
            )
            self.marks[table.name].mark(ids[mine & (ids >= 0)].view(np.uint64), step)

    def note(self, step: int, moves: Moves) -> None:
        """Note which rows the training batch of a step gave to other ids."""
        before = {}
        for stack in self._stacks:
            lost, given, keys = [], [], []
            for table in stack.tables:
                taken = moves.taken[table.name]
                for found, rows in (
                    (lost, taken.evicted_rows),
                    (given, taken.new_rows),
                ):
                    found.append(stack.physical(rows.astype(stack.index_dtype), table))
                keys.append(taken.new_keys.view(np.int64))
            ids, rows = (
                self._ids[stack.name],
                np.unique(np.concatenate([*lost, *given])),
            )
            if rows.size:
                before[stack.name] = rows, ids[rows]
            ids[np.concatenate(lost)] = -1
            # A row that was lost may be, at once.
            ids[np.concatenate(given)] = np.concatenate(keys)
        self._before.append(before)
        self._noted = step
        for stack, rows, updated in self._waiting.pop(step, []):
            self._mark(stack, rows, self._ids[stack.name][rows], updated)

    def undo(self, step: int) -> None:
        """Forget what was recorded of batches after a step, which were never admitted."""
        self._waiting = {at: some for at, some in self._waiting.items() if at <= step}


_LEAST_LOST = 1024
"""Lost keys that are remembered at least, however few rows a table has."""


_NOBODY = np.zeros(0, np.uint64)


class Changes(NamedTuple):
    """What changed in one table since a version.

    Attributes:
      rows: int64 `[n]`: the row ids of a table on the devices, or the ids of one on the host.
      keys: uint64 `[n]`, whose rows these are, ascending; None if ids are row numbers. Of a table
        on the host without vocabulary they are its ids.
      lost: uint64 `[m]`, keys that had a row and have none now, ascending.
      shared: the row that unseen keys share, if it changed; otherwise None.
    """

    rows: np.ndarray
    keys: np.ndarray | None = None
    lost: np.ndarray = _NOBODY
    shared: int | None = None


class KeyMarks:
    """Which rows of a table were given to keys, and which keys lost their rows, and when.

    Lost keys are remembered up to the number of rows: a delta with more of them would say less than
    a full export.

    Args:
      table: the table.

    Attributes:
      given: the step at which each row, or id at home, was given to a key last.
      lost: the step at which each key lost its row; some may have another by now.
      lost_since: the first step after which all lost keys are known.
    """

    def __init__(self, table: TableSlice) -> None:
        # Of a table on the host only few ids may ever have a row.
        self.given = (
            IdMarks() if table.is_on_host else RowMarks(_zeros(table.vocabulary_size))
        )
        self.lost = IdMarks()
        self._most_lost = max(_LEAST_LOST, min(table.declared_size, 2**31))
        self.lost_since = 0

    def note(
        self, step: int, given: np.ndarray, new: np.ndarray, lost: np.ndarray
    ) -> None:
        """Note what the training batch of a step did.

        Args:
          step: of the maps.
          given: uint64 `[a]`, rows, or ids at home, that were given to keys or came to the devices.
          new: uint64 `[b]`, the keys that got rows.
          lost: uint64 `[e]`, the keys that lost theirs.
        """
        self.given.mark(given, step)
        self.lost.mark(lost, step)
        self.lost.remove(new)
        if len(self.lost) > 2 * self._most_lost:
            self.lost_since = max(
                self.lost_since, self.lost.keep_latest(self._most_lost)
            )


class TableMarks:
    """Marks of all tables of an engine; its owner locks.

    Args:
      layout: the engine's layout.
      maps: its maps; None without dynamic vocabularies and tables on the host.

    Attributes:
      hosted: the marks of tables on the host.
      tables: all tables.
    """

    def __init__(self, layout: Layout, maps: Vocabularies | None) -> None:
        self._layout = layout
        self._maps: Any = maps  # which are there where a table has keys
        self.hosted = HostedMarks(layout, maps)
        self.tables = [table for _, table in layout.tables.values()]
        # By table; and of physical rows by stack, of which those of its tables are views.
        self._marks: dict[str, Any] = {**self.hosted.marks}
        self._places: dict[str, RowMarks] = {}
        for stack in layout.stacks:
            if not stack.is_on_host:
                places = _zeros(stack.physical_rows)
                self._places[stack.name] = RowMarks(places)
                for table in stack.tables:
                    rows = stack.logical_view(places, table)
                    self._marks[table.name] = RowMarks(rows, table.vocabulary_size)
        self._keys = {table.name: KeyMarks(table) for _, table in layout.living}
        # By batch admitted after `_first`, the newest update that was recorded by then. With a row
        # given by a batch of 5 here, a key may have been in update 5 before it had that row.
        self._first, self._newest = (
            0 if maps is None else maps.admitted,
            array.array("i"),
        )

    # -- what happens --------------------------------------------------------------------------

    def touch(self, stack: Stack, rows: np.ndarray, batch_step: int, step: int) -> None:
        """Mark the physical rows of a batch, or the whole stack if its optimizer changes all rows.

        Args:
          stack: the stack.
          rows: int `[n]`.
          batch_step: the step of the maps that the batch is.
          step: of its update.

        Raises:
          ValueError: see `HostedMarks.touch`.
        """
        if stack.optimizer is None:
            return
        if stack.is_on_host:
            self.hosted.touch(stack, rows, batch_step, step)
        elif stack.optimizer.updates_every_row:
            for table in stack.tables:
                self.mark_all(table.name, step)
        else:
            self._places[stack.name].mark(rows, step)

    def mark(self, name: str, ids: np.ndarray, step: int) -> None:
        """Mark row ids, or ids of a table on the host, int64 `[n]`."""
        self._marks[name].mark(ids.view(np.uint64), step)

    def mark_all(self, name: str, step: int) -> None:
        """Mark all rows of a table on the devices."""
        self._marks[name].mark_all(step)

    def note_admitted(self, step: int, moves: Moves, newest: int) -> None:
        """Note what the maps did for the training batch of a step.

        Args:
          step: of the maps.
          moves: what they did.
          newest: the newest update that was recorded; it may be of a key that gets a row now.
        """
        for _, table in self._layout.living:
            known, taken = self._keys[table.name], moves.of_keys(table.name)
            if table.key_rules is None:
                # Its ids have their rows for ever. Those that come to the devices may be new ones.
                known.note(step, moves.taken[table.name].new_keys, _NOBODY, _NOBODY)
            else:
                new_rows = taken.new_rows.astype(np.uint64)
                known.note(step, new_rows, taken.new_keys, taken.evicted_keys)
        self.hosted.note(step, moves)
        self._newest.append(newest)

    # -- what has changed ----------------------------------------------------------------------

    def changed(self, since: Version) -> dict[str, Changes]:
        """Return what changed after a version, by table; meanwhile the maps must not move.

        Raises:
          ValueError: more keys were lost since than are remembered.
        """
        return {table.name: self._changes_of(table, since) for table in self.tables}

    def _changes_of(self, table: TableSlice, since: Version) -> Changes:
        touched = self._marks[table.name].after(since.step)
        if table.vocabulary is None:
            return Changes(touched.view(np.int64))
        known = self._keys[table.name]
        if 0 <= since.keys < known.lost_since:
            refuse(
                "since",
                expected=f"a version of {known.lost_since} admitted batches or more",
                got=f"one of {since.keys}: table {table.name!r} has lost more keys "
                "than it has rows",
                remedy="publish a full export, and deltas more often",
            )
        begun = self._first + bisect.bisect_right(self._newest, since.step)
        ids = np.union1d(known.given.after(min(since.keys, begun)), touched)
        if table.key_rules is None:
            return Changes(ids.view(np.int64), ids)
        shared = shared_row(table)
        shared = shared if shared is not None and shared in ids else None
        keys, rows = self._maps.keys(table.name)
        here = np.isin(rows.view(np.uint64), ids)
        keys, rows = keys[here], rows[here]
        order = np.argsort(keys)
        lost = known.lost.after(since.keys)
        return Changes(
            rows[order], keys[order], lost[self.find(table, lost) < 0], shared
        )

    def find(self, table: TableSlice, keys: np.ndarray) -> np.ndarray:
        """Return the rows, or ids at home, of keys or ids of 64 bits; -1: none; int64 `[n]`."""
        if table.key_rules is None:
            return keys.view(np.int64)
        return self._maps.find(table.name, keys, self._maps.admitted).astype(np.int64)

    # -- kept ----------------------------------------------------------------------------------

    def saved(self) -> dict[str, SavedMarks]:
        """Return what is known, by table, by key or id; meanwhile the maps must not move."""
        return {table.name: self._saved(table) for table in self.tables}

    def _saved(self, table: TableSlice) -> SavedMarks:
        marks = self._marks[table.name]
        if table.vocabulary is None:
            rows = marks.after(NEVER)
            given = np.full(rows.size, NEVER, np.int32)
            return SavedMarks(
                rows, marks.steps(rows), given, _NOBODY, _NOBODY.astype(np.int32)
            )
        known = self._keys[table.name]
        if table.key_rules is None:
            keys = ids = np.union1d(marks.after(NEVER), known.given.after(NEVER))
        else:
            keys, rows = self._maps.keys(table.name)
            ids = rows.view(np.uint64)
        steps, given = marks.steps(ids), known.given.steps(ids)
        here = np.flatnonzero(given > self._first)
        newest = np.array(self._newest, np.int32)[given[here] - self._first - 1]
        steps[here] = np.maximum(steps[here], newest)
        lost, shared = known.lost.after(NEVER), shared_row(table)
        last = (
            NEVER
            if shared is None
            else int(marks.steps(np.array([shared], np.uint64))[0])
        )
        lost_at = known.lost.steps(lost)
        return SavedMarks(keys, steps, given, lost, lost_at, known.lost_since, last)

    def load(self, saved: Mapping[str, SavedMarks], step: int) -> None:
        """Go on from what was saved; nothing has been marked yet.

        Args:
          saved: by table; tables that are missing are new.
          step: of the maps.
        """
        for table in self.tables:
            if table.name in saved:
                self._load(table, saved[table.name], step)

    def _load(self, table: TableSlice, saved: SavedMarks, step: int) -> None:
        found, shared = self.find(table, saved.keys), shared_row(table)
        here = found >= 0
        ids, given = found[here].view(np.uint64), saved.given[here] > NEVER
        if table.name in self._keys:
            known = self._keys[table.name]
            known.given.mark(ids[given], saved.given[here][given])
            known.lost.mark(saved.lost, saved.lost_at)
            known.lost.mark(saved.keys[~here], step + 1)
            known.lost_since = saved.lost_since
        steps = saved.touched[here]
        if shared is not None:
            ids, steps = (
                np.append(ids, np.uint64(shared)),
                np.append(steps, np.int32(saved.shared)),
            )
        self._marks[table.name].mark(ids[steps > NEVER], steps[steps > NEVER])


def _zeros(size: int) -> np.ndarray:
    return np.zeros(size, _STEP)


def shared_row(table: TableSlice) -> int | None:
    """Return the row, or the id at home, that unseen keys share; None if they don't."""
    rules = table.key_rules
    return None if rules is None else rules.shared_row(table.declared_size)


def check_row_ids(table: TableSlice, given: np.ndarray) -> np.ndarray:
    """Return row ids of a table, or ids of one on the host, int64 `[n]`.

    Raises:
      ValueError: they are not integers `[n]` in [0, V).
    """
    what, size = f"table {table.name!r}: rows", table.declared_size
    if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
        refuse(
            what,
            expected="integers of shape (n,)",
            got=f"{given.dtype} of shape {given.shape}",
        )
    outside = given[(given < 0) | (given >= size)]
    if outside.size:
        refuse(what, expected=f"rows in [0, {size})", got=f"row {outside[0]}")
    return given.astype(np.int64)
