"""Publish changed rows: export all tables once, then every few minutes only the rows that changed.

Input: an engine's state and its `TouchedRows`. Output: a directory of ids and rows
(`delta_files.py`), or NumPy arrays with those rows set. A `ServedModel` applies deltas itself.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tpu_embed._checks import refuse
from tpu_embed._types import PADDING_ID
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.rows import DeviceRows, pieces
from tpu_embed.core.state import TableState, check_state, field
from tpu_embed.io import directory
from tpu_embed.io.commits import find
from tpu_embed.io.delta import delta_files
from tpu_embed.io.delta.delta_files import Delta
from tpu_embed.io.quantize import QuantizedTable
from tpu_embed.io.store import Place, place_of
from tpu_embed.kernels import storage
from tpu_embed.processes import check_same, gather_bytes, raise_on_all
from tpu_embed.storage import VALUES
from tpu_embed.touched import Changes, TouchedRows, Version, check_record


def export_delta(
    path: str | os.PathLike[str],
    engine: EmbeddingEngine,
    state: TableState,
    touched: TouchedRows,
    since: int | Version,
) -> Version:
    """Write the current values of the rows that were touched after a version.

    Of a table with a dynamic vocabulary, a delta has the keys that changed or got a row, with their
    values, and the keys that lost theirs; of a table on the host, its ids.

    Only these rows are read from the devices; the host holds one copy of them. The directory is
    either complete or absent. When there are several processes, all call this with the same path
    and the same `since`, and the first one writes.

    Args:
      path: the directory to write; it must not exist yet.
      engine: the engine that made the state.
      state: tables and slots; `touched` must have recorded every update up to its step. With
        dynamic vocabularies or tables on the host, the newest state.
      touched: the record of touched rows.
      since: the version of the full export, or of the previous delta; or its step.

    Returns:
      The version of tables after applying this delta: the `since` of the next one.

    Raises:
      FileExistsError: something exists at `path`.
      ValueError: the path is a bad URL; an update was not recorded; `since` is before recording
        began, after the state, or of another run.
      Exception: an error in another process.

    Example:
      >>> import tempfile, tpu_embed
      >>> table = tpu_embed.TableConfig(vocabulary_size=8, dim=2, name="item")
      >>> engine = EmbeddingEngine(tpu_embed.FeatureConfig(table), tpu_embed.optimizers.SGD(0.1))
      >>> state, touched = engine.init(jax.random.key(0)), TouchedRows(engine)
      >>> published, version = np.array(engine.tables(state)["item"]), touched.version(state)
      >>> batch = engine.place(np.full(jax.device_count(), 5))
      >>> touched.record(batch, 1)
      >>> state = engine.update(state, batch, engine.lookup(state, batch))
      >>> with tempfile.TemporaryDirectory() as root:
      ...     path = f"{root}/delta-1"
      ...     _ = export_delta(path, engine, state, touched, since=version)
      ...     version = apply_delta({"item": published}, path, version)
      >>> version.step, np.array_equal(published, engine.tables(state)["item"])
      (1, True)
    """
    root = place_of(path)
    check_same("export_delta", f"{root.absolute()}")

    def prepared():
        if jax.process_index() == 0:
            directory.check_free(root)
        check_record(engine, touched)
        check_state(state, engine.layout)
        version, first = touched.version(state), touched.known(since)
        for part in ("step", "edits", "keys"):
            mine, last = getattr(first, part), getattr(version, part)
            if mine > last:
                refuse(
                    "since",
                    expected=f"at most {last}, the state's {part}",
                    got=f"{mine}",
                )
        return version, first, touched.changes(first)

    version, first, changes = raise_on_all("export_delta", root.parent, prepared)
    remedy = "give what one version or export_delta returned to all processes; all "
    remedy += "make the TouchedRows together, and call record_rows for the same edits"
    check_same("since", f"{first}", remedy)
    check_same("version", f"{version}", remedy)
    tables = _read_tables(engine, state, changes, root)

    def written():
        if jax.process_index() == 0:
            with directory.written(root) as temporary:
                ancestors = touched.lineage.ancestors
                delta_files.write(temporary, Delta(first, version, ancestors, tables))

    raise_on_all("export_delta", root.parent, written)
    return version


# -- rows ------------------------------------------------------------------------------------------


def _read_tables(
    engine: EmbeddingEngine,
    state: TableState,
    changes: Mapping[str, Changes],
    root: Place,
) -> dict[str, directory.Table]:
    """Return what changed in all processes, with values; only the first process keeps rows."""
    tables: dict[str, directory.Table] = {}
    for name in sorted(engine.table_configs):
        f, mine = field(engine.layout, name, None), changes[name]
        size, dim, dtype, rule = f.table.declared_size, f.stack.dim, f.stack.dtype, None
        if mine.keys is not None:
            keys, rows, shared = _of_all_maps(
                f"export_delta: table {name!r}", mine.keys, mine
            )
            found = engine.rows(state, name, np.append(rows, shared))
            stored, n = found.view(storage.stored_dtype(dtype)), keys.size
            arrays = {
                "keys": keys,
                "values": stored[:n],
                "lost": mine.lost,
                "shared": stored[n:],
            }
            rule = directory.rule_without_row(f.table.key_rules)
        else:
            ids = _of_all_processes(mine.rows.astype(f.stack.index_dtype), size)
            kept = ids if jax.process_index() == 0 else ids[:0]
            rows = DeviceRows(state, engine.layout, name, [VALUES])
            empty = functools.partial(rows.empty, kept.size)
            values = raise_on_all("export_delta", root.parent, empty)[VALUES]
            for some in pieces(ids.size, rows.block):
                found = rows.read(ids[some])[VALUES]
                values[some] = found[: len(kept[some])]
            arrays = {
                "ids": kept.astype(delta_files.kept_dtype(size)),
                "values": values,
            }
        tables[name] = directory.Table(size, dim, dtype, rule, arrays)
    return tables


def _of_all_maps(
    what: str, keys: np.ndarray, changes: Changes
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the keys that changed in any process, and their rows; and the shared row if it did.

    Maps are alike in all processes, but each has only recorded what its own batches touched.

    Returns:
      uint64 `[n]`, int64 `[n]`, and int64 `[0 or 1]`.
    """
    shared = np.array([] if changes.shared is None else [changes.shared], np.int64)
    pairs = _gathered(what, np.stack([keys, changes.rows.view(np.uint64)], axis=1))
    keys, first = np.unique(pairs[:, 0], return_index=True)
    return (
        keys,
        pairs[first, 1].view(np.int64),
        np.unique(_gathered(f"{what}: shared", shared)),
    )


