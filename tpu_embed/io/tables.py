"""All tables and slots of an engine in a directory, and back into any engine that has such tables.

Enters: an engine and its state. Leaves: files by table and slot name, with a manifest; or a state.
Called by `checkpoint.py`.

What is on disk is logical: names, rows in order. Placement, stacking, packing, devices and
processes may be others when it is read.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import urllib.parse
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import message
from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core import collectives
from tpu_embed.core.collectives import MeshAxes
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.fields import Field, fields
from tpu_embed.core.init import blank_tables
from tpu_embed.core.logical import check_state
from tpu_embed.core.tables import TableState
from tpu_embed.io.rows import BLOCK, RowArray, Shards, row_array, write_rows
from tpu_embed.kernels import dispatch, storage

__all__ = ["FORMAT", "Prepared", "Wanted", "prepare", "read", "write"]

FORMAT = 1
"""The version of the directory's form."""

_MANIFEST = "tables.json"


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What one process writes.

    Attributes:
      manifest: what the directory holds.
      parts: its shards of every field, and where they go.
    """

    manifest: dict[str, Any]
    parts: list[tuple[Field, Shards | np.ndarray]]


def prepare(engine: EmbeddingEngine, state: TableState, *, copied: bool) -> Prepared:
    """Take what must be written out of a state.

    Args:
      engine: whose state it is.
      state: the state.
      copied: whether to copy everything to the host now: the state may be donated afterwards.

    Raises:
      ValueError: the state is that of another engine.
    """
    check_state(state, engine.layout)
    parts: list[tuple[Field, Shards | np.ndarray]] = []
    for f in fields(engine.layout):
        if f.shape.per_row:
            parts.append((f, Shards(f, f.read(state), copied=copied)))
        elif jax.process_index() == 0:
            parts.append((f, np.array(f.read(state)).view(np.dtype(f.shape.dtype))))
    return Prepared(_manifest(engine, state), parts)


def _manifest(engine: EmbeddingEngine, state: TableState) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for f in fields(engine.layout):
        if f.slot is None:
            array = row_array(Path(), f)
            tables[f.table.name] = {
                "vocabulary_size": f.table.vocabulary_size,
                "shards": array.shards,
                "rows_per_shard": array.rows_per_shard,
                "alternate": array.alternate,
                "table": _form(f),
                "slots": {},
            }
        else:
            tables[f.table.name]["slots"][f.slot] = _form(f)
    paths = [feature.path for feature in engine.layout.features]
    bad_ids = np.asarray(state.counters["bad_ids"]).tolist()
    return {
        "format": FORMAT,
        "step": int(state.step),
        "bad_ids": dict(zip(paths, bad_ids, strict=True)),
        "overflows": int(state.counters["overflows"]),
        "tables": tables,
    }


def _form(f: Field) -> dict[str, Any]:
    """Return what one element of a field is: a row, or the whole of it."""
    dtype = np.dtype(f.shape.dtype).name
    return {"shape": list(f.shape.shape), "dtype": dtype, "per_row": f.shape.per_row}


def write(directory: Path, prepared: Prepared) -> None:
    """Write this process's part of the tables.

    Args:
      directory: exists.
      prepared: what `prepare` returned.
    """
    for f, part in prepared.parts:
        path = _path(directory, f.table.name, f.slot)
        if isinstance(part, Shards):
            write_rows(row_array(path, f), part)
        else:
            _whole(path, _form(f)).create(1)[...].write(part[None, None]).result()
    if jax.process_index() == 0:
        text = json.dumps(prepared.manifest, sort_keys=True)
        signed = {"crc32": zlib.crc32(text.encode()), "manifest": prepared.manifest}
        (directory / _MANIFEST).write_text(json.dumps(signed, sort_keys=True))


def _path(directory: Path, table: str, slot: str | None) -> Path:
    """Return the directory of a field; names are quoted, "." too."""
    parts = [table, "table"] if slot is None else [table, "slots", slot]
    return directory.joinpath(*(urllib.parse.quote(p, safe="").replace(".", "%2E") for p in parts))


def _whole(path: Path, form: dict[str, Any]) -> RowArray:
    """Return the array of what a whole stack shares: one row."""
    return RowArray(path, 1, 1, True, tuple(form["shape"]), np.dtype(form["dtype"]))


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What to make of tables on disk.

    Attributes:
      engine: whose state to make.
      key: for rows, tables and slots that are not on disk; None: that is an error.
      convert: whether dtypes may be others.
      leave_out: tables on disk that are not read.
    """

    engine: EmbeddingEngine
    key: Array | None = None
    convert: bool = False
    leave_out: tuple[str, ...] = ()


