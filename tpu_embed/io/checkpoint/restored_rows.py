"""Restore tables that are, or were, on the host: between rows by id and whole tables.

    saved       restored to     what happens
    by id       the host        rows go home
    by id       the devices     the table is drawn as it was at first, and rows are written over it
    whole       the host        all rows go home

Input: files of tables, an engine. Output: rows at home; or a state with the rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tpu_embed._checks import message
from tpu_embed._types import Array
from tpu_embed.core.layout import NUMBERS_SLOT
from tpu_embed.core.rows import DeviceRows, logical
from tpu_embed.core.state import Field, TableState, fields
from tpu_embed.io.checkpoint import host_rows, manifest, maps
from tpu_embed.io.checkpoint.checked import REMEDY
from tpu_embed.io.checkpoint.host_rows import Block, Rows
from tpu_embed.io.checkpoint.manifest import SavedTables, Wanted
from tpu_embed.io.checkpoint.rounding_numbers import numbers_of
from tpu_embed.io.checkpoint.row_files import RowArray, RowReader
from tpu_embed.io.files import file_name
from tpu_embed.kernels import storage
from tpu_embed.storage import VALUES, HostRows, slot_field


def field_place(f: Field) -> str:
    """Return the directory of a field that is saved whole, relative to that of the tables."""
    table = file_name(f.table.name)
    return f"{table}/table" if f.slot is None else f"{table}/slots/{file_name(f.slot)}"


def field_reader(directory: Path, f: Field, found: SavedTables) -> RowReader:
    """Return a reader of the rows of a field that is saved whole."""
    table, form = found.tables[f.table.name], found.form(f)
    assert form is not None, "checked"
    shape = table["shards"], table["rows_per_shard"], table["alternate"]
    array = RowArray(
        directory / field_place(f), *shape, tuple(form["shape"]), np.dtype(form["dtype"])
    )
    return RowReader(array, found.checksums.get(field_place(f), {}))


def read_by_id(directory: Path, described: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return what each process has said of the tables in a directory that are saved by id.

    Args:
      directory: that of the tables.
      described: the manifest.

    Raises:
      FileNotFoundError, ValueError: a file is missing or damaged, or of another checkpoint; it
        names other tables than the first one, or other fields of a row than the manifest.
    """
    checkpoint, tables = manifest.name_of(directory), described["tables"]
    every: list[dict[str, Any]] = []
    if not (directory / host_rows.FILE.format(0)).exists():
        return {}
    for process in range(described["processes"]):
        every.append(said := host_rows.described_by(directory, checkpoint, process))
        expected = {name: _fields_of(tables[name]) for name in every[0] if name in tables}
        got = {
            name: {part["name"]: [part["shape"], part["dtype"]] for part in one["fields"]}
            for name, one in said.items()
        }
        if got != expected:
            what = f"{directory / host_rows.FILE.format(process)}: fields of rows"
            raise ValueError(message(what, expected=f"{expected}", got=f"{got}", remedy=REMEDY))
    return {name: [said[name] for said in every] for name in every[0]}


