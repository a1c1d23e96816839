"""The maps from keys to rows of an engine: as batches leave them, and as its newest state has them.

A map (`tpu_embed/vocabulary/`) moves when a training batch is placed. The tables follow later: when
the batch's turn to be trained on has come, `admit` makes the rows of its new keys new. So there are
two steps, both counted in training batches. With two batches placed ahead:

    placed     the maps' step         12      the batches 11 and 12 can still be undone
    admitted   the state's step       10      the rows of the tables are those of this step

A training batch looks up rows of its own step. A batch that is only looked up has the rows of the
admitted step, whatever was placed ahead.

Saved maps are put in place for all tables together, of several engines too, or for none.

Input: keys and rows of batches, steps of states, saved maps. Output: rows; or errors about batches
and states that do not belong together (`timeline.py`).
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from tpu_embed._checks import check_type, refuse, refuse_pickle
from tpu_embed.columns import describe_values, read_column
from tpu_embed.kernels.vocabulary_reference import MapState
from tpu_embed.key_hashes import hash_keys
from tpu_embed.processes import Order
from tpu_embed.storage import Homes, HostRows, Incoming, Room
from tpu_embed.vocabulary.batch_keys import (
    BatchKeys,
    MapStates,
    ValidSteps,
    map_version,
)
from tpu_embed.vocabulary.config import LivingTable, check_lookahead
from tpu_embed.vocabulary.table_maps import (
    FoundKeys,
    KeyChanges,
    KeyScores,
    Moves,
    Observer,
    TableMaps,
    changes_of,
)
from tpu_embed.vocabulary.timeline import FOREVER, SHARE_MAPS, Pin, Timeline

# -- loads -----------------------------------------------------------------------------------------
#
# A model may have many layers, each with an engine and maps of its own. A restore changes all of
# them or none, so whatever can fail comes first: new maps are made beside the old ones. Then the
# two are exchanged, which only changes references, in one call of C that no interrupt can cut; and
# exchanged again if anything fails after all.

_Act = Callable[[], None]


def _nothing() -> None:
    """Do nothing."""


class MapLoad(NamedTuple):
    """Maps that are ready to take the place of those of an engine.

    Attributes:
      order: the order in which batches are placed with those maps.
      lock: while a thread holds it, no map of the engine changes.
      wait: waits for rows on their way home.
      stores: the attributes of an object, and those that it is to have.
      observers: are told afterwards.
    """

    order: Order
    lock: contextlib.AbstractContextManager[bool]
    wait: Callable[[], None]
    stores: list[tuple[dict[str, Any], dict[str, Any]]]
    observers: weakref.WeakSet[Observer]


def load_together(
    loads: Sequence[MapLoad], then: _Act = _nothing, undo: _Act = _nothing
) -> None:
    """Put maps in their places and call `then`; if it raises, the old maps are there again.

    Batches that are being placed end first.

    Args:
      loads: of the same maps, the last one counts.
      then: what belongs to it, such as setting the tables of the same step.
      undo: takes back what `then` has done, or a part of it.
    """
    # Layers share their maps where one is a copy of the other. Whoever waits for several waits for
    # them in the same order as others do, so that no two wait for each other.
    different = {id(one.order): one for one in loads}
    _alone([different[number] for number in sorted(different)], [], then, undo)


def _alone(
    waiting: list[MapLoad], ready: list[MapLoad], then: _Act, undo: _Act
) -> None:
    """Exchange all maps when nobody else moves them, or looks at them."""
    if not waiting:
        exchange(ready, then, undo)
        return
    first, *others = waiting

    def locked():
        with first.lock:
            _alone(others, [*ready, first], then, undo)

    first.order.run(locked)


def exchange(
    loads: Sequence[MapLoad], then: _Act = _nothing, undo: _Act = _nothing
) -> None:
    """Do what `load_together` does, in a thread that has all locks."""
    new = [store for one in loads for store in one.stores]
    for one in loads:
        one.wait()
    old = [(held, {name: held[name] for name in fields}) for held, fields in new]
    try:
        _store(new)
        then()
    except BaseException:
        _store(old)
        undo()
        raise
    try:
        _note_loaded(loads)
    except BaseException:
        _note_loaded(loads)  # an interrupt has come before all were told
        raise


def _note_loaded(loads: Sequence[MapLoad]) -> None:
    for one in loads:
        for observer in list(one.observers):
            observer.note_loaded()


def _store(stores: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Change the attributes of objects, all of them in one call of C."""
    collections.deque(itertools.starmap(dict.update, stores), maxlen=0)


