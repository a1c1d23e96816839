"""Rows of tables on the host in a checkpoint: those that were touched, by id, in segments.

A row is saved where it is: on the devices, or at home. A save that follows another one of the same
run writes only the rows that changed since, and links the segments of the other one, so that each
checkpoint is whole by itself, whichever others are removed. In a bucket, where nothing can be
linked, its commit names them, and they stay while a commit does. With several processes, each does
so with the rows that are at home in it:

    first save      a: rows 1 2 3 4
    second save     a  (the same files)     b: row 3 as it is now, row 9
    read            a, then b over it

    host_rows.0.json            the segments of each table, oldest first, and the fields of a row
    films/rows/NAME/ids         uint64 `[n]`
    films/rows/NAME/rows        uint8 `[n, w]`: values and slots of a row, one field after the other

Input: an engine and its state. Output: files; or rows by table, and rows written into a state.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.rows import DeviceRows, Rows, blocks_of, pieces
from tpu_embed.core.state import TableState
from tpu_embed.io import files, schema
from tpu_embed.io.checkpoint import manifest
from tpu_embed.io.checkpoint.checked import read_bound, write_bound
from tpu_embed.io.checkpoint.row_files import (
    Checksums,
    RowArray,
    RowReader,
    column,
    write_all,
    write_column,
)
from tpu_embed.io.commits import find
from tpu_embed.io.files import file_name
from tpu_embed.io.schema import Json
from tpu_embed.io.store import Bucket, Place
from tpu_embed.storage import VALUES, RowField, RowGroups, Save

FILE = "host_rows.{}.json"
"""The name of what a process says of its rows."""


_INSIDE = schema.accept(
    "the name of a segment, without '..'",
    lambda value: isinstance(value, str) and ".." not in value.split("/"),
)
"""Accepts a path below the rows of a table that leads nowhere else."""

_BESIDE = schema.accept(
    "the name of a root, without '/'",
    lambda value: isinstance(value, str) and "/" not in value and value != "..",
)
"""Accepts the name of a root in a bucket, beside that of the checkpoint."""

_FORM = schema.mapping(
    schema.record(
        owners=schema.integer(1),
        saved=schema.naturals,
        fields=schema.sequence(
            schema.record(name=schema.text, shape=schema.naturals, dtype=schema.dtype)
        ),
        segments=schema.sequence(
            schema.either(
                schema.record(name=_INSIDE, rows=schema.integer(1), root=_BESIDE),
                schema.record(name=_INSIDE, rows=schema.integer(1)),
            )
        ),
    )
)
_MOST_SEGMENTS = 64
"""With more of them, a save writes all rows anew."""


Block = tuple[np.ndarray, Rows]
"""Some ids, uint64 `[n]`, and their rows, `[n, …]` by field."""


class NewSegment(NamedTuple):
    """A segment to write.

    Attributes:
      name: its name.
      ids: uint64 `[n]`.
      blocks: the same ids in blocks of the files, with their rows.
    """

    name: str
    ids: np.ndarray
    blocks: Iterable[Block]


class SavedRows(NamedTuple):
    """What is written for one table.

    Attributes:
      fields: what a row has.
      row_groups: which ids this process saves.
      old: the segments of an earlier save that are linked, as the file describes them.
      new: the segments that are written.
    """

    fields: dict[str, RowField]
    row_groups: RowGroups
    old: list[Json]
    new: list[NewSegment]


class _Base(NamedTuple):
    """An earlier save that this one goes on from.

    Attributes:
      save: when it was begun.
      described: its `host_rows.json`.
      checksums: of its files, by directory.
    """

    save: Save
    described: Json
    checksums: Checksums


def prepare(
    engine: EmbeddingEngine,
    state: TableState,
    path: Place,
    *,
    checkpoint: str,
    copied: bool,
) -> Callable[[Place], Checksums] | None:
    """Return what writes the rows of a save, see `_write`; None without tables on the host.

    Args:
      engine: the engine.
      state: the newest one.
      path: the directory of the tables, once the checkpoint is finished.
      checkpoint: the name of the checkpoint.
      copied: whether to copy the rows on the devices now, so that the state may be donated
        afterwards. Those at home are read later in any case.

    Raises:
      RuntimeError: rows were lost on their way home.
    """
    homes, maps = engine.storage, engine.vocabularies
    if homes is None or maps is None:
        return None
    homes.flush()
    base = _base(homes.saves, path)
    found = {}
    for name in homes.tables:
        found[name] = _prepare_table(
            engine, state, name, base, checkpoint, copied=copied
        )
    homes.begin_save(path, checkpoint, maps.admitted)
    return functools.partial(_write, checkpoint, found, base)


def go_on_from(
    engine: EmbeddingEngine, directory: Place, checkpoint: str | None
) -> None:
    """Have later saves write only what changes after a restore, and link the rest.

    Args:
      engine: the engine that has been filled.
      directory: that of the tables.
      checkpoint: the name of the checkpoint; None if its rows are at home elsewhere now.
    """
    homes, maps = engine.storage, engine.vocabularies
    if homes is not None and maps is not None and checkpoint is not None:
        homes.begin_save(directory, checkpoint, maps.admitted)


def _base(saves: Iterable[Save], path: Place) -> _Base | None:
    """Return the newest save that was finished, still exists, and whose files can be linked."""
    for save in reversed([*saves]):
        try:
            if Bucket in map(type, (path, save.path)) and not _may_share(
                path, save.path
            ):
                continue
            there = find(save.path.parent) / save.path.name
            described = described_by(there, save.checkpoint, jax.process_index())
            _, _, checksums = manifest.read_described(there, save.checkpoint)
        except (FileNotFoundError, ValueError):
            continue  # it failed, or was removed: an older one will do, or none
        return _Base(save._replace(path=there), described, checksums)
    return None


def _may_share(new: Any, old: Any) -> bool:
    """Return whether both are the tables of numbered checkpoints in one place of a bucket."""
    numbers = new.parent.name.isdecimal() and old.parent.name.isdecimal()
    return numbers and new.parent.parent == old.parent.parent


def _prepare_table(
    engine: EmbeddingEngine,
    state: TableState,
    name: str,
    base: _Base | None,
    checkpoint: str,
    *,
    copied: bool,
) -> SavedRows:
    """Return what is written for one table."""
    assert engine.storage is not None, "checked"
    assert engine.vocabularies is not None, "checked"
    home, held = engine.storage[name], engine.vocabularies.held(name)
    row_groups = engine.storage.tables[name].row_groups
    mine = row_groups.are_saved(held.keys)
    held = held._replace(
        keys=held.keys[mine], rows=held.rows[mine], last_seen=held.last_seen[mine]
    )

    def changed(mark, step):
        """Return which rows have changed: of `held`, bool `[k]`, and the ids of others.

        Those that were written at home since a mark, or were in a batch since a step.
        """
        ids = home.ids(mark)
        # `set_rows` writes rows at home, too, whichever are on the devices.
        on_devices = (held.last_seen >= step) | np.isin(
            held.keys, ids, assume_unique=True
        )
        # Of a row that is on the devices, what is at home is old.
        at_home = np.setdiff1d(ids, held.keys, assume_unique=True)
        return on_devices, at_home[row_groups.are_saved(at_home)]

    old = (
        []
        if base is None or name not in base.described
        else base.described[name]["segments"]
    )
    since = 1, 0  # all rows
    if base is not None and old:
        # A row that was updated since was in a batch since, or in one that still was to be updated.
        since = base.save.marks[name], base.save.step - engine.vocabularies.lookahead
    on_devices, at_home = changed(*since)
    rows = len(home) + int((~home.contains(held.keys)).sum())
    written = sum(one["rows"] for one in old) + on_devices.sum() + at_home.size
    if old and (written > 2 * rows or len(old) >= _MOST_SEGMENTS):
        old, (on_devices, at_home) = [], changed(1, 0)
    # The blocks of files, whatever the number of rows.
    size = column(Path(), 2**31, row_dtype(home.fields)).block
    keys, places = held.keys[on_devices], held.rows[on_devices]
    devices = DeviceRows(state, engine.layout, name)
    blocks: Iterable[Block] = (
        (keys[at], devices.read_here(places[at])) for at in pieces(keys.size, size)
    )
    if copied:
        blocks = [*blocks]
    label = f"{file_name(checkpoint)}-{jax.process_index()}"
    made = [
        NewSegment(f"{label}-devices", keys, blocks),
        NewSegment(f"{label}-home", at_home, home.snapshot(at_home).blocks(size)),
    ]
    return SavedRows(
        home.fields, row_groups, old, [one for one in made if one.ids.size]
    )


def _write(
    checkpoint: str,
    tables: Mapping[str, SavedRows],
    base: _Base | None,
    directory: Place,
) -> Checksums:
    """Write and link the segments of all tables; return the checksums of files, by directory.

    Args:
      checkpoint: the name of the checkpoint.
      tables: what is written, by name.
      base: the save whose segments are linked, or None.
      directory: that of the tables.
    """
    checksums: Checksums = {}
    described = {}
    for name, saved in tables.items():
        segments = []
        for one in saved.old:
            assert base is not None, "it has old segments"
            start = _place(name, one["name"])
            for place in (f"{start}/ids", f"{start}/rows"):
                checksums[place] = base.checksums[place]
                if isinstance(directory, Path):
                    _link(base.save.path / place, directory / place)
            if isinstance(directory, Bucket):
                one = {"root": base.save.path.parent.name} | one
                assert directory.written is not None, "it is being written"
                rows = _directory_of(directory, one) / start
                directory.written[rows.key] = []
            segments.append(one)
        for one in saved.new:
            checksums |= _write_segment(directory, name, row_dtype(saved.fields), one)
            segments.append({"name": one.name, "rows": one.ids.size})
        described[name] = {
            **describe(saved.fields, saved.row_groups),
            "segments": segments,
        }
    write_bound(directory / FILE.format(jax.process_index()), checkpoint, described)
    return checksums


def _directory_of(directory: Any, segment: Json) -> Any:
    """Return the directory of the tables where a segment is: this one, or of an earlier root."""
    root = segment.get("root")
    return (
        directory if root is None else directory.parent.parent / root / directory.name
    )


def describe(fields: Mapping[str, RowField], row_groups: RowGroups) -> Json:
    """Return what a row has, and whose rows a process saves, as the file says it."""
    described = [
        {"name": name, "shape": list(one.shape), "dtype": np.dtype(one.dtype).name}
        for name, one in fields.items()
    ]
    return {
        "owners": row_groups.num_owners,
        "saved": sorted(row_groups.saved),
        "fields": described,
    }


def _write_segment(
    directory: Place, table: str, dtype: np.dtype, segment: NewSegment
) -> Checksums:
    """Write one segment; return the checksums of its files, by directory."""

    def as_bytes(rows):
        whole = np.empty(len(rows[VALUES]), dtype)
        for name in dtype.names or ():
            whole[name] = rows[name]
        return whole.view(np.uint8).reshape(len(whole), -1)

    arrays = _arrays(directory, table, segment.name, segment.ids.size, dtype)
    (of_ids, ids), (of_rows, rows) = arrays.items()
    blocks = (as_bytes(some) for _, some in segment.blocks)
    return {of_ids: write_all(ids, segment.ids), of_rows: write_column(rows, blocks)}


def _link(old: Any, new: Any) -> None:
    """Give the files of a directory a second name in a new one; copy them where that cannot be."""
    new.mkdir(parents=True)
    for file in old.iterdir():
        try:
            os.link(file, new / file.name)
        except OSError:
            with file.open("rb") as source, files.create(new / file.name) as copy:
                shutil.copyfileobj(source, copy)


def described_by(directory: Place, checkpoint: str | None, process: int) -> Json:
    """Return what a process has said of the tables in a directory that are saved by id, by name.

    Raises:
      FileNotFoundError, ValueError: the file is missing or damaged, or of another checkpoint.
    """
    return read_bound(directory / FILE.format(process), _FORM, checkpoint)[1]


def read(
    directory: Place,
    table: str,
    described: Iterable[Json],
    checksums: Checksums,
) -> Iterator[Block]:
    """Yield the rows of a table, block by block; of a row that comes twice, the last is valid.

    Args:
      directory: that of the tables.
      table: its name.
      described: what `names` says of it, of the processes whose rows are wanted.
      checksums: of all files, by directory.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or belongs to another place.
    """
    for one in described:
        forms = (
            (part["name"], part["dtype"], tuple(part["shape"]))
            for part in one["fields"]
        )
        dtype = np.dtype([*forms])
        for segment in one["segments"]:
            where, n = _directory_of(directory, segment), segment["rows"]
            arrays = _arrays(where, table, segment["name"], n, dtype).items()
            of_ids, of_rows = (
                RowReader(array, checksums.get(at, {})) for at, array in arrays
            )
            for some in blocks_of(range(n), of_rows.array.block):
                rows = np.ascontiguousarray(of_rows.read(some)).view(dtype)[:, 0]
                ids = np.ascontiguousarray(of_ids.read(some)).reshape(-1)
                yield (
                    ids,
                    {
                        name: np.ascontiguousarray(rows[name])
                        for name in dtype.names or ()
                    },
                )


def row_dtype(fields: Mapping[str, RowField]) -> np.dtype:
    """Return the dtype of a whole row: one field after the other, without gaps."""
    return np.dtype([(name, one.dtype, one.shape) for name, one in fields.items()])


def _place(table: str, segment: str) -> str:
    """Return the directory of a segment, relative to that of the tables."""
    return f"{file_name(table)}/rows/{segment}"


def _arrays(
    directory: Place, table: str, segment: str, n: int, dtype: np.dtype
) -> dict[str, RowArray]:
    """Return the arrays of ids and rows of a segment of n rows, by their directories."""
    ids, rows = (f"{_place(table, segment)}/{part}" for part in ("ids", "rows"))
    return {
        ids: column(directory / ids, n, np.uint64),
        rows: column(directory / rows, n, np.uint8, (dtype.itemsize,)),
    }
