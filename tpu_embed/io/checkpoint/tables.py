"""Write all tables and slots of an engine to a directory, and read them into any matching engine.

The files are logical: rows in order, under the names of tables and slots. So placement, stacking,
packing, devices and processes may differ when they are read. Rows of tables on the host are saved
by id, those that were touched:

    saved       restored to     what happens
    whole       the devices     all rows are written; of dynamic vocabularies, those of keys that
    stay whole       the host        all rows go home
    by id       the host        rows go home
    by id       the devices     the table is drawn as it was at first, and rows are written over it

Rows are read from the devices and written block by block, so that little memory is needed. Each
process writes the shards that it holds, and no two of them write to the same chunk.

Input: an engine and its state. Output: files by table and slot name, with a manifest; or a state.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import message, refuse
from tpu_embed._types import Array
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.layout import NUMBERS_SLOT, Layout, TableSlice
from tpu_embed.core.rows import (
    DeviceRows,
    Grid,
    as_stored,
    blocks_of,
    copy_rows,
    pieces,
)
from tpu_embed.core.state import (
    Field,
    TableState,
    blank_arrays,
    check_state,
    fields,
    matched_counters,
    put_everywhere,
    random_key,
    vocabulary_of_maps,
)
from tpu_embed.io.checkpoint import host_rows, manifest, maps
from tpu_embed.io.checkpoint.checked import REMEDY
from tpu_embed.io.checkpoint.host_rows import Block
from tpu_embed.io.checkpoint.manifest import SavedTables, Wanted
from tpu_embed.io.checkpoint.row_files import (
    Checksums,
    RowArray,
    RowReader,
    RowWriter,
    column,
    write_all,
)
from tpu_embed.io.files import file_name
from tpu_embed.io.schema import Json
from tpu_embed.io.store import Place
from tpu_embed.kernels import storage
from tpu_embed.kernels.stochastic import number_ids
from tpu_embed.processes import raise_on_all
from tpu_embed.storage import VALUES, HomeTable, HostRows, slot_field
from tpu_embed.vocabulary import MapStates

_T = TypeVar("_T")


class Prepared(NamedTuple):
    """What one process will write.

    Attributes:
      checkpoint: the unique name of the checkpoint, the same in every process.
      manifest: the description of the tables.
      writers: each writes some of it in the directory of the tables, and returns the checksums of
        its files.
    """

    checkpoint: str
    manifest: Json
    writers: list[Callable[[Place], Checksums]]


def prepare(
    engine: EmbeddingEngine,
    state: TableState,
    path: Place,
    *,
    checkpoint: str,
    copied: bool,
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
    is_first, writers = jax.process_index() == 0, []
    for f in fields(engine.layout):
        if not f.shape.per_row:
            if is_first:
                value = np.array(f.read(state)).view(np.dtype(f.shape.dtype))
                writers.append(functools.partial(_write_value, f, value))
        elif not f.table.is_on_host:  # those are saved by id
            shards = LocalShards(state, engine.layout, f, copied=copied)
            writers.append(functools.partial(_write_field, f, shards))
    if is_first and (found := maps.prepare(engine, state)) is not None:
        writers.append(functools.partial(maps.write, checkpoint, found))
    homes = host_rows.prepare(engine, state, path, checkpoint=checkpoint, copied=copied)
    if homes is not None:
        writers.append(homes)
    return Prepared(checkpoint, manifest.describe(engine, state), writers)


def write(directory: Place, prepared: Prepared) -> None:
    """Write this process's part of the tables.

    Args:
      directory: an existing directory.
      prepared: what `prepare` returned.
    """
    checksums: Checksums = {}
    for one in prepared.writers:
        checksums |= one(directory)
    manifest.write(directory, prepared.checkpoint, prepared.manifest, checksums)


def _write_field(f: Field, shards: LocalShards, directory: Place) -> Checksums:
    place = field_place(f)
    return {place: write_rows(row_array(directory / place, f), shards)}


def _write_value(f: Field, value: np.ndarray, directory: Place) -> Checksums:
    """Write a field without rows, such as a step count, as one row `[1, 1, …]`."""
    array = column(directory / (place := field_place(f)), 1, value.dtype, value.shape)
    return {place: write_all(array, value[None])}


def field_place(f: Field) -> str:
    """Return the directory of a field that is saved whole, relative to that of the tables."""
    table = file_name(f.table.name)
    return f"{table}/table" if f.slot is None else f"{table}/slots/{file_name(f.slot)}"


class LocalShards:
    """The rows of a field on the shards that this process saves.

    Args:
      state: the state.
      layout: the engine's layout.
      field: the field.
      copied: whether to copy the rows to the host now, because the state may be donated later.

    Attributes:
      numbers: of the shards, ascending: of several copies of a shard, one is saved.
      side_by_side: how many neighbouring shards every process writes together; 1 if processes have
        different numbers of shards, or shards that are not neighbours.
    """

    def __init__(
        self, state: TableState, layout: Layout, field: Field, *, copied: bool
    ) -> None:
        self.field = field
        self.rows = DeviceRows(state, layout, field.table.name, [field.part])
        holders = layout.axes.processes_of_parts(field.stack.shard_axes)
        owners = np.array([min(processes) for processes in holders])
        self.numbers: list[int] = np.flatnonzero(owners == jax.process_index()).tolist()
        # With 4 shards of processes 0 0 1 1 two are side by side: process 0 writes shards 0 and 1,
        # process 1 writes 2 and 3. With 0 1 0 1 chunks of two shards would have two writers.
        n = int(np.bincount(owners).max())
        regular = (
            owners.size % n == 0 and (owners.reshape(-1, n) == owners[::n, None]).all()
        )
        self.side_by_side = n if regular else 1
        if copied:
            self.rows.keep(self.numbers)

    def block(self, shards: list[int], first: int, last: int) -> np.ndarray:
        """Return local rows `[first, last)` of neighbouring shards, in their logical dtype.

        Returns:
          `[n, k, …]` of a field whose rows alternate between the shards, otherwise `[k, n, …]`.
        """
        grid = self.rows.grid
        found = self.rows.read_here(grid.ids(shards, first, last))[self.field.part]
        shape = (last - first, len(shards)) if grid.alternate else (1, last - first)
        return found.reshape(*shape, *found.shape[1:]).view(
            np.dtype(self.field.shape.dtype)
        )


def row_array(path: Place, field: Field) -> RowArray:
    """Return where and in which shape a field is saved; the layout decides."""
    grid, form = Grid.of(field.stack, field.table), field.shape
    return RowArray(path, *grid, tuple(form.shape), np.dtype(form.dtype))


def write_rows(array: RowArray, shards: LocalShards) -> dict[str, int]:
    """Write this process's shards of a field; return the checksums of the files by file name.

    Args:
      array: where to write.
      shards: the rows.
    """
    if not shards.numbers:
        return {}
    together = shards.side_by_side if array.alternate else 1
    with RowWriter(array, together) as writer:
        for lines in pieces(array.rows_per_shard, array.block):
            for at in pieces(len(shards.numbers), together):
                some = shards.numbers[at]
                place = slice(some[0], some[-1] + 1)
                rows = shards.block(some, lines.start, lines.stop)
                writer.write(
                    (lines, place) if array.alternate else (place, lines), rows
                )
        return writer.finish()


# -- reading -----------------------------------------------------------------------------------


class FoundTables(NamedTuple):
    """What was read.

    Attributes:
      state: tables and slots.
      maps: of dynamic vocabularies and tables on the host; None without them.
      homes: the rows at home, by table on the host.
      checkpoint: the name of the checkpoint, if a later save may go on from it; else None.
    """

    state: TableState
    maps: MapStates | None
    homes: dict[str, HostRows]
    checkpoint: str | None


def read(directory: Place, wanted: Wanted) -> FoundTables:
    """Return what the files in a directory hold for an engine.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a table, field, shape or dtype is not what is wanted; a file is damaged.
    """
    on_all = functools.partial(raise_on_all, "restore", directory)

    def described():
        found = manifest.read(directory, wanted)
        by_id = read_by_id(directory, found.checkpoint, found.manifest)
        here = {name: said for name, said in by_id.items() if name in found.tables}
        return _Restore(directory, found, wanted, here)

    restore, engine = on_all(described), wanted.engine
    found = restore.found
    first = restore.first_state()  # one program on all
    state = on_all(lambda: restore.fill(first))
    said, forms = (
        found.manifest,
        jax.eval_shape(engine.init, jax.random.key(0)).counters,
    )
    counters = matched_counters(
        said["counters"], said["features"], forms, engine.layout
    )
    scalars = np.asarray(said["step"], np.int32), counters
    step, counters = put_everywhere(scalars, engine.layout.axes)
    state = dataclasses.replace(state, step=step, counters=counters)
    if found.maps is None:
        return FoundTables(state, None, {}, None)
    key = found.maps.key
    if (
        key is None and state.vocabulary is not None
    ):  # no map was saved, and what is new is drawn
        key = jax.tree.map(np.asarray, random_key(state.vocabulary))
    vocabulary = vocabulary_of_maps(found.maps.states, key, engine.layout)
    homes = on_all(
        lambda: restore.named("rows at home", lambda: restore.homes(vocabulary))
    )
    name = found.checkpoint if restore.goes_on else None
    state = dataclasses.replace(state, vocabulary=vocabulary)
    return FoundTables(state, found.maps.states, homes, name)


@dataclasses.dataclass(frozen=True)
class _Restore:
    """The tables of a directory, for one engine.

    Attributes:
      directory: that of the tables.
      found: what the manifest says.
      wanted: what is wanted of them.
      by_id: what `read_by_id` says of those that are read and saved by id.
    """

    directory: Place
    found: SavedTables
    wanted: Wanted
    by_id: Mapping[str, list[Json]]

    def first_state(self) -> TableState:
        """Return a state to write rows over: blank, or with the first values of what is lacking."""
        engine, key = self.wanted.engine, self.wanted.key
        drawn, complete = self._by_id_on_devices, self.found.complete
        if complete and not drawn:
            tables, slots = blank_arrays(engine.layout.stacks, engine.layout.axes)
            return TableState(tables, slots, jnp.int32(0), {})
        if drawn:  # rows that nobody had touched are as they were at first
            state = engine.init(maps.read_key(self.directory, self.found.checkpoint))
        if complete:
            return state
        assert key is not None, "checked"
        made = engine.init(key)
        for name in drawn:
            parts = [
                f.part for f in self._fields(name) if self.found.form(f) is not None
            ]
            source, sink = (
                DeviceRows(x, engine.layout, name, parts) for x in (state, made)
            )
            copy_rows(
                source.read_here,
                sink.write,
                sink.lines(sink.grid.shards * sink.grid.size),
            )
            made = sink.state
        return made

    def fill(self, state: TableState) -> TableState:
        """Return the state with all rows that are read to the devices, in place."""
        for f in fields(self.wanted.engine.layout):
            at_home = f.shape.per_row and f.table.is_on_host
            if at_home or f.table.name not in self.found.tables:
                continue
            if self.found.form(f) is None:
                if f.slot == NUMBERS_SLOT:
                    state = self._with_numbers(state, f)
            elif not (f.shape.per_row and f.table.name in self.by_id):
                state = self.named(
                    f.label, functools.partial(self._fill_whole, state, f)
                )
        for name in self._by_id_on_devices:
            state = self.named(
                "rows by id", functools.partial(self._fill_by_id, state, name)
            )
        return state

    def named(self, label: str, read: Callable[[], _T]) -> _T:
        """Return what a function reads; its errors name what it was.

        Raises:
          FileNotFoundError: a file is missing.
          ValueError: a file is damaged, or in the place of another.
        """
        try:
            return read()
        except (ValueError, OSError) as error:
            what = f"{self.wanted.label(self.directory)}: {label}"
            expected = "files as they were written"
            text = message(what, expected=expected, got=str(error), remedy=REMEDY)
            kind = (
                FileNotFoundError
                if isinstance(error, FileNotFoundError)
                else ValueError
            )
            raise kind(text) from error

    def _fill_whole(self, state: TableState, f: Field) -> TableState:
        """Return the state with a field read that is saved whole."""
        layout, name = self.wanted.engine.layout, f.table.name
        if not f.shape.per_row:
            value = self._reader(f).read(range(1))[0].astype(np.dtype(f.shape.dtype))
            stored = np.asarray(storage.encode(jnp.asarray(value), f.shape.dtype))
            return f.write(state, put_everywhere(stored, layout.axes))
        rows = DeviceRows(state, layout, name, [f.part])
        # A block of rows that do not alternate is a run on each shard.
        reader = self._reader(f, 1 if rows.grid.alternate else len(rows.here))

        def read(ids):
            return {f.part: as_stored(reader.read(ids), f)}

        limit = min(self.found.tables[name]["vocabulary_size"], f.table.vocabulary_size)
        copy_rows(read, rows.write, rows.lines(limit))
        if name in self._moves:  # those that have another place now
            moves = self._moves[name].moved()
            both = (blocks_of(ids, rows.block) for ids in (moves.before, moves.now))
            copy_rows(read, rows.write, zip(*both, strict=True))
        return rows.state

    def _fill_by_id(self, state: TableState, name: str) -> TableState:
        """Return the state with the rows written of a table that is saved by id."""
        rows = DeviceRows(state, self.wanted.engine.layout, name)
        for ids, saved in self._blocks(name):
            rows.write(ids, saved)
        return rows.state

    def homes(self, vocabulary: Mapping[str, Array]) -> dict[str, HostRows]:
        """Return the rows at home of the engine's tables on the host.

        Args:
          vocabulary: that of the state, which holds the random key.
        """
        made: dict[str, HostRows] = {}
        for name, table in self._host_tables.items():
            made[name] = HostRows(table.fields, table.storage.path)
            for every, rows in self._blocks(
                name
            ):  # of a row that comes twice, the last
                mine = table.row_groups.at_home(every.view(np.uint64))
                ids = every[mine].view(np.uint64)
                saved = {part: some[mine] for part, some in rows.items()}
                made[name].write(ids, self._lacking_rows(name, vocabulary, ids) | saved)
        return made

    def _lacking_rows(
        self, name: str, vocabulary: Mapping[str, Array], ids: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return what a table on the host lacks of rows, `[n, …]` by field, as it is at first."""
        if not (lacking := self._lacking(name)):
            return {}
        drawn = self.wanted.engine.drawn_rows(vocabulary, name, ids)
        rows = {f.part: drawn[f.part] for f in lacking}
        if (numbers := slot_field(NUMBERS_SLOT)) in rows:
            rows[numbers] = self._numbers_of(lacking[0].table, ids)
        return rows

    @property
    def goes_on(self) -> bool:
        """Whether a later save may link these files: rows are at home just as they are saved."""
        here, count = jax.process_index(), jax.process_count()
        for name, table in self._host_tables.items():
            saved, now = (
                self.by_id.get(name, []),
                host_rows.describe(table.fields, table.row_groups),
            )
            if len(saved) != count or saved[here] != saved[here] | now:
                return False
            if self._lacking(name) or self._has_moved(name):
                return False
        return bool(self._host_tables)

    @property
    def _host_tables(self) -> Mapping[str, HomeTable]:
        storage = self.wanted.engine.storage
        return {} if storage is None else storage.tables

    @property
    def _by_id_on_devices(self) -> list[str]:
        """The tables that are saved by id, and whose rows go to the devices."""
        return [name for name in self.by_id if name not in self._host_tables]

    @property
    def _moves(self) -> Mapping[str, Any]:
        """Where rows of dynamic vocabularies went, by table."""
        return {} if self.found.maps is None else self.found.maps.moves

    def _has_moved(self, name: str) -> bool:
        """Return whether rows of a table have other ids than they were saved with."""
        return name in self._moves and self._moves[name].moved().now.size > 0

    def _fields(self, name: str) -> list[Field]:
        """Return the fields with a row for each id of a table."""
        return [f for f in fields(self.wanted.engine.layout, name) if f.shape.per_row]

    def _lacking(self, name: str) -> list[Field]:
        return [f for f in self._fields(name) if self.found.form(f) is None]

    def _reader(self, f: Field, runs: int = 1) -> RowReader:
        """Return a reader of a field that is saved whole; see `RowReader`."""
        table, form, place = (
            self.found.tables[f.table.name],
            self.found.form(f),
            field_place(f),
        )
        assert form is not None, "checked"
        grid = Grid(1, 1, True)
        if f.shape.per_row:
            grid = Grid(table["shards"], table["rows_per_shard"], table["alternate"])
        dtype = np.dtype(form["dtype"])
        array = RowArray(self.directory / place, *grid, tuple(form["shape"]), dtype)
        return RowReader(array, self.found.checksums.get(place, {}), runs)

    def _blocks(self, name: str) -> Iterator[Block]:
        """Yield the rows of a table as the engine stores them, with the ids that they have now.

        Those of nobody are left out; of a row that comes twice, the last is valid.

        Yields:
          int64 `[n]`; `[n, …]` by field.
        """
        forms = {f: self.found.form(f) for f in self._fields(name)}
        for before, rows in self._saved_blocks(name):
            here, now = slice(None), before.view(np.int64)
            if name in self._moves:
                here, now = self._moves[name].follow(now)
            # Numbers of 16 bits are saved by id as they are stored, and whole as what they mean.
            yield (
                now,
                {
                    f.part: as_stored(
                        rows[f.part][here].view(np.dtype(form["dtype"])), f
                    )
                    for f, form in forms.items()
                    if form is not None
                },
            )

    def _saved_blocks(self, name: str) -> Iterator[Block]:
        """Yield the rows of a table as they were saved; on the host, at least those of here."""
        if name not in self.found.tables:
            return
        if name not in self.by_id:
            mine = [f for f in self._fields(name) if self.found.form(f) is not None]
            readers = {f.part: self._reader(f) for f in mine}
            block = min(
                reader.array.block * reader.array.shards for reader in readers.values()
            )
            for ids in blocks_of(
                range(self.found.tables[name]["vocabulary_size"]), block
            ):
                rows = {part: reader.read(ids) for part, reader in readers.items()}
                yield np.asarray(ids, np.uint64), rows
            return
        said = self.by_id[name]
        if name in self._host_tables and not self._has_moved(name):
            row_groups = self._host_tables[name].row_groups
            # Where ids were divided in the same way, rows of other processes need not be read.
            said = [
                one
                for one in said
                if one["owners"] != row_groups.num_owners
                or row_groups.mine.intersection(one["saved"])
            ]
        yield from host_rows.read(self.directory, name, said, self.found.checksums)

    def _numbers_of(self, table: TableSlice, ids: np.ndarray) -> np.ndarray:
        """Return what stands for rows that are rounded at random, uint32 `[n]`.

        Args:
          table: a table with a map, in which a key stands for its row.
          ids: uint64 `[n]`, ids at home of a table on the host; otherwise rows.
        """
        whole, found = ids.copy(), self.found.maps
        if table.key_rules is not None and found is not None:
            known = (found.states.ids if table.is_on_host else found.states.maps)[
                table.name
            ]
            # Keys 70 90 in the rows 0 2; of the ids 0 1 2 the first and the last have a key.
            rows = known.rows.view(np.uint64)
            _, here, at = np.intersect1d(
                ids, rows, assume_unique=True, return_indices=True
            )
            whole[here] = known.keys[at]
        return number_ids(whole)

    def _with_numbers(self, state: TableState, f: Field) -> TableState:
        """Return the state with what stands for the rows of a table on the devices."""
        assert self.found.maps is not None, "the vocabulary of the table lives"
        # The rows of keys, and the last one, which keys without a row may share.
        known = self.found.maps.states.maps[f.table.name].rows
        ids = np.union1d(known, [f.table.vocabulary_size - 1])
        rows = DeviceRows(state, self.wanted.engine.layout, f.table.name, [f.part])
        rows.write(ids, {f.part: self._numbers_of(f.table, ids.view(np.uint64))})
        return rows.state