# -- keys as people have them ----------------------------------------------------------------------

_STRING_KEYS = np.uint64(2**63)
"""Hashes of strings are below this, so that -1 stays padding (`hash_ids(keys, None)`)."""


def read_keys(what: str, keys: Any) -> np.ndarray:
    """Return keys as maps hold them, as the features of a batch would be read.

    Args:
      what: their name, for messages.
      keys: integers of at most 64 bits or strings, `[n]`: an array, a list, or a column of pandas
        or Arrow. Signed integers count by their bits, so -1 is the key 2⁶⁴ − 1 here, and no
        padding. Strings are hashed as `hash_ids(keys, None)` does.

    Returns:
      uint64 `[n]`.

    Raises:
      TypeError: they are neither all integers nor all strings.
      ValueError: another shape, or one is missing.

    Example:
      >>> read_keys("keys", [7, 2**63]).tolist(), read_keys("keys", ["red"]).tolist()
      ([7, 9223372036854775808], [318610774259147834])
    """
    column = read_column(what, keys)
    if column.ndim != 1:
        refuse(
            what,
            expected="keys of shape (n,)",
            got=f"{column.dtype} of shape {column.shape}",
        )
    missing = np.ma.getmaskarray(column)
    if missing.any():
        refuse(
            what,
            expected="a key at every place",
            got=f"a missing one at {int(np.argmax(missing))}",
        )
    numbers = np.ma.getdata(column)
    if numbers.dtype.kind == "i":
        return numbers.astype(np.int64).view(np.uint64)
    if numbers.dtype.kind == "u":
        return np.ascontiguousarray(numbers, np.uint64)
    if numbers.dtype.kind not in "USO":
        got, remedy = describe_values(numbers)
        refuse(
            what,
            expected="integers or strings",
            got=got,
            remedy=remedy,
            error=TypeError,
        )
    if numbers.dtype.kind == "O" and not all(
        isinstance(one, (str, bytes)) for one in numbers
    ):
        expected, (got, remedy) = (
            "integers of at most 64 bits, or strings",
            describe_values(numbers),
        )
        refuse(what, expected=expected, got=got, remedy=remedy, error=TypeError)
    return hash_keys(numbers, 0)[0] % _STRING_KEYS


# -- the maps of an engine -------------------------------------------------------------------------


