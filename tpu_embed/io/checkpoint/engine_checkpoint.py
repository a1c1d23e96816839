"""Checkpoints of an engine: its tables and slots by name, with a network and a data position.

A checkpoint is logical, so it can be restored with any mesh, placement and stacking. For a
`TPUEmbedding`, pass its `engine` and `state`. The record of touched rows is kept beside them, so
that deltas go on after a restart.

Input: an engine and its state, a pytree, a position in the data, a record. Output: a directory, or
the same read back.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from tpu_embed._checks import refuse
from tpu_embed._types import Array, PyTree
from tpu_embed.core.engine import EmbeddingEngine, check_engine
from tpu_embed.core.state import TableState
from tpu_embed.io import directory, schema
from tpu_embed.io.checkpoint import host_rows, manifest, tables, trees
from tpu_embed.io.checkpoint.checked import (
    REMEDY,
    MismatchError,
    as_json,
    read_bound,
    read_position,
    write_bound,
    write_position,
)
from tpu_embed.io.checkpoint.commit import (
    MODEL,
    POSITION,
    TABLES,
    TOUCHED,
    Begin,
    find_checkpoint,
    open_checkpoint,
    write_checkpoint,
)
from tpu_embed.io.checkpoint.manifest import Wanted
from tpu_embed.io.store import Place, place_of
from tpu_embed.processes import raise_on_all
from tpu_embed.touched import (
    SavedMarks,
    SavedRecord,
    TouchedRows,
    Version,
    check_record,
    merge_records,
)


class Restored(NamedTuple):
    """The contents of a checkpoint.

    Attributes:
      state: tables and slots in the layout of the engine.
      model: the pytree that was saved with them, or None if `restore` was given no `model`.
      position: the JSON value that was saved with them, or None.
    """

    state: TableState
    model: PyTree
    position: Any


def save(
    path: str | Path,
    engine: EmbeddingEngine,
    state: TableState,
    *,
    model: PyTree = None,
    position: Any = None,
    touched: TouchedRows | None = None,
) -> None:
    """Write a checkpoint; it appears complete, and is on disk when this returns.

    When there are several processes, all call this, and an error in one is raised in all.

    Args:
      path: a directory that does not exist yet, or a URL of `gs://` or `s3://`.
      engine: the engine that made the state.
      state: tables and slots. Only a few blocks of rows are copied at a time.
      model: a container (not a single leaf) of arrays and Python numbers.
      position: a JSON value with string keys, for example the state of the data iterator.
      touched: the record of touched rows, if deltas are to go on after a restart.

    Raises:
      ValueError: the path exists, or is a bad URL; the state is not this engine's; the model has no
        arrays; the position is not JSON; `touched` lacks an update of the state.
      TypeError: `engine` is not an `EmbeddingEngine`.

    Example:
      >>> import tempfile, jax, tpu_embed
      >>> table = tpu_embed.TableConfig(vocabulary_size=8, dim=2, name="item")
      >>> engine = EmbeddingEngine({"x": tpu_embed.FeatureConfig(table)})
      >>> state = engine.init(jax.random.key(0))
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     save(f"{directory}/first", engine, state, position={"epoch": 1})
      ...     restored = restore(f"{directory}/first", engine)
      >>> restored.position, bool((engine.tables(restored.state)["item"][0]
      ...                         == engine.tables(state)["item"][0]).all())
      ({'epoch': 1}, True)
    """
    check_engine_or_name_others(engine)
    content = engine, state, model, position, touched
    write_checkpoint(path, functools.partial(prepare_save, *content, copied=False))


def restore(
    path: str | Path,
    engine: EmbeddingEngine,
    *,
    model: PyTree = None,
    key: Array | None = None,
    convert: bool = False,
    leave_out: Sequence[str] = (),
    touched: TouchedRows | None = None,
) -> Restored:
    """Return the contents of a checkpoint, for an engine of any mesh, placement and stacking.

    An engine without optimizers reads only the tables. Maps of dynamic vocabularies are loaded into
    `engine.vocabularies`; batches placed before are refused from then on. A table whose vocabulary
    lives may have another capacity: the keys with the best scores stay. A table may be on the host
    or on the devices, wherever it was when it was saved. When there are several
    processes, all call this, and an error in one is raised in all.

    Args:
      path: what `save` wrote, or one of the numbered directories of a `CheckpointManager`.
      engine: the engine to make a state for.
      model: the pytree that was saved with the tables, or its shapes. Each leaf is restored with
        the sharding that the leaf given here has; without one, it goes to every device of the
        engine. None: no model is read.
      key: initializes what the checkpoint lacks, as `engine.init` would: new tables, the rows by
        which a table has grown, and all slots of a table whose optimizer is of another class or has
        other slots; or none, if it has no slots. None: a difference of this kind is an error.
      convert: whether a float array may have another dtype than it was saved with; its values are
        rounded then.
      leave_out: names of tables in the checkpoint that are not read.
      touched: a record of this engine, which goes on from the one that was saved. What it knows is
        replaced, and its run is a new one.

    Raises:
      ValueError: the path is a bad URL; a table, slot, leaf, shape or dtype differs from what was
        saved; a file is damaged, or belongs to another checkpoint, table, slot or place.
      FileNotFoundError: there is no checkpoint, it has no model or no record of touched rows, or
        one of its files is missing.
      TypeError: `engine` is not an `EmbeddingEngine`.
    """
    check_engine_or_name_others(engine)
    items = [TABLES, POSITION]
    if model is not None:
        items.append(MODEL)
    if touched is not None:
        check_record(engine, touched)
        items.append(TOUCHED)
    root, everywhere = find_checkpoint(path), engine.layout.axes.sharding(())

    def prepared():
        checkpoint = manifest.name_of(root / TABLES)
        if model is None:
            return checkpoint, None
        trees.check_leaves("model", model)
        leaves = trees.read_leaves(root / MODEL, checkpoint)
        abstract = jax.tree.map(
            lambda leaf: trees.abstract_leaf(leaf, everywhere), model
        )
        differences = trees.leaf_differences(leaves, abstract, convert=convert)
        if differences:
            remedy = "give model= as it was saved; convert=True rounds floats"
            raise MismatchError(f"checkpoint {root / MODEL}", differences, remedy)
        return checkpoint, abstract

    checkpoint, abstract = open_checkpoint(root, items, prepared, writer="save")
    loaded = tables.read(root / TABLES, Wanted(engine, key, convert, tuple(leave_out)))

    def others() -> Any:
        record = None if touched is None else read_record(root / TOUCHED, checkpoint)
        tree = None if model is None else trees.read(root / MODEL, checkpoint, abstract)
        return tree, read_position(root / POSITION, checkpoint), record

    tree, position, record = raise_on_all("restore", root, others)
    if loaded.maps is not None:  # everything has been read
        assert engine.vocabularies is not None
        engine.vocabularies.load_states(loaded.maps, loaded.homes)
        host_rows.go_on_from(engine, place_of(path) / TABLES, loaded.checkpoint)
    if touched is not None:
        touched.load(record)
    return Restored(loaded.state, tree, position)


def check_engine_or_name_others(engine: Any) -> None:
    """Check that a value is an engine; of a flax module, name what takes it.

    Raises:
      TypeError: it is something else.
    """
    of_modules = (
        "save_modules, restore_modules and ModuleCheckpointManager take flax modules"
    )
    remedy = of_modules if isinstance(engine, nnx.Pytree) else None
    check_engine("engine", engine, remedy=remedy)


def prepare_save(
    engine: EmbeddingEngine,
    state: TableState,
    model: PyTree,
    position: Any,
    touched: TouchedRows | None,
    *,
    path: Place,
    checkpoint: str,
    copied: bool,
) -> Mapping[str, Begin]:
    """Return what a checkpoint of an engine is written with, by item.

    Args:
      engine: the engine that made the state.
      state: tables and slots.
      model: a pytree to save with them, or None.
      position: a JSON value.
      touched: the record of touched rows, or None.
      path: where the checkpoint will be.
      checkpoint: the name of the checkpoint.
      copied: whether to copy the state to the host now, so that it may be donated afterwards.

    Raises:
      ValueError: the state is another engine's, the model has no arrays, or the position is not
        JSON.
    """
    prepared = tables.prepare(
        engine, state, path / TABLES, checkpoint=checkpoint, copied=copied
    )
    position = as_json(position)
    items: dict[str, Begin] = {
        TABLES: lambda at: lambda: tables.write(at, prepared),
        POSITION: lambda at: lambda: write_position(at, checkpoint, position),
    }
    if model is not None:
        if not jax.tree.leaves(model):
            refuse("model", expected="arrays", got=repr(model), remedy="leave it out")
        trees.check_leaves("model", model)
        items[MODEL] = lambda at: trees.begin(at, checkpoint, model)
    if touched is not None:
        check_record(engine, touched)
        record = touched.saved(state)
        items[TOUCHED] = lambda at: lambda: write_record(at, checkpoint, record)
    return items


# -- the record of touched rows --------------------------------------------------------------------
#
#   touched.0.json      of the first process: moments, and the arrays with their checksums
#   0/tables/*.npy      its arrays, by table and part
#
# Each process has recorded its own part of every batch, so each writes its own files; whoever reads
# them takes the latest step of each row.

_RECORD = "touched.{}.json"
_DTYPES = {
    "keys": "uint64",
    "touched": "int32",
    "given": "int32",
    "lost": "uint64",
    "lost_at": "int32",
}
_TABLE = schema.record(
    files=schema.mapping(directory.ARRAY),
    lost_since=schema.natural,
    shared=schema.integer(-1),
)
_RECORD_FORM = schema.record(
    processes=schema.integer(1),
    version=directory.VERSION,
    start=directory.VERSION,
    ancestors=schema.sequence(directory.VERSION),
    known=schema.sequence(schema.naturals),
    tables=schema.mapping(_TABLE),
)


def write_record(root: Place, checkpoint: str, saved: SavedRecord) -> None:
    """Write what this process has recorded.

    Args:
      root: the directory of the record.
      checkpoint: the name of the checkpoint.
      saved: what `TouchedRows.saved` returned.
    """
    process = jax.process_index()
    mine = root / f"{process}"
    (mine / "tables").mkdir(parents=True)
    tables = {}
    for name, one in saved.tables.items():
        rest = one._asdict()
        arrays = {part: rest.pop(part) for part in _DTYPES}
        tables[name] = {"files": directory.write_arrays(mine, name, arrays), **rest}
    described = {
        "processes": jax.process_count(),
        "version": saved.version._asdict(),
        "start": saved.start._asdict(),
        "ancestors": [one._asdict() for one in saved.ancestors],
        "known": [[step, keys] for step, keys in saved.known.items()],
        "tables": tables,
    }
    write_bound(root / _RECORD.format(process), checkpoint, described)


def read_record(root: Place, checkpoint: str) -> SavedRecord:
    """Return what all processes have recorded.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or belongs to another checkpoint.
    """
    first = read_bound(root / _RECORD.format(0), _RECORD_FORM, checkpoint)[1]
    return merge_records(
        [_read_marks(root, checkpoint, p) for p in range(first["processes"])]
    )


def _read_marks(root: Place, checkpoint: str, process: int) -> SavedRecord:
    found, tables = (
        read_bound(root / _RECORD.format(process), _RECORD_FORM, checkpoint)[1],
        {},
    )
    for name, table in found["tables"].items():
        described, forms = table.pop("files"), {}
        for part, dtype in _DTYPES.items():
            first = "lost" if part.startswith("lost") else "keys"
            forms[part] = dtype, (directory.count_of(described, first),)
        arrays = directory.read_arrays(
            root / f"{process}", name, described, forms, REMEDY
        )
        # Not the files.
        kept = {part: np.array(array) for part, array in arrays.items()}
        tables[name] = SavedMarks(**kept, **table)
    moments = Version(**found["version"]), Version(**found["start"])
    ancestors = tuple(Version(**one) for one in found["ancestors"])
    return SavedRecord(*moments, ancestors, dict(found["known"]), tables)
