"""Pytrees of a checkpoint, such as networks: orbax's files, and checks before they are read.

Orbax checks what it needs to find arrays, and not their bytes, and it converts numbers without
being asked to. So beside its files stand `leaves.json`, with shape and dtype of every leaf by name,
and `checksums.json`, with the CRC-32 of every file.

Input: pytrees, and what orbax asks of a handler. Output: files, or the pytrees again.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from tpu_embed._checks import message
from tpu_embed._types import PyTree
from tpu_embed.io import files, schema
from tpu_embed.io.checkpoint.checked import REMEDY, MismatchError, read_bound, write_bound
from tpu_embed.processes import raise_on_all

_LEAVES, _SUMS = "leaves.json", "checksums.json"


@dataclasses.dataclass
class PyTreeArgs(ocp.args.CheckpointArgs):
    """The checkpoint, and a pytree to save; or the abstract one to restore.

    Attributes:
      checkpoint: its name.
      tree: what to save, or shapes of what to restore.
      convert: whether floats of another dtype are converted.
      leave_out: names of leaves, or of what is above them, that are not restored.
    """

    checkpoint: str
    tree: PyTree
    convert: bool = False
    leave_out: tuple[str, ...] = ()


class PyTreeHandler(ocp.AsyncCheckpointHandler):
    """Orbax's handler of pytrees; leaves and files are checked before it reads them.

    Orbax keeps no arrays of size 0: they are made anew, as `leaves.json` describes them.
    """

    def __init__(self) -> None:
        self._handler = ocp.PyTreeCheckpointHandler()
        self._background = concurrent.futures.ThreadPoolExecutor(1, "tpu_embed_save_model")

    def save(self, directory: Any, args: PyTreeArgs) -> None:
        """Write the tree before returning."""
        (written,) = asyncio.run(self.async_save(directory, args))
        written.result()

    async def async_save(self, directory: Any, args: PyTreeArgs) -> list[Any]:
        """Copy the tree to the host; return a future of its being written by all processes."""
        futures, failed = None, None
        try:
            tree = _with_numbers(args.tree)
            if jax.tree.leaves(tree):
                saved = ocp.args.PyTreeSave(tree)
                futures = await self._handler.async_save(directory, args=saved)
        except Exception as error:  # the other processes wait to be told
            failed = error

        def written() -> None:
            if failed is not None:
                raise failed
            for one in futures or []:
                one.result()
            _write_leaves(Path(directory), args)

        return [self._background.submit(raise_on_all, "save", Path(directory), written)]

    def restore(self, directory: Any, args: PyTreeArgs) -> PyTree:
        """Check leaves and files, and return the tree."""

        def read() -> PyTree:
            _check_sums(Path(directory), args.checkpoint)
            _check_same_leaves(Path(directory), args)
            tree = _with_numbers(args.tree)
            if not jax.tree.leaves(tree):
                return jax.tree.map(_made_empty, args.tree)
            forms = ocp.checkpoint_utils.construct_restore_args(tree)
            wanted = ocp.args.PyTreeRestore(tree, restore_args=forms, partial_restore=True)
            found = self._handler.restore(directory, args=wanted)
            return jax.tree.map(
                lambda leaf, new: _made_empty(leaf) if new is None else new, args.tree, found
            )

        return raise_on_all("restore", Path(directory), read)

    def finalize(self, directory: Any) -> None:
        """Let orbax finish, put its files on the disk, and write their checksums."""
        self._handler.finalize(directory)
        if jax.process_index() == 0:
            root = Path(directory)
            checkpoint, _ = read_bound(root / _LEAVES, schema.anything)
            for file in _files(root):
                files.sync(file)
            write_bound(root / _SUMS, checkpoint, _sums(root))

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
    _, sums = read_bound(directory / _SUMS, form, checkpoint)
    found = _sums(directory)
    wrong = sorted(name for name in sums if found.get(name) != sums[name])
    if wrong:  # files beside them: orbax adds a mark of its own later
        what, got = f"checkpoint {directory}", f"other bytes, or none, in {wrong}"
        expected = "files as they were written"
        raise ValueError(message(what, expected=expected, got=got, remedy=REMEDY))


def check_leaves(what: str, tree: PyTree) -> None:
    """Check that a pytree is one that can be kept, each leaf by a name of its own.

    Args:
      what: what it is, for messages.
      tree: the pytree.

    Raises:
      ValueError: it is a leaf itself; a leaf is no array, gone, or of a dtype that JAX would make
        another; two have one name.
    """
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    if pairs and not pairs[0][0]:
        expected, got = "a dict, list or other container", f"one {type(tree).__name__}"
        raise ValueError(message(what, expected=expected, got=got, remedy='give {"all": …}'))
    for separator in "./":  # orbax joins names with the one, we with the other
        names = [_name(path, separator) for path, _ in pairs]
        for name, count in collections.Counter(names).items():
            if count > 1:
                expected, remedy = "one leaf of this name", "name leaves without '.' and '/'"
                leaf = f"{what}: leaf {name!r}"
                raise ValueError(message(leaf, expected=expected, got=f"{count}", remedy=remedy))
    for path, leaf in pairs:
        problem = _problem(leaf)
        if problem:
            name, expected = f"{what}: leaf {_name(path)!r}", "an array of numbers, or a number"
            raise ValueError(message(name, expected=expected, got=problem))


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
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSUMm":
        return f"one of dtype {leaf.dtype}"
    if isinstance(leaf, jax.ShapeDtypeStruct) and not _is_jax_dtype(leaf.dtype):
        return f"{leaf.dtype}, which JAX makes only with jax_enable_x64; give a NumPy array"
    return None


def _is_jax_dtype(dtype: Any) -> bool:
    extended = jnp.issubdtype(dtype, jax.dtypes.extended)
    return extended or jax.dtypes.canonicalize_dtype(dtype) == dtype


def _with_numbers(tree: PyTree) -> PyTree:
    """Return a pytree with None for every array of size 0."""
    return jax.tree.map(lambda leaf: leaf if np.size(leaf) else None, tree)


def _made_empty(leaf: Any) -> Any:
    """Return an array of size 0, of the form of this one."""
    if isinstance(leaf, np.ndarray):
        return np.empty_like(leaf)
    if leaf.sharding is None:
        return jnp.empty(leaf.shape, leaf.dtype)
    empty = np.empty(leaf.shape, leaf.dtype)
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, empty.__getitem__)


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
        write_bound(directory / _LEAVES, args.checkpoint, _leaves(args.tree))


def read_leaves(directory: Path, checkpoint: str) -> dict[str, Any]:
    """Return shape and dtype of the leaves that are in a directory, by name.

    Raises:
      FileNotFoundError: the file that has them is missing.
      ValueError: it is damaged, or of another checkpoint.
    """
    leaf = schema.record(shape=schema.sequence(schema.integer()), dtype=schema.text)
    return read_bound(directory / _LEAVES, schema.mapping(leaf), checkpoint)[1]


def is_left_out(name: str, leave_out: Sequence[str]) -> bool:
    """Tell whether a name, or what is above it, is among those that are left out.

    Example:
      >>> [is_left_out(name, ["model/head"]) for name in ("model/head/kernel", "model/header")]
      [True, False]
    """
    return any(name == path or name.startswith(f"{path}/") for path in leave_out)


def _check_same_leaves(directory: Path, args: PyTreeArgs) -> None:
    """Check that a tree has the leaves that are in a directory.

    Raises:
      MismatchError: it has others, or another shape or dtype.
    """
    differences = leaf_differences(read_leaves(directory, args.checkpoint), args)
    if differences:
        remedy = "give model= as it was saved; convert=True rounds floats"
        raise MismatchError(f"checkpoint {directory}", differences, remedy)


def leaf_differences(found: Mapping[str, Any], args: PyTreeArgs) -> list[str]:
    """Return a message for each leaf of a tree that is not as it was saved.

    Args:
      found: what `read_leaves` returned.
      args: the tree, and what may differ.
    """
    wanted = _leaves(args.tree)
    differences = []
    for path in sorted(found.keys() | wanted.keys()):
        forms = wanted.get(path), found.get(path)
        if None in forms and is_left_out(path, args.leave_out):
            continue
        if None in forms:
            expected, got = ("none" if form is None else "one" for form in forms)
            differences.append(message(f"leaf {path!r}", expected=expected, got=got))
            continue
        for kind in ("shape", "dtype"):
            expected, got = (f"{kind} {form[kind]}" for form in forms if form)
            rounds = kind == "dtype" and all(is_float(form["dtype"]) for form in forms if form)
            if expected != got and not (rounds and args.convert):
                differences.append(message(f"leaf {path!r}", expected=expected, got=got))
    return differences


def is_float(dtype: str) -> bool:
    """Tell whether a dtype, by name, is one of real floats; a type of Python's is not."""
    return schema.dtype(dtype) is None and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)


def as_array(leaf: Any) -> Any:
    """Return a NumPy scalar, which orbax does not know, as an array; others as they are."""
    return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf


def abstract_leaf(leaf: Any, everywhere: jax.sharding.Sharding) -> Any:
    """Return what orbax is to make of an array, with a sharding; of others, themselves.

    Args:
      leaf: an array, or its shape; one that was donated will do.
      everywhere: the sharding of an array that nothing has placed.
    """
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return as_array(leaf)
    given = leaf.sharding if not isinstance(leaf, jax.Array) or leaf.committed else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=given or everywhere)