def _fields_of(table: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return shape and stored dtype of what a row has, by name, from the manifest of its table."""
    slots = {slot_field(name): one for name, one in table["slots"].items() if one["per_row"]}
    return {
        name: [one["shape"], storage.stored_dtype(one["dtype"]).name]
        for name, one in {VALUES: table["table"], **slots}.items()
    }


@dataclasses.dataclass(frozen=True)
class RestoredRows:
    """The tables of a directory, for one engine.

    Attributes:
      directory: that of the tables.
      found: what the manifest says.
      wanted: what is wanted of them.
      by_id: what `read_by_id` says of those that are saved by id.
    """

    directory: Path
    found: SavedTables
    wanted: Wanted
    by_id: Mapping[str, list[dict[str, Any]]]

    def drawn_state(self) -> TableState | None:
        """Return a state with first values; None without tables that are written over them."""
        engine = self.wanted.engine
        drawn = [f for f in fields(engine.layout) if self._is_by_id(f) and not f.table.is_on_host]
        if not drawn:
            return None
        key = maps.read_key(self.directory, manifest.name_of(self.directory))
        state = engine.init(key)
        if self.found.complete:
            return state
        # What is lacking is made with the key that was given; at home there is nothing yet.
        assert self.wanted.key is not None, "checked"
        made = engine.init(self.wanted.key)
        on_devices = [f for f in fields(engine.layout) if not f.table.is_on_host]
        lacking = [f for f in on_devices if self.found.form(f) is None]
        tables = {
            f.table.name: logical.read_field(made, f, engine.layout.axes)
            for f in lacking
            if f.slot is None
        }
        slots: dict[str, dict[str, Array]] = {}
        for f in lacking:
            if f.slot is not None:
                whole = logical.read_field(made, f, engine.layout.axes)
                slots.setdefault(f.table.name, {})[f.slot] = whole
        return engine.load_arrays(state, tables, slots)

    def is_read_whole(self, f: Field) -> bool:
        """Return whether a field is read into the state from an array of all its rows."""
        if self.found.form(f) is None:
            return False
        return not f.shape.per_row or not (f.table.is_on_host or self._is_by_id(f))

    def write_over(self, state: TableState) -> TableState:
        """Return the state with the rows of tables that are saved by id and not on the host."""
        layout = self.wanted.engine.layout
        for name in self.by_id.keys() & self.found.tables.keys():
            if layout.table(name)[1].is_on_host:
                continue
            made = DeviceRows(state, layout, name)
            mine = [f for f in made.fields.values() if self.found.form(f) is not None]
            for ids, rows in self._moved(name, self._segments(name)):
                made.write(ids, {f.part: self._converted(f, rows) for f in mine})
            state = made.state
        return state

    def homes(self, vocabulary: Mapping[str, Array]) -> dict[str, HostRows]:
        """Return the rows at home of the engine's tables on the host.

        Args:
          vocabulary: that of the state, which holds the random key.
        """
        engine, made = self.wanted.engine, {}
        if engine.storage is None:
            return made
        for name, table in engine.storage.tables.items():
            blocks = self._blocks(name, vocabulary) if name in self.found.tables else ()
            made[name] = HostRows(table.fields, table.storage.path)
            for ids, rows in blocks:  # of a row that comes twice, the last is valid
                made[name].write(ids, rows)
        return made

    @property
    def goes_on(self) -> bool:
        """Whether a later save may link these files: rows are at home just as they are saved."""
        storage = self.wanted.engine.storage
        if storage is None or any(map(self._lacking, storage.tables)):
            return False
        if any(map(self._moves, storage.tables)):
            return False
        here, count = jax.process_index(), jax.process_count()
        for name, table in storage.tables.items():
            saved = self.by_id.get(name, [])
            now = host_rows.describe(table.fields, table.row_groups)
            if len(saved) != count or any(saved[here][what] != one for what, one in now.items()):
                return False
        return True

    def _is_by_id(self, f: Field) -> bool:
        return f.shape.per_row and f.table.name in self.by_id and f.table.name in self.found.tables

    def _fields(self, name: str) -> list[Field]:
        """Return the fields with a row for each id of a table."""
        layout = self.wanted.engine.layout
        every = [f for f in fields(layout) if f.table.name == name]
        return [f for f in every if f.shape.per_row]

    def _lacking(self, name: str) -> list[Field]:
        return [f for f in self._fields(name) if self.found.form(f) is None]

    def _segments(self, name: str) -> Iterator[Block]:
        """Yield the rows of a table that are saved by id; on the host, at least those of here."""
        engine, said = self.wanted.engine, self.by_id[name]
        if engine.storage is not None and name in engine.storage.tables and not self._moves(name):
            row_groups = engine.storage.tables[name].row_groups
            # Where ids were divided in the same way, rows of other processes need not be read.
            said = [
                one
                for one in said
                if one["owners"] != row_groups.num_owners
                or row_groups.mine.intersection(one["saved"])
            ]
        return host_rows.read(self.directory, name, said, self.found.checksums)

    def _moves(self, name: str) -> bool:
        """Return whether rows of a table have other ids than they were saved with."""
        moves = {} if self.found.maps is None else self.found.maps.moves
        return name in moves and moves[name].moved().now.size > 0

    def _blocks(self, name: str, vocabulary: Mapping[str, Array]) -> Iterator[Block]:
        """Yield the rows of a table on the host that are at home here, as they are stored."""
        engine, lacking = self.wanted.engine, self._lacking(name)
        assert engine.storage is not None, "it has tables on the host"
        row_groups = engine.storage.tables[name].row_groups
        saved = self._segments(name) if name in self.by_id else self._whole(name)
        for every, values in self._moved(name, saved):
            mine = row_groups.at_home(every.view(np.uint64))
            ids = every[mine].view(np.uint64)
            rows = {part: some[mine] for part, some in values.items()}
            made = {
                f.part: self._converted(f, rows) for f in self._fields(name) if f not in lacking
            }
            if lacking:
                drawn = engine.drawn_rows(vocabulary, name, ids)
                made |= {f.part: drawn[f.part] for f in lacking}
            numbers = slot_field(NUMBERS_SLOT)
            if any(f.part == numbers for f in lacking):
                made[numbers] = numbers_of(self.found, lacking[0].table, ids)
            yield ids, made

    def _moved(self, name: str, blocks: Iterable[Block]) -> Iterator[tuple[np.ndarray, Rows]]:
        """Yield blocks with the rows that their ids are now, int64 `[n]`; nobody's are left out."""
        moves = {} if self.found.maps is None else self.found.maps.moves
        for ids, rows in blocks:
            before = ids.astype(np.int64)
            if name not in moves:
                yield before, rows
                continue
            here, now = moves[name].follow(before)
            if now.size:
                yield now, {part: some[here] for part, some in rows.items()}

    def _whole(self, name: str) -> Iterator[Block]:
        """Yield all rows of a table that is saved whole."""
        size = self.found.tables[name]["vocabulary_size"]
        mine = [f for f in self._fields(name) if self.found.form(f) is not None]
        readers = {f.part: field_reader(self.directory, f, self.found) for f in mine}
        block = min(reader.array.block * reader.array.shards for reader in readers.values())
        for first in range(0, size, block):
            last = min(first + block, size)
            rows = {part: reader.read(range(first, last)) for part, reader in readers.items()}
            yield np.arange(first, last, dtype=np.uint64), rows

    def _converted(self, f: Field, rows: Rows) -> np.ndarray:
        """Return saved rows of a field, `[n, …]`, as the engine stores them."""
        form = self.found.form(f)
        assert form is not None, "checked"
        # Numbers of 16 bits are saved by id as they are stored, and whole as what they mean.
        return logical.as_stored(rows[f.part].view(np.dtype(form["dtype"])), f)
