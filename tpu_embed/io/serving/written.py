"""Write what a delta changes into the tables of a served model.

Input: tables and keys, and what changed. Output: new tables and keys; the old ones stay, unless
they may be written in place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import Array
from tpu_embed.io.delta import (
    ChangedKeys,
    TableChanges,
    check_numbered,
    set_rows,
    set_rows_in_place,
)
from tpu_embed.io.serving.served_keys import Plan, ServedKeys, with_room
from tpu_embed.touched import Version

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
        return bool(self.rows.size) and not self.needs_room(arrays)

    def needs_room(self, arrays: Parts) -> bool:
        """Return whether its arrays have too few rows."""
        return self.plan is not None and self.plan.num_rows > len(arrays["values"])


class Prepared(NamedTuple):
    """What a delta writes to the tables of a model.

    Attributes:
      version: of the tables afterwards.
      tables: those that change, by name.
    """

    version: Version
    tables: dict[str, Writing]


def prepare(
    tables: Mapping[str, Parts],
    keys: Mapping[str, ServedKeys],
    changed: Mapping[str, TableChanges],
    version: Version,
) -> Prepared:
    """Return what a delta writes; nothing changes yet.

    Args:
      tables: by name.
      keys: of tables whose ids are keys, by name.
      changed: what the delta has, by name.
      version: of the tables afterwards.

    Raises:
      ValueError: rows cannot be quantized, or numbered.
    """
    writings = {
        name: _writing(one, tables[name], keys.get(name))
        for name, one in changed.items()
        if not one.is_empty
    }
    return Prepared(version, writings)


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
    new = {n: _copied(one, tables[n]) for n, one in writings.items() if n not in in_place}
    jax.block_until_ready(new)
    changing = [name for name in writings if name in keys]
    new_keys = {n: keys[n] if n in in_place else keys[n].copy() for n in changing}
    for name in in_place:
        new[name] = _written(writings[name], tables[name], set_rows_in_place)
    for name, one in new_keys.items():
        plan = writings[name].plan
        assert plan is not None, "it has keys"
        one.change(plan)
    return jax.block_until_ready(new), new_keys


def _writing(change: TableChanges, arrays: Parts, keys: ServedKeys | None) -> Writing:
    """Return what a change writes to a table."""
    parts = change.parts(arrays)
    for array in arrays.values():
        check_numbered(array)
    if not isinstance(change, ChangedKeys):
        return Writing(change.ids, parts, None)
    assert keys is not None, "the declarations were compared"
    plan = keys.plan(change.keys, change.lost)
    return Writing(change.places(plan.rows), parts, plan)


def _copied(writing: Writing, arrays: Parts) -> Parts:
    """Return copies of the arrays, with more rows if need be, in which rows are set."""
    if not writing.needs_room(arrays):
        return _written(writing, arrays, set_rows)
    assert writing.plan is not None, "it needs room"
    missing = with_room(writing.plan.num_rows) - len(arrays["values"])
    larger = {
        part: jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))
        for part, array in arrays.items()
    }
    return _written(writing, larger, set_rows_in_place)


def _written(writing: Writing, arrays: Parts, write: Callable[..., Array]) -> Parts:
    return {part: write(array, writing.rows, writing.parts[part]) for part, array in arrays.items()}