def read(directory: Path, wanted: Wanted) -> TableState:
    """Return a state with the tables and slots of a directory.

    Raises:
      ValueError: a table, a field, a shape or a dtype that is not as wanted; a damaged file.
    """
    engine, manifest = wanted.engine, _read_manifest(directory)
    found = {name: t for name, t in manifest["tables"].items() if name not in wanted.leave_out}
    chosen = list(fields(engine.layout))
    missing = _check(directory, chosen, found, wanted)
    state = _base(wanted, fresh=missing)
    for f in chosen:
        if _on_disk(found, f) is None:
            continue
        try:
            state = _filled(state, directory, f, found[f.table.name], engine)
        except ValueError as error:
            remedy = "restore another step; this one is damaged"
            got = str(error)
            expected = "files as they were written"
            what = f"checkpoint {directory}: {f.label}"
            raise ValueError(message(what, expected=expected, got=got, remedy=remedy)) from error
    paths = [feature.path for feature in engine.layout.features]
    counters = {
        "bad_ids": jnp.asarray([manifest["bad_ids"].get(p, 0) for p in paths], jnp.int32),
        "overflows": jnp.int32(manifest["overflows"]),
    }
    scalars = engine.layout.axes.sharding(())
    step, counters = jax.device_put((jnp.int32(manifest["step"]), counters), scalars)
    return dataclasses.replace(state, step=step, counters=counters)


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / _MANIFEST
    remedy = "give the directory that save wrote; restore another step if this one is damaged"
    try:
        signed = json.loads(path.read_text())
        manifest, crc32 = signed["manifest"], signed["crc32"]
        whole = zlib.crc32(json.dumps(manifest, sort_keys=True).encode()) == crc32
    except (OSError, ValueError, KeyError, TypeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise ValueError(
            message(f"{path}", expected="a manifest", got=got, remedy=remedy)
        ) from error
    if not whole:
        expected, got = f"a manifest of checksum {crc32}", "another one"
        raise ValueError(message(f"{path}", expected=expected, got=got, remedy=remedy))
    if manifest["format"] != FORMAT:
        expected, got = f"format {FORMAT}", f"{manifest['format']}"
        raise ValueError(message(f"{path}", expected=expected, got=got, remedy="update tpu_embed"))
    return manifest


def _on_disk(found: dict[str, Any], f: Field) -> dict[str, Any] | None:
    """Return the form of a field on disk, None if it is not there."""
    table = found.get(f.table.name)
    if table is None:
        return None
    return table["table"] if f.slot is None else table["slots"].get(f.slot)


def _check(directory: Path, chosen: list[Field], found: dict[str, Any], wanted: Wanted) -> bool:
    """Check every field before anything is read; tell whether some rows are not on disk."""

    def refuse(what: str, expected: str, got: str, remedy: str) -> None:
        what = f"checkpoint {directory}: {what}"
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))

    names = {f.table.name for f in chosen}
    for name in found.keys() - names:
        remedy = f"leave it out: leave_out=({name!r},)"
        refuse(f"table {name!r}", f"one of the engine's tables {sorted(names)}", "it", remedy)
    fresh = False
    for f in chosen:
        form, expected = _on_disk(found, f), _form(f)
        if form is None:
            fresh = True
            if wanted.key is None:
                remedy = "give key=, by which to make it anew"
                refuse(f.label, "it on disk", f"{sorted(found)}", remedy)
            continue
        if form["shape"] != expected["shape"] or form["per_row"] != expected["per_row"]:
            refuse(f.label, f"shape {expected['shape']}", f"{form['shape']}", "make it alike")
        if form["dtype"] != expected["dtype"] and not wanted.convert:
            refuse(f.label, expected["dtype"], form["dtype"], "convert=True rounds it")
        rows, size = found[f.table.name]["vocabulary_size"], f.table.vocabulary_size
        if rows > size:
            refuse(f.label, f"at most {size} rows", f"{rows}", "tables grow, and never shrink")
        fresh |= rows < size
        if rows < size and wanted.key is None:
            refuse(f.label, f"{size} rows", f"{rows}", "give key=, by which to make the new rows")
    return fresh


