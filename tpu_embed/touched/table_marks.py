"""What is known of all tables of an engine: which rows were touched, who got them, who lost them.

A table is of one of three kinds: its ids are row numbers; they are keys of a living vocabulary,
which have rows for a time; or it is on the host, where ids keep their rows for ever, and have
places on the devices for a time.

Input: rows that updates touched, what maps did. Output: what changed since a version.
"""

from __future__ import annotations

import array
import bisect
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from tpu_embed._checks import message
from tpu_embed.core.layout import Layout, Stack, TableSlice
from tpu_embed.touched.hosted import HostedMarks
from tpu_embed.touched.key_marks import KeyMarks, given_by
from tpu_embed.touched.marks import NEVER, RowMarks
from tpu_embed.touched.saved import SavedMarks
from tpu_embed.touched.versions import Version
from tpu_embed.vocabulary import Moves, Vocabularies


class Changes(NamedTuple):
    """What changed in one table since a version.

    Attributes:
      rows: int64 `[n]`: the row ids of a table on the devices, or the ids of one on the host.
      keys: uint64 `[n]`, whose rows these are, ascending; None if ids are row numbers. Of a table
        on the host without vocabulary they are its ids.
      lost: uint64 `[m]`, keys that had a row and have none now, ascending; None as for `keys`.
      shared: the row that unseen keys share, if it changed; otherwise None.
    """

    rows: np.ndarray
    keys: np.ndarray | None = None
    lost: np.ndarray | None = None
    shared: int | None = None


