"""Pytrees of a checkpoint, such as networks: orbax's files, and checks before they are read.

Orbax checks what it needs to find arrays, and not their bytes, and it converts numbers without
being asked to. So beside its files stand `leaves.json`, with shape and dtype of every leaf by name,
and `checksums.json`, with the CRC-32 of every file.

Input: pytrees. Output: files, or the pytrees again.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from tpu_embed._checks import message, refuse
from tpu_embed._types import PyTree
from tpu_embed.io import files, schema
from tpu_embed.io.checkpoint.checked import REMEDY, read_bound, write_bound
from tpu_embed.io.store import Bucket, Place

_LEAVES, _SUMS = "leaves.json", "checksums.json"


def begin(directory: Place, checkpoint: str, tree: PyTree) -> Callable[[], None]:
    """Copy a tree to the host, and return what writes it.

    Orbax keeps no arrays of size 0: they are made anew, as `leaves.json` describes them.

    Args:
      directory: an existing directory.
      checkpoint: the name of the checkpoint.
      tree: arrays and numbers that `check_leaves` lets pass.
    """
    if isinstance(directory, Bucket):
        return _begin_in_bucket(directory, checkpoint, tree)
    handler, loop, futures = ocp.PyTreeCheckpointHandler(), asyncio.new_event_loop(), []
    if jax.tree.leaves(saved := _with_numbers(jax.tree.map(_as_array, tree))):
        copied = handler.async_save(
            epath.Path(directory), args=ocp.args.PyTreeSave(saved)
        )
        # In a thread, because a loop may be running here, as in a notebook.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            futures = pool.submit(loop.run_until_complete, copied).result()

    def written():
        try:
            for future in futures or ():
                future.result()
        finally:
            loop.close()  # not before: what is being written reports to it
            handler.close()
        _write_leaves(directory, checkpoint, tree)

    return written


def finish(directory: Place, checkpoint: str) -> None:
    """Let orbax finish, put its files on the disk, and write their checksums, in one process.

    Args:
      directory: that of a tree which all processes have written.
      checkpoint: the name of the checkpoint.
    """
    if isinstance(directory, Bucket):
        return
    with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        handler.finalize(epath.Path(directory))
    sums = _sums(directory)
    for name in sums:
        files.sync(directory / name)
    write_bound(directory / _SUMS, checkpoint, sums)


def read(directory: Place, checkpoint: str, tree: PyTree) -> PyTree:
    """Return a tree, after a check of its files.

    Args:
      directory: that of the tree.
      checkpoint: the name of the checkpoint that the files must belong to.
      tree: its leaves, as `abstract_leaf` returns them; `leaf_differences` has found them there.

    Raises:
      FileNotFoundError: the file of the checksums is missing.
      ValueError: a file is damaged, missing, or of another checkpoint.
    """
    if isinstance(directory, Bucket):
        return _read_from_bucket(directory, checkpoint, tree)
    _check_sums(directory, checkpoint)
    numbers = _with_numbers(tree)
    if not jax.tree.leaves(numbers):
        return jax.tree.map(_made_empty, tree)
    forms = ocp.checkpoint_utils.construct_restore_args(numbers)
    wanted = ocp.args.PyTreeRestore(numbers, restore_args=forms, partial_restore=True)
    with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        found = handler.restore(epath.Path(directory), args=wanted)
    return jax.tree.map(
        lambda leaf, new: _made_empty(leaf) if new is None else new, tree, found
    )


# -- in a bucket, where orbax does not tell one of two writers: an object per shard of a leaf ------


def _begin_in_bucket(
    directory: Bucket, checkpoint: str, tree: PyTree
) -> Callable[[], None]:
    """Copy this process's shards of a tree to the host, and return what writes them."""
    pieces: dict[str, bytes] = {}
    for i, leaf in enumerate(map(_numbers, jax.tree.leaves(tree))):
        for index, data in _shards(leaf):
            # Rows 0 to 7 and columns 4 to 7 of the third leaf are the object 2@0-8,4-8.
            ends = [
                one.indices(n) for one, n in zip(index, np.shape(leaf), strict=True)
            ]
            place = ",".join(f"{first}-{last}" for first, last, _ in ends)
            pieces[f"{i}@{place}"] = np.asarray(data).tobytes()

    def written():
        for name, content in pieces.items():
            with files.create(directory / name) as file:
                file.write(content)
        _write_leaves(directory, checkpoint, tree)

    return written