def _base(wanted: Wanted, *, fresh: bool) -> TableState:
    """Return a state to be filled: made by the key where not all of it will be."""
    engine = wanted.engine
    if fresh:
        assert wanted.key is not None, "checked"
        return engine.init(wanted.key)
    layout = engine.layout
    tables, slots = jax.jit(functools.partial(blank_tables, layout.groups, layout.axes))()
    return TableState(tables, slots, jnp.int32(0), {})


def _filled(
    state: TableState, directory: Path, f: Field, found: dict[str, Any], engine: EmbeddingEngine
) -> TableState:
    """Return the state with one field read from disk, in place."""
    path, form = _path(directory, f.table.name, f.slot), _form(f)
    on_disk = found["table"] if f.slot is None else found["slots"][f.slot]
    if not f.shape.per_row:
        array = _whole(path, on_disk)
        value = np.asarray(array.open()[0, 0].read().result()).astype(form["dtype"])
        stored = storage.encode(jnp.asarray(value), f.shape.dtype)
        return f.write(state, jax.device_put(stored, engine.layout.axes.sharding(())))
    array = RowArray(
        path,
        found["shards"],
        found["rows_per_shard"],
        found["alternate"],
        tuple(on_disk["shape"]),
        np.dtype(on_disk["dtype"]),
    )
    physical = f.read(state)
    for first, rows in _lines(array, f, found["vocabulary_size"]):
        sharding = engine.layout.axes.sharding(f.group.shard_axes)
        values = jax.make_array_from_callback(rows.shape, sharding, rows.__getitem__)
        limit = np.asarray(found["vocabulary_size"], f.group.index_dtype)
        start = np.asarray(first, f.group.index_dtype)
        physical = _put(physical, values, start, limit, f, engine.layout.axes)
    return f.write(state, physical)


def _lines(array: RowArray, f: Field, limit: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield first local rows, and as many rows of every shard from there on: `[S * n, …]`."""
    store, group, size = array.open(), f.group, f.table.rows_per_shard
    width = int(np.prod(array.row, dtype=np.int64)) * array.dtype.itemsize * group.num_shards
    n, dtype = max(1, min(size, BLOCK // max(1, width))), np.dtype(f.shape.dtype)
    for first in range(0, size, n):
        rows = np.zeros((group.num_shards, n, *array.row), dtype)
        if group.placement != "div":
            begin, end = first * group.num_shards, min((first + n) * group.num_shards, limit)
            if begin < end:
                flat = np.zeros((n * group.num_shards, *array.row), dtype)
                flat[: end - begin] = array.read(store, begin, end)
                rows = np.swapaxes(flat.reshape(n, group.num_shards, *array.row), 0, 1)
        else:
            for shard in range(group.num_shards):
                begin = shard * size + first
                end = min(shard * size + min(first + n, size), limit)
                if begin < end:
                    rows[shard, : end - begin] = array.read(store, begin, end)
        flat = np.ascontiguousarray(rows).reshape(-1, *array.row)
        yield first, flat.view(storage.stored_dtype(dtype))


@functools.partial(jax.jit, static_argnames=("f", "axes"), donate_argnums=0)
def _put(
    physical: Array, values: Array, first: Array, limit: Array, f: Field, axes: MeshAxes
) -> Array:
    """Return the physical array with local rows of every shard set, from `first` on."""
    group, table = f.group, f.table

    def shard(physical: Array, values: Array, first: Array, limit: Array) -> Array:
        inside = first + jnp.arange(values.shape[0], dtype=first.dtype)
        number = collectives.axis_index(group.shard_axes).astype(first.dtype)
        if group.placement == "div":
            rows = number * table.rows_per_shard + inside
        else:
            rows = inside * group.num_shards + number
        present = (inside < table.rows_per_shard) & (rows < limit)
        places = jnp.where(present, table.offset + inside, PADDING_ID)
        return dispatch.write_ascending_rows(physical, places, values, f.form)

    spec, whole = axes.spec(group.shard_axes), jax.sharding.PartitionSpec()
    return jax.shard_map(
        shard,
        mesh=axes.mesh,
        in_specs=(spec, spec, whole, whole),
        out_specs=spec,
        check_vma=False,
    )(physical, values, first, limit)
