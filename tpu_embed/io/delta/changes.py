"""What a delta has of one table: rows with new values, by row number or by key.

Input: ids or keys and values. Output: the arrays of the files; and what a server has to write.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from tpu_embed.io.quantize import quantize_rows


@dataclasses.dataclass(frozen=True, eq=False)
class ChangedRows:
    """The changed rows of one table whose ids are row numbers.

    Attributes:
      vocabulary_size: V of the table.
      dim: D.
      dtype: the dtype of the table.
      ids: int32 or int64 `[n]`, ascending.
      values: `[n, D]`, bfloat16 as its bits in uint16.
    """

    vocabulary_size: int
    dim: int
    dtype: str
    ids: np.ndarray
    values: np.ndarray
    unseen: ClassVar[None] = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing changed."""
        return not self.ids.size

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of the files, by part."""
        return {"ids": self.ids, "values": self.values}

    def parts(self, names: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the values in the parts of a served table; see `parts_of`."""
        return parts_of(self.values, self.dtype, names)


@dataclasses.dataclass(frozen=True, eq=False)
class ChangedKeys:
    """The changed keys of one table.

    Attributes:
      vocabulary_size: V of the table.
      dim: D.
      dtype: the dtype of the table.
      unseen: what keys without a row get, "zero" or "shared".
      keys: uint64 `[n]`, ascending: those whose row or value changed.
      values: `[n, D]`, bfloat16 as its bits in uint16.
      lost: uint64 `[m]`, ascending: keys that had a row and have none now.
      shared: `[1, D]` as the values: the row that unseen keys share; `[0, D]` if it did not change.
    """

    vocabulary_size: int
    dim: int
    dtype: str
    unseen: str
    keys: np.ndarray
    values: np.ndarray
    lost: np.ndarray
    shared: np.ndarray

    @property
    def is_empty(self) -> bool:
        """Whether nothing changed."""
        return not (self.keys.size or self.lost.size or self.shared.size)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of the files, by part."""
        return {
            "keys": self.keys,
            "values": self.values,
            "lost": self.lost,
            "shared": self.shared,
        }

    def parts(self, names: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the shared row, if it changed, then the values, in the parts of a served table."""
        return parts_of(np.concatenate([self.shared, self.values]), self.dtype, names)

    def places(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows of a served table that `parts` belong to, int32 `[s + n]`.

        Args:
          rows: int32 `[n]`, those of the keys.
        """
        return np.concatenate([np.full(len(self.shared), SHARED_ROW, np.int32), rows])


TableChanges = ChangedRows | ChangedKeys

SHARED_ROW = 0
"""The row of a served table with keys that unseen keys share; of zeros if they share none."""


def form_of(vocabulary_size: int, dim: int, dtype: str, unseen: str | None) -> str:
    """Return what a table must be for a delta to be applied to it.

    How many keys a table may have is not part of it, because tables may grow.
    """
    size = f"{vocabulary_size}" if unseen is None else "keys"
    return f"{dtype} [{size}, {dim}]" + ("" if unseen is None else f", unseen={unseen!r}")


def parts_of(values: np.ndarray, dtype: str, names: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return rows in the parts of a served table: its values, or also scales and offsets.

    Args:
      values: `[n, D]`, bfloat16 as its bits in uint16.
      dtype: of the table.
      names: the names of the parts that the served table has.

    Raises:
      ValueError: the table is quantized, but the rows cannot be.
    """
    if "scale" not in names:
        return {"values": values}
    return dict(vars(quantize_rows(values.view(jnp.dtype(dtype)))))
