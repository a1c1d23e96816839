"""What people ask about the keys of a table: how busy they are, and which came and went.

Input: states of maps, and what maps did with a batch. Output: tuples of NumPy arrays.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tpu_embed._checks import message
from tpu_embed.columns import read_column
from tpu_embed.vocabulary.config import LivingTable
from tpu_embed.vocabulary.given_keys import read_keys
from tpu_embed.vocabulary.table_maps import Moves, TableMaps
from tpu_embed.vocabulary.timeline import Timeline


class KeyScores(NamedTuple):
    """What decides which keys of a table stay, and which are admitted next.

    Attributes:
      keys: uint64 `[n]`, the keys that have a row, by ascending row.
      rows: int64 `[n]`, their rows.
      last_seen: int64 `[n]`, the last step whose batch had the key.
      batches_seen: int64 `[n]`, how many training batches had the key since its admission, that
        one included.
      waiting_keys: uint64 `[w]`, the keys that are counted and have no row yet, the one first
        counted longest ago first.
      waiting_counts: int64 `[w]`, how many training batches had each of them.
      step: the step of all this: the training batches that were admitted.
    """

    keys: np.ndarray
    rows: np.ndarray
    last_seen: np.ndarray
    batches_seen: np.ndarray
    waiting_keys: np.ndarray
    waiting_counts: np.ndarray
    step: int

    @property
    def ages(self) -> np.ndarray:
        """How many steps ago a batch had each key, int64 `[n]`; 0: the last batch had it."""
        return self.step - self.last_seen


class KeyChanges(NamedTuple):
    """Which keys of a table came and went in one step.

    Attributes:
      step: the step.
      admitted: uint64 `[a]`, the keys that got a row, in order.
      evicted: uint64 `[e]`, the keys that lost their row to one of these.
      expired: uint64 `[x]`, the keys whose `ttl` had passed.
      unseen: how many distinct keys of the batch have no row.
    """

    step: int
    admitted: np.ndarray
    evicted: np.ndarray
    expired: np.ndarray
    unseen: int

    def counts(self) -> dict[str, int]:
        """Return how many there are of each kind, by its name."""
        kinds = ("admitted", "evicted", "expired")
        return {kind: getattr(self, kind).size for kind in kinds} | {"unseen": self.unseen}


def changes_of(
    moves: Moves, before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, KeyChanges]:
    """Return which keys came and went in a step, by table.

    Args:
      moves: what the maps did.
      before: the totals of each table before it, as `Vocabularies.counters` has them.
      after: those after it.
    """
    found = {}
    for name in moves.taken:
        taken = moves.of_keys(name)
        # The keys that lost their rows: first those whose ttl had passed, then the evicted ones.
        expired = after[name]["expired"] - before[name]["expired"]
        lost = taken.evicted_keys
        found[name] = KeyChanges(
            taken.step, taken.new_keys, lost[expired:], lost[:expired], taken.unseen
        )
    return found


class KeyReports:
    """The part of `Vocabularies` that tells of single keys; see there.

    Args:
      tables: the tables, by name.
      maps: their maps.
      timeline: which step of them is admitted.
    """

    def __init__(
        self, tables: Mapping[str, LivingTable], maps: TableMaps, timeline: Timeline
    ) -> None:
        self.tables, self._maps, self._timeline = dict(tables), maps, timeline
        self.lock = threading.RLock()
        self._last: dict[str, KeyChanges] = {}

    def keys(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys of a table, as of the admitted batches, and their rows.

        Returns:
          The keys, uint64 `[n]`, and their rows, int64 `[n]`, ascending by row. Of a table on the
          host these are the rows at home, in [0, V), if its vocabulary lives; otherwise the ids
          that are on the devices, and their rows there.

        Raises:
          ValueError: no such table has a living vocabulary.
        """
        with self.lock:
            found = self._maps.keys(self._known(name), self._timeline.admitted)
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
          ValueError: no such table has a living vocabulary.
        """
        with self.lock:
            state = self._maps.keys(self._known(name), self._timeline.admitted)
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
        given = read_keys(what, keys)
        with self.lock:
            after = self._timeline.after(self._timeline.admitted)
            rows = self._maps.find(name, given, after).ids.astype(np.int64)
        unknown = np.flatnonzero(rows < 0)
        if unknown.size:
            first = np.ma.getdata(read_column(what, keys))[unknown[:1]].tolist()[0]
            more = f" and {unknown.size - 1} more" if unknown.size > 1 else ""
            expected, got = "keys that have a row", f"{first!r}{more} without one"
            remedy = "engine.vocabularies.find tells which have one; set_rows gives a key one"
            raise ValueError(message(what, expected=expected, got=got, remedy=remedy))
        return rows

    def _known(self, name: str) -> str:
        if name not in self.tables:
            expected = f"one of {sorted(self.tables)}, whose vocabularies live"
            raise ValueError(message("table", expected=expected, got=repr(name)))
        return name