def read_by_id(
    directory: Place, checkpoint: str, described: Json
) -> dict[str, list[Json]]:
    """Return what each process has said of the tables in a directory that are saved by id.

    Args:
      directory: that of the tables.
      checkpoint: the name that the files must carry.
      described: the manifest.

    Raises:
      FileNotFoundError, ValueError: a file is missing or damaged, or of another checkpoint; it
        names other tables than the first one, or other fields of a row than the manifest.
    """
    tables = described["tables"]
    every: list[Json] = []
    if not (directory / host_rows.FILE.format(0)).exists():
        return {}
    for process in range(described["processes"]):
        every.append(said := host_rows.described_by(directory, checkpoint, process))
        expected = {
            name: _fields_of(tables[name]) for name in every[0] if name in tables
        }
        got = {
            name: {
                part["name"]: [part["shape"], part["dtype"]] for part in one["fields"]
            }
            for name, one in said.items()
        }
        if got != expected:
            refuse(
                f"{directory / host_rows.FILE.format(process)}: fields of rows",
                expected=f"{expected}",
                got=f"{got}",
                remedy=REMEDY,
            )
    return {name: [said[name] for said in every] for name in every[0]}


def _fields_of(table: Json) -> dict[str, list[Any]]:
    """Return shape and stored dtype of what a row has, by name, from the manifest of its table."""
    slots = {
        slot_field(name): one for name, one in table["slots"].items() if one["per_row"]
    }
    return {
        name: [one["shape"], storage.stored_dtype(one["dtype"]).name]
        for name, one in {VALUES: table["table"], **slots}.items()
    }
