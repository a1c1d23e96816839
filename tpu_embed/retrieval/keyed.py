"""Rows and keys of tables whose vocabularies live, as a search needs them.

Such a table has rows without a key: nobody has looked them up, and they are no answer. Which ones
these are is known to the map on the host.

Input: an engine and its newest state. Output: which rows have keys, and the keys of rows.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from tpu_embed._checks import message
from tpu_embed._types import Array, ArrayLike, Tracer
from tpu_embed.core.engine import EmbeddingEngine, check_engine
from tpu_embed.core.state import TableState


def keyed_rows(engine: EmbeddingEngine, state: TableState, table: str) -> Array:
    """Return which rows of a table with a living vocabulary have a key, bool `[V]`.

    Give it to a jit as an operand, and there to `top_k` as `allowed`. It is that of one state: rows
    may get other keys with every batch that is admitted. With `unseen="shared"`, the shared row has
    no key.

    Args:
      engine: the engine.
      state: its newest state.
      table: the table's name.

    Raises:
      ValueError: the table has no living vocabulary, or is at home on the host; the state is not
        the newest one; a call inside a jit.

    Example:
      >>> import tpu_embed
      >>> words = tpu_embed.DynamicVocabulary()
      >>> table = tpu_embed.TableConfig(4, 2, name="word", vocabulary=words)
      >>> engine = EmbeddingEngine(tpu_embed.FeatureConfig(table))
      >>> state = engine.init(jax.random.key(0))
      >>> state = engine.set_rows(state, "word", keys=["red", "blue"], values=[[1, 2], [3, 4]])
      >>> keyed_rows(engine, state, "word").tolist()
      [True, True, False, False]
    """
    _, rows, capacity = _keys("keyed_rows", engine, state, table)
    found = np.zeros(capacity, bool)
    found[rows] = True
    return jax.device_put(found, engine.layout.axes.sharding(()))


def keys_of(
    engine: EmbeddingEngine, state: TableState, table: str, ids: ArrayLike
) -> np.ma.MaskedArray:
    """Return the keys of rows, uint64 in the shape of the ids.

    Keys that were strings are their hashes, as `hash_ids` returns them.

    Args:
      engine: the engine.
      state: its newest state, in which the rows were found.
      table: the table's name.
      ids: integers of any shape, such as `TopK.ids`.

    Returns:
      A NumPy masked array: an id that has no key, such as -1, is masked.

    Raises:
      ValueError: as for `keyed_rows`.
      TypeError: ids that are not integers.

    Example:
      >>> import tpu_embed
      >>> words = tpu_embed.DynamicVocabulary()
      >>> table = tpu_embed.TableConfig(4, 2, name="word", vocabulary=words)
      >>> engine = EmbeddingEngine(tpu_embed.FeatureConfig(table))
      >>> state = engine.init(jax.random.key(0))
      >>> state = engine.set_rows(state, "word", keys=[700, 900], values=[[1, 2], [3, 4]])
      >>> keys_of(engine, state, "word", [[1, 0], [-1, 0]]).tolist()
      [[900, 700], [None, 700]]
    """
    keys, rows, capacity = _keys("keys_of", engine, state, table)
    _refuse_traced("keys_of", ids)
    numbers = np.asarray(ids)
    numbers = numbers if numbers.size else np.zeros(numbers.shape, int)  # such as []
    if not np.issubdtype(numbers.dtype, np.integer):
        raise TypeError(message("keys_of: ids", expected="integers", got=f"{numbers.dtype}"))
    by_row, has_key = np.zeros(capacity + 1, np.uint64), np.zeros(capacity + 1, bool)
    by_row[rows], has_key[rows] = keys, True
    inside = np.where((numbers >= 0) & (numbers < capacity), numbers, capacity)
    return np.ma.masked_array(by_row[inside], ~has_key[inside])


def _refuse_traced(what: str, given: Any) -> None:
    """Raise `ValueError` inside a jit: the keys are on the host, which does not run then."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(given)):
        remedy = "give the jit what keyed_rows returned, and keys_of what the jit returns"
        text = message(what, expected="a call outside a jit", got="one inside", remedy=remedy)
        raise ValueError(text)


def _keys(
    what: str, engine: Any, state: TableState, table: str
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the keys of a table, their rows, and the number of its rows."""
    check_engine(f"{what}: engine", engine)
    _refuse_traced(what, state)
    _, part = engine.layout.table(table)
    engine.layout.check_on_devices(what, [table])
    if part.vocabulary is None:
        expected, got = "a table whose vocabulary lives", f"{table!r}, whose ids are its rows"
        raise ValueError(message(f"{what}: table", expected=expected, got=got))
    with engine.vocabularies.lock:  # so that no batch is admitted in between
        engine.vocabularies.check_newest(state)
        return *engine.vocabularies.keys(table), part.vocabulary_size
