"""A table on the host as it is looked up and exported: rows by id, trained or not.

Input: an engine and a state. Output: what `serving_lookup` and `export_model` take for the table.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from tpu_embed._checks import message
from tpu_embed._types import Array
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.state import TableState, first_rows


@dataclasses.dataclass(frozen=True, eq=False)
class HostTable:
    """The rows of a table on the host whose ids are row numbers; call it with ids.

    Attributes:
      rows: returns the rows of ids, int64 `[n]`, all different, as `[n, D]`.
      ids: those that training batches had, int64 `[n]`, ascending.
      first_rows: draws the first rows of ids that nobody has trained, also in a jit; see
        `core.state.first_rows`.
    """

    rows: Callable[[np.ndarray], np.ndarray]
    ids: np.ndarray
    first_rows: Callable[[Array], Array]

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """Return the rows of ids, int64 `[n]`, as `[n, D]`."""
        return self.rows(ids)


def host_table(engine: EmbeddingEngine, state: TableState, name: str) -> HostTable:
    """Return a table on the host for `serving_lookup` or `export_model`.

    It reads rows when it is asked, so the state must stay the newest one until then.

    Args:
      engine: the engine that made the state.
      state: the newest state.
      name: the table, which has `storage` and no vocabulary.

    Raises:
      ValueError: it is no such table.
    """
    ids = engine.touched(name)
    stack, table = engine.layout.table(name)
    if table.key_table is not None or state.vocabulary is None:
        expected, got = "a table on the host whose ids are row numbers", f"{name!r}"
        remedy = "functools.partial(engine.rows, state, name) is a function of its ids"
        raise ValueError(message("table", expected=expected, got=got, remedy=remedy))
    rows = functools.partial(engine.rows, state, name)
    return HostTable(rows, ids, first_rows(state.vocabulary, table, stack))