class TableMarks:
    """Marks of all tables of an engine; its owner locks.

    Args:
      layout: the engine's layout.
      maps: its maps; None without living vocabularies and tables on the host.
    """

    def __init__(self, layout: Layout, maps: Vocabularies | None) -> None:
        self._layout, self._maps = layout, maps
        self._rows, self._hosted = RowMarks(), HostedMarks(layout)
        self._keys = {table.name: KeyMarks(table) for _, table in layout.living}
        # By batch admitted after `_first`, the newest update that was recorded by then. With a row
        # given by a batch of 5 here, a key may have been in update 5 before it had that row.
        self._first, self._newest = 0 if maps is None else maps.admitted, array.array("i")
        if maps is not None:
            held = {table.name: maps.held(table.name) for _, table in layout.on_host}
            pairs = {name: (one.keys, one.rows) for name, one in held.items()}
            self._hosted.begin(maps.admitted, pairs)

    def _all(self) -> Iterator[tuple[Stack, TableSlice]]:
        return ((stack, table) for stack in self._layout.stacks for table in stack.tables)

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
            self._hosted.touch(stack, rows, batch_step, step)
        elif stack.optimizer.updates_every_row:
            for table in stack.tables:
                self._rows.mark_all(table, step)
        else:
            self._rows.mark(stack, rows, step)

    def mark(self, name: str, ids: np.ndarray, step: int) -> None:
        """Mark row ids, or ids of a table on the host, int64 `[n]`."""
        stack, table = self._layout.table(name)
        if table.is_on_host:
            self._hosted.marks[name].mark(ids.view(np.uint64), step)
        else:
            self._rows.mark(stack, stack.physical(ids.astype(stack.index_dtype), table), step)

    def mark_all(self, name: str, step: int) -> None:
        """Mark all rows of a table on the devices."""
        self._rows.mark_all(self._layout.table(name)[1], step)

    def note_admitted(self, step: int, moves: Moves, newest: int) -> None:
        """Note what the maps did for the training batch of a step.

        Args:
          step: of the maps.
          moves: what they did.
          newest: the newest update that was recorded; it may be of a key that gets a row now.
        """
        for _, table in self._layout.living:
            self._keys[table.name].note(step, given_by(moves, table))
        self._hosted.note(step, moves)
        self._newest.append(newest)

    def note_undone(self, step: int) -> None:
        """Forget what was recorded of batches after a step, which were never admitted."""
        self._hosted.undo(step)

    # -- what has changed ----------------------------------------------------------------------

    def changed(self, since: Version) -> dict[str, Changes]:
        """Return what changed after a version, by table; meanwhile the maps must not move.

        Raises:
          ValueError: more keys were lost since than are remembered.
        """
        return {table.name: self._changes_of(stack, table, since) for stack, table in self._all()}

    def _changes_of(self, stack: Stack, table: TableSlice, since: Version) -> Changes:
        if table.vocabulary is None:
            return Changes(self._rows.after(stack, table, since.step))
        known = self._keys[table.name]
        if 0 <= since.keys < known.lost_since:
            expected = f"a version of {known.lost_since} admitted batches or more"
            got = f"one of {since.keys}: table {table.name!r} has lost more keys than it has rows"
            remedy = "publish a full export, and deltas more often"
            raise ValueError(message("since", expected=expected, got=got, remedy=remedy))
        if table.is_on_host:
            touched = self._hosted.marks[table.name].after(since.step).view(np.int64)
        else:
            touched = self._rows.after(stack, table, since.step)
        begun = self._first + bisect.bisect_right(self._newest, since.step)
        ids = np.union1d(known.given(min(since.keys, begun)).view(np.int64), touched)
        shared = shared_row(table)
        shared = shared if shared is not None and shared in ids else None
        if table.key_rules is None:
            keys = np.sort(ids.view(np.uint64))
            return Changes(keys.view(np.int64), keys, keys[:0])
        keys, rows = self._keys_of(table)
        here = np.isin(rows, ids)
        keys, rows = keys[here], rows[here]
        order = np.argsort(keys)
        return Changes(rows[order], keys[order], self._without_row(table, known, since), shared)

    def _keys_of(self, table: TableSlice) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys of a living vocabulary, uint64 `[n]`, and their rows or ids, int64."""
        assert self._maps is not None, "a vocabulary lives"
        return self._maps.keys(table.name)

    def find(self, table: TableSlice, keys: np.ndarray) -> np.ndarray:
        """Return the rows, or ids at home, of keys or ids of 64 bits; -1: none; int64 `[n]`."""
        if table.key_rules is None or self._maps is None:
            return keys.view(np.int64)
        return self._maps.find(table.name, keys, self._maps.admitted).astype(np.int64)

    def _without_row(self, table: TableSlice, known: KeyMarks, since: Version) -> np.ndarray:
        """Return the keys that lost their rows since a version and have none, ascending."""
        lost = known.lost(since.keys)
        return lost[self.find(table, lost) < 0]

    # -- kept ----------------------------------------------------------------------------------

    def saved(self) -> dict[str, SavedMarks]:
        """Return what is known, by table, by key or id; meanwhile the maps must not move."""
        return {table.name: self._saved(stack, table) for stack, table in self._all()}

    def _saved(self, stack: Stack, table: TableSlice) -> SavedMarks:
        nobody, never = np.zeros(0, np.uint64), np.zeros(0, np.int32)
        if table.vocabulary is None:
            rows = self._rows.after(stack, table, NEVER)
            steps = self._rows.steps(stack, table, rows)
            given = np.full(rows.size, NEVER, np.int32)
            return SavedMarks(rows.view(np.uint64), steps, given, nobody, never)
        known = self._keys[table.name]
        if table.key_rules is None:
            hosted = self._hosted.marks[table.name]
            keys = np.union1d(hosted.after(NEVER), known.given(NEVER))
            rows = keys.view(np.int64)
        else:
            keys, rows = self._keys_of(table)
        shared = shared_row(table)
        at = np.append(rows, [] if shared is None else [shared]).astype(np.int64)
        if table.is_on_host:
            steps = self._hosted.marks[table.name].steps(at.view(np.uint64))
        else:
            steps = self._rows.steps(stack, table, at)
        given = known.steps(rows.view(np.uint64))
        here = np.flatnonzero(given > self._first)
        newest = np.array(self._newest, np.int32)[given[here] - self._first - 1]
        steps[here] = np.maximum(steps[here], newest)
        lost = known.lost_steps()
        last = NEVER if shared is None else int(steps[-1])
        return SavedMarks(keys, steps[: rows.size], given, *lost, known.lost_since, last)

    def load(self, saved: Mapping[str, SavedMarks], step: int) -> None:
        """Go on from what was saved; nothing has been marked yet.

        Args:
          saved: by table; tables that are missing are new.
          step: of the maps.
        """
        for stack, table in self._all():
            if table.name in saved:
                self._load(stack, table, saved[table.name], step)

    def _load(self, stack: Stack, table: TableSlice, saved: SavedMarks, step: int) -> None:
        if table.vocabulary is None:
            self._rows.load(stack, table, saved.keys.view(np.int64), saved.touched)
            return
        ids = self.find(table, saved.keys)
        here = ids >= 0
        ids, steps, shared = ids[here], saved.touched[here], shared_row(table)
        if shared is not None:
            ids, steps = np.append(ids, shared), np.append(steps, np.int32(saved.shared))
        known = steps > NEVER
        if table.is_on_host:
            self._hosted.marks[table.name].load(ids[known].view(np.uint64), steps[known])
        else:
            self._rows.load(stack, table, ids[known], steps[known])
        at = saved.given[here]
        given = ids[: at.size].view(np.uint64)[at > NEVER], at[at > NEVER]
        mine = self._keys[table.name]
        mine.load(given, (saved.lost, saved.lost_at), saved.lost_since)
        mine.lose(saved.keys[~here], step)


def shared_row(table: TableSlice) -> int | None:
    """Return the row, or the id at home, that unseen keys share; None if they don't."""
    rules = table.key_rules
    return table.declared_size - 1 if rules is not None and rules.unseen == "shared" else None


def check_row_ids(table: TableSlice, given: np.ndarray) -> np.ndarray:
    """Return row ids of a table, or ids of one on the host, int64 `[n]`.

    Raises:
      ValueError: they are not integers `[n]` in [0, V).
    """
    what, size = f"table {table.name!r}: rows", table.declared_size
    if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
        got = f"{given.dtype} of shape {given.shape}"
        raise ValueError(message(what, expected="integers of shape (n,)", got=got))
    outside = given[(given < 0) | (given >= size)]
    if outside.size:
        raise ValueError(message(what, expected=f"rows in [0, {size})", got=f"row {outside[0]}"))
    return given.astype(np.int64)
