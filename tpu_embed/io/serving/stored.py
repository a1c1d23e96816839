"""Tables that a server reads rows from: whole, quantized, or only the rows the host has picked.

A table on the host is read by a function of ids. Those that nobody has trained have first rows; an
exported program finds them in an array of their own, by the numbers after the exported rows.

Input: tables as the user gave them. Output: one checked `Stored` per table; in a compiled program,
the rows of its ids.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import message
from tpu_embed._snapshot import snapshot
from tpu_embed._types import PADDING_ID, Array
from tpu_embed.config import TableConfig
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.ids import Structure
from tpu_embed.core.layout import Stack
from tpu_embed.core.state import TableState, first_rows
from tpu_embed.io.quantize import QuantizedTable
from tpu_embed.kernels import dispatch, storage

FIRST = "first"
"""The name of the array of first rows among the parts of a table."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
    """One table as it is served.

    Attributes:
      arrays: NumPy or JAX arrays by part. `"values"` is `[V, D]` in the table's dtype (bfloat16
        also as its bits in uint16); or int8, with `"scale"` and `"offset"`, float32 `[V]`.
      picked: whether the arrays have one row per id instead, in the order of the ids.
    """

    arrays: dict[str, Any]
    picked: bool = dataclasses.field(default=False, metadata={"static": True})

    def operand(self, row_ids: np.ndarray) -> Stored:
        """Return what a program takes to look up ids, `[N]`.

        Of NumPy arrays only the rows go there, any row for an absent id.
        """
        if not all(isinstance(array, np.ndarray) for array in self.arrays.values()):
            return jax.tree.map(snapshot, self)
        valid = np.maximum(row_ids, 0)
        return Stored({name: array[valid] for name, array in self.arrays.items()}, picked=True)

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return some rows, int64 `[n]`, on the host, by part."""
        return {name: np.asarray(array)[rows] for name, array in self.arrays.items()}

    def found(self, row_ids: Array, stack: Stack) -> tuple[Array, Array]:
        """Return rows in the compute dtype, and the position of each id's row; runs in a jit.

        Args:
          row_ids: row ids `[N]`, `PADDING_ID` for an absent id.
          stack: the stack of this table.
        """
        # A plain table needs no gather: the row ids themselves are positions in its values.
        values = self.arrays["values"]
        plain = values.dtype in (stack.compute_dtype, jnp.uint16) and FIRST not in self.arrays
        if not self.picked and plain:
            return values, row_ids
        arrays = {name: array for name, array in self.arrays.items() if name != FIRST}
        if not self.picked:
            arrays = {name: dispatch.gather_rows(a, row_ids) for name, a in arrays.items()}
        values = arrays["values"]
        if "scale" in arrays:
            values = QuantizedTable(**arrays).dequantized()
        if FIRST in self.arrays:
            values = self._with_first(values, row_ids)
        if values.dtype != jnp.uint16:
            values = values.astype(stack.compute_dtype)
        positions = jax.lax.iota(row_ids.dtype, row_ids.shape[0])
        return values, jnp.where(row_ids < 0, jnp.asarray(PADDING_ID, row_ids.dtype), positions)

    def _with_first(self, values: Array, row_ids: Array) -> Array:
        """Return rows `[N, D]`, those with a number beyond the table from the rows drawn first."""
        num_rows = self.arrays["values"].shape[0]
        numbers = (row_ids - num_rows).astype(row_ids.dtype)
        drawn = dispatch.gather_rows(self.arrays[FIRST], jnp.maximum(numbers, PADDING_ID))
        if values.dtype != drawn.dtype:  # dequantized ones are floats, and bfloat16 ones are bits
            drawn = storage.decode(drawn, "bfloat16") if drawn.dtype == jnp.uint16 else drawn
            drawn = drawn.astype(values.dtype)
        return jnp.where((numbers >= 0)[:, None], drawn, values)


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


@dataclasses.dataclass(frozen=True)
class RowSource:
    """A table on the host as it is served: a function returns the rows of ids.

    Attributes:
      what: the table, for messages.
      rows: takes ids, int64 `[n]`, all different, and returns their rows `[n, D]`.
      dim: D.
      dtype: of the rows.
    """

    what: str
    rows: Callable[[np.ndarray], Any]
    dim: int
    dtype: str

    def read(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Return the rows of ids, int64 `[n]`, by part.

        Raises:
          ValueError: the function returns something else.
        """
        found = np.asarray(self.rows(ids))
        if found.shape != (ids.size, self.dim) or found.dtype.name != self.dtype:
            expected = f"{self.dtype} of shape ({ids.size}, {self.dim}) from its function"
            got = f"{found.dtype.name} of shape {found.shape}"
            raise ValueError(message(self.what, expected=expected, got=got))
        return {"values": found}