def _shards(leaf: Any) -> list[tuple[tuple[slice, ...], Any]]:
    """Return the parts of a leaf that this process saves, and where they are in it."""
    # What each process has an array of its own of is saved by the first one.
    if jax.process_index() and getattr(leaf, "is_fully_addressable", True):
        return []
    if isinstance(leaf, jax.Array):
        return [
            (one.index, one.data)
            for one in leaf.addressable_shards
            if one.replica_id == 0
        ]
    return [(tuple(map(slice, np.shape(leaf))), leaf)]


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", np.bool_), jax.dtypes.prng_key)


def _numbers(leaf: Any) -> Any:
    """Return what random keys consist of; other leaves as they are."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _read_from_bucket(directory: Bucket, checkpoint: str, tree: PyTree) -> PyTree:
    """Return a tree whose shards are objects, which a commit names with their sums."""
    forms = read_leaves(directory, checkpoint)
    numbers = {name: i for i, name in enumerate(forms)}
    pieces: dict[int, list[Bucket]] = {}
    for key in directory.parts or ():
        number, at, _ = key.removeprefix(f"{directory.key}/").partition("@")
        if at and number.isdecimal():
            pieces.setdefault(int(number), []).append(
                dataclasses.replace(directory, key=key)
            )

    def read_leaf(path, leaf):
        name, kinds = name_of(path), []
        shape, dtype = forms[name]["shape"], forms[name]["dtype"]
        if python := isinstance(leaf, int | float):
            dtype = np.asarray(leaf).dtype
        elif _is_key(leaf):
            data = jax.eval_shape(
                lambda key: kinds.append(jax.random.key_impl(key)) or _numbers(key),
                leaf,
            )
            shape, dtype = data.shape, data.dtype
        whole: Any = np.zeros(shape, dtype)
        for piece in pieces.get(numbers[name], []):
            ends = [
                one.split("-") for one in piece.name.partition("@")[2].split(",") if one
            ]
            part = whole[(*(slice(int(first), int(last)) for first, last in ends), ...)]
            part[...] = np.frombuffer(piece.read_bytes(), dtype).reshape(part.shape)
        if python:
            return type(leaf)(whole)
        whole = (
            jax.random.wrap_key_data(whole, impl=kinds[0])
            if kinds
            else whole.astype(leaf.dtype)
        )
        return whole if isinstance(leaf, np.ndarray) else _placed(whole, leaf)

    return jax.tree.map_with_path(read_leaf, tree)


def _placed(array: Any, like: Any) -> jax.Array:
    """Return an array with the sharding of a leaf."""
    return jax.make_array_from_callback(array.shape, like.sharding, array.__getitem__)


def _sums(directory: Path) -> dict[str, int]:
    """Return the CRC-32 of every file in a directory but that of them, by its path there."""
    return {
        str(path.relative_to(directory)): files.checksum(path, REMEDY)
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != _SUMS
    }


def _check_sums(directory: Path, checkpoint: str) -> None:
    """Check the files of a tree.

    Raises:
      FileNotFoundError: the file of their checksums is missing.
      ValueError: one is damaged, missing, or of another checkpoint.
    """
    _, sums = read_bound(directory / _SUMS, schema.mapping(schema.natural), checkpoint)
    found = _sums(directory)
    wrong = sorted(name for name in sums if found.get(name) != sums[name])
    if wrong:  # files beside them: orbax adds a mark of its own later
        refuse(
            f"checkpoint {directory}",
            expected="files as they were written",
            got=f"other bytes, or none, in {wrong}",
            remedy=REMEDY,
        )


def check_leaves(what: str, tree: PyTree) -> None:
    """Check that a pytree is one that can be kept, each leaf by a name of its own.

    Args:
      what: what it is, for messages.
      tree: the pytree.

    Raises:
      ValueError: it is a leaf itself; a leaf is no array, gone, or of a dtype that JAX would make
        another; two have one name.
    """
    pairs = jax.tree.leaves_with_path(tree)
    if pairs and not pairs[0][0]:
        refuse(
            what,
            expected="a dict, list or other container",
            got=f"one {type(tree).__name__}",
            remedy='give {"all": …}',
        )
    for separator in "./":  # orbax joins names with the one, we with the other
        names = collections.Counter(name_of(path, separator) for path, _ in pairs)
        for name, count in names.items():
            if count > 1:
                refuse(
                    f"{what}: leaf {name!r}",
                    expected="one leaf of this name",
                    got=f"{count}",
                    remedy="name leaves without '.' and '/'",
                )
    for path, leaf in pairs:
        if problem := _problem(leaf):
            refuse(
                f"{what}: leaf {name_of(path)!r}",
                expected="an array of numbers, or a number",
                got=problem,
            )


def name_of(path: Any, separator: str = "/") -> str:
    """Return the name of a leaf: the keys that lead to it, joined."""
    return jax.tree_util.keystr(path, simple=True, separator=separator)


def _problem(leaf: Any) -> str | None:
    """Return why a leaf cannot be kept, or None."""
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return "one that was deleted or donated"
    if isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
        return f"{leaf}, which takes more than 64 bits"
    arrays = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
    if not isinstance(leaf, arrays | int | float):
        return f"{type(leaf).__name__}"
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSUMm":
        return f"one of dtype {leaf.dtype}"
    if isinstance(leaf, jax.ShapeDtypeStruct):
        extended = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        if not (extended or jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype):
            return f"{leaf.dtype}, which JAX makes only with jax_enable_x64; give a NumPy array"
    return None


def _with_numbers(tree: PyTree) -> PyTree:
    """Return a pytree with None for every array of size 0."""
    return jax.tree.map(lambda leaf: leaf if np.size(leaf) else None, tree)


def _made_empty(leaf: Any) -> Any:
    """Return an array of size 0, of the form of this one."""
    empty = np.empty(leaf.shape, leaf.dtype)
    return empty if isinstance(leaf, np.ndarray) else _placed(empty, leaf)


def _leaves(tree: PyTree) -> dict[str, schema.Json]:
    """Return shape and dtype of every leaf, by its path."""
    return {
        name_of(path): {
            "shape": list(getattr(leaf, "shape", ())),
            "dtype": str(getattr(leaf, "dtype", type(leaf).__name__)),
        }
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _write_leaves(directory: Place, checkpoint: str, tree: PyTree) -> None:
    if jax.process_index() == 0:
        write_bound(directory / _LEAVES, checkpoint, _leaves(tree))


def read_leaves(directory: Place, checkpoint: str) -> schema.Json:
    """Return shape and dtype of the leaves that are in a directory, by name.

    Raises:
      FileNotFoundError: the file that has them is missing.
      ValueError: it is damaged, or of another checkpoint.
    """
    leaf = schema.record(shape=schema.naturals, dtype=schema.text)
    return read_bound(directory / _LEAVES, schema.mapping(leaf), checkpoint)[1]


def is_left_out(name: str, leave_out: Sequence[str]) -> bool:
    """Tell whether a name, or what is above it, is among those that are left out.

    Example:
      >>> [is_left_out(name, ["model/head"]) for name in ("model/head/kernel", "model/header")]
      [True, False]
    """
    return any(name == path or name.startswith(f"{path}/") for path in leave_out)


def leaf_differences(
    found: Mapping[str, Any],
    tree: PyTree,
    *,
    convert: bool,
    leave_out: Sequence[str] = (),
) -> list[str]:
    """Return a message for each leaf of a tree that is not as it was saved.

    Args:
      found: what `read_leaves` returned.
      tree: the tree.
      convert: whether floats of another dtype are converted.
      leave_out: names of leaves, or of what is above them, that are not restored.
    """
    wanted, differences = _leaves(tree), []
    for path in sorted(found.keys() | wanted.keys()):
        if path not in wanted or path not in found:
            if not is_left_out(path, leave_out):
                expected, got = (
                    "one" if path in forms else "none" for forms in (wanted, found)
                )
                differences.append(
                    message(f"leaf {path!r}", expected=expected, got=got)
                )
            continue
        for kind, wish in wanted[path].items():
            given = found[path][kind]
            rounds = kind == "dtype" and is_float(wish) and is_float(given)
            if wish != given and not (rounds and convert):
                expected, got = f"{kind} {wish}", f"{kind} {given}"
                differences.append(
                    message(f"leaf {path!r}", expected=expected, got=got)
                )
    return differences


def is_float(dtype: str) -> bool:
    """Tell whether a dtype, by name, is one of real floats; a type of Python's is not."""
    return schema.dtype(dtype) is None and jnp.issubdtype(
        jnp.dtype(dtype), jnp.floating
    )


def _as_array(leaf: Any) -> Any:
    """Return a NumPy scalar, which orbax does not know, as an array; others as they are."""
    return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf


def abstract_leaf(leaf: Any, everywhere: jax.sharding.Sharding) -> Any:
    """Return what orbax is to make of an array, with a sharding; of others, themselves.

    Args:
      leaf: an array, or its shape; one that was donated will do.
      everywhere: the sharding of an array that nothing has placed.
    """
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return _as_array(leaf)
    given = leaf.sharding if not isinstance(leaf, jax.Array) or leaf.committed else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=given or everywhere)
