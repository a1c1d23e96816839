"""The record of touched rows in a checkpoint, so that deltas go on after a restart.

    touched.0.json      of the first process: moments, and the arrays with their checksums
    0/tables/*.npy      its arrays, by table and part

Each process has recorded its own part of every batch, so each writes its own files; whoever reads
them takes the latest step of each row.

Input: a `TouchedRows` and a state. Output: files, or what they hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tpu_embed.io import directory, schema
from tpu_embed.io.checkpoint.checked import REMEDY, read_bound, write_bound
from tpu_embed.io.store import Place
from tpu_embed.touched import SavedMarks, SavedRecord, Version, merge_records

_FILE = "touched.{}.json"
_DTYPES = {
    "keys": "uint64",
    "touched": "int32",
    "given": "int32",
    "lost": "uint64",
    "lost_at": "int32",
}
_TABLE = schema.record(
    files=schema.mapping(directory.ARRAY),
    lost_since=schema.integer(),
    shared=schema.integer(-1),
)
_FORM = schema.record(
    processes=schema.integer(1),
    version=directory.VERSION,
    start=directory.VERSION,
    ancestors=schema.sequence(directory.VERSION),
    known=schema.sequence(schema.sequence(schema.integer())),
    tables=schema.mapping(_TABLE),
)


def write(root: Place, checkpoint: str, saved: SavedRecord) -> None:
    """Write what this process has recorded.

    Args:
      root: the directory of the record.
      checkpoint: the name of the checkpoint.
      saved: what `TouchedRows.saved` returned.
    """
    process = jax.process_index()
    mine = root / f"{process}"
    (mine / "tables").mkdir(parents=True)
    tables = {
        name: {
            "files": directory.write_arrays(mine, name, {p: getattr(one, p) for p in _DTYPES}),
            "lost_since": one.lost_since,
            "shared": one.shared,
        }
        for name, one in saved.tables.items()
    }
    described = {
        "processes": jax.process_count(),
        "version": saved.version._asdict(),
        "start": saved.start._asdict(),
        "ancestors": [one._asdict() for one in saved.ancestors],
        "known": [[step, keys] for step, keys in saved.known.items()],
        "tables": tables,
    }
    write_bound(root / _FILE.format(process), checkpoint, described)


def read(root: Place, checkpoint: str) -> SavedRecord:
    """Return what all processes have recorded.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or belongs to another checkpoint.
    """
    first = read_bound(root / _FILE.format(0), _FORM, checkpoint)[1]
    return merge_records([_read(root, checkpoint, p) for p in range(first["processes"])])


def _read(root: Place, checkpoint: str, process: int) -> SavedRecord:
    found = read_bound(root / _FILE.format(process), _FORM, checkpoint)[1]
    tables = {name: _marks(root / f"{process}", name, one) for name, one in found["tables"].items()}
    moments = Version(**found["version"]), Version(**found["start"])
    ancestors = tuple(Version(**one) for one in found["ancestors"])
    return SavedRecord(*moments, ancestors, dict(found["known"]), tables)


def _marks(root: Place, name: str, table: Mapping[str, Any]) -> SavedMarks:
    described = table["files"]
    forms: dict[str, tuple[str, tuple[int, ...]]] = {}
    for part, dtype in _DTYPES.items():
        first = "lost" if part.startswith("lost") else "keys"
        forms[part] = dtype, tuple(described.get(first, {}).get("shape", ()))[:1]
    arrays = directory.read_arrays(root, name, described, forms, REMEDY)
    kept = {part: np.array(array) for part, array in arrays.items()}  # not the files
    return SavedMarks(**kept, lost_since=table["lost_since"], shared=table["shared"])
