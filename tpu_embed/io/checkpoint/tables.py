"""Write all tables and slots of an engine to a directory, and read them into any matching engine.

The files are logical: rows in order, under the names of tables and slots. So placement, stacking,
packing, devices and processes may differ when they are read.

Input: an engine and its state. Output: files by table and slot name, with a manifest; or a state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import message
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.rows import DeviceRows, Ids, blocks_of, copy_rows, logical
from tpu_embed.core.state import (
    MAP_VERSION,
    Field,
    TableState,
    blank_arrays,
    check_state,
    fields,
    put_everywhere,
    vocabulary_of_maps,
)
from tpu_embed.io.checkpoint import host_rows, manifest, maps
from tpu_embed.io.checkpoint.checked import REMEDY
from tpu_embed.io.checkpoint.manifest import SavedTables, Wanted
from tpu_embed.io.checkpoint.restored_rows import (
    RestoredRows,
    field_place,
    field_reader,
    read_by_id,
)
from tpu_embed.io.checkpoint.rounding_numbers import with_rounding_numbers
from tpu_embed.io.checkpoint.row_files import RowArray, RowReader, write_column
from tpu_embed.io.checkpoint.rows import LocalShards, row_array, write_rows
from tpu_embed.kernels import storage
from tpu_embed.processes import raise_on_all
from tpu_embed.storage import HostRows
from tpu_embed.vocabulary import MapStates

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What one process will write.

    Attributes:
      checkpoint: the unique name of the checkpoint, the same in every process.
      manifest: the description of the tables.
      parts: every field with this process's shards of it, or with its value if it has no rows.
      maps: those of living vocabularies, in the first process; None if there are none.
      homes: what writes the rows of tables on the host; None if there are none.
    """

    checkpoint: str
    manifest: dict[str, Any]
    parts: list[tuple[Field, LocalShards | np.ndarray]]
    maps: maps.SavedMaps | None = None
    homes: Callable[[Path], host_rows.Checksums] | None = None


def prepare(
    engine: EmbeddingEngine, state: TableState, path: Path, *, checkpoint: str, copied: bool
) -> Prepared:
    """Collect what must be written from a state.

    Args:
      engine: the engine that made the state.
      state: tables and slots.
      path: the directory of the tables, once the checkpoint is finished.
      checkpoint: the name of the checkpoint.
      copied: whether to copy everything to the host now, so that the state may be donated
        afterwards.

    Raises:
      ValueError: the state is another engine's.
    """
    check_state(state, engine.layout)
    parts: list[tuple[Field, LocalShards | np.ndarray]] = []
    for f in fields(engine.layout):
        if f.shape.per_row and f.table.is_on_host:
            continue  # by id, below
        if f.shape.per_row:
            parts.append((f, LocalShards(state, engine.layout, f, copied=copied)))
        elif jax.process_index() == 0:
            parts.append((f, np.array(f.read(state)).view(np.dtype(f.shape.dtype))))
    found = maps.prepare(engine, state) if jax.process_index() == 0 else None
    homes = host_rows.prepare(engine, state, path, checkpoint=checkpoint, copied=copied)
    return Prepared(checkpoint, manifest.describe(engine, state), parts, found, homes)


def write(directory: Path, prepared: Prepared) -> None:
    """Write this process's part of the tables.

    Args:
      directory: an existing directory.
      prepared: what `prepare` returned.
    """
    checksums = {}
    for f, part in prepared.parts:
        place = field_place(f)
        if isinstance(part, LocalShards):
            checksums[place] = write_rows(row_array(directory / place, f), part)
        else:
            whole = _whole(directory / place, manifest.form_of(f))
            checksums[place] = write_column(whole, part[None])
    if prepared.maps is not None:
        checksums |= maps.write(directory, prepared.checkpoint, prepared.maps)
    if prepared.homes is not None:
        checksums |= prepared.homes(directory)
    manifest.write(directory, prepared.checkpoint, prepared.manifest, checksums)


def _whole(path: Path, form: dict[str, Any]) -> RowArray:
    """Return the array of a field without rows, such as a step count: one row `[1, 1, …]`."""
    return RowArray(path, 1, 1, True, tuple(form["shape"]), np.dtype(form["dtype"]))


class FoundTables(NamedTuple):
    """What was read.

    Attributes:
      state: tables and slots.
      maps: of living vocabularies and tables on the host; None without them.
      homes: the rows at home, by table on the host.
      checkpoint: the name of the checkpoint, if a later save may go on from it; else None.
    """

    state: TableState
    maps: MapStates | None
    homes: dict[str, HostRows]
    checkpoint: str | None