def stored_tables(
    tables: Any, declared: Structure, used: Structure | None = None
) -> tuple[Stored | RowSource, ...]:
    """Return what each table that is used is served from, after checking shapes and dtypes.

    Args:
      tables: arrays `[V, D]` in the table's dtype, or `QuantizedTable`s, by `TableConfig` or name;
        functions for tables on the host.
      declared: the feature configuration.
      used: the part of it that is looked up; other declared tables may be missing. None: all.

    Raises:
      ValueError: a table is missing, given twice or not declared, or has another shape or dtype.
      TypeError: `tables` is not a mapping.
    """
    used = declared if used is None else used
    names = used.table_names
    given = _by_name(tables, declared)
    absent, surplus = set(names) - set(given), set(given) - set(declared.table_names)
    if absent or surplus:
        problem = "missing" if absent else "not declared"
        raise ValueError(
            message(
                f"tables: {', '.join(sorted(absent or surplus))} {problem}",
                expected=f"exactly {sorted(names)}",
                got=f"{sorted(given)}",
                remedy="key them by TableConfig, or by its name (table_0, … without one)",
            )
        )
    return tuple(
        _stored(f"table {name!r}", given[name], config)
        for name, config in zip(names, used.tables, strict=True)
    )


def name_of_table(key: Any, declared: Structure) -> str:
    """Return the name of a table that a user names, by `TableConfig` or by name."""
    if not isinstance(key, TableConfig):
        return str(key)
    names = dict(zip(declared.tables, declared.table_names, strict=True))
    return names.get(key, f"{key!r}")


def _by_name(tables: Any, declared: Structure) -> dict[str, Any]:
    if not isinstance(tables, Mapping):
        got = type(tables).__name__
        expected = "a mapping from TableConfig or table name to its array"
        raise TypeError(message("tables", expected=expected, got=got))
    found: dict[str, Any] = {}
    for key, table in tables.items():
        name = name_of_table(key, declared)
        if name in found:
            expected, got = "each table once", "it by TableConfig and by name"
            raise ValueError(message(f"tables: {name}", expected=expected, got=got))
        found[name] = table
    return found


def _stored(what: str, table: Any, config: TableConfig) -> Stored | RowSource:
    rows, dim = config.vocabulary_size, config.dim
    if config.storage is not None:
        if not callable(table):
            expected, got = "a function from ids to rows, for a table on the host", type(table)
            remedy = "functools.partial(engine.rows, state, name) is one; or leave storage out"
            raise ValueError(message(what, expected=expected, got=got.__name__, remedy=remedy))
        return RowSource(what, table, dim, config.dtype)
    if isinstance(table, QuantizedTable):
        arrays = dict(vars(table))
        _check(f"{what}: values", table.values, "int8", (rows, dim))
        for part in ("scale", "offset"):
            _check(f"{what}: {part}", arrays[part], "float32", (rows,))
        return Stored(arrays)
    _check(what, table, config.dtype, (rows, dim))
    return Stored({"values": table})


def _check(what: str, array: Any, dtype: str, shape: tuple[int, ...]) -> None:
    if not isinstance(array, (np.ndarray, jax.Array)):
        got = type(array).__name__
    elif not np.dtype(array.dtype).isnative:
        got = f"{np.dtype(array.dtype).str}, of another byte order"
    elif jnp.dtype(array.dtype).name != dtype or array.shape != shape:
        got = f"{jnp.dtype(array.dtype).name} of shape {tuple(array.shape)}"
    else:
        return
    remedy = "give what the training engine's tables returned, or cast it to the declared dtype"
    raise ValueError(message(what, expected=f"{dtype} of shape {shape}", got=got, remedy=remedy))
