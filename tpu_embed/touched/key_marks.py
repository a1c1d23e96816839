"""What happened to the keys of a table, or to the ids of one on the host: who got or lost a row.

    step 3    key 7 gets row 0                 given: row 0 at 3
    step 5    key 7 loses row 0 to key 9       given: row 0 at 5     lost: key 7 at 5
    step 8    key 7 gets row 4                 given: row 4 at 8     lost: -

Steps here are those of the maps: training batches that were admitted.

Input: what maps did with batches. Output: the rows that were given to keys after a step, and the
keys that lost theirs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tpu_embed.core.layout import TableSlice
from tpu_embed.touched.marks import NEVER, IdMarks, PlaceMarks
from tpu_embed.vocabulary import Moves

_LEAST_LOST = 1024
"""Lost keys that are remembered at least, however few rows a table has."""


class Given(NamedTuple):
    """What one training batch did to a table.

    Attributes:
      ids: uint64 `[a]`, the rows, or ids at home, that were given to keys or came to the devices.
      new: uint64 `[a]`, the keys that got them.
      lost: uint64 `[e]`, the keys that lost theirs.
    """

    ids: np.ndarray
    new: np.ndarray
    lost: np.ndarray


def given_by(moves: Moves, table: TableSlice) -> Given:
    """Return what a training batch did to a table."""
    nobody = np.zeros(0, np.uint64)
    if table.is_on_host and table.key_table is None:
        # Its ids have their rows for ever. Those that come to the devices may be new ones.
        return Given(moves.taken[table.name].new_keys, nobody, nobody)
    taken = moves.of_keys(table.name)
    return Given(taken.new_rows.astype(np.uint64), taken.new_keys, taken.evicted_keys)


class KeyMarks:
    """Which rows of a table were given to keys, and which keys lost their rows, and when.

    Lost keys are remembered up to the number of rows: a delta with more of them would say less than
    a full export.

    Args:
      table: the table.

    Attributes:
      lost_since: the first step after which all lost keys are known.
    """

    def __init__(self, table: TableSlice) -> None:
        # Of a table on the host only few ids may ever have a row.
        few = table.is_on_host
        self._given = IdMarks() if few else PlaceMarks(table.vocabulary_size)
        self._lost = IdMarks()
        self._most_lost = max(_LEAST_LOST, min(table.declared_size, 2**31))
        self.lost_since = 0

    def note(self, step: int, given: Given) -> None:
        """Note what the training batch of a step did."""
        self._given.mark(given.ids, step)
        self._lost.mark(given.lost, step)
        self._lost.remove(given.new)
        if len(self._lost) > 2 * self._most_lost:
            self.lost_since = max(self.lost_since, self._lost.keep_latest(self._most_lost))

    def lose(self, keys: np.ndarray, step: int) -> None:
        """Note that keys, uint64 `[n]`, lost their rows without a batch, after a step."""
        self._lost.mark(keys, step + 1)

    def given(self, step: int) -> np.ndarray:
        """Return the rows, or ids at home, given to keys after a step, uint64 `[n]` ascending."""
        return self._given.after(step)

    def lost(self, step: int) -> np.ndarray:
        """Return keys, uint64 `[n]`, that lost a row after a step; some may have another by now."""
        return self._lost.after(step)

    def steps(self, ids: np.ndarray) -> np.ndarray:
        """Return when rows, or ids at home, uint64 `[n]`, were given last, int32 `[n]`."""
        return self._given.steps(ids)

    def lost_steps(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all keys that are remembered as lost, uint64 `[n]`, and when, int32 `[n]`."""
        keys = self._lost.after(NEVER)
        return keys, self._lost.steps(keys)

    def load(
        self,
        given: tuple[np.ndarray, np.ndarray],
        lost: tuple[np.ndarray, np.ndarray],
        lost_since: int,
    ) -> None:
        """Go on from what was saved.

        Args:
          given: rows, or ids at home, uint64 `[n]`, and when they were given, integers `[n]`.
          lost: keys, uint64 `[m]`, and when they lost theirs, integers `[m]`.
          lost_since: see the attribute.
        """
        self._given.load(*given)
        self._lost.load(*lost)
        self.lost_since = lost_since
