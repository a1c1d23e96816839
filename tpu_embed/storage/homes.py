"""The homes of an engine's rows on the host, and the rows that are on their way there.

A table is declared to be at home on the host by its `HostStorage`. An id that comes back must find
its row in a process that stored it. So with several processes, each id belongs to a group, and each
group to the processes that hold certain shards; an id gets rows of its group only. With two
processes of two shards each, and rows split by MOD:

    rows        0  1  2  3  4  5  6  7       shards 0 and 1 are in process 0, 2 and 3 in process 1
    groups      0  0  1  1  0  0  1  1       an id whose hash is even is at home in process 0

When a training batch is admitted, the rows that it displaces are copied from the devices in the
background and written at home. When one is placed, its incoming rows are read from home ahead of
time. Between the two stands a row that comes back before it has arrived:

    step   placed   the batch displaces    and brings     row 7 is read
     5       yes    7                                     -
     6       yes                           7              at `complete`, once step 5 has arrived

All other rows at home are final: nobody writes a row at home before it has been to the devices.

Input: declarations, keys, rows by field, steps. Output: rows by field.
"""

from __future__ import annotations

import atexit
import collections
import dataclasses
import functools
import os
import queue
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from tpu_embed._checks import check_choice, check_int, local_path, refuse
from tpu_embed.kernels.dispatch import host_kernels
from tpu_embed.key_hashes import mix
from tpu_embed.storage.host_rows import HostRows, RowField, Rows

