"""The manifest of saved tables: their names, shapes and dtypes, compared with an engine's.

Everything is compared before the first row is read, so that a mismatch is one clear error. The
manifest also lists the checksums of the row files, which `row_files.py` checks.

Input: an engine and its state, or a directory. Output: the manifest `tables.json`, written or
checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from tpu_embed._checks import message, refuse
from tpu_embed._types import Array
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.layout import NUMBERS_SLOT, ROUNDING_SLOTS
from tpu_embed.core.rows import Grid
from tpu_embed.core.state import (
    Field,
    TableState,
    fields,
    rule_slots,
    slot_shapes,
)
from tpu_embed.io import schema
from tpu_embed.io.checkpoint import maps
from tpu_embed.io.checkpoint.checked import MismatchError, read_bound, write_bound
from tpu_embed.io.checkpoint.row_files import Checksums
from tpu_embed.io.checkpoint.trees import is_float
from tpu_embed.io.schema import Json
from tpu_embed.io.store import Place

_MANIFEST, _CHECKSUMS = "tables.json", "checksums.{}.json"

_INT32 = schema.integer(-(2**31), 2**31 - 1)
_FIELD = schema.record(shape=schema.naturals, dtype=schema.dtype, per_row=schema.flag)
_TABLE = schema.record(
    vocabulary_size=schema.integer(1, 2**63),
    shards=schema.integer(1),
    rows_per_shard=schema.integer(1),
    alternate=schema.flag,
    table=_FIELD,
    slots=schema.mapping(_FIELD),
    optimizer=schema.optional(schema.text),
    config=schema.mapping(schema.anything),
)
_FORM = schema.record(
    processes=schema.integer(1),
    step=schema.integer(0, 2**31 - 1),
    features=schema.texts,
    counters=schema.mapping(schema.either(_INT32, schema.sequence(_INT32))),
    tables=schema.mapping(_TABLE),
)
"""The schema of the manifest, which is what `describe` returns."""


def describe(engine: EmbeddingEngine, state: TableState) -> Json:
    """Return the manifest of a state."""
    tables: Json = {}
    described, configs = engine.describe()["tables"], engine.table_configs
    for f in fields(engine.layout):
        if f.slot is None:
            grid, config = Grid.of(f.stack, f.table), configs[f.table.name]
            tables[f.table.name] = {
                "vocabulary_size": f.table.declared_size,
                "shards": grid.shards,
                "rows_per_shard": grid.size,
                "alternate": grid.alternate,
                "table": form_of(f),
                "slots": {},
                "optimizer": _rule(f),
                "config": described[f.table.name]
                | {"combiner": config.combiner, "trainable": config.trainable},
            }
        else:
            tables[f.table.name]["slots"][f.slot] = form_of(f)
    return {
        "processes": jax.process_count(),
        "step": int(state.step),
        "features": [feature.path for feature in engine.layout.features],
        "counters": {
            name: np.asarray(n).tolist() for name, n in state.counters.items()
        },
        "tables": tables,
    }


def _rule(f: Field) -> str | None:
    """Return the class name of the optimizer of a field's table, or None."""
    return None if f.stack.optimizer is None else f.stack.optimizer.describe()["class"]