def read(directory: Path, wanted: Wanted) -> FoundTables:
    """Return what the files in a directory hold for an engine.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a table, field, shape or dtype is not what is wanted; a file is damaged.
    """
    engine = wanted.engine
    found = raise_on_all("restore", directory, lambda: manifest.read(directory, wanted))
    by_id = raise_on_all("restore", directory, lambda: read_by_id(directory, found.manifest))
    rows = RestoredRows(directory, found, wanted, by_id)
    base = rows.drawn_state() or _base(wanted, fresh=not found.complete)  # one program on all

    def filled() -> TableState:
        state = base
        for f in fields(engine.layout):
            if rows.is_read_whole(f):
                state = _read_field(state, directory, f, found, wanted)
        state = with_rounding_numbers(state, engine, found)
        return _named(directory, wanted, "rows by id", lambda: rows.write_over(state))

    state = raise_on_all("restore", directory, filled)
    scalars = np.asarray(found.manifest["step"], np.int32), found.counters(engine)
    step, counters = put_everywhere(scalars, engine.layout.axes)
    state = dataclasses.replace(state, step=step, counters=counters)
    if found.maps is None:
        return FoundTables(state, None, {}, None)
    state = _with_maps(state, found.maps, engine)
    assert state.vocabulary is not None, "made above"
    vocabulary = state.vocabulary
    homes = raise_on_all(
        "restore",
        directory,
        lambda: _named(directory, wanted, "rows at home", lambda: rows.homes(vocabulary)),
    )
    name = manifest.name_of(directory) if rows.goes_on else None
    return FoundTables(state, found.maps.states, homes, name)


def _with_maps(state: TableState, found: maps.FoundMaps, engine: EmbeddingEngine) -> TableState:
    """Return the state that belongs to maps."""
    key = found.key
    if key is None and state.vocabulary is not None:  # no map was saved, and what is new is drawn
        key = {name: np.asarray(x) for name, x in state.vocabulary.items() if name != MAP_VERSION}
    vocabulary = vocabulary_of_maps(found.states, key, engine.layout)
    return dataclasses.replace(state, vocabulary=vocabulary)


def _base(wanted: Wanted, *, fresh: bool) -> TableState:
    """Return a state to read into: initialized by the key if rows are lacking, else blank."""
    engine = wanted.engine
    if fresh:
        assert wanted.key is not None, "checked"
        return engine.init(wanted.key)
    layout = engine.layout
    tables, slots = blank_arrays(layout.stacks, layout.axes)
    return TableState(tables, slots, jnp.int32(0), {})


def _read_field(
    state: TableState, directory: Path, f: Field, found: SavedTables, wanted: Wanted
) -> TableState:
    """Return the state with one field read from disk, updated in place.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or in the place of another.
    """
    engine = wanted.engine
    return _named(directory, wanted, f.label, lambda: _filled(state, directory, f, found, engine))


def _named(directory: Path, wanted: Wanted, label: str, read: Callable[[], _T]) -> _T:
    """Return what a function reads; its errors name what it was.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or in the place of another.
    """
    try:
        return read()
    except (ValueError, OSError) as error:
        what, expected = f"{wanted.label(directory)}: {label}", "files as they were written"
        text = message(what, expected=expected, got=str(error), remedy=REMEDY)
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(text) from error


def _filled(
    state: TableState, directory: Path, f: Field, found: SavedTables, engine: EmbeddingEngine
) -> TableState:
    """Return the state with one field read from disk, updated in place."""
    path, form, table = directory / field_place(f), manifest.form_of(f), found.tables[f.table.name]
    on_disk, checksums = found.form(f), found.checksums.get(field_place(f), {})
    assert on_disk is not None, "checked"
    if not f.shape.per_row:
        lines = RowReader(_whole(path, on_disk), checksums).read(range(1))
        value = lines[0].astype(form["dtype"])
        stored = np.asarray(storage.encode(jnp.asarray(value), f.shape.dtype))
        return f.write(state, put_everywhere(stored, engine.layout.axes))
    name = f.table.name
    reader, rows = (
        field_reader(directory, f, found),
        DeviceRows(state, engine.layout, name, [f.part]),
    )

    def read(ids: Ids) -> dict[str, np.ndarray]:
        return {f.part: logical.as_stored(reader.read(ids), f)}

    limit = min(table["vocabulary_size"], f.table.vocabulary_size)
    copy_rows(read, rows.write, rows.lines(limit))
    if found.maps is not None and name in found.maps.moves:  # those that have another place now
        moves = found.maps.moves[name].moved()
        both = (blocks_of(ids, rows.block) for ids in (moves.before, moves.now))
        copy_rows(read, rows.write, zip(*both, strict=True))
    return rows.state
