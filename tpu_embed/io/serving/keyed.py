"""Tables with keys as they are exported: only rows that keys have, sorted by key.

    row 0             the row that unseen keys share, or zeros
    rows 1 … n        those of the n keys, which ascend
    rows n + 1 …      room for keys that deltas bring

Input: tables in the training's order, and the keys that their rows belong to. Output: tables in
this order; the declaration of the same tables by row number, for a program that knows no keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from tpu_embed.config import FeatureConfig, TableConfig
from tpu_embed.core.ids import Structure, structure
from tpu_embed.io.delta import SHARED_ROW
from tpu_embed.io.serving.served_keys import with_room
from tpu_embed.io.serving.stored import RowSource, Stored

_INT32_MAX = int(np.iinfo(np.int32).max)


class Keys(NamedTuple):
    """The keys of a table.

    Attributes:
      keys: uint64 `[n]`, ascending.
      rows: int64 `[n]`, their rows in the training's tables, or their ids at home.
    """

    keys: np.ndarray
    rows: np.ndarray


def sort_rows(table: Stored | RowSource, keys: Keys, config: TableConfig) -> Stored:
    """Return a table with the rows of its keys, in the order of an export, on the host.

    Args:
      table: as it was given.
      keys: its keys.
      config: its declaration.
    """
    rules = config.vocabulary
    shared = rules is not None and rules.unseen == "shared"
    at = keys.rows if not shared else np.append(keys.rows, config.vocabulary_size - 1)
    read = table.read(at)
    n = keys.rows.size
    arrays = {}
    for part, found in read.items():
        arrays[part] = np.zeros((_room(n, config), *found.shape[1:]), found.dtype)
        arrays[part][1 : n + 1] = found[:n]
        if shared:
            arrays[part][SHARED_ROW] = found[n]
    return Stored(arrays)


def _room(n: int, config: TableConfig) -> int:
    """Return how many rows an export of n keys has."""
    most = min(config.vocabulary_size, _INT32_MAX - 1)
    return 1 + min(most, with_room(n))


def by_row_number(declared: Structure, names: Mapping[str, Keys]) -> Structure:
    """Return a feature configuration whose keys are the numbers of exported rows.

    Args:
      declared: the configuration.
      names: the tables with keys.
    """
    plain: dict[int, TableConfig] = {}
    for name, table in zip(declared.table_names, declared.tables, strict=True):
        changes = {"vocabulary_size": _INT32_MAX, "vocabulary": None, "storage": None}
        plain[id(table)] = dataclasses.replace(
            table, name=name, **(changes if name in names else {})
        )

    def renumbered(feature: FeatureConfig) -> FeatureConfig:
        table = plain[id(feature.table)]
        if feature.table.vocabulary is None:
            return dataclasses.replace(feature, table=table)
        return dataclasses.replace(feature, table=table, on_bad_id="drop")

    return structure.flatten(declared.unflatten([renumbered(one) for one in declared.features]))


def as_written(table: Stored | RowSource) -> Stored:
    """Return a table as the NumPy arrays of its files: bfloat16 as its bits in uint16."""
    assert isinstance(table, Stored), "rows of a table on the host were sorted by key"
    arrays = {name: np.asarray(array) for name, array in table.arrays.items()}
    values = arrays["values"]
    bits = {"values": values.view(np.uint16)} if values.dtype == jnp.bfloat16 else {}
    return Stored(arrays | bits)
