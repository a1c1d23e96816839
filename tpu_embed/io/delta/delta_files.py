"""The files of a delta, and the rule for which versions of a table it can be applied to.

    metadata.json         first moment and version; shape, dtype and CRC-32 of every file, and its
                          own
    tables/*.values.npy   [n, D] in the table's dtype, bfloat16 as its bits in uint16
    tables/*.ids.npy      int32 or int64 [n], ascending

and of a table with keys, instead of ids

    tables/*.keys.npy     uint64 [n], ascending
    tables/*.lost.npy     uint64 [m], ascending: keys that have no row any more
    tables/*.shared.npy   [1, D] as the values, the row that unseen keys share; or [0, D]

Input: a `Delta`, or a directory. Output: files, or the delta read back and checked; whether it can
be applied to tables of some version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import refuse
from tpu_embed.io import directory, schema
from tpu_embed.io.quantize import quantize_rows
from tpu_embed.io.schema import Json
from tpu_embed.io.store import Place
from tpu_embed.kernels import storage
from tpu_embed.touched import Lineage, Version

SHARED_ROW = 0
"""The row of a served table with keys that unseen keys share; of zeros if they share none."""


def served_parts(
    change: directory.Table, names: Collection[str]
) -> dict[str, np.ndarray]:
    """Return changed rows in the parts of a served table: its values, or also scales and offsets.

    Of a table with keys, the row that unseen keys share comes first, if it changed.

    Args:
      change: what changed.
      names: the names of the parts that the served table has.

    Raises:
      ValueError: the table is quantized, but the rows cannot be.
    """
    values = change.arrays["values"]
    if change.has_keys:
        values = np.concatenate([change.arrays["shared"], values])
    if "scale" not in names:
        return {"values": values}
    return dict(vars(quantize_rows(values.view(jnp.dtype(change.dtype)))))


KIND = "delta"

_REMEDY = "copy the directory whole, or publish a full export"

_FORM = schema.record(
    since=directory.VERSION,
    version=directory.VERSION,
    ancestors=schema.sequence(directory.VERSION),
    tables=schema.mapping(directory.TABLE),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Delta:
    """All rows that were touched after one moment, with their values at a later one.

    Attributes:
      since: the first moment; it is of the version's run, or of one that this goes on from.
      version: the version of tables after applying the delta.
      ancestors: see `Lineage`.
      tables: what changed in every table of the engine, by name, as the files have it.
    """

    since: Version
    version: Version
    ancestors: tuple[Version, ...]
    tables: dict[str, directory.Table]

    @property
    def has_keys(self) -> bool:
        """Whether the ids of some table are keys."""
        return any(one.has_keys for one in self.tables.values())


def follows(delta: Delta, path: Place, version: Version | None) -> bool:
    """Return whether a delta must be applied to tables of a version; False if they are newer.

    A delta with `since` 100 and step 120 fits tables of steps 100 to 120. Versions of the same step
    are ordered by their number of `edits`, and of admitted batches.

    Args:
      delta: the delta.
      path: the path of the delta, for messages.
      version: the version of the tables, or None if it is unknown.

    Raises:
      ValueError: the version is unknown, of another run, or before the first step of the delta. A
        delta with keys is also refused by tables that have it already, or are newer.
    """
    if version is None:
        refuse(
            f"{path}",
            expected="a model of a known version",
            got="none",
            remedy="export it with version=touched.version(state)",
        )
    new = delta.version
    if not Lineage(new.run, delta.ancestors).has(version):
        expected = f"run {version.run!r}, as the tables"
        got = f"{new.run!r}"
        remedy = "training began anew: load a full export of its new run"
        for one in (one for one in delta.ancestors if one.run == version.run):
            expected += f" of step {version.step}"
            got += f", which goes on from step {one.step} of it"
            remedy = f"load a full export of its new run, or of a step up to {one.step}, and the "
            remedy += "deltas after it"
        refuse(f"{path}: run", expected=expected, got=got, remedy=remedy)
    if version.step < delta.since.step or version.keys < delta.since.keys:
        expected = f"at most {version.step}, the step of the tables"
        got = f"{delta.since.step}"
        if version.step >= delta.since.step:
            expected = f"at most {version.keys} admitted batches, as the tables have"
            got = f"{delta.since.keys}"
        refuse(
            f"{path}: since",
            expected=expected,
            got=got,
            remedy="apply the deltas in between first, or load a newer full export",
        )
    if version.run != new.run:
        return True
    is_new = version[1:] <= new[1:]
    if delta.has_keys and (not is_new or version == new):
        refuse(
            f"{path}: version",
            expected=f"a delta to a later moment than {version[1:]}",
            got=f"{new[1:]}",
            remedy="these tables have it already: apply each delta once, in order",
        )
    return is_new


def check_declared(delta: Delta, path: Place, declared: Mapping[str, Json]) -> None:
    """Check that a delta has some tables, with the declared shapes and dtypes.

    Args:
      delta: the delta.
      path: the path of the delta, for messages.
      declared: their descriptions in the metadata of a model, by name.

    Raises:
      ValueError: a table is missing, or has another shape or dtype, or other ids.
    """
    for name, described in declared.items():
        expected = directory.Table.of(described, {}).form
        got = delta.tables[name].form if name in delta.tables else "none"
        if got != expected:
            refuse(
                f"{path}: table {name!r}",
                expected=expected,
                got=got,
                remedy="publish a full export of these tables",
            )


# -- files -----------------------------------------------------------------------------------------


def write(root: Place, delta: Delta) -> None:
    """Write all files of a delta.

    Args:
      root: an empty directory.
      delta: what to write.
    """
    described = {
        "since": delta.since._asdict(),
        "version": delta.version._asdict(),
        "ancestors": [one._asdict() for one in delta.ancestors],
        "tables": directory.write_tables(root, delta.tables),
    }
    directory.write_metadata(root, KIND, described)


def read_metadata(root: Place) -> Json:
    """Return the `metadata.json` of a delta.

    Raises:
      FileNotFoundError: it is missing.
      ValueError: it is damaged, of another format, or not that of a delta.
    """
    return directory.read_metadata(root, KIND, _FORM, _REMEDY)


def read(root: Place) -> Delta:
    """Return the delta of a directory, after checking every byte.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, of another format, or not part of a delta.
    """
    described = read_metadata(root)
    tables = {
        name: _read_changes(root, name, one)
        for name, one in described["tables"].items()
    }
    since, version = (Version(**described[part]) for part in ("since", "version"))
    return Delta(
        since, version, tuple(Version(**one) for one in described["ancestors"]), tables
    )


def _read_changes(root: Place, name: str, table: Json) -> directory.Table:
    """Return what changed in one table."""
    size, dim, described = table["vocabulary_size"], table["dim"], table["files"]
    stored, has_keys = (
        storage.stored_dtype(table["dtype"]).name,
        table["unseen"] is not None,
    )
    ids = "keys" if has_keys else "ids"
    n, lost, shared = (
        directory.count_of(described, part) for part in (ids, "lost", "shared")
    )
    forms: directory.ArrayForms = {"values": (stored, (n, dim))}
    if has_keys:
        forms |= {"keys": ("uint64", (n,)), "lost": ("uint64", (lost,))}
        forms["shared"] = stored, (min(shared, 1), dim)
    else:
        forms["ids"] = kept_dtype(size).name, (n,)
    arrays = directory.read_arrays(root, name, described, forms, _REMEDY)
    numbers = arrays[ids]
    if has_keys:
        gone, expected = arrays["lost"], "ascending keys, each with a row or lost"
        fit = directory.ascend(gone) and not np.intersect1d(numbers, gone).size
    else:
        expected = f"ascending ids from 0 to {size - 1}"
        fit = not n or (numbers[0] >= 0 and numbers[-1] < size)
    if not (fit and directory.ascend(numbers)):
        refuse(
            f"{root}: table {name!r}", expected=expected, got="others", remedy=_REMEDY
        )
    return directory.Table.of(table, arrays)


def kept_dtype(vocabulary_size: int) -> np.dtype:
    """Return the dtype in which the ids of a table are saved."""
    small = vocabulary_size <= np.iinfo(np.int32).max
    return np.dtype(np.int32 if small else np.int64)
