"""Files of a checkpoint that know where they belong: JSON with its checksum, and orbax's pytrees.

Enters: values, pytrees, and what orbax asks of a handler. Leaves: files, or what was in them.
Called by `items.py`, which hands the handlers to orbax, and by `manifest.py`.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from tpu_embed._checks import message
from tpu_embed._types import PyTree
from tpu_embed.core.processes import together
from tpu_embed.io import files, schema, signed

__all__ = [
    "FORMAT",
    "REMEDY",
    "JsonArgs",
    "JsonHandler",
    "PyTreeArgs",
    "PyTreeHandler",
    "check_model",
    "is_float",
    "read_signed",
    "write_signed",
]

_VALUE, _LEAVES, _SUMS = "value.json", "leaves.json", "checksums.json"

FORMAT = 2
"""The version of a checkpoint's format."""

REMEDY = "restore another step; this one is damaged"
"""What helps against any damage."""


def write_signed(path: Path, checkpoint: str, value: Any) -> None:
    """Write a JSON file of a checkpoint: its kind is its file name.

    Args:
      path: of the file.
      checkpoint: the name of the checkpoint, which no other has.
      value: any JSON value.
    """
    signed.write(path, path.name, FORMAT, {"checkpoint": checkpoint, "value": value})


def read_signed(path: Path, form: schema.Form, checkpoint: str | None = None) -> tuple[str, Any]:
    """Return the name of the checkpoint that a file belongs to, and the value that it holds.

    Args:
      path: of the file.
      form: what the value must be.
      checkpoint: which one it must belong to; None: to any.

    Raises:
      FileNotFoundError: it is missing.
      ValueError: it is damaged, or belongs to another checkpoint or in another place.
    """
    whole = schema.record(checkpoint=schema.text, value=form)
    found = signed.read(path, path.name, FORMAT, whole, REMEDY)
    if checkpoint not in (None, found["checkpoint"]):
        expected, got = f"a file of checkpoint {checkpoint}", f"one of {found['checkpoint']}"
        raise ValueError(message(f"{path}", expected=expected, got=got, remedy=REMEDY))
    return found["checkpoint"], found["value"]


@dataclasses.dataclass
class JsonArgs(ocp.args.CheckpointArgs):
    """The checkpoint, and a JSON value to save."""

    checkpoint: str
    value: Any = None


class JsonHandler(ocp.CheckpointHandler):
    """Saves and restores a JSON value."""

    def save(self, directory: Any, args: JsonArgs) -> None:
        """Write the value."""

        def written() -> None:
            if jax.process_index() == 0:
                write_signed(Path(directory) / _VALUE, args.checkpoint, args.value)

        together("save", Path(directory), written)

    def restore(self, directory: Any, args: JsonArgs) -> Any:
        """Return the value."""
        path = Path(directory)

        def read() -> Any:
            return read_signed(path / _VALUE, schema.anything, args.checkpoint)[1]

        return together("restore", path, read)

    def finalize(self, directory: Any) -> None:
        """Do nothing: all is written."""

    def metadata(self, directory: Any) -> Any:
        """Return nothing: the value says it all."""
        return None

    def close(self) -> None:
        """Do nothing: nothing is open."""


@dataclasses.dataclass
class PyTreeArgs(ocp.args.CheckpointArgs):
    """The checkpoint, and a pytree to save; or the abstract one to restore, floats converted."""

    checkpoint: str
    tree: PyTree
    convert: bool = False


class PyTreeHandler(ocp.AsyncCheckpointHandler):
    """Orbax's handler of pytrees; leaves and files are checked before it reads them.

    Orbax checks what it needs to find arrays, and not their bytes; another dtype it converts.
    """

    def __init__(self) -> None:
        self._handler = ocp.StandardCheckpointHandler()
        self._background = concurrent.futures.ThreadPoolExecutor(1, "tpu_embed_save_model")

    def save(self, directory: Any, args: PyTreeArgs) -> None:
        """Write the tree before returning."""
        (written,) = asyncio.run(self.async_save(directory, args))
        written.result()

    async def async_save(self, directory: Any, args: PyTreeArgs) -> list[Any]:
        """Copy the tree to the host; return a future of its being written by all processes."""
        futures, failed = None, None
        try:
            saved = ocp.args.StandardSave(args.tree)
            futures = await self._handler.async_save(directory, args=saved)
        except Exception as error:  # the other processes wait to be told
            failed = error

        def written() -> None:
            if failed is not None:
                raise failed
            for one in futures or []:
                one.result()
            _write_leaves(Path(directory), args)

        return [self._background.submit(together, "save", Path(directory), written)]

    def restore(self, directory: Any, args: PyTreeArgs) -> PyTree:
        """Check leaves and files, and return the tree."""

        def read() -> PyTree:
            _check_sums(Path(directory), args.checkpoint)
            _check_leaves(Path(directory), args)
            return self._handler.restore(directory, args=ocp.args.StandardRestore(args.tree))

        return together("restore", Path(directory), read)

    def finalize(self, directory: Any) -> None:
        """Let orbax finish, put its files on the disk, and write their checksums."""
        self._handler.finalize(directory)
        if jax.process_index() == 0:
            root = Path(directory)
            checkpoint, _ = read_signed(root / _LEAVES, schema.anything)
            for file in _files(root):
                files.sync(file)
            write_signed(root / _SUMS, checkpoint, _sums(root))

    def metadata(self, directory: Any) -> Any:
        """Return what orbax says of the tree."""
        return self._handler.metadata(directory)

    def close(self) -> None:
        """End the threads, and orbax's."""
        self._background.shutdown()
        self._handler.close()


