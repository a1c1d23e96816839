"""The tables of a served model and their keys, while deltas write rows and give some to new keys.

The keys of an export are sorted, and the key at place i has row i + 1; row 0 is the one that unseen
keys share. They stay in their file. What deltas changed stands beside them:

    keys of the export   5 7 9      rows 1 2 3
    a delta              7 is lost, 8 is new, in the row that is free
    beside them          7: none, 8: row 2

Input: tables and keys, and what changed. Output: rows of keys; new tables and keys. The old ones
stay, unless they may be written in place.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import refuse
from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.layout import INT32_ROWS
from tpu_embed.io import directory
from tpu_embed.io.delta import SHARED_ROW, served_parts
from tpu_embed.kernels import dispatch
from tpu_embed.storage import HostRows, RowField
from tpu_embed.touched import Version


class Plan(NamedTuple):
    """What a delta changes among the keys of a table.

    Attributes:
      keys: uint64 `[n]`, those that changed.
      rows: int32 `[n]`, their rows.
      is_new: bool `[n]`, which of them had none.
      lost: uint64 `[m]`, keys that lose their rows.
      free: int32 `[f]`, rows that are free afterwards.
      num_rows: how many rows have been in use.
    """

    keys: np.ndarray
    rows: np.ndarray
    is_new: np.ndarray
    lost: np.ndarray
    free: np.ndarray
    num_rows: int


class ServedKeys:
    """The keys of one table. Threads may call `find` at the same time, but not beside `change`.

    Args:
      keys: of the export, uint64 `[n]`, ascending.

    Example:
      >>> keys = ServedKeys(np.array([5, 7, 9], np.uint64))
      >>> keys.change(keys.plan(np.array([8], np.uint64), np.array([7], np.uint64)))
      >>> keys.find(np.array([5, 7, 8, 9], np.uint64))
      array([1, 0, 2, 3], dtype=int32)
    """

    def __init__(self, keys: np.ndarray) -> None:
        # The file stays mapped, but a plain view is indexed faster than NumPy's class for files.
        self._exported = np.asarray(keys)
        self._firsts = np.array(keys[::_STRIDE])
        self._moved = HostRows({"row": RowField((), _ROW)})
        self._free, self.num_rows = np.zeros(0, _ROW), 1 + keys.size

    def copy(self) -> ServedKeys:
        """Return the same keys, which may change without these."""
        new = ServedKeys(self._exported)
        moved = self._moved.ids()
        new._moved.write(moved, {"row": self.find(moved)})
        new._free, new.num_rows = self._free, self.num_rows
        return new

    def all(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all keys that have a row, uint64 `[n]` ascending, and their rows, int32 `[n]`."""
        keys = np.union1d(self._exported, self._moved.ids())
        rows = self.find(keys)
        return keys[rows > 0], rows[rows > 0]

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the rows of keys, uint64 `[n]`, int32 `[n]`; row 0 for keys without one."""
        rows = self._exported_rows(keys)
        if len(self._moved):
            self._moved.read_into({"row": rows}, None, keys)
        return rows

    def _exported_rows(self, keys: np.ndarray) -> np.ndarray:
        """Return the rows that keys had in the export, int32 `[n]`; row 0 for those without."""
        if not self._exported.size:
            return np.zeros(keys.size, _ROW)
        # Keys 5 7 9 11 with a stride of 2: 9 is after the first 9, so at place 2 or 3. The firsts
        # stay in the processor's cache; a search in all keys would wait for memory at every step.
        at = (
            np.maximum(np.searchsorted(self._firsts, keys, side="right") - 1, 0)
            * _STRIDE
        )
        last, step = self._exported.size - 1, _STRIDE // 2
        while step:
            further = np.minimum(at + step, last)
            at = np.where(self._exported[further] <= keys, further, at)
            step //= 2
        return np.where(self._exported[at] == keys, at + 1, 0).astype(_ROW)

    def plan(self, keys: np.ndarray, lost: np.ndarray) -> Plan:
        """Return what a delta changes; nothing changes yet.

        Args:
          keys: uint64 `[n]`, different ones: those that changed, or have a row now.
          lost: uint64 `[m]`, different ones: those that have no row any more.
        """
        rows, gone = self.find(keys), self.find(lost)
        is_new, free = rows == 0, np.append(self._free, gone[gone > 0])
        count = int(is_new.sum())
        reused = min(count, free.size)
        # The rows that were freed last are taken first; then those that nobody has had.
        fresh = np.arange(self.num_rows, self.num_rows + count - reused, dtype=_ROW)
        rows[is_new] = np.append(free[free.size - reused :], fresh)
        left = free[: free.size - reused]
        return Plan(
            keys, rows, is_new, lost[gone > 0], left, self.num_rows + fresh.size
        )

    def change(self, plan: Plan) -> None:
        """Do what `plan` said."""
        # Only keys of the export must be remembered as lost; of a stream, they would be too many.
        exported = self._exported_rows(plan.lost) > 0
        self._moved.remove(plan.lost[~exported])
        self._moved.write(
            plan.lost[exported], {"row": np.zeros(int(exported.sum()), _ROW)}
        )
        self._moved.write(plan.keys[plan.is_new], {"row": plan.rows[plan.is_new]})
        self._free, self.num_rows = plan.free, plan.num_rows


_ROW = np.dtype(np.int32)
_STRIDE = 64
"""Of so many exported keys, the first is kept in memory."""


def with_room(num_rows: int) -> int:
    """Return how many rows arrays get that have so many in use, so that there is room for keys."""
    return num_rows + max(num_rows // 4, _LEAST_ROOM)


_LEAST_ROOM = 1024
"""Rows for new keys that a table has at least, when it is exported and when it grows."""


# -- rows of an array ----------------------------------------------------------------------------
#
# They are set in blocks of constant size. It depends on the table alone, so that deltas of any
# length use one compiled program.

_NUMBERS = 2**20
"""The most numbers in a block, except that a block has at least 64 rows."""


def check_numbered(array: Array) -> None:
    """Check that the index dtype can number all rows of an array.

    Raises:
      ValueError: there are more rows than int32 can number, and x64 is off.
    """
    if array.shape[0] > INT32_ROWS and not jax.config.read("jax_enable_x64"):
        refuse(
            "table",
            expected=f"at most {INT32_ROWS} rows while x64 is off",
            got=f"{array.shape[0]}",
            remedy='turn it on with jax.config.update("jax_enable_x64", True)',
        )


def set_rows(array: Array, ids: np.ndarray, rows: np.ndarray) -> Array:
    """Set some rows in the memory of an array, which is deleted by this; return another one.

    Args:
      array: `[V, D]` or `[V]`.
      ids: `[n]`, unique.
      rows: `[n, …]`, in the array's dtype.

    Raises:
      ValueError: whatever `check_numbered` refuses.
    """
    check_numbered(array)
    # Constant per table, so that only one program compiles: V rounded up to a power of two, at most
    # `_NUMBERS / D`, and at least 64.
    most = max(64, _NUMBERS // math.prod(array.shape[1:]))
    size = min(max(64, 1 << (array.shape[0] - 1).bit_length()), most)
    for first in range(0, ids.size, size):
        block, values = ids[first : first + size], rows[first : first + size]
        missing = (0, size - block.size)
        places = np.pad(block, missing, constant_values=PADDING_ID)
        array = _set(
            array, places, np.pad(values, [missing] + [(0, 0)] * (rows.ndim - 1))
        )
    return array


_set = jax.jit(dispatch.set_rows, donate_argnums=0)


# -- what a delta writes -------------------------------------------------------------------------


Parts = dict[str, Array]
"""The arrays of a table, by part."""


class Writing(NamedTuple):
    """What is to be written to one table.

    Attributes:
      rows: int `[n]`, which of its rows.
      parts: their new contents, `[n, …]` by part.
      plan: of its keys; None if its ids are row numbers.
    """

    rows: np.ndarray
    parts: dict[str, np.ndarray]
    plan: Plan | None

    def can_replace(self, arrays: Parts) -> bool:
        """Return whether its arrays can be written in place, and are others then."""
        return bool(self.rows.size) and not self.missing(arrays)

    def missing(self, arrays: Parts) -> int:
        """Return how many rows its arrays have too few, so that there is room for more keys."""
        if self.plan is None or self.plan.num_rows <= len(arrays["values"]):
            return 0
        return with_room(self.plan.num_rows) - len(arrays["values"])


class Prepared(NamedTuple):
    """What a delta writes to the tables of a model.

    Attributes:
      version: of the tables afterwards.
      tables: those that change, by name.
    """

    version: Version
    tables: dict[str, Writing]


def writing_of(
    change: directory.Table, arrays: Parts, keys: ServedKeys | None
) -> Writing:
    """Return what a change writes to a table; nothing changes yet.

    Args:
      change: what a delta has of the table.
      arrays: of the table, by part.
      keys: those of the table; None if its ids are row numbers.

    Raises:
      ValueError: rows cannot be quantized, or numbered.
    """
    parts, changed = served_parts(change, arrays), change.arrays
    for array in arrays.values():
        check_numbered(array)
    if keys is None:
        return Writing(changed["ids"], parts, None)
    plan = keys.plan(changed["keys"], changed["lost"])
    shared = np.full(len(changed["shared"]), SHARED_ROW, np.int32)
    return Writing(np.concatenate([shared, plan.rows]), parts, plan)


def write(
    tables: Mapping[str, Parts],
    keys: Mapping[str, ServedKeys],
    writings: Mapping[str, Writing],
    own: Collection[str],
) -> tuple[dict[str, Parts], dict[str, ServedKeys]]:
    """Return the tables that change, and their keys.

    Args:
      tables, keys: as they were when the writings were prepared, or copies of these.
      writings: what changes, by table.
      own: the tables whose arrays and keys may be written in place; they are gone then.
    """
    # Copies first, because they may fail for lack of memory; then the updates in place. Where no
    # row is set, as if keys were only lost, the arrays stay the same, so the keys are copied.
    in_place = {n for n in own if n in writings and writings[n].can_replace(tables[n])}
    new = {
        n: tables[n] if n in in_place else _copied(one, tables[n])
        for n, one in writings.items()
    }
    jax.block_until_ready(new)
    plans = {name: one.plan for name, one in writings.items() if one.plan is not None}
    new_keys = {n: keys[n] if n in in_place else keys[n].copy() for n in plans}
    for names in (new.keys() - in_place, in_place):  # what cannot be undone comes last
        for name in names:
            one, arrays = writings[name], new[name].items()
            new[name] = {
                part: set_rows(array, one.rows, one.parts[part])
                for part, array in arrays
            }
        jax.block_until_ready(new)
    for name, plan in plans.items():
        new_keys[name].change(plan)
    return new, new_keys


def _copied(writing: Writing, arrays: Parts) -> Parts:
    """Return copies of the arrays, with more rows if need be; the same ones if no row is set."""
    if not writing.rows.size:
        return arrays
    if not (missing := writing.missing(arrays)):
        return jax.tree.map(jnp.copy, arrays)
    return {
        part: jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))
        for part, array in arrays.items()
    }
