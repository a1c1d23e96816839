"""Record which rows every update touched, so that only changed rows need to be exported.

For every row on the devices, the host keeps the number of the last update that touched it: 4 bytes
per row. With dynamic vocabularies it keeps also which keys got rows, and which lost theirs.

Input: every batch that is applied, with the number of its update. Output: the rows, ids or keys
that changed since a version; and the `Version` of a state, which orders exports and deltas in time.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np

from tpu_embed._checks import check_int, check_type, refuse
from tpu_embed._types import PADDING_ID, ArrayLike, PyTree, Tracer
from tpu_embed.core.batch import Batch, fields_of, line_of
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.layout import Layout, TableSlice
from tpu_embed.core.state import TableState, check_own
from tpu_embed.processes import gather_from_all
from tpu_embed.touched.table_marks import (
    NEVER,
    Changes,
    Lineage,
    SavedRecord,
    TableMarks,
    Version,
    check_row_ids,
    shared_row,
)
from tpu_embed.vocabulary import Moves, map_version, read_keys

# Steps are kept as int32, and `record_rows` marks rows with the step after the given one.
_LAST = 2**31 - 2
_FULL = "publish a full export"


def _new_run() -> str:
    """Return a name that no run has had, the same in all processes, which call this together."""
    return gather_from_all("TouchedRows", uuid.uuid4().hex)[0]


class TouchedRows:
    """Keep, for every row, the number of the last update that touched it.

    An update touches the row of every valid id that its batch keeps, even if the id's weight or
    gradient is zero. So a row that is reported may be unchanged, but every changed row is reported.
    An optimizer that changes every row, such as `Adam(lazy_adam=False)`, touches whole tables.
    Several threads may record at the same time.

    With several processes, all make it together, in the same order as other calls of this kind:
    they agree on the name of the run, so that a `Version` of one process is one of each.

    With dynamic vocabularies it follows the engine's maps by itself. When they are loaded, as by
    `io.restore`, it knows nothing any more, unless it was saved and is restored with them.

    Args:
      engine: the engine of the tables.
      step: the current `state.step`; updates before it are unknown.

    Attributes:
      lineage: the run that is recorded, and the moments of earlier runs that it goes on from.

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
        self._engine, self.layout = engine, engine.layout
        self._maps = engine.vocabularies
        self._maps_lock = (
            contextlib.nullcontext() if self._maps is None else self._maps.lock
        )
        self._lock, step = threading.Lock(), check_int("step", step, minimum=0)
        run = _new_run()
        with self._maps_lock:
            self._begin(Lineage(run), Version("", step, 0, self._admitted))
            if self._maps is not None:
                self._maps.observers.add(self)

    def _begin(self, lineage: Lineage, start: Version) -> None:
        """Know nothing of what was before a moment."""
        self.lineage, self._start = lineage, start
        self._through, self._edits = start.step, start.edits
        # All steps up to `_through` are recorded; `_ahead` has later ones, which threads may record
        # first: with 1, 2 and 4 recorded, _through is 2 and _ahead is {4}.
        self._ahead: set[int] = set()
        self._published = start.step  # the latest step of which there is a version
        self._is_stale = False
        self._keys_at: dict[
            int, int
        ] = {}  # by step of a version, the batches admitted by then
        self._marks = TableMarks(self.layout, self._maps)

    @property
    def _admitted(self) -> int:
        return 0 if self._maps is None else self._maps.admitted

    # -- batches -------------------------------------------------------------------------------

    def record(self, batch: PyTree, step: int) -> None:
        """Record that a batch was applied, or will be.

        Args:
          batch: what `place` returned, or features as `place` takes them; weights do not matter.
            With several processes, each gives its own part.
          step: `state.step` after the batch's update, 1 for the first update.

        Raises:
          ValueError: what `place` refuses; a step before the last one that is known; with tables on
            the host, a batch that was admitted long ago.
          TypeError: what `place` refuses.
        """
        if isinstance(batch, Batch):
            rows, at, given = physical_rows(batch, self.layout), step_of(batch), []
        else:  # a stack whose optimizer changes all rows is touched by any batch
            rows, at = (
                [np.zeros(0, stack.index_dtype) for stack in self.layout.stacks],
                0,
            )
            given = self._ids_of_features(batch)
        # Between the look for the rows of keys and the note of the step, no key gets or loses one.
        with self._maps_lock if given else contextlib.nullcontext(), self._lock:
            step = self._checked_step(step)
            mark = max(step, self._published + 1)  # no version so far knows of it
            for stack, mine in zip(self.layout.stacks, rows, strict=True):
                self._marks.touch(stack, mine, at, mark)
            for table, ids in given:
                self._marks.mark(table.name, self._ids_of_keys(table, ids), mark)
            self._count(step)

    def _ids_of_features(self, features: PyTree) -> list[tuple[TableSlice, np.ndarray]]:
        """Return the ids, int64, or keys, uint64, of features, with each table that is trained."""
        found = []
        for f, host in zip(
            self.layout.features, self._engine.host_ids(features), strict=True
        ):
            ids = host.ids[host.ids >= 0].astype(np.int64)
            if self.layout.stacks[f.stack].optimizer is not None:
                found.append(
                    (f.table, ids if host.keys is None else host.keys[np.unique(ids)])
                )
        return found

    def _ids_of_keys(self, table: TableSlice, keys: np.ndarray) -> np.ndarray:
        """Return rows, or ids at home, int64 `[n]`, that updates of keys may have touched.

        A key without a row has lost it since, or gets one later: see `note_admitted`. What batches
        that are not admitted yet do to it does not count: they may be undone, and its row was
        touched while it had it.
        """
        ids = self._marks.find(table, keys)
        ids, shared = ids[ids >= 0], shared_row(table)
        # A key that has a row by now may have been unseen in its batch.
        return ids if shared is None else np.append(ids, shared)

    def _checked_step(self, step: int) -> int:
        step = check_int("step", step, minimum=self._start.step + 1)
        if step < self._through:
            refuse(
                "step",
                expected=f"a step from {self._through} on",
                got=f"{step}",
                remedy=f"after a return to an earlier state, make another TouchedRows and {_FULL}",
            )
        if step > _LAST:
            refuse("step", expected=f"at most {_LAST}", got=f"{step}")
        return step

    def _count(self, step: int) -> None:
        """Note that a step is recorded: all of its rows are marked."""
        if step > self._through:
            self._ahead.add(step)
        # With _through = 2 and _ahead = {4}, step 3 moves _through to 4.
        while self._through + 1 in self._ahead:
            self._through += 1
            self._ahead.remove(self._through)

    # -- rows that are set ---------------------------------------------------------------------

    def record_rows(
        self, name: str, rows: ArrayLike | None, step: int, *, keys: Any = None
    ) -> None:
        """Record that rows were set by `set_rows`, or that a whole table was loaded.

        With several processes, all must call this, because each counts the edits.

        Args:
          name: the table, trainable or not.
          rows: row ids, or ids of a table on the host, integers `[n]`; None: all rows.
          step: `state.step` when they were set; they count as touched by the next update.
          keys: with rows=None, the keys whose rows were set, as for `engine.set_rows`, if the
            table's vocabulary lives.

        Raises:
          ValueError: an unknown name, a bad row id, a key without a row, or a step before this
            object's first; all rows of a table on the host.
        """
        _, table = self.layout.table(name)
        check_int("step", step, minimum=self._start.step)
        if keys is not None:
            rows = self._rows_of(table, rows, keys)
        if table.is_on_host and rows is None:
            refuse(
                f"table {name!r}: rows",
                expected="the ids whose rows were set, of a table on the host",
                got="None",
            )
        chosen = None if rows is None else check_row_ids(table, np.asarray(rows))
        with self._lock:
            self._edits += 1
            mark = max(step, self._published) + 1
            if chosen is None:
                self._marks.mark_all(name, mark)
            else:
                self._marks.mark(name, chosen, mark)

    def _rows_of(
        self, table: TableSlice, rows: ArrayLike | None, keys: Any
    ) -> np.ndarray:
        """Return the rows, or ids at home, of keys, int64 `[n]`.

        Raises:
          ValueError: rows were given, too; the table has no keys; a key has no row.
        """
        what = f"table {table.name!r}: keys"
        if rows is not None or table.key_rules is None:
            refuse(
                what,
                expected="None beside rows"
                if rows is not None
                else "None: ids are row numbers",
                got="keys",
            )
        numbers = read_keys(what, keys)
        found = self._marks.find(table, numbers)
        if (found < 0).any():
            refuse(
                what,
                expected="keys with a row",
                got=f"key {numbers[found < 0][0]}, which has none",
            )
        return found

    # -- what has changed ----------------------------------------------------------------------

    def since(self, since: int | Version) -> dict[str, np.ndarray]:
        """Return what was touched after a version, by table, ascending.

        With several processes, each returns what its own batches touched. Of a table that is not
        trainable, these are the rows given to `record_rows`, and keys that got rows.

        Args:
          since: what `version` or `export_delta` returned; or its step.

        Returns:
          Row ids, int64 `[n]`; keys, uint64 `[n]`, of a dynamic vocabulary; ids, uint64 `[n]`, of a
          table on the host.

        Raises:
          ValueError: a version before this object's first, or of another run; with dynamic
            vocabularies or tables on the host, also a step of which there was no version.
        """
        pairs = self.changes(since).items()
        return {name: one.rows if one.keys is None else one.keys for name, one in pairs}

    def changes(self, since: int | Version) -> dict[str, Changes]:
        """Return what changed after a version, by table; see `since`."""
        known = self.known(since)
        with self._maps_at_rest(), self._lock:
            return self._marks.changed(known)

    def never(self) -> dict[str, int]:
        """Return, by table, how many rows were not touched since recording began.

        Of a dynamic vocabulary, only rows that have keys count.
        """
        with self._maps_at_rest(), self._lock:
            found = self._marks.changed(Version("", NEVER, 0, NEVER))
            sizes = {}
            for table in self._marks.tables:
                sizes[table.name] = table.declared_size
                if table.key_rules is not None and self._maps is not None:
                    sizes[table.name] = self._maps.keys(table.name)[0].size
        return {name: size - found[name].rows.size for name, size in sizes.items()}

    def known(self, since: int | Version) -> Version:
        """Return a version, after a check that what changed since is known; see `since`."""
        if not isinstance(since, Version):
            step = check_int("step", since, minimum=0)
            keys = 0 if self._maps is None else self._keys_at.get(step)
            if keys is None and step >= self._start.step:
                refuse(
                    "since",
                    expected="a Version, or the step of one that this object has returned",
                    got=f"{step}",
                    remedy="keep what touched.version or export_delta returned",
                )
            since = Version(self.lineage.run, step, 0, keys or 0)
        parts = zip(since._fields[1:], since[1:], strict=True)
        numbers = (
            check_int(f"since: {part}", number, minimum=0) for part, number in parts
        )
        since = Version(since.run, *numbers)
        if not self.lineage.has(since):
            refuse(
                "since",
                expected=f"a version of run {self.lineage.run!r}",
                got=f"{since}",
                remedy=_FULL,
            )
        if since.step < self._start.step or since.keys < self._start.keys:
            refuse(
                "step",
                expected=f"a step from {self._start.step} on, where recording began",
                got=f"{since.step}",
                remedy=_FULL,
            )
        return since

    def version(self, state: TableState) -> Version:
        """Return the version of a state, after a check that all of its updates were recorded.

        Raises:
          ValueError: an update between this object's first step and the state's was not recorded,
            or the state is from before the first step; with dynamic vocabularies or tables on the
            host, the state is not the newest one, or the maps were loaded since.
        """
        check_own(state, self.layout)
        step, keys = int(state.step), 0
        if step < self._start.step:
            refuse(
                "TouchedRows",
                expected=f"a state of step {self._start.step} or later",
                got=f"{step}",
                remedy=f"make another TouchedRows with step={step}, and {_FULL}",
            )
        if self._maps is not None:
            self._check_current()
            self._maps.check_newest(state)
            keys, _ = map_version(state)
        with self._lock:
            through, edits = self._through, self._edits
            if step > through:
                refuse(
                    "TouchedRows",
                    expected=f"every update from {self._start.step + 1} to {step} recorded",
                    got=f"none for step {through + 1}",
                    remedy="record each batch with the step that state.step is after it",
                )
            self._keys_at.setdefault(step, keys)
            self._published = max(self._published, step)
        return Version(self.lineage.run, step, edits, keys)

    # -- what the maps do: see `vocabulary.table_maps.Observer` -----------------------------------

    def note_admitted(self, step: int, moves: Moves) -> None:
        """Follow the maps; keys that get rows count as touched by the newest recorded update.

        That may be their own, recorded as features before they had rows. Then a version between
        the row and the update has the row's first values only, and a delta since it needs them.
        """
        with self._lock:
            self._marks.note_admitted(
                step, moves, max(self._ahead, default=self._through)
            )

    def note_undone(self, step: int) -> None:
        """Follow the maps."""
        with self._lock:
            self._marks.hosted.undo(step)

    def note_loaded(self) -> None:
        """Follow the maps."""
        self._is_stale = True

    @contextlib.contextmanager
    def _maps_at_rest(self) -> Iterator[None]:
        """Let no map move between what it tells and what is known here."""
        with self._maps_lock:
            self._check_current()
            yield

    def _check_current(self) -> None:
        """Check that the maps are those that were followed.

        Raises:
          ValueError: others were loaded since.
        """
        if self._is_stale:
            expected, got = (
                "the record of the engine's maps",
                "one from before they were loaded",
            )
            remedy = "restore it with the tables, io.restore(…, touched=touched); or make another "
            remedy += f"TouchedRows(engine, step=int(state.step)), and {_FULL}"
            refuse("TouchedRows", expected=expected, got=got, remedy=remedy)

    # -- kept ----------------------------------------------------------------------------------

    def saved(self, state: TableState) -> SavedRecord:
        """Return what a checkpoint keeps of this beside a state, by key or id.

        `io.save(…, touched=)` calls this. It is also for the record of an engine that is to adopt
        the state.

        Raises:
          ValueError: whatever `version` refuses.
        """
        version = self.version(state)
        with self._maps_at_rest(), self._lock:
            kept = self._start, self.lineage.ancestors, dict(self._keys_at)
            return SavedRecord(version, *kept, self._marks.saved())

    def begin(self, state: TableState) -> None:
        """Know nothing of what was before a state, which was restored without a record.

        This is a new run. With several processes, all call this.
        """
        run, step = _new_run(), int(state.step)
        with self._maps_lock, self._lock:
            self._begin(Lineage(run), Version("", step, 0, self._admitted))

    def load(self, saved: SavedRecord) -> None:
        """Go on from what was saved, once the engine has the maps of the same moment.

        `io.restore(…, touched=)` calls this. After `engine.adopt`, call it yourself, with what the
        record of the other engine saved.

        This is a new run, which goes on from the saved one: what that did after the save is not
        part of it. With several processes, all call this, with the same record.
        """
        lineage = Lineage(_new_run(), (*saved.ancestors, saved.version))
        with self._maps_lock, self._lock:
            self._begin(lineage, saved.start)
            self._through = self._published = saved.version.step
            self._edits = saved.version.edits
            self._keys_at = dict(saved.known)
            self._marks.load(saved.tables, self._admitted)


