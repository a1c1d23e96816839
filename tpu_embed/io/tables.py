"""All tables and slots of an engine in a directory, and back into any engine that has such tables.

Enters: an engine and its state. Leaves: files by table and slot name, with a manifest; or a state.
Called by `checkpoint.py`.

What is on disk is logical: names, rows in order. Placement, stacking, packing, devices and
processes may be others when it is read.
"""

from __future__ import annotations

import dataclasses
import functools
import urllib.parse
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
from tpu_embed.core.tables import TableState, slot_shapes
from tpu_embed.io.checked import read_signed, write_signed
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
            sharding = engine.layout.axes.sharding(f.group.shard_axes)
            physical = jax.device_put(f.read(state), sharding)  # moves what lies otherwise
            parts.append((f, Shards(f, physical, copied=copied)))
        elif jax.process_index() == 0:
            parts.append((f, np.array(f.read(state)).view(np.dtype(f.shape.dtype))))
    return Prepared(_manifest(engine, state), parts)


def _manifest(engine: EmbeddingEngine, state: TableState) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    described, configs = engine.describe()["tables"], engine.table_configs
    for f in fields(engine.layout):
        if f.slot is None:
            array, config = row_array(Path(), f), configs[f.table.name]
            tables[f.table.name] = {
                "vocabulary_size": f.table.vocabulary_size,
                "shards": array.shards,
                "rows_per_shard": array.rows_per_shard,
                "alternate": array.alternate,
                "table": _form(f),
                "slots": {},
                "optimizer": _rule(f),
                "config": described[f.table.name]
                | {"combiner": config.combiner, "trainable": config.trainable},
            }
        else:
            tables[f.table.name]["slots"][f.slot] = _form(f)
    return {
        "format": FORMAT,
        "step": int(state.step),
        "features": [feature.path for feature in engine.layout.features],
        "counters": {name: np.asarray(n).tolist() for name, n in state.counters.items()},
        "tables": tables,
    }


def _rule(f: Field) -> str | None:
    """Return the class of the optimizer of a field's table."""
    return None if f.group.optimizer is None else f.group.optimizer.describe()["class"]


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
        write_signed(directory / _MANIFEST, prepared.manifest)


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
    found = _chosen_tables(directory, manifest["tables"], wanted)
    chosen = list(fields(engine.layout))
    missing = _check(directory, chosen, found, wanted)
    state = _base(wanted, fresh=missing)
    for f in chosen:
        if _on_disk(found, f) is None:
            continue
        try:
            state = _filled(state, directory, f, found[f.table.name], engine)
        except (ValueError, OSError) as error:
            remedy = "restore another step; this one is damaged"
            got = str(error)
            expected = "files as they were written"
            what = f"checkpoint {directory}: {f.label}"
            raise ValueError(message(what, expected=expected, got=got, remedy=remedy)) from error
    scalars = jnp.int32(manifest["step"]), _counters(engine, manifest)
    step, counters = jax.device_put(scalars, engine.layout.axes.sharding(()))
    return dataclasses.replace(state, step=step, counters=counters)


