"""The maps of dynamic vocabularies in a checkpoint: which key has which row, and what decides it.

    vocabularies.json           the step, the random key of new rows, and the sizes of all maps
    films/map/keys/ …           the arrays of a map (`MapState`), one directory each

They stand beside the tables and are of the same step, so one commit holds both. A map may be read
for a table of another capacity: then the keys with the best scores stay, and rows beyond the
capacity move to free ones.

Input: an engine and its state. Output: files; or the maps for another engine, and which rows moved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from tpu_embed._checks import refuse
from tpu_embed._types import Array
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.layout import TableSlice
from tpu_embed.core.state import TableState, open_key, random_key
from tpu_embed.io import schema
from tpu_embed.io.checkpoint.checked import read_bound, write_bound
from tpu_embed.io.checkpoint.row_files import Checksums, RowReader, column, write_all
from tpu_embed.io.files import file_name
from tpu_embed.io.store import Place
from tpu_embed.vocabulary import (
    DynamicVocabulary,
    MapState,
    MapStates,
    RowMoves,
    empty_state,
    fit_rows,
    map_version,
    states_to_load,
)

_FILE = "vocabularies.json"
_ARRAYS = (
    "keys",
    "rows",
    "last_seen",
    "batches_seen",
    "waiting_keys",
    "waiting_counts",
)
_FORM = schema.record(
    step=schema.integer(0, 2**31 - 2),
    history=schema.integer(0, 2**31 - 2),
    kind=schema.text,
    key=schema.sequence(schema.integer(0, 2**32 - 1)),
    tables=schema.mapping(
        schema.record(
            capacity=schema.integer(1),
            keys=schema.natural,
            waiting=schema.natural,
            unseen=schema.choice("zero", "shared"),
            counters=schema.naturals,
        )
    ),
)


SavedMaps = tuple[schema.Json, dict[str, MapState]]
"""What is written: the contents of `vocabularies.json`, and the state of each map, by table."""


@dataclasses.dataclass(frozen=True)
class FoundMaps:
    """The maps of a checkpoint, fitted to an engine.

    Attributes:
      states: for `Vocabularies.load_state`.
      key: the data of the random key of new rows, by its kind; None if none was saved.
      moves: by table, where its rows go.
    """

    states: MapStates
    key: dict[str, np.ndarray] | None
    moves: Mapping[str, RowMoves]


def prepare(engine: EmbeddingEngine, state: TableState) -> SavedMaps | None:
    """Return the maps as of a state; None for an engine without dynamic vocabularies."""
    vocabularies = engine.vocabularies
    if vocabularies is None:
        return None
    if engine.storage is not None:
        # Older rows may have gone home, or changed there.
        vocabularies.check_newest(state)
    step, history = map_version(state)
    if (step, history) != vocabularies.at(step):
        refuse(
            "state",
            expected="a state of the maps' history",
            got="one from before they were loaded, or of another engine's",
            remedy="share the maps: EmbeddingEngine(…, vocabularies=other.vocabularies)",
        )
    assert state.vocabulary is not None, "checked"
    ((kind, data),) = random_key(state.vocabulary).items()
    states, tables, maps = vocabularies.states(step), {}, {}
    for name, (_, rules) in _living(engine).items():
        maps[name] = one = {**states.maps, **states.ids}[name]
        tables[name] = {
            "capacity": vocabularies.capacity(name),
            "keys": one.keys.size,
            "waiting": one.waiting_keys.size,
            "unseen": rules.unseen,
            "counters": one.counters.tolist(),
        }
    key = np.asarray(data).tolist()
    # A history is a number of this run alone: whoever restores this begins one of its own.
    return {
        "step": step,
        "history": 0,
        "kind": kind,
        "key": key,
        "tables": tables,
    }, maps


def write(checkpoint: str, saved: SavedMaps, directory: Place) -> Checksums:
    """Write the maps; one process does. Return the checksums of files, by directory.

    Args:
      checkpoint: the name of the checkpoint.
      saved: what `prepare` returned.
      directory: that of the tables.
    """
    checksums, (described, states) = {}, saved
    for name, state in states.items():
        for field in _ARRAYS:
            values, place = getattr(state, field), _place(name, field)
            array = column(directory / place, values.size, _dtype(field))
            checksums[place] = write_all(array, values)
    write_bound(directory / _FILE, checkpoint, described)
    return checksums


def read(
    directory: Place,
    checkpoint: str,
    checksums: Checksums,
    engine: EmbeddingEngine,
    mismatch: Callable[[str, str, str, str], Exception],
    *,
    saved_tables: schema.Json,
) -> FoundMaps | None:
    """Return the maps of a checkpoint for an engine; None if it has no dynamic vocabularies.

    Args:
      directory: that of the tables.
      checkpoint: the name that the file must carry.
      checksums: of all files, by directory.
      engine: the engine.
      mismatch: makes the error of a table that is not what is wanted: what, expected, got, remedy.
      saved_tables: the tables that are to be read, by name.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged; a table lives on disk or in the engine alone; its unseen keys
        share a row in the engine alone, so that nobody has trained this row.
    """
    found = read_description(directory, checkpoint)
    saved = {} if found is None else found["tables"]
    wanted = _living(engine)
    for name in saved_tables:
        if (name in saved) != (name in wanted):
            forms = ["row numbers", "keys of a dynamic vocabulary"]
            expected, got = forms[name in wanted], forms[name in saved]
            raise mismatch(
                f"table {name!r}: ids", expected, got, "declare it as it was"
            )
    vocabularies = engine.vocabularies
    if vocabularies is None:
        return None
    step = 0 if found is None else found["step"]
    maps, moves = {}, {}
    for name, (table, rules) in wanted.items():
        if name not in saved_tables:
            maps[name] = empty_state(step)
            continue
        before, now = saved[name]["unseen"], rules.unseen
        if now == "shared" and before != now:
            raise mismatch(
                f"table {name!r}: unseen",
                repr(now),
                repr(before),
                "declare it as it was",
            )
        state = read_state(directory, name, saved[name], step, checksums)
        capacity = saved[name]["capacity"], before
        maps[name], moves[name] = fit_rows(state, capacity, table.declared_size, rules)
    states = states_to_load([table for _, table in engine.layout.living], maps, step)
    key = None if found is None else {found["kind"]: np.array(found["key"], np.uint32)}
    return FoundMaps(states, key, moves)


def read_description(directory: Place, checkpoint: str) -> schema.Json | None:
    """Return what is written of all maps, see `SavedMaps`; None if no vocabulary lives.

    Raises:
      ValueError: the file is damaged, or belongs to another checkpoint.
    """
    if not (directory / _FILE).exists():
        return None
    return read_bound(directory / _FILE, _FORM, checkpoint)[1]


def _living(engine: EmbeddingEngine) -> dict[str, tuple[TableSlice, DynamicVocabulary]]:
    """Return the tables whose ids are keys, by name, and how their keys get rows."""
    living = engine.layout.living
    return {t.name: (t, t.key_rules) for _, t in living if t.key_rules is not None}


def read_key(directory: Place, checkpoint: str) -> Array:
    """Return the random key that rows which nobody has trained are drawn with.

    Raises:
      FileNotFoundError, ValueError: the file is missing, or damaged.
    """
    found = read_bound(directory / _FILE, _FORM, checkpoint)[1]
    return open_key({found["kind"]: np.array(found["key"], np.uint32)})


def read_state(
    directory: Place,
    name: str,
    saved: schema.Json,
    step: int,
    checksums: Checksums,
) -> MapState:
    """Return the state of the map of one table, as it was saved.

    Args:
      directory: that of the tables.
      name: the table.
      saved: what is written of it in `read_description`.
      step: of the checkpoint.
      checksums: of all files, by directory.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged.
    """
    arrays = {}
    for field in _ARRAYS:
        size = saved["waiting" if field.startswith("waiting") else "keys"]
        place = _place(name, field)
        array = column(directory / place, size, _dtype(field))
        reader = RowReader(array, checksums.get(place, {}))
        arrays[field] = np.ascontiguousarray(reader.read(range(size))).reshape(-1)
    counters = np.array(saved["counters"], np.int64)
    return MapState(**arrays, step=np.array(step, np.int64), counters=counters)


def _place(name: str, field: str) -> str:
    """Return the directory of an array, relative to that of the tables."""
    return f"{file_name(name)}/map/{field}"


def _dtype(field: str) -> type:
    return np.uint64 if field.endswith("keys") else np.int64