def form_of(f: Field) -> Json:
    """Return shape and dtype of one row of a field, or of the whole field if it has no rows."""
    dtype = np.dtype(f.shape.dtype).name
    return {"shape": list(f.shape.shape), "dtype": dtype, "per_row": f.shape.per_row}


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What to restore from tables on disk.

    Attributes:
      engine: the engine to make a state for.
      key: initializes rows, tables and slots that are not on disk, and lets go of slots that the
        engine does not have; None: lacking ones are an error, and so are these.
      convert: whether float dtypes may differ.
      leave_out: tables on disk that are not read.
      layer: the path of the layer that has the engine, for messages; "" for an engine by itself.
      checkpoint: the checkpoint name that the files must carry; None: any, but all the same one.
    """

    engine: EmbeddingEngine
    key: Array | None = None
    convert: bool = False
    leave_out: tuple[str, ...] = ()
    layer: str = ""
    checkpoint: str | None = None

    def label(self, directory: Place) -> str:
        """Return how messages name the tables in a directory."""
        return f"checkpoint {directory}" + (
            f": layer {self.layer!r}" if self.layer else ""
        )


@dataclasses.dataclass(frozen=True)
class SavedTables:
    """The description of saved tables, checked against what is wanted.

    Attributes:
      checkpoint: the name of the checkpoint.
      manifest: the whole manifest.
      tables: its entries for the tables that are to be read.
      checksums: the checksum of every file: directory of the field -> file name -> checksum.
      complete: whether every wanted row is on disk.
      maps: those of dynamic vocabularies; None if the engine has none.
    """

    checkpoint: str
    manifest: Json
    tables: Json
    checksums: Checksums
    complete: bool
    maps: maps.FoundMaps | None = None

    def form(self, f: Field) -> Json | None:
        """Return the saved shape and dtype of a field.

        None if it was not saved, or if it is a slot of another optimizer.
        """
        return _on_disk(self.tables, f)


def write(
    directory: Place,
    checkpoint: str,
    manifest: Json,
    checksums: Checksums,
) -> None:
    """Write the checksums of the files that this process has written; the first one says the rest.

    Args:
      directory: the directory of the tables.
      checkpoint: the name of the checkpoint.
      manifest: what `describe` returned.
      checksums: directory of the field -> file name -> checksum.
    """
    process = jax.process_index()
    write_bound(directory / _CHECKSUMS.format(process), checkpoint, checksums)
    if process == 0:
        write_bound(directory / _MANIFEST, checkpoint, manifest)


def name_of(directory: Place) -> str:
    """Return the name of the checkpoint that tables belong to.

    Raises:
      FileNotFoundError: the manifest is missing.
      ValueError: the manifest is damaged.
    """
    return read_bound(directory / _MANIFEST, _FORM)[0]


def read(directory: Place, wanted: Wanted) -> SavedTables:
    """Return the description of the tables in a directory, after a check of every field.

    Raises:
      FileNotFoundError: a file is missing.
      MismatchError: a table, field, shape or dtype is not what is wanted.
      ValueError: a file is damaged.
    """
    checkpoint, manifest, checksums = read_described(directory, wanted.checkpoint)
    label, found, engine = wanted.label(directory), manifest["tables"], wanted.engine

    def mismatch(what, expected, got, remedy):
        return MismatchError(label, [message(what, expected=expected, got=got)], remedy)

    for name in wanted.leave_out:
        if name not in found:
            refuse(
                f"{label}: leave_out",
                expected=f"some of {sorted(found)}",
                got=repr(name),
            )
    tables = {
        name: table for name, table in found.items() if name not in wanted.leave_out
    }
    names = sorted(engine.table_configs)
    for name in sorted(tables.keys() - set(names)):
        expected, got = f"it among the engine's tables {names}", "none of this name"
        left_out = f"leave_out=({wanted.layer or name!r},)"
        remedy = f"name one {name!r}, or leave it out: {left_out}"
        raise mismatch(f"table {name!r}", expected, got, remedy)
    found_maps = maps.read(
        directory, checkpoint, checksums, engine, mismatch, saved_tables=tables
    )
    lacking = [_lacks_rows(f, tables, wanted, mismatch) for f in fields(engine.layout)]
    return SavedTables(
        checkpoint, manifest, tables, checksums, not any(lacking), found_maps
    )


def read_described(
    directory: Place, checkpoint: str | None
) -> tuple[str, Json, Checksums]:
    """Return the name of a checkpoint, the manifest, and the checksums; see `SavedTables`.

    Args:
      directory: the directory of the tables.
      checkpoint: the name that the files must carry; None: any, but all the same one.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or belongs to another checkpoint.
    """
    checkpoint, manifest = read_bound(directory / _MANIFEST, _FORM, checkpoint)
    checksums: Checksums = {}
    form = schema.mapping(schema.mapping(schema.natural))
    for process in range(
        manifest["processes"]
    ):  # they write different files of the same field
        _, theirs = read_bound(directory / _CHECKSUMS.format(process), form, checkpoint)
        for place, some in theirs.items():
            checksums.setdefault(place, {}).update(some)
    return checkpoint, manifest, checksums


def _on_disk(found: Json, f: Field) -> Json | None:
    """Return the saved shape and dtype of a field; see `SavedTables.form`."""
    table = found.get(f.table.name)
    if table is None:
        return None
    if f.slot is None:
        return table["table"]
    # Slots of another optimizer may have the same names, so its class is compared too.
    of_rule = table["slots"].keys() - set(ROUNDING_SLOTS)
    same = table["optimizer"] == _rule(f) and of_rule == rule_slots(f.stack).keys()
    return table["slots"].get(f.slot) if same or f.slot in ROUNDING_SLOTS else None


def _lacks_rows(
    f: Field, found: Json, wanted: Wanted, mismatch: Callable[..., MismatchError]
) -> bool:
    """Check one field; return whether some of its rows are not on disk."""
    form, expected, size = _on_disk(found, f), form_of(f), f.table.declared_size
    if form is None and f.slot == NUMBERS_SLOT:
        return False  # keys and ids tell it: `tables.py` makes them
    if form is None:
        if wanted.key is None:
            raise mismatch(f.label, *_absent(f, found), "give key= to make it anew")
        return True
    if f.slot is None and wanted.key is None and _loses_slots(f, found, wanted):
        remedy = "give key= to go on without them"
        raise mismatch(f"{f.label}, slots", *_absent(f, found), remedy)
    for what in ("shape", "per_row", "dtype"):
        rounds = what == "dtype" and is_float(form[what]) and is_float(expected[what])
        if form[what] != expected[what] and not (rounds and wanted.convert):
            remedy = "convert=True rounds it" if rounds else "declare it as it was"
            got, wish = f"{what} {form[what]}", f"{what} {expected[what]}"
            raise mismatch(f.label, wish, got, remedy)
    rows = found[f.table.name]["vocabulary_size"]
    if f.table.key_rules is not None:
        # `maps.py` finds room for rows with keys and for the shared one; others need no values.
        return False
    if rows > size:
        remedy = "tables grow, and never shrink"
        raise mismatch(f.label, f"at most {size} rows", f"{rows}", remedy)
    if rows < size and wanted.key is None:
        remedy = "give key= to make the new rows"
        raise mismatch(f.label, f"{size} rows", f"{rows}", remedy)
    return rows < size


def _loses_slots(f: Field, found: Json, wanted: Wanted) -> bool:
    """Tell whether a table has slots on disk that nobody reads, though the engine goes on training.

    So it is under a rule without slots, such as SGD, or where the table is not trained any more. An
    engine without optimizers leaves slots out: it cannot put another checkpoint in place of this.
    """
    saved = found[f.table.name]["slots"].keys() - set(ROUNDING_SLOTS)
    trains = any(stack.optimizer is not None for stack in wanted.engine.layout.stacks)
    return bool(saved) and trains and not rule_slots(f.stack)


def _absent(f: Field, found: Json) -> tuple[str, str]:
    """Return (expected, got) of the message about a field that is not on disk."""
    table = found.get(f.table.name)
    if table is None:
        return "it in the checkpoint", f"tables {sorted(found)}"
    got = f"those of {table['optimizer']}, {sorted(table['slots'])}"
    rule = _rule(f) or "a table that is not trained"
    return f"slots of {rule}, {sorted(slot_shapes(f.stack))}", got
