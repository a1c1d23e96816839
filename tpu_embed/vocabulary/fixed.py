"""The keys of a table at one moment, for servers: no key comes or goes.

Input: keys and their rows. Output: the rows of keys.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from tpu_embed._checks import refuse


@dataclasses.dataclass(frozen=True, eq=False)
class FixedVocabulary:
    """Keys with rows, to be looked up with `serving_lookup`; it can be pickled and copied.

    It is sorted by key, so a lookup of n keys among m takes time in proportion to n log m.

    Args:
      keys: integers `[m]` of 64 bits, all different; signed ones count by their bits.
      rows: integers `[m]`, their rows.

    Raises:
      ValueError: another shape or dtype, a key or a row that occurs twice, or a negative row.

    Example:
      >>> FixedVocabulary([7, 5], [0, 3]).find(np.array([5, 6, 7], np.uint64))
      array([ 3, -1,  0])
    """

    keys: Any
    rows: Any

    def __post_init__(self) -> None:
        keys, rows = np.asarray(self.keys), np.asarray(self.rows)
        for name, array in (("keys", keys), ("rows", rows)):
            if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
                refuse(
                    f"FixedVocabulary.{name}",
                    expected="integers of shape (m,)",
                    got=f"{array.dtype} of shape {array.shape}",
                )
        if keys.shape != rows.shape:
            refuse("FixedVocabulary", expected=f"{keys.size} rows", got=f"{rows.size}")
        signed = keys.dtype.kind == "i"
        keys = keys.astype(np.int64).view(np.uint64) if signed else keys.astype(np.uint64)
        order = np.argsort(keys)
        keys = keys[order]
        if (keys[1:] == keys[:-1]).any():
            twice = int(keys[:-1][keys[1:] == keys[:-1]][0])
            refuse("FixedVocabulary.keys", expected="each key once", got=f"key {twice} twice")
        rows = rows[order].astype(np.int64)
        if (rows < 0).any():
            refuse("FixedVocabulary.rows", expected="at least 0", got=f"{rows.min()}")
        again = np.sort(rows)
        again = again[:-1][again[1:] == again[:-1]]
        if again.size:
            both = keys[rows == again[0]][:2].tolist()
            refuse(
                "FixedVocabulary.rows",
                expected="each row once",
                got=f"row {again[0]} for the keys {both[0]} and {both[1]}",
            )
        object.__setattr__(self, "keys", keys)
        object.__setattr__(self, "rows", rows)

    def __repr__(self) -> str:
        return f"FixedVocabulary({len(self)} keys, rows below {self.num_rows})"

    def __len__(self) -> int:
        """Return the number of keys."""
        return self.keys.size

    @functools.cached_property
    def num_rows(self) -> int:
        """The least number of rows that a table of these keys has."""
        return int(self.rows.max(initial=-1)) + 1

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the row of each key, int64 `[n]`; -1 for keys without a row.

        Args:
          keys: uint64 `[n]`.
        """
        if not self.keys.size:
            return np.full(keys.shape, -1, np.int64)
        at = np.minimum(np.searchsorted(self.keys, keys), self.keys.size - 1)
        return np.where(self.keys[at] == keys, self.rows[at], -1)