def _counters(engine: EmbeddingEngine, manifest: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the engine's counters: by feature path, or whole; 0 where there was none."""
    forms = jax.eval_shape(engine.init, jax.random.key(0)).counters
    paths, counters = [feature.path for feature in engine.layout.features], {}
    for name, form in forms.items():
        counters[name] = np.zeros(form.shape, form.dtype)
        count = manifest["counters"].get(name, 0)
        if np.shape(count) == (len(manifest["features"]),) and form.shape == (len(paths),):
            by_path = dict(zip(manifest["features"], count, strict=True))
            counters[name][:] = [by_path.get(path, 0) for path in paths]
        elif np.shape(count) == form.shape:
            counters[name][...] = count
    return counters


def _chosen_tables(directory: Path, found: dict[str, Any], wanted: Wanted) -> dict[str, Any]:
    """Return the tables on disk that are to be read."""
    for name in wanted.leave_out:
        if name not in found:
            what, expected = f"checkpoint {directory}: leave_out", f"some of {sorted(found)}"
            raise ValueError(message(what, expected=expected, got=repr(name)))
    return {name: table for name, table in found.items() if name not in wanted.leave_out}


def _read_manifest(directory: Path) -> dict[str, Any]:
    manifest = read_signed(directory / _MANIFEST)
    if manifest["format"] != FORMAT:
        what, expected, got = f"{directory}", f"format {FORMAT}", f"{manifest['format']}"
        raise ValueError(message(what, expected=expected, got=got, remedy="update tpu_embed"))
    return manifest


def _on_disk(found: dict[str, Any], f: Field) -> dict[str, Any] | None:
    """Return the form of a field on disk; None if it is not there, or another optimizer's slot."""
    table = found.get(f.table.name)
    if table is None:
        return None
    if f.slot is None:
        return table["table"]
    same = table["optimizer"] == _rule(f) and table["slots"].keys() == slot_shapes(f.group).keys()
    return table["slots"][f.slot] if same else None


def _check(directory: Path, chosen: list[Field], found: dict[str, Any], wanted: Wanted) -> bool:
    """Check every field before anything is read; tell whether some rows are not on disk."""
    names = sorted({f.table.name for f in chosen})
    for name in sorted(found.keys() - set(names)):
        expected, got = f"it among the engine's tables {names}", "none of this name"
        remedy = f"leave it out: leave_out=({name!r},)"
        raise _refusal(directory, f"table {name!r}", expected, got, remedy)
    lacking = [_lacks_rows(directory, f, found, wanted) for f in chosen]
    return any(lacking)


def _lacks_rows(directory: Path, f: Field, found: dict[str, Any], wanted: Wanted) -> bool:
    """Check one field; tell whether some of its rows are not on disk."""
    form, expected, size = _on_disk(found, f), _form(f), f.table.vocabulary_size
    if form is None:
        if wanted.key is None:
            raise _refusal(directory, f.label, *_absent(f, found), "give key= to make it anew")
        return True
    for what in ("shape", "per_row", "dtype"):
        if form[what] != expected[what] and not (what == "dtype" and wanted.convert):
            remedy = "convert=True rounds it" if what == "dtype" else "declare it as it was"
            got, wish = f"{what} {form[what]}", f"{what} {expected[what]}"
            raise _refusal(directory, f.label, wish, got, remedy)
    rows = found[f.table.name]["vocabulary_size"]
    if rows > size:
        remedy = "tables grow, and never shrink"
        raise _refusal(directory, f.label, f"at most {size} rows", f"{rows}", remedy)
    if rows < size and wanted.key is None:
        remedy = "give key= to make the new rows"
        raise _refusal(directory, f.label, f"{size} rows", f"{rows}", remedy)
    return rows < size


def _absent(f: Field, found: dict[str, Any]) -> tuple[str, str]:
    """Return what was expected, and what was got, where a field is not on disk."""
    table = found.get(f.table.name)
    if table is None:
        return "it in the checkpoint", f"tables {sorted(found)}"
    got = f"those of {table['optimizer']}, {sorted(table['slots'])}"
    return f"slots of {_rule(f)}, {sorted(slot_shapes(f.group))}", got


def _refusal(directory: Path, what: str, expected: str, got: str, remedy: str) -> ValueError:
    what = f"checkpoint {directory}: {what}"
    return ValueError(message(what, expected=expected, got=got, remedy=remedy))


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
    sharding = engine.layout.axes.sharding(f.group.shard_axes)
    mine = engine.layout.axes.local_parts(f.group.shard_axes).tolist()
    for first, rows in _lines(array, f, found["vocabulary_size"], mine):
        values = jax.make_array_from_callback(rows.shape, sharding, rows.__getitem__)
        limit = np.asarray(found["vocabulary_size"], f.group.index_dtype)
        start = np.asarray(first, f.group.index_dtype)
        jax.block_until_ready(physical)  # no more than two blocks are held
        physical = _put(physical, values, start, limit, f, engine.layout.axes)
    return f.write(state, physical)


def _lines(
    array: RowArray, f: Field, limit: int, mine: list[int]
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield first local rows, and as many rows of every shard from there on: `[S * n, …]`.

    Only rows of the shards `mine`, those of this process, are sure to be read.
    """
    store, group, size = array.open(), f.group, f.table.rows_per_shard
    width = int(np.prod(array.row, dtype=np.int64)) * array.dtype.itemsize * group.num_shards
    n, dtype = max(1, min(size, BLOCK // max(1, width))), np.dtype(f.shape.dtype)
    for first in range(0, size, n):
        rows = np.zeros((group.num_shards, n, *array.row), dtype)
        if group.placement != "div" and array.alternate and array.shards == len(rows):
            lines = array.read_lines(store, first, first + n, mine)
            rows[mine, : len(lines)] = np.swapaxes(lines, 0, 1)
        elif group.placement != "div":
            begin, end = first * group.num_shards, min((first + n) * group.num_shards, limit)
            if begin < end:
                flat = np.zeros((n * group.num_shards, *array.row), dtype)
                flat[: end - begin] = array.read(store, begin, end)
                rows = np.swapaxes(flat.reshape(n, group.num_shards, *array.row), 0, 1)
        else:
            for shard in mine:
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