def _files(directory: Path) -> list[Path]:
    """Return all files in a directory but that of their checksums."""
    return sorted(p for p in directory.rglob("*") if p.is_file() and p.name != _SUMS)


def _sums(directory: Path) -> dict[str, int]:
    """Return the CRC-32 of every file in a directory, by its path there."""
    return {
        str(path.relative_to(directory)): files.checksum(path, REMEDY) for path in _files(directory)
    }


def _check_sums(directory: Path, checkpoint: str) -> None:
    """Check the files of a tree.

    Raises:
      FileNotFoundError: the file of their checksums is missing.
      ValueError: one is damaged, missing, or of another checkpoint.
    """
    form = schema.mapping(schema.integer())
    _, sums = read_signed(directory / _SUMS, form, checkpoint)
    found = _sums(directory)
    wrong = sorted(name for name in sums if found.get(name) != sums[name])
    if wrong:  # files beside them: orbax adds a mark of its own later
        what, got = f"checkpoint {directory}", f"other bytes, or none, in {wrong}"
        expected = "files as they were written"
        raise ValueError(message(what, expected=expected, got=got, remedy=REMEDY))


def check_model(tree: PyTree) -> None:
    """Check that a pytree is one that orbax can keep, each leaf by a name of its own.

    Raises:
      ValueError: it is a leaf itself; a leaf is no array, empty, gone, or of a dtype that JAX would
        make another; two have one name.
    """
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    if pairs and not pairs[0][0]:
        expected, got = "a dict, list or other container", f"one {type(tree).__name__}"
        raise ValueError(message("model", expected=expected, got=got, remedy='give {"all": …}'))
    for separator in "./":  # orbax joins names with the one, we with the other
        names = [_name(path, separator) for path, _ in pairs]
        for name, count in collections.Counter(names).items():
            if count > 1:
                what, expected = f"model: leaf {name!r}", "one leaf of this name"
                remedy = "name leaves without '.' and '/'"
                raise ValueError(message(what, expected=expected, got=f"{count}", remedy=remedy))
    for path, leaf in pairs:
        problem = _problem(leaf)
        if problem:
            expected = "an array with numbers in it, or a Python number"
            raise ValueError(
                message(f"model: leaf {_name(path)!r}", expected=expected, got=problem)
            )


def _name(path: Any, separator: str = "/") -> str:
    return jax.tree_util.keystr(path, simple=True, separator=separator)


def _problem(leaf: Any) -> str | None:
    """Return why a leaf cannot be kept, or None."""
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return "one that was deleted or donated"
    if isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
        return f"{leaf}, which takes more than 64 bits"
    if isinstance(leaf, int | float):
        return None
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        return f"{type(leaf).__name__}"
    if not leaf.size:
        return f"one of shape {leaf.shape}"
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSUMm":
        return f"one of dtype {leaf.dtype}"
    if isinstance(leaf, jax.ShapeDtypeStruct) and not _is_jax_dtype(leaf.dtype):
        return f"{leaf.dtype}, which JAX makes only with jax_enable_x64; give a NumPy array"
    return None


def _is_jax_dtype(dtype: Any) -> bool:
    extended = jnp.issubdtype(dtype, jax.dtypes.extended)
    return extended or jax.dtypes.canonicalize_dtype(dtype) == dtype


def _leaves(tree: PyTree) -> dict[str, dict[str, Any]]:
    """Return shape and dtype of every leaf, by its path."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        _name(path): {
            "shape": list(getattr(leaf, "shape", ())),
            "dtype": str(getattr(leaf, "dtype", type(leaf).__name__)),
        }
        for path, leaf in pairs
    }


def _write_leaves(directory: Path, args: PyTreeArgs) -> None:
    if jax.process_index() == 0:
        write_signed(directory / _LEAVES, args.checkpoint, _leaves(args.tree))


def _check_leaves(directory: Path, args: PyTreeArgs) -> None:
    """Check that a tree has the leaves that are in a directory.

    Raises:
      ValueError: it has others, or another shape or dtype.
    """
    leaf = schema.record(shape=schema.sequence(schema.integer()), dtype=schema.text)
    _, found = read_signed(directory / _LEAVES, schema.mapping(leaf), args.checkpoint)
    wanted = _leaves(args.tree)
    for path in sorted(found.keys() | wanted.keys()):
        what, remedy = f"checkpoint {directory}: leaf {path!r}", "give model= as it was saved"
        forms = wanted.get(path), found.get(path)
        if None in forms:
            expected, got = ("none" if form is None else "one" for form in forms)
            raise ValueError(message(what, expected=expected, got=got, remedy=remedy))
        for kind in ("shape", "dtype"):
            expected, got = (f"{kind} {form[kind]}" for form in forms if form)
            rounds = kind == "dtype" and all(is_float(form["dtype"]) for form in forms if form)
            if expected != got and not (rounds and args.convert):
                remedy = "convert=True rounds it" if rounds else remedy
                raise ValueError(message(what, expected=expected, got=got, remedy=remedy))


def is_float(dtype: str) -> bool:
    """Tell whether a dtype, by name, is one of real floats; a type of Python's is not."""
    return schema.dtype(dtype) is None and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
