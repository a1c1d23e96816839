"""The files of an exported model: its program, its tables, and a description of both.

    metadata.json         inputs, outputs and JAX version of the program; size, shape, dtype and
                          CRC-32 of every file, and its own CRC-32
    model.stablehlo       jax.export's program
    tables/*.values.npy   [V, D] in the table's dtype, bfloat16 as its bits in uint16; or int8, and
                          *.scale.npy and *.offset.npy, float32 [V], of a `QuantizedTable`
    tables/*.first.stablehlo  of a table on the host: a program that draws the first rows of ids
    tables/*.keys.npy     of a table with keys: uint64 [n], ascending. Key i has row i + 1 of its
                          [R, D] values; row 0 is the one that keys without a row share

Input: a program, tables and their description; or a directory. Output: files, or the same three
read back and checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tpu_embed._checks import refuse
from tpu_embed._types import PyTree
from tpu_embed.io import directory, files, schema
from tpu_embed.io.schema import Json
from tpu_embed.io.store import Place
from tpu_embed.kernels import storage

KIND, PROGRAM, KEYS = "model", "model.stablehlo", "keys"

_REMEDY = "export the model again, or copy the directory whole"

_SHAPE = schema.sequence(schema.optional(schema.natural))  # null: any size
_LEAF = schema.record(
    path=schema.text, shape=_SHAPE, size=schema.text, dtype=schema.text
)
_FEATURE = schema.record(
    table=schema.text,
    shape=_SHAPE,
    size=schema.text,  # of the batch: a number, or the name of one that is open
    dtype=schema.choice("int32", "int64"),
    weights=schema.optional(schema.choice("float32", "float64")),
    max_sequence_length=schema.natural,
    jagged=schema.flag,
    keep=schema.choice("first", "last"),
    on_bad_id=schema.choice("error", "drop", "clip"),
)
_FORM = schema.record(
    jax=schema.text,
    platforms=schema.texts,
    batch=schema.optional(schema.integer(1)),
    version=schema.optional(directory.VERSION),
    program=directory.FILE,
    first_rows=schema.mapping(directory.FILE),
    tables=schema.mapping(directory.TABLE),
    features=schema.mapping(_FEATURE),
    inputs=schema.sequence(_LEAF),
    outputs=schema.sequence(_LEAF),
)


def shape(leaf: Any) -> list[int | None]:
    """Return a shape for the metadata, with None for a dimension of any size."""
    return [n if isinstance(n, int) else None for n in leaf.shape]


def describe(leaf: Any) -> Json:
    """Return shape and dtype of a leaf for the metadata.

    Its size is the first dimension: a number, or its name if any size will do.
    """
    first = "".join(map(str, leaf.shape[:1]))
    return {"shape": shape(leaf), "size": first, "dtype": str(leaf.dtype)}


def describe_leaves(tree: PyTree) -> list[Json]:
    """Return path, shape and dtype of each leaf of the inputs or outputs, for the metadata."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [
        {"path": jax.tree_util.keystr(key), **describe(leaf)} for key, leaf in leaves
    ]


def write(
    root: Place,
    program: bytes,
    tables: Mapping[str, directory.Table],
    first_rows: Mapping[str, bytes],
    described: Json,
) -> None:
    """Write all files of a model.

    Args:
      root: an empty directory.
      program: the serialized program.
      tables: the tables by name.
      first_rows: the serialized programs that draw rows nobody has trained, by table.
      described: further entries of `metadata.json`.
    """
    drawn = first_rows.items()
    metadata = {
        "tables": directory.write_tables(root, tables),
        "jax": jax.__version__,
        "program": _write_file(root, PROGRAM, program),
        "first_rows": {
            name: _write_file(root, _first_file(name), one) for name, one in drawn
        },
        **described,
    }
    directory.write_metadata(root, KIND, metadata)


def _write_file(root: Place, name: str, content: bytes) -> Json:
    """Write a file, and return its description."""
    with files.create(root / name) as file:
        file.write(content)
    return directory.describe_file(root, name)


def read_metadata(root: Place) -> Json:
    """Return the `metadata.json` of a model.

    Raises:
      FileNotFoundError: it is missing.
      ValueError: it is damaged, of another format, or not that of a model.
    """
    return directory.read_metadata(root, KIND, _FORM, _REMEDY)


def read(
    root: Place, *, check: bool
) -> tuple[Json, bytes, dict[str, bytes], dict[str, dict[str, np.ndarray]]]:
    """Return what the files of a model hold.

    Args:
      root: the directory.
      check: whether to read every byte of the tables for the checksums; otherwise only sizes,
        shapes and dtypes are compared.

    Returns:
      The metadata; the serialized program; those that draw rows nobody has trained, by table; and
      the arrays of all tables by name and part, memory-mapped.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or in the place of another; a table lacks its program.
    """
    metadata = read_metadata(root)
    described, programs = metadata["tables"].items(), metadata["first_rows"]

    def read_file(name, one):
        return files.read(directory.check_file(root, name, one, _REMEDY), _REMEDY)

    drawn = sorted(name for name, one in described if one["unseen"] == "initial")
    if drawn != sorted(programs):
        refuse(
            f"{root}: first_rows",
            expected=f"those of {drawn}",
            got=f"{sorted(programs)}",
            remedy=_REMEDY,
        )
    program, tables = read_file(PROGRAM, metadata["program"]), {}
    for name, one in described:
        arrays = directory.read_arrays(
            root, name, one["files"], _forms(one), _REMEDY, whole=check
        )
        if check and KEYS in arrays and not directory.ascend(arrays[KEYS]):
            refuse(
                f"{root}: table {name!r}",
                expected="ascending keys",
                got="others",
                remedy=_REMEDY,
            )
        tables[name] = arrays
    first = {name: read_file(_first_file(name), one) for name, one in programs.items()}
    return metadata, program, first, tables


def _first_file(name: str) -> str:
    return f"tables/{files.file_name(name)}.first.stablehlo"


def _forms(table: Json) -> directory.ArrayForms:
    """Return the dtype and shape that each part of a table must have."""
    size, dim, keys = table["vocabulary_size"], table["dim"], {}
    if table["unseen"] is not None:
        n, size = (
            directory.count_of(table["files"], part) for part in (KEYS, "values")
        )
        # Each has a row, and row 0 is no key's.
        keys = {KEYS: ("uint64", (min(n, size - 1),))}
    if "scale" in table["files"]:
        one = ("float32", (size,))
        return keys | {"values": ("int8", (size, dim)), "scale": one, "offset": one}
    return keys | {"values": (storage.stored_dtype(table["dtype"]).name, (size, dim))}