def check_record(engine: EmbeddingEngine, touched: Any) -> None:
    """Check that a record is one of an engine.

    Raises:
      TypeError: it is no record.
      ValueError: it is another engine's.
    """
    check_type("touched", touched, TouchedRows, expected="a TouchedRows, or None")
    if touched.layout is not engine.layout:
        refuse("touched", expected="the record of this engine", got="another engine's")


def physical_rows(batch: Batch, layout: Layout) -> list[np.ndarray]:
    """Return the physical rows of this process's ids, one array per stack, with duplicates.

    Raises:
      ValueError: it is another engine's batch, or inside a jit.
    """
    batch.check(layout)
    if isinstance(batch.packed, Tracer):
        refuse(
            "batch",
            expected="a Batch",
            got="a tracer",
            remedy="record outside the jitted function",
        )
    # The lines on this process's devices, by the first one; without a split all devices hold the
    # same. And of each line the number of its device in the mesh.
    pieces = {s.index[0].start or 0: s.data for s in batch.packed.addressable_shards}
    lines = np.concatenate([np.asarray(piece) for piece in pieces.values()])
    numbers = np.concatenate(
        [first + np.arange(len(piece)) for first, piece in pieces.items()]
    )
    found = []
    for view, names in line_of(batch.spec, layout):
        stack, fields = view.stack, fields_of(lines, names)  # [devices, …]
        if "row_ids" in fields:
            rows = fields["row_ids"]
        elif stack.num_shards == 1:
            rows = fields["index"]
        else:
            # Local rows that are asked for: of this owner, where one host knows all; else of each
            # shard.
            owner = np.arange(stack.num_shards)[:, None]
            if layout.axes.one_process:
                owner = layout.axes.parts_of_devices(stack.shard_axes)[numbers][
                    :, None, None
                ]
            asked = fields["asked"]
            rows = np.where(asked < 0, PADDING_ID, owner * stack.num_rows + asked)
        found.append(rows[rows >= 0])
    return found


def step_of(batch: Batch) -> int:
    """Return the step of the maps that a batch is, or whose rows it has; 0 without maps."""
    if batch.keys.steps is not None:
        return batch.keys.steps.first
    return 0 if batch.valid_steps is None else int(np.asarray(batch.valid_steps)[0])