class Vocabularies:
    """The maps from keys to rows of all tables with a dynamic vocabulary.

    Engines share them if one is made with the `vocabularies` of the other. Any thread may call any
    method.

    Args:
      tables: the tables.
      lookahead: how many training batches may be admitted before their turn to be updated: rows of
        the `lookahead` batches before a batch are not taken from their keys for it.
      homes: of the tables on the host; None without them.

    Attributes:
      tables: the tables, by name.
      lookahead, homes: see above.
      order: the order in which training batches are placed.
      observers: are told what the maps do, for as long as somebody else holds them.
      lock: while a thread holds it, no map changes.
    """

    def __init__(
        self, tables: Sequence[LivingTable], lookahead: int, homes: Homes | None = None
    ) -> None:
        self.lookahead, self.homes = lookahead, homes
        self.order = Order()
        homes_of = {} if homes is None else homes.tables
        groups = {name: one.row_groups for name, one in homes_of.items()}
        self.tables = {table.name: table for table in tables}
        self._maps = TableMaps(tables, lookahead, groups)
        self._timeline = Timeline(tables, lookahead)
        self._counted = {0: self.counters}  # after the admitted step and each later one
        self._last: dict[str, KeyChanges] = {}
        self.observers: weakref.WeakSet[Observer] = weakref.WeakSet()
        self.lock = threading.RLock()

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied, alone or in a model: then there were two histories."""
        remedy = "share the maps, EmbeddingEngine(…, vocabularies=engine.vocabularies), or give "
        remedy += "load_state of another engine's vocabularies what state() returned"
        refuse_pickle("Vocabularies", remedy=remedy)

    def __repr__(self) -> str:
        """Show a line per table: how many of its rows have keys."""
        lines = [
            f"Vocabularies, {self.placed} batches placed, {self.admitted} admitted"
        ]
        for name, (count, capacity) in self._maps.sizes.items():
            lines.append(f"{name}: {count} of {capacity} rows")
        return "\n  ".join(lines)

    def __len__(self) -> int:
        """Return how many keys have a row, in all tables."""
        return sum(count for count, _ in self._maps.sizes.values())

    def __bool__(self) -> bool:
        """Return True: there is a table with a dynamic vocabulary, though it may have no key."""
        return True

    # -- what a user asks ----------------------------------------------------------------------

    @property
    def placed(self) -> int:
        """The number of training batches that were placed."""
        return self._timeline.placed

    @property
    def admitted(self) -> int:
        """The number of training batches that were admitted into a state."""
        return self._timeline.admitted

    @property
    def now(self) -> tuple[int, int]:
        """Step and history of the newest state."""
        return self._timeline.admitted, self._timeline.history

    def at(self, step: int) -> tuple[int, int]:
        """Return step and history of a state that has, or will have, the rows of a step."""
        with self.lock:
            return step, self._timeline.history_of(step)

    def held(self, name: str) -> MapState:
        """Return what has a row on the devices, as of the admitted batches: keys, or ids at home.

        Args:
          name: the table.
        """
        with self.lock:
            return self._maps.held(self._known(name), self.admitted)

    @property
    def admitted_counters(self) -> dict[str, dict[str, int]]:
        """The same totals, of the batches that were admitted."""
        with self.lock:
            return self._counted[self.admitted]

    @property
    def nbytes(self) -> int:
        """The bytes of the host's memory that the maps take."""
        with self.lock:
            return self._timeline.nbytes + self._maps.nbytes

    def keys(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys of a table, as of the admitted batches, and their rows.

        Returns:
          The keys, uint64 `[n]`, and their rows, int64 `[n]`, ascending by row. Of a table on the
          host these are the rows at home, in [0, V), if it is dynamic; otherwise the ids
          that are on the devices, and their rows there.

        Raises:
          ValueError: no such table has a dynamic vocabulary.
        """
        found = self.scores(name)
        return found.keys, found.rows

    @property
    def counters(self) -> dict[str, dict[str, int]]:
        """Totals by table, of all batches that were placed.

        `keys`, which have a row now; and those that were "admitted"; "evicted" for another key;
        "expired" by their ttl; "unseen", distinct keys without a row, summed over the batches;
        "forgotten", waiting keys that were too many.
        """
        return self._maps.counters

    def capacity(self, name: str) -> int:
        """Return how many rows the keys of a table can have."""
        return self._maps.sizes[self._known(name)][1]

    def scores(self, name: str) -> KeyScores:
        """Return the keys of a table as of the admitted batches, with what decides which stay.

        It takes time in proportion to the table's capacity. Of a table on the host with row
        numbers these are the ids that the devices hold.

        Args:
          name: the table.

        Raises:
          ValueError: no such table has a dynamic vocabulary.
        """
        with self.lock:
            state = self._maps.keys(self._known(name), self.admitted)
        return KeyScores(*state[:6], step=int(state.step))

    @property
    def last(self) -> dict[str, KeyChanges]:
        """The keys that came and went in the step that was admitted last, by table.

        It is empty before the first batch, and after a restore. Of a table on the host with row
        numbers these are the ids that came to the devices and left them.
        """
        with self.lock:
            return dict(self._last)

    def rows_of(self, name: str, keys: Any) -> np.ndarray:
        """Return the rows of keys, int64 `[n]`, as of the admitted batches; see `keys`.

        Args:
          name: the table.
          keys: integers or strings `[n]`, see `read_keys`.

        Raises:
          ValueError: a key has no row; the message names the first one.
          TypeError: the keys are neither integers nor strings.
        """
        what = f"table {self._known(name)!r}: keys"
        rows = self.find(name, keys, self.admitted).astype(np.int64)
        unknown = np.flatnonzero(rows < 0)
        if unknown.size:
            first = np.ma.getdata(read_column(what, keys))[unknown[:1]].tolist()[0]
            more = f" and {unknown.size - 1} more" if unknown.size > 1 else ""
            refuse(
                what,
                expected="keys that have a row",
                got=f"{first!r}{more} without one",
                remedy="engine.vocabularies.find tells which have one; set_rows gives a key one",
            )
        return rows

    def _known(self, name: str) -> str:
        if name not in self.tables:
            refuse(
                "table",
                expected=f"one of {sorted(self.tables)}, with a dynamic vocabulary",
                got=repr(name),
            )
        return name

    # -- placing -------------------------------------------------------------------------------

    def find(self, name: str, keys: Any, step: int | None = None) -> np.ndarray:
        """Return the rows of keys of one table, int32 `[n]`, see `keys`; -1 for those without one.

        Args:
          name: the table.
          keys: integers or strings `[n]`, as its features take them; -1 is a key here.
          step: after which the rows are wanted, at least `admitted`; None: all that was placed.
        """
        given = read_keys(f"table {self._known(name)!r}: keys", keys)
        return self.find_all({0: (name, given)}, step)[1][0].ids

    def find_all(
        self, keys: Mapping[int, tuple[str, np.ndarray]], step: int | None = None
    ) -> tuple[ValidSteps, dict[int, FoundKeys]]:
        """Return the ids and rows of keys as they were after a step; no map changes.

        Args:
          keys: by any number, a table and keys of it, uint64 `[n]`.
          step: one that is not before `admitted`, or that is pinned. None: the present one.

        Returns:
          The states that a batch with these rows may be looked up in; the first one is `admitted`
          if what came after the given step is not known any more. And by number, what is known of
          the keys.
        """
        with self.lock:
            self._check_whole()
            step = self.placed if step is None else self._timeline.known(step)
            after = self._timeline.after(step)
            found = {
                n: self._maps.find(name, some, after)
                for n, (name, some) in keys.items()
            }
            # Under the same lock: another thread may load maps at once, which begins a history.
            return self._timeline.steps(step, training=False), found

    def rows(self, name: str, ids: np.ndarray, step: int | None = None) -> np.ndarray:
        """Return the rows on the devices, int32 `[n]`, of ids of a table on the host; -1 for none.

        Args:
          name: the table.
          ids: integers `[n]`; -1 for unseen keys.
          step: after which the rows are wanted; None: the present one.
        """
        with self.lock:
            after = () if step is None else self._timeline.after(step)
            return self._maps.rows(name, ids, after)

    def shared(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Return ids, that of the shared row for those that are -1; see `TableMaps.shared`."""
        return self._maps.shared(name, ids)

    def pin(self) -> Pin:
        """Return the admitted step, whose rows can be found while somebody holds what is returned.

        A `Prefetcher` of lookups takes one where the loop asks for a batch, so that the rows do not
        depend on when its thread comes to place it.
        """
        with self.lock:
            return self._timeline.pin()

    def take(self, batch: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Moves:
        """Take one training batch in all maps; see `TableMaps.take`.

        Raises:
          ValueError: the rows are of another step or find no place on the devices, or there were
            too many steps; no map changes.
        """
        return self._step(lambda: self._maps.take(batch))

    def take_keys(self, name: str, keys: np.ndarray) -> Moves:
        """Take one step in which all keys of a table get rows; see `TableMaps.take_keys`."""
        return self._step(lambda: self._maps.take_keys(name, keys))

    def _step(self, take: Callable[[], Moves]) -> Moves:
        with self.lock:
            self._check_whole()
            step = self.placed
            if step + 1 + self.lookahead >= FOREVER:
                refuse(
                    "place",
                    expected=f"fewer than {FOREVER} training batches",
                    got=f"{step + 1}",
                )
            try:
                moves = take()
            except BaseException:
                self._maps.rewind(step)
                raise
            self._timeline.note_taken(step + 1, moves)
            self._counted[step + 1] = self.counters
        return moves

    def _check_whole(self) -> None:
        """Check that all maps are at the step that the batches placed so far have led to.

        Raises:
          ValueError: Ctrl-C has cut a call that moves them.
        """
        if self._maps.steps != {self._timeline.placed}:
            refuse(
                "vocabularies",
                expected="maps of one step",
                got="maps that an interrupted call has left halfway",
                remedy="engine.vocabularies.rewind(state) forgets the batches placed "
                "since the state",
            )

    def incoming(self, moves: Moves, rooms: Mapping[str, Room]) -> dict[str, Incoming]:
        """Return the rows from home that a batch just taken brings, by table: read to the rooms."""
        if self.homes is None:
            return {}
        with self.lock:
            before = self._timeline.leaving(self.placed - 1)
        brought = {}
        for name in self.homes.tables:
            keys, is_new = moves.taken[name].new_keys, None
            keys = keys[self.homes.tables[name].row_groups.at_home(keys)]
            if name in moves.owners:
                # What is at home for the id of a new key belonged to another key.
                is_new = np.isin(
                    keys, moves.owners[name].taken.new_rows.view(np.uint64)
                )
            brought[name] = self.homes.fetch(
                name, keys, before[name], rooms[name], is_new
            )
        return brought

    def undo(self, step: int) -> None:
        """Undo the batches placed after a step, as if they had never been placed.

        Raises:
          ValueError: one of them was admitted, or is not known any more.
        """
        with self.lock:
            if step < self.admitted:
                refuse(
                    "vocabularies",
                    expected=f"a step of at least {self.admitted}, which is admitted",
                    got=f"{step}",
                )
            self._timeline.undo(step)
            self._maps.rewind(step)
            self._counted = {
                at: counted for at, counted in self._counted.items() if at <= step
            }
            for one in list(self.observers):
                one.note_undone(step)

    def steps(self, first: int, *, training: bool) -> ValidSteps:
        """Return the states that a batch may be looked up in; see `Timeline.steps`."""
        with self.lock:
            return self._timeline.steps(first, training=training)

    # -- states --------------------------------------------------------------------------------

    def check(self, now: tuple[int, int], steps: ValidSteps, keys: BatchKeys) -> None:
        """Check that a batch may be looked up in a state; see `Timeline.check`."""
        with self.lock:
            self._timeline.check(now, steps, keys)

    def check_next(self, now: tuple[int, int], keys: BatchKeys) -> ValidSteps:
        """Check that a training batch is the next one that a state admits; return its steps."""
        with self.lock:
            return self._timeline.check_next(now, keys)

    def check_newest(self, state: Any) -> None:
        """Check that a state has the step and the history of the maps.

        Raises:
          ValueError: it has another one.
        """
        if map_version(state) != self.now:
            refuse(
                "state",
                expected=f"the newest state, of step {self.admitted} of these maps",
                got=f"one of step {map_version(state)[0]}, of other maps, or from before a load",
                remedy=f"restore a checkpoint, which has maps and tables of one step; {SHARE_MAPS}",
            )

    def is_current(self, batch: Any) -> bool:
        """Return whether a placed batch can still be admitted, or looked up, with these maps."""
        if batch.visits is not None and self.homes is not None:  # it has rows from home
            if batch.visits[0] != self.homes.replaced:
                return False
        with self.lock:
            return self._timeline.is_current(
                ValidSteps(*batch.valid_steps.tolist()), batch.keys
            )

    def note_admitted(self, step: int) -> None:
        """Note that a state has the rows of a step; what came before cannot be undone any more."""
        with self.lock:
            (*_, moves), before = (
                self._timeline.after(step - 1),
                self._counted[self.admitted],
            )
            self._last = changes_of(moves, before, self._counted[step])
            try:
                moves = self._timeline.note_admitted(step)
                for one in list(self.observers):
                    one.note_admitted(step, moves)
            except BaseException:
                for one in list(self.observers):
                    one.note_loaded()  # interrupted, they have not followed this step
                raise
            self._maps.forget(step)
            self._counted = {
                at: counted for at, counted in self._counted.items() if at >= step
            }

    def rewind(self, state: Any) -> None:
        """Take the maps back to the step of a state: batches placed since are as if never placed.

        Args:
          state: the newest state, or one that `init` made, with which all keys are forgotten.

        Raises:
          ValueError: later batches were admitted into another state.
        """
        self.order.run(lambda: self._rewind(state))

    def _rewind(self, state: Any) -> None:
        step, history = map_version(state)
        with self.lock:
            first = 0, self._timeline.first_history
            if (step, history) == first and self.now != first:
                exchange([self._load(self._maps.empty_states(history), {})])
                return
            self.check_newest(state)
            self.undo(step)

    # -- kept ----------------------------------------------------------------------------------

    def state(self, step: int | None = None) -> MapStates:
        """Return all maps after a step, as arrays that a checkpoint can keep.

        Args:
          step: of the state that is kept beside them; None: the admitted one.

        Raises:
          ValueError: the maps no longer know that step, or there are tables on the host.
        """
        self._refuse_homes("state")
        return self.states(step)

    def states(self, step: int | None = None) -> MapStates:
        """Return what `state` does, for those who keep the rows at home, too."""
        with self.lock:
            at = self.admitted if step is None else step
            return self._maps.states(self._timeline.history_of(at), at)

    def load_state(self, states: MapStates) -> None:
        """Replace all maps; batches placed before are refused from now on.

        The state of the tables that belongs to them has the same step and history.

        Args:
          states: what `state` returned; of other capacities, `tpu_embed.io.restore` fits them.

        Raises:
          ValueError: other tables, or states that maps of these capacities cannot have; nothing
            changes then. There are tables on the host.
        """
        self._refuse_homes("load_state")
        self.load_states(states, None)

    def load_states(
        self, states: MapStates, rows: Mapping[str, HostRows] | None
    ) -> None:
        """Replace all maps, and the rows at home, by table on the host (None without them)."""
        load_together([self.prepare_load(states, rows)])

    def prepare_load(
        self, states: MapStates, rows: Mapping[str, HostRows] | None
    ) -> MapLoad:
        """Return maps, and rows at home, that can take the place of these; see `load_states`."""
        self._maps.check(states)
        return self._load(states, rows or {})

    def _refuse_homes(self, what: str) -> None:
        """Refuse to keep maps without the rows that are at home."""
        if self.homes is not None:
            refuse(
                f"vocabularies.{what}",
                expected="dynamic vocabularies alone",
                got=f"tables on the host {[*self.homes.tables]}",
                remedy="tpu_embed.io.save keeps maps, rows at home and rows on the devices "
                "together",
            )

    @property
    def first_history(self) -> int:
        """The history of states without keys, as `init` makes them."""
        return self._timeline.first_history

    def _load(self, states: MapStates, rows: Mapping[str, HostRows]) -> MapLoad:
        """Return these states, and rows at home, ready to take the place of those of now."""
        maps = self._maps.loaded(states)
        timeline = self._timeline.loaded(maps.step, states.history)
        counted = {maps.step: maps.counters}
        mine = {"_maps": maps, "_timeline": timeline, "_counted": counted, "_last": {}}
        stores = [(vars(self), mine)]
        if self.homes is not None:
            stores.append((vars(self.homes), self.homes.contents_of(rows)))
        wait = (lambda: None) if self.homes is None else self.homes.wait
        return MapLoad(self.order, self.lock, wait, stores, self.observers)


def choose_vocabularies(
    tables: Sequence[LivingTable],
    lookahead: int | None,
    shared: Any,
    homes: Homes | None,
) -> Vocabularies | None:
    """Return the maps of an engine: new ones, or those of another engine; None if it needs none.

    Args:
      tables: those with dynamic vocabularies.
      lookahead: as for `Vocabularies`; None: 0, or that of the other engine.
      shared: the other engine's maps, or None.
      homes: of the tables on the host; None without them.

    Raises:
      ValueError: a lookahead that is no number from 0 to 2¹⁶; or the other engine's maps are for
        other tables, or another lookahead.
    """
    if lookahead is not None:
        lookahead = check_lookahead(lookahead)
    if shared is None:
        return Vocabularies(tables, lookahead or 0, homes) if tables else None
    check_type(
        "vocabularies",
        shared,
        Vocabularies,
        expected="the vocabularies of another engine",
        error=ValueError,
    )
    ours, theirs = (
        {
            table.name: (table.vocabulary_size, table.vocabulary, table.key_table)
            for table in some
        }
        for some in (tables, shared.tables.values())
    )
    if ours != theirs:
        refuse(
            "vocabularies",
            expected=f"maps of the engine's tables {ours}",
            got=f"{theirs}",
        )
    ours, theirs = (one and one.tables for one in (homes, shared.homes))
    if ours != theirs:
        refuse(
            "vocabularies", expected=f"homes of the same rows, {ours}", got=f"{theirs}"
        )
    if lookahead not in (None, shared.lookahead):
        refuse(
            "vocabularies",
            expected=f"lookahead={lookahead}",
            got=f"{shared.lookahead}",
            remedy="leave lookahead out",
        )
    return shared
