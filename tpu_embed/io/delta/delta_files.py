"""The files of a delta, and the rule for which versions of a table it can be applied to.

    metadata.json         first step and version; shape, dtype and CRC-32 of every file, and its own
    tables/*.ids.npy      int32 or int64 [n], ascending
    tables/*.values.npy   [n, D] in the table's dtype, bfloat16 as its bits in uint16

Input: a `Delta`, or a directory. Output: files, or the delta read back and checked; whether it can
be applied to tables of some version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import message
from tpu_embed.io import directory, schema
from tpu_embed.io.quantize import quantize_rows
from tpu_embed.touched import Version

KIND = "delta"

_REMEDY = "copy the directory whole, or publish a full export"

_FORM = schema.record(
    since=schema.integer(), version=directory.VERSION, tables=schema.mapping(directory.TABLE)
)


@dataclasses.dataclass(frozen=True, eq=False)
class ChangedRows:
    """The changed rows of one table.

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

    @property
    def rows(self) -> np.ndarray:
        """The values as an array of the table's dtype."""
        return self.values.view(jnp.dtype(self.dtype))

    def parts(self, names: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the rows in the parts of a served table: its values, or also scales and offsets.

        Args:
          names: the names of the parts that the served table has.

        Raises:
          ValueError: the table is quantized, but the rows cannot be.
        """
        if "scale" not in names:
            return {"values": self.values}
        return dict(vars(quantize_rows(self.rows)))


@dataclasses.dataclass(frozen=True, eq=False)
class Delta:
    """All rows that were touched after one step, with their values after a later step.

    Attributes:
      since: the first step of the run whose tables this delta can be applied to.
      version: the version of tables after applying it.
      tables: the changed rows of every table of the engine, by name.
    """

    since: int
    version: Version
    tables: dict[str, ChangedRows]


def follows(delta: Delta, path: Path, version: Version | None) -> bool:
    """Return whether a delta must be applied to tables of a version; False if they are newer.

    A delta with `since` 100 and step 120 fits tables of steps 100 to 120. Versions of the same step
    are ordered by their number of `edits`.

    Args:
      delta: the delta.
      path: the path of the delta, for messages.
      version: the version of the tables, or None if it is unknown.

    Raises:
      ValueError: the version is unknown, of another run, or before the first step of the delta.
    """
    if version is None:
        expected, got = "a model of a known version", "none"
        remedy = "export it with version=touched.version(state)"
        raise ValueError(message(f"{path}", expected=expected, got=got, remedy=remedy))
    new = delta.version
    if version.run != new.run:
        expected, got = f"run {version.run!r}, as the tables", f"{new.run!r}"
        remedy = "training began anew: load a full export of its new run"
        raise ValueError(message(f"{path}: run", expected=expected, got=got, remedy=remedy))
    if version.step < delta.since:
        expected = f"at most {version.step}, the step of the tables"
        remedy = "apply the deltas in between first, or load a newer full export"
        raise ValueError(
            message(f"{path}: since", expected=expected, got=f"{delta.since}", remedy=remedy)
        )
    return (version.step, version.edits) <= (new.step, new.edits)


def check_declared(delta: Delta, path: Path, declared: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that a delta has some tables, with the declared shapes and dtypes.

    Args:
      delta: the delta.
      path: the path of the delta, for messages.
      declared: table name -> vocabulary_size, dim and dtype.

    Raises:
      ValueError: a table is missing, or has another shape or dtype.
    """
    for name, form in declared.items():
        expected, got = _form(form["vocabulary_size"], form["dim"], form["dtype"]), "none"
        rows = delta.tables.get(name)
        if rows is not None:
            got = _form(rows.vocabulary_size, rows.dim, rows.dtype)
        if got != expected:
            what, remedy = f"{path}: table {name!r}", "publish a full export of these tables"
            raise ValueError(message(what, expected=expected, got=got, remedy=remedy))


def _form(size: int, dim: int, dtype: str) -> str:
    return f"{dtype} [{size}, {dim}]"


# -- files -----------------------------------------------------------------------------------------


def write(root: Path, delta: Delta) -> None:
    """Write all files of a delta.

    Args:
      root: an empty directory.
      delta: what to write.
    """
    tables = {
        name: (rows, {"ids": rows.ids, "values": rows.values})
        for name, rows in delta.tables.items()
    }
    described = {
        "since": delta.since,
        "version": delta.version._asdict(),
        "tables": directory.write_tables(root, tables),
    }
    directory.write_metadata(root, KIND, described)


def read(root: Path) -> Delta:
    """Return the delta of a directory, after checking every byte.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, of another format, or not part of a delta.
    """
    described = directory.read_metadata(root, KIND, _FORM, _REMEDY)
    tables = {name: _read_rows(root, name, table) for name, table in described["tables"].items()}
    return Delta(described["since"], Version(**described["version"]), tables)


def _read_rows(root: Path, name: str, table: Mapping[str, Any]) -> ChangedRows:
    """Return the changed rows of one table."""
    size, dim, dtype, described = (
        table[key] for key in ("vocabulary_size", "dim", "dtype", "files")
    )
    n = next(iter(described.get("ids", {}).get("shape", ())), 0)
    stored = "uint16" if dtype == "bfloat16" else dtype
    forms = {"ids": (kept_dtype(size).name, (n,)), "values": (stored, (n, dim))}
    arrays = directory.read_arrays(root, name, described, forms, _REMEDY)
    ids = arrays["ids"]
    if n and not (ids[0] >= 0 and ids[-1] < size and (ids[1:] > ids[:-1]).all()):
        what, expected = f"{root}: table {name!r}", f"ascending ids from 0 to {size - 1}"
        raise ValueError(message(what, expected=expected, got="others", remedy=_REMEDY))
    return ChangedRows(size, dim, dtype, **arrays)


def kept_dtype(vocabulary_size: int) -> np.dtype:
    """Return the dtype in which the ids of a table are saved."""
    small = vocabulary_size <= np.iinfo(np.int32).max
    return np.dtype(np.int32 if small else np.int64)
