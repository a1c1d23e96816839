"""Replace rows at home so that it can be undone: all of a call has happened, or nothing of it.

A call that gives rows new values writes some of them at home and some on the devices. What is
written at home cannot be taken back by returning the old state. So the rows from before are kept
until the call is sure to succeed: in this process, where Ctrl-C may end it, and in the others.

Input: what makes the ids and the new rows. Output: rows at home, the new ones or the old ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from tpu_embed.storage.host_rows import HostRows

_numbers = itertools.count(-1, -1)


class NewRows(NamedTuple):
    """What is to be at home.

    Attributes:
      ids: distinct, uint64 `[n]`.
      rows: `[n, …]` by field.
    """

    ids: np.ndarray
    rows: Mapping[str, np.ndarray]


class Replacement:
    """Rows of one table that are to be replaced at home.

    Args:
      home: the rows of the table at home. No other thread writes the rows of these ids.
      make: returns the new rows; called by `write`.

    Attributes:
      number: of this replacement, less than those before, and than any step. By the last one that
        was written, a batch that has read rows at home is compared with a state.

    Example:
      >>> from tpu_embed.storage.host_rows import RowField
      >>> home = HostRows({"values": RowField((1,), np.dtype(np.float32))})
      >>> ids = np.array([7], np.uint64)
      >>> home.write(ids, {"values": np.ones((1, 1), np.float32)})
      >>> two = Replacement(home, lambda: NewRows(ids, {"values": np.full((1, 1), 2, np.float32)}))
      >>> two.write()
      >>> home.read(ids)[0]["values"]
      array([[2.]], dtype=float32)
      >>> two.undo()
      >>> home.read(ids)[0]["values"]
      array([[1.]], dtype=float32)
    """

    def __init__(self, home: HostRows, make: Callable[[], NewRows]) -> None:
        self._home, self._make = home, make
        self.number = next(_numbers)
        self._before: tuple[NewRows, np.ndarray, int] | None = None

    def write(self) -> None:
        """Write the new rows, all or none.

        Raises:
          Exception: what `make` raises; MemoryError, OSError: there is no room. No row has changed.
        """
        ids, rows = self._make()
        old, found = self._home.read(ids)
        # `undo` may follow an interrupt that has come anywhere below.
        self._before = NewRows(ids, old), found, self._home.replaced
        self._home.write(ids, rows)
        self._home.replaced = self.number

    def undo(self) -> None:
        """Bring back the rows from before `write`, if it has written; ids without one have none."""
        if self._before is not None:
            (ids, old), found, number = self._before
            self._home.write(ids[found], old, np.flatnonzero(found))
            self._home.remove(ids[~found])
            # Last, so that who reads a number, then rows, has no newer rows than it says.
            self._before, self._home.replaced = None, number