EvictFromDevice = Literal["lru", "lfu"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostStorage:
    """Keep the rows of a table, and their slots, on the host, and the busy ones on the devices.

    Every row has its home on the host; `device_rows` of them have a place on the devices. A
    training batch brings its rows to the devices, and sends home those that it displaces.
    Activations and updates are, to the bit, those of a table that is wholly on the devices,
    whatever is given here. A row that no training batch has had takes no memory: it is drawn, as
    `init` draws it, when it is looked up. With a dynamic vocabulary, V is how many keys have a row
    at home; which keys have one is decided as if all V rows were on the devices.

    Args:
      device_rows: C, the rows that the devices hold together; a batch must find room for its
        distinct rows, and those of the `lookahead` batches before it.
      path: a folder on a fast local disk, for a scratch file that holds the rows; None: the host's
        memory holds them.
      evict: the row that goes home when a place is needed. "lru": the one that was seen longest
        ago; "lfu": the one that the fewest training batches have had since it came.
      groups: G, into how many groups ids are divided by a hash; each has its part of the rows on
        the devices, and a batch must find room in every group. None: as many as there are different
        sets of processes that hold shards of the table, so 1 in a single process.

    Raises:
      ValueError: an argument is outside its range; the path is a URL.

    Example:
      >>> HostStorage(device_rows=1_000_000).evict
      'lru'
    """

    device_rows: int
    path: str | None = None
    evict: EvictFromDevice = "lru"
    groups: int | None = None

    def __post_init__(self) -> None:
        rows = check_int("HostStorage.device_rows", self.device_rows, minimum=1)
        object.__setattr__(self, "device_rows", rows)
        check_choice("HostStorage.evict", self.evict, get_args(EvictFromDevice))
        if self.groups is not None:
            count = check_int("HostStorage.groups", self.groups, minimum=1)
            if count > rows:
                refuse(
                    "HostStorage.groups",
                    expected=f"at most {rows}, the device_rows",
                    got=f"{count}",
                )
            object.__setattr__(self, "groups", count)
        if self.path is not None:
            local_path(self.path, "HostStorage.path")
            object.__setattr__(self, "path", os.fspath(self.path))


@dataclasses.dataclass(frozen=True)
class RowGroups:
    """The groups of one table on the host.

    Attributes:
      num_rows: C, the rows that the devices hold together.
      owners: for each shard, the number of the processes that hold it: shards have the same number
        if the same processes do.
      by_range: whether each shard has a range of the rows ("div"); otherwise row r is on shard
        r mod S ("mod").
      count: G, the number of groups; a multiple of the different owners.
      mine: the numbers in `owners` whose shards this process holds.
      saved: those of them whose rows it saves: the first process that holds them does.
    """

    num_rows: int
    owners: tuple[int, ...]
    by_range: bool
    count: int
    mine: frozenset[int]
    saved: frozenset[int]

    @property
    def num_owners(self) -> int:
        """How many different owners there are."""
        return max(self.owners) + 1

    @functools.cached_property
    def rows(self) -> list[np.ndarray]:
        """The rows of each group, int64, ascending: nearly equally many of each owner's."""
        # Owner 1 of 2, with 6 groups, has the groups 1, 3 and 5: its rows are dealt out in turn.
        of_row = np.asarray(self.owners)[self.shards(np.arange(self.num_rows))]
        each = self.count // self.num_owners
        groups = []
        for group in range(self.count):
            mine = np.flatnonzero(of_row == group % self.num_owners)
            groups.append(mine[group // self.num_owners :: each])
        return groups

    def shards(self, rows: np.ndarray) -> np.ndarray:
        """Return the shard of each row on the devices."""
        num_shards = len(self.owners)
        if self.by_range:
            return rows // -(-self.num_rows // num_shards)
        return rows % num_shards

    def of(self, ids: np.ndarray) -> np.ndarray:
        """Return the group of each id, int64 `[n]`, given uint64 `[n]`."""
        if self.count == 1:
            return np.zeros(ids.size, np.int64)
        return (mix(ids) % np.uint64(self.count)).astype(np.int64)

    def at_home(self, ids: np.ndarray) -> np.ndarray:
        """Return which ids, uint64 `[n]`, are at home in this process, bool `[n]`."""
        return self._are_of(self.mine, ids)

    def are_saved(self, ids: np.ndarray) -> np.ndarray:
        """Return the rows of which ids, uint64 `[n]`, this process saves, bool `[n]`."""
        return self._are_of(self.saved, ids)

    def _are_of(self, owners: frozenset[int], ids: np.ndarray) -> np.ndarray:
        if len(owners) == self.num_owners:
            return np.ones(ids.size, bool)
        return np.isin(self.of(ids) % self.num_owners, [*owners])

    @property
    def is_whole(self) -> bool:
        """Whether all ids are at home in this process."""
        return len(self.mine) == self.num_owners


# -- homes -----------------------------------------------------------------------------------------

VALUES = "values"
"""The name of a row's values among the fields that it has."""


def slot_field(slot: str) -> str:
    """Return the name of a slot among the fields of a row."""
    return f"slot {slot}"


_every: weakref.WeakSet[Homes] = weakref.WeakSet()
"""All that there are, for the end of the program."""

_SAVES = 4
"""Saves that are remembered: the latest ones may have failed, or their files may be gone."""

_MOST_ON_THEIR_WAY = 4
"""Steps whose displaced rows may be on their way at a time: their copies take memory."""


class HomeTable(NamedTuple):
    """A table that is at home on the host.

    Attributes:
      storage: what the user declared.
      fields: what a row has.
      row_groups: which rows of the devices an id may have, and which ids are at home here.
    """

    storage: HostStorage
    fields: dict[str, RowField]
    row_groups: RowGroups


class Room(NamedTuple):
    """Where rows of one table are to be read to, or are written from.

    Attributes:
      rows: `[m, …]` by field.
      at: int64 `[n]`, the place of each row among the m; None: 0, 1, ….
    """

    rows: Rows
    at: np.ndarray | None


@dataclasses.dataclass(frozen=True, eq=False)
class Incoming:
    """Rows of one table that a batch brings to the devices.

    Attributes:
      keys: uint64 `[n]`.
      room: has their rows; arbitrary where there is none at home, or none yet.
      found: bool `[n]`, whether a row was at home.
      awaited: int64 `[n]`, the step whose displaced rows must have arrived first; 0: none.
    """

    keys: np.ndarray
    room: Room
    found: np.ndarray
    awaited: np.ndarray


class Save(NamedTuple):
    """A save that was begun. If it ended well, the next one writes only what changed since.

    Attributes:
      path: the directory of the tables in the checkpoint, once it is finished.
      checkpoint: the unique name of the checkpoint.
      step: of the state.
      marks: by table, the mark of the rows that were written at home since.
    """

    path: Any
    checkpoint: str
    step: int
    marks: Mapping[str, int]


class _Departure:
    """Rows on their way home.

    Ctrl-C may come between any two lines of Python code, also of the classes of `threading` and
    `concurrent.futures`, whose locks it would leave behind. So only a plain lock is waited for.

    Args:
      homes: where they are written, by table: those of when they were sent.
      keys: distinct, uint64 `[n]` by table.
      read: returns the rows of each table.

    Attributes:
      homes, keys, read: see above.
      has_arrived: whether they were written, or lost.
      error: what kept them from being written, or None.
    """

    def __init__(
        self,
        homes: Mapping[str, HostRows],
        keys: Mapping[str, np.ndarray],
        read: Callable[[], Mapping[str, Room]],
    ) -> None:
        self.homes, self.keys, self.read = homes, keys, read
        self.error: BaseException | None = None
        self.has_arrived, self._on_the_way = False, threading.Lock()
        self._on_the_way.acquire()

    def arrive(self) -> None:
        """Write the rows; what that raises becomes `error`."""
        try:
            rooms = self.read()
            for name, some in self.keys.items():
                self.homes[name].write(some, *rooms[name])
        except BaseException as error:  # whoever waits raises it, whatever it is
            self.error = error
        del self.homes, self.read  # and the copies that it holds
        self.has_arrived = True
        self._on_the_way.release()

    def wait(self) -> None:
        """Wait until they have arrived."""
        with self._on_the_way:
            pass


def _write_back(departures: queue.SimpleQueue[_Departure | None]) -> None:
    """Let departures arrive, one after the other, until there is None."""
    while (one := departures.get()) is not None:
        one.arrive()
        del one


@functools.cache
def _wait_at_exit() -> None:
    """Wait at the end of the program for rows on their way: JAX is not called after its end."""
    atexit.register(lambda: [homes.wait() for homes in [*_every]])


class Homes:
    """The homes of all tables of an engine that are on the host: `engine.storage`.

    Any thread may call any method.

    Args:
      tables: by name.

    Attributes:
      tables: see above.
      saves: the latest saves that were begun, the newest last.

    Example:
      >>> import jax, numpy as np, tpu_embed
      >>> storage = tpu_embed.HostStorage(device_rows=8)
      >>> table = tpu_embed.TableConfig(2**40, 2, name="item", storage=storage)
      >>> optimizer = tpu_embed.optimizers.SGD(0.1)
      >>> engine = tpu_embed.EmbeddingEngine(tpu_embed.FeatureConfig(table), optimizer)
      >>> state = engine.init(jax.random.key(0))
      >>> for first in (0, 8, 2**39):
      ...     batch = engine.place(np.arange(first, first + 8).reshape(8, 1))
      ...     state, batch = engine.admit(state, batch)
      ...     state = engine.update(state, batch, engine.lookup(state, batch))
      >>> engine.storage.flush()
      >>> engine.storage.counters["item"]["rows"], engine.touched("item").size
      (16, 24)
    """

    _rows: dict[str, HostRows]  # by table
    # Rows on their way, or that were lost there, by step.
    _departures: dict[int, _Departure]
    saves: collections.deque[Save]

    def __init__(self, tables: Mapping[str, HomeTable]) -> None:
        self._sent: queue.SimpleQueue[_Departure | None] = queue.SimpleQueue()
        self.tables = dict(tables)
        vars(self).update(self.contents_of({}))
        self._lock = threading.RLock()
        self._counts = {
            name: dict.fromkeys(("missed", "sent", "brought", "late"), 0)
            for name in tables
        }
        threading.Thread(
            target=_write_back,
            args=(self._sent,),
            name="tpu_embed write-back",
            daemon=True,
        ).start()
        _every.add(self)
        _wait_at_exit()

    def __del__(self) -> None:
        self._sent.put(None)  # the thread ends

    def __getitem__(self, name: str) -> HostRows:
        """Return the rows of a table that have arrived at home."""
        return self._rows[name]

    @property
    def replaced(self) -> int:
        """The number of the last `Replacement` of rows of any table; 0: none was replaced."""
        return min(rows.replaced for rows in self._rows.values())

    @property
    def counters(self) -> dict[str, dict[str, int]]:
        """What each table has at home, and totals of the rows that batches moved.

        `rows` at home and the `bytes` that they take, index included; rows "sent" home; distinct
        rows that batches "missed" on the devices, summed over the batches; of these, rows "brought"
        from home, and of them the "late" ones, which came back before they had arrived. Totals may
        lack those of a call that was interrupted.
        """
        with self._lock:
            return {
                name: {"rows": len(rows), "bytes": rows.nbytes, **self._counts[name]}
                for name, rows in self._rows.items()
            }

    # -- coming --------------------------------------------------------------------------------

    def fetch(
        self,
        name: str,
        keys: np.ndarray,
        placed: Sequence[tuple[int, np.ndarray]],
        room: Room | None = None,
        is_new: np.ndarray | None = None,
    ) -> Incoming:
        """Read the rows of keys that come to the devices, as far as they are final at home.

        Args:
          name: the table.
          keys: distinct, uint64 `[n]`.
          placed: of batches that are placed and not admitted, the step and the keys that it
            displaces; read before this call, so that no step is between `placed` and on its way.
          room: where the rows are to be read to; None: to new arrays.
          is_new: bool `[n]`, whose rows are made new, whatever is at home; None: none.
        """
        awaited = np.zeros(keys.size, np.int64)
        for step, leaving in sorted(
            [*placed, *self._on_their_way(name)], key=lambda one: one[0]
        ):
            awaited[host_kernels().are_among(keys, leaving)] = step
        final = awaited == 0
        if is_new is not None:
            awaited[is_new], final[is_new] = 0, False
        room = room or Room(self._rows[name].empty(keys.size), None)
        incoming = Incoming(keys, room, np.zeros(keys.size, bool), awaited)
        self._read(name, incoming, final)
        return incoming

    def complete(self, name: str, incoming: Incoming) -> tuple[Rows, np.ndarray]:
        """Return the arrays that the rows of a batch are in, and which were at home, bool `[n]`.

        Waits for those that had to arrive first.
        """
        if incoming.awaited.any():
            late = incoming.awaited > 0
            self._wait(np.unique(incoming.awaited[late]).tolist())
            self._read(name, incoming, late)
        return incoming.room.rows, incoming.found

    def note_brought(self, name: str, incoming: Incoming) -> None:
        """Count the rows that a batch has brought to the devices."""
        with self._lock:
            self._counts[name]["missed"] += incoming.keys.size
            self._counts[name]["brought"] += int(np.count_nonzero(incoming.found))
            self._counts[name]["late"] += int(np.count_nonzero(incoming.awaited))

    def _read(self, name: str, incoming: Incoming, chosen: np.ndarray) -> None:
        """Read the chosen rows, bool `[n]`, of a batch."""
        keys, (rows, at) = incoming.keys, incoming.room
        if chosen.all():
            incoming.found[:] = self._rows[name].read_into(rows, at, keys)
            return
        at = np.flatnonzero(chosen) if at is None else at[chosen]
        incoming.found[chosen] = self._rows[name].read_into(rows, at, keys[chosen])

    def visit(self, name: str, keys: np.ndarray) -> tuple[Rows, np.ndarray]:
        """Return the rows of keys that the devices do not hold, and which are found, bool `[n]`.

        Waits for those that are on their way home.
        """
        return self.complete(name, self.fetch(name, keys, ()))

    # -- going ---------------------------------------------------------------------------------

    def wait_for_room(self) -> None:
        """Wait until the rows of one more step may be sent home.

        Raises:
          RuntimeError: some were lost; see `check`.
        """
        self._wait(sorted(self._pending())[: -_MOST_ON_THEIR_WAY + 1])

    def send(
        self,
        step: int,
        keys: Mapping[str, np.ndarray],
        read: Callable[[], Mapping[str, Room]],
    ) -> None:
        """Write rows at home in the background, after `wait_for_room`.

        Tables have been donated by now, so nothing is raised here about rows of earlier steps. The
        same rows may be sent again after an interrupt.

        Args:
          step: of the batch that displaces them.
          keys: distinct, uint64 `[n]` by table.
          read: returns the rows of each table; it may wait for the devices.
        """
        leaving = {name: some for name, some in keys.items() if some.size}
        if not leaving:
            return
        with self._lock:
            rows, departures = self._rows, self._departures
            if step in departures:
                return
            departure = _Departure(rows, leaving, read)
            self._sent.put(departure)  # first, because who finds it below waits for it
            departures[step] = departure
            for name, some in leaving.items():
                self._counts[name]["sent"] += some.size

    def _pending(self) -> dict[int, _Departure]:
        """Return the departures whose rows have not arrived, by step, and forget the others."""
        with self._lock:
            departures = self._departures  # a load replaces it by another one
            for step, one in [*departures.items()]:
                if one.has_arrived and one.error is None:
                    del departures[step]
            return dict(departures)

    def _on_their_way(self, name: str) -> list[tuple[int, np.ndarray]]:
        """Return the steps whose displaced rows of a table have not arrived, with their keys."""
        pairs = self._pending().items()
        return [(step, one.keys[name]) for step, one in pairs if name in one.keys]

    def ids(self, name: str) -> np.ndarray:
        """Return the ids of a table whose rows are at home or on their way, uint64 `[n]`."""
        # Those on their way first: a row that arrives meanwhile is at home by then.
        coming = [some for _, some in self._on_their_way(name)]
        return np.unique(np.concatenate([*coming, self._rows[name].ids()]))

    def _wait(self, steps: Collection[int]) -> None:
        for step, one in self._pending().items():
            if step in steps:
                one.wait()
        self.check()

    def check(self) -> None:
        """Check that no row was lost on its way home.

        Raises:
          RuntimeError: some were; the cause is the error that kept them from being written.
        """
        for step, one in self._pending().items():
            if (error := one.error) is not None:
                refuse(
                    "HostStorage",
                    expected=f"rows of {sorted(one.keys)} written at home",
                    got=f"an error at step {step}: {type(error).__name__}: {error}",
                    remedy="restore the last checkpoint, when there is room again",
                    error=RuntimeError,
                    cause=error,
                )

    def flush(self) -> None:
        """Wait until all rows that were sent home have arrived.

        Raises:
          RuntimeError: some were lost; see `check`.
        """
        self._wait(self._pending())

    def begin_save(self, path: Any, checkpoint: str, step: int) -> None:
        """Note that all rows are being saved as they are now.

        Args:
          path, checkpoint, step: see `Save`.
        """
        marks = {name: rows.begin_mark() for name, rows in self._rows.items()}
        self.saves.append(Save(path, checkpoint, step, marks))

    def contents_of(self, rows: Mapping[str, HostRows]) -> dict[str, Any]:
        """Return the attributes that this has once these rows are at home, by table, and no others.

        Whoever stores them calls `wait` before.
        """
        whole = {
            name: rows[name] if name in rows else HostRows(one.fields, one.storage.path)
            for name, one in self.tables.items()
        }
        saves: collections.deque[Save] = collections.deque(maxlen=_SAVES)
        return {"_rows": whole, "_departures": {}, "saves": saves}

    def wait(self) -> None:
        """Wait until all rows that were sent home have arrived, or were lost there."""
        for one in self._pending().values():
            one.wait()