def _gathered(what: str, mine: np.ndarray) -> np.ndarray:
    """Return the arrays of all processes, one after the other along the first axis."""
    said = b"".join(gather_bytes(what, mine.tobytes()))
    return np.frombuffer(said, mine.dtype).reshape(-1, *mine.shape[1:])


def _of_all_processes(ids: np.ndarray, size: int) -> np.ndarray:
    """Return the ids (all below `size`) that any process has, unique and ascending."""
    # Pad to the longest list, so that all processes gather arrays of the same shape.
    most = int(np.max(multihost_utils.process_allgather(np.int32(ids.size))))
    if most == size:
        return np.arange(size, dtype=ids.dtype)
    padded = np.pad(ids, (0, most - ids.size), constant_values=PADDING_ID)
    gathered = np.unique(multihost_utils.process_allgather(padded))
    return gathered[gathered >= 0]


# -- plain arrays ----------------------------------------------------------------------------------


def apply_delta(
    tables: Mapping[str, Any], path: str | os.PathLike[str], version: Version
) -> Version:
    """Set the rows of a delta in NumPy arrays, in place; newer tables are not changed.

    Everything is checked before the first row is set. A reader in another thread may see some rows
    set and others not; a server should use `ServedModel.apply`.

    Args:
      tables: any of the engine's tables by name: writable arrays `[V, D]` in the table's dtype
        (bfloat16 also as its bits in uint16), or `QuantizedTable`s of writable arrays.
      path: what `export_delta` wrote.
      version: the version of the tables now.

    Returns:
      The version of the tables afterwards.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: the path is a bad URL; a file is damaged; the delta is of another run, or begins
        after the step of the version; the delta lacks a table, or has it with another shape or
        dtype.
    """
    root = find(path)
    delta = delta_files.read(root)
    given = {name: _arrays(table) for name, table in tables.items()}
    absent = set(given) - set(delta.tables)
    if absent:
        refuse(
            "tables",
            expected=f"tables among {sorted(delta.tables)}",
            got=f"{sorted(absent)}",
        )
    changed = {name: delta.tables[name] for name in given}
    if with_keys := sorted(name for name, one in changed.items() if one.has_keys):
        refuse(
            "tables",
            expected="tables whose ids are row numbers",
            got=f"{with_keys}, whose ids are keys",
            remedy="apply it to a model that load_model has loaded",
        )
    if not delta_files.follows(delta, root, version):
        return version
    # Two loops, so that nothing has changed if any table is refused.
    parts = {
        name: delta_files.served_parts(changed[name], given[name]) for name in given
    }
    for name, arrays in given.items():
        for part, rows in parts[name].items():
            _check(
                f"table {name!r}: {part}",
                arrays[part],
                rows,
                changed[name].vocabulary_size,
            )
    for name, arrays in given.items():
        for part, rows in parts[name].items():
            arrays[part][changed[name].arrays["ids"]] = rows.view(arrays[part].dtype)
    return delta.version


def _arrays(table: Any) -> dict[str, Any]:
    return dict(vars(table)) if isinstance(table, QuantizedTable) else {"values": table}


def _check(what: str, array: Any, rows: np.ndarray, size: int) -> None:
    """Check that an array has the right shape and dtype, and that its rows can be set."""
    shape = (size, *rows.shape[1:])
    names = {rows.dtype.name}
    if rows.dtype == np.uint16:
        names.add("bfloat16")
    expected = f"a writable NumPy array, {' or '.join(sorted(names))} of shape {shape}"
    if not isinstance(array, np.ndarray):
        got = f"a {type(array).__name__}"
    elif not array.flags.writeable:
        got = "a read-only one"
    elif not array.dtype.isnative:
        got = f"{array.dtype.str}, of another byte order"
    elif array.dtype.name not in names or array.shape != shape:
        got = f"{array.dtype.name} of shape {array.shape}"
    else:
        return
    refuse(what, expected=expected, got=got, remedy="np.array copies")
