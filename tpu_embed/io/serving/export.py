"""Export a trained model as a directory for serving: a StableHLO program with its tables.

The tables are arguments of the program, not constants in it, so that a server can memory-map them
and replace rows. `load_model` loads the directory; JAX and NumPy alone can do so, too.

Input: a model, its tables and example features. Output: a directory of these files:

    model.stablehlo   jax.export's program: (tables, features, weights, *inputs) → outputs
    metadata.json     inputs, outputs and JAX version of the program; size and CRC-32 of each file
    tables/*.npy      memory-mappable arrays, arguments of the program
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from tpu_embed import _checks
from tpu_embed._checks import check_choice, message
from tpu_embed._types import Array, PyTree
from tpu_embed.core.ids import Structure, dense_shape, structure
from tpu_embed.core.lookup import Jagged
from tpu_embed.io import directory
from tpu_embed.io.serving import model_files
from tpu_embed.io.serving.lookup import Server, server_of
from tpu_embed.io.serving.stored import Stored, stored_tables
from tpu_embed.kernels import dispatch
from tpu_embed.touched import Version

_INT32_MAX = int(np.iinfo(np.int32).max)


def export_model(
    path: str | os.PathLike[str],
    model: Callable[..., PyTree],
    tables: Any,
    feature_config: PyTree,
    features: PyTree,
    *,
    weights: PyTree | None = None,
    inputs: Sequence[PyTree] = (),
    batch: int | None = None,
    platforms: str | Sequence[str] = ("cpu", "cuda", "tpu"),
    version: Version | None = None,
) -> None:
    """Export a program that computes `model(activations, *inputs)` from ids.

    The directory is either complete or absent, and is on disk when this returns. The lookups of the
    program are plain XLA operations; on CPU they give the same bits as in training.

    Args:
      path: the directory to write; it must not exist yet.
      model: called with the activations in the structure of the features, and the inputs. Arrays
        that it closes over, such as its parameters, become constants of the program.
      tables: as for `serving_lookup`.
      feature_config: as for `serving_lookup`, but all features have one batch size. An
        `output_shape` fixes it.
      features: examples of dense ids, or `jax.ShapeDtypeStruct`s; only their shapes are read. A
        jagged feature gives a `Jagged` of one replica, for which examples are padded with -1.
      weights: examples of weights in the same structure, None for a feature without weights.
      inputs: examples of the model's other arguments: pytrees of arrays whose first dimension is
        the batch size of some feature, or scalars.
      batch: the only batch size that the program accepts; None: any size, if the model allows it.
        Features whose examples have one size share it; those of another size have another.
      platforms: one or several of "cpu", "cuda", "rocm", "tpu".
      version: `touched.version(state)` of the tables, so that deltas may follow (`export_delta`).

    Raises:
      ImportError: flatbuffers is missing.
      FileExistsError: something exists at `path`.
      ValueError: ids are not dense; a first dimension is not the batch size;
        the model needs several devices; the results are not in dicts, lists and tuples; a platform
        is unknown; whatever `serving_lookup` refuses about tables.
    """
    chosen = (platforms,) if isinstance(platforms, str) else tuple(platforms)
    for platform in chosen or (None,):
        check_choice("platforms: each", platform, ("cpu", "cuda", "rocm", "tpu"))
    root = Path(path)
    directory.check_free(root)
    declared = structure.flatten(feature_config)
    # A program takes row numbers; it has no map.
    declared.refuse_on_host("export_model", "declare the table that is served without storage")
    declared.refuse_keys("serve it with serving_lookup, which takes vocabularies=")
    whole = [one for one in stored_tables(tables, declared) if isinstance(one, Stored)]
    stored = [_as_written(table) for table in whole]
    arguments = _arguments(declared, features, weights, inputs, batch)
    exported = _exported(model, declared, stored, arguments, chosen)
    _check_flatbuffers()  # what is wrong with the arguments is said first
    outputs = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    described = {
        "platforms": list(exported.platforms),
        "batch": arguments.batch,
        "version": None if version is None else version._asdict(),
        "features": arguments.described(declared),
        "inputs": model_files.describe_leaves(arguments.inputs),
        "outputs": model_files.describe_leaves(outputs),
    }
    named = dict(zip(declared.table_names, stored, strict=True))
    with directory.written(root) as temporary:
        model_files.write(temporary, _serialized(exported), named, declared, described)


def _check_flatbuffers() -> None:
    if importlib.util.find_spec("flatbuffers") is None:
        what, remedy = "export_model", 'pip install "tpu-embed[export]"'
        raise ImportError(message(what, expected="flatbuffers", got="none", remedy=remedy))


def _as_written(table: Stored) -> Stored:
    """Return a table as the NumPy arrays of its files: bfloat16 as its bits in uint16."""
    arrays = {name: np.asarray(array) for name, array in table.arrays.items()}
    values = arrays["values"]
    bits = {"values": values.view(np.uint16)} if values.dtype == jnp.bfloat16 else {}
    return Stored(arrays | bits)


# -- what the program takes ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Arguments:
    """The shapes of the program's arguments, whose first dimension is a batch size.

    Attributes:
      batch: the only batch size, or None for any; first dimensions are symbols then, one for all
        features of one size.
      features: ids of each feature by path, int32 or int64.
      weights: weights of each weighted feature by path, floats.
      inputs: the other arguments of the model.
    """

    batch: int | None
    features: dict[str, jax.ShapeDtypeStruct]
    weights: dict[str, jax.ShapeDtypeStruct]
    inputs: tuple[PyTree, ...]

    def described(self, declared: Structure) -> dict[str, Any]:
        """Return the description of the features for `metadata.json`."""
        found = {}
        for path, feature in zip(declared.paths, declared.features, strict=True):
            ids = self.features[path]
            found[path] = {
                "table": declared.table_names[declared.table_index(feature)],
                "shape": model_files.shape(ids),
                "size": model_files.size(ids),
                "dtype": str(ids.dtype),
                "weights": str(self.weights[path].dtype) if path in self.weights else None,
                "max_sequence_length": feature.max_sequence_length,
                "jagged": feature.jagged,
                "keep": feature.keep,
                "on_bad_id": feature.on_bad_id,
            }
        return found


def _arguments(
    declared: Structure, features: PyTree, weights: PyTree | None, inputs: Any, batch: int | None
) -> _Arguments:
    given = declared.match(features, what="features")
    scales = [None] * len(given)
    if weights is not None:
        scales = declared.match(weights, what="weights")
    shapes = [_dense(path, ids) for path, ids in zip(declared.labels, given, strict=True)]
    fixed = _fixed(declared, [shape[0] for shape in shapes], batch)
    firsts = _first_dimensions([shape[0] for shape in shapes], fixed is not None)
    ids, numbers = {}, {}
    for f, feature in enumerate(declared.features):
        path, label, scale = declared.paths[f], f"feature {declared.labels[f]!r}", scales[f]
        dense_shape(label, feature, shapes[f], weighted=scale is not None)
        shape = (firsts[shapes[f][0]], *shapes[f][1:])
        big = feature.table.vocabulary_size > _INT32_MAX
        ids[path] = jax.ShapeDtypeStruct(shape, np.dtype(np.int64 if big else np.int32))
        if scale is not None:
            _check_weights(label, scale, shapes[f])
            double = feature.table.dtype == "float64"
            numbers[path] = jax.ShapeDtypeStruct(shape, np.float64 if double else np.float32)

    def as_input(key: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        if not np.shape(leaf):
            return jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(jnp.result_type(leaf)))
        first = _first(f"inputs{jax.tree_util.keystr(key)}", np.shape(leaf), firsts)
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.ShapeDtypeStruct((first, *np.shape(leaf)[1:]), dtype)

    leaves = jax.tree_util.tree_map_with_path(as_input, tuple(inputs))
    return _Arguments(fixed, ids, numbers, leaves)


def _dense(label: str, ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, (np.ndarray, np.generic, jax.Array, jax.ShapeDtypeStruct)):
        what, remedy = f"feature {label!r}", "a program has static shapes: pad bags with -1"
        expected, got = "an array of ids, or its ShapeDtypeStruct", type(ids).__name__
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        what, expected = f"feature {label!r}", "ids of an integer dtype"
        raise TypeError(message(what, expected=expected, got=ids.dtype))
    if not ids.shape:
        raise ValueError(message(f"feature {label!r}", expected="[B] or [B, H]", got="rank 0"))
    return tuple(ids.shape)


def _fixed(declared: Structure, sizes: Sequence[int], batch: int | None) -> int | None:
    """Return the only batch size, the first of several, or None if any sizes are allowed."""
    if batch is not None:
        _checks.check_int("batch", batch, minimum=1)
    if batch is not None and {*sizes} != {batch}:
        known = ", ".join(map(str, dict.fromkeys(sizes)))
        expected, remedy = f"that of features, {known}", "give examples of the size that is served"
        if len({*sizes}) > 1:
            expected = f"None for features of the sizes {known}"
            remedy = "leave it out, and pad what you serve to a few sizes"
        raise ValueError(message("batch", expected=expected, got=batch, remedy=remedy))
    shapes = [feature.output_shape for feature in declared.features]
    return sizes[0] if batch is None and any(shapes) else batch


def _first_dimensions(sizes: Sequence[int], fixed: bool) -> dict[int, Any]:
    """Return the first dimension of the arguments whose examples have each size.

    Args:
      sizes: of the features' examples.
      fixed: whether the program has these sizes; otherwise each becomes a symbol.
    """
    different = list(dict.fromkeys(sizes))
    if fixed:
        return {size: size for size in different}
    names = [f"b{i}" for i in range(len(different))] if len(different) > 1 else ["b"]
    return dict(zip(different, jax_export.symbolic_shape(", ".join(names)), strict=True))


def _first(what: str, shape: Sequence[int], firsts: dict[int, Any]) -> Any:
    """Return the first dimension of an input, which must be the batch size of a feature."""
    if shape[0] not in firsts:
        remedy = "what does not depend on the example belongs in the model"
        sizes = " or ".join(map(str, firsts))
        expected, got = f"batch size {sizes} as first dimension", f"shape {tuple(shape)}"
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))
    return firsts[shape[0]]


def _check_weights(label: str, weights: Any, shape: tuple[int, ...]) -> None:
    got = getattr(weights, "shape", type(weights).__name__)
    if len(shape) == 1 or got != shape:
        expected = f"shape {shape}" if len(shape) > 1 else "None for ids [B]"
        raise ValueError(message(f"weights of {label}", expected=expected, got=got))


# -- the program ---------------------------------------------------------------------------------


def _exported(
    model: Callable[..., PyTree],
    declared: Structure,
    stored: Sequence[Stored],
    arguments: _Arguments,
    platforms: tuple[str, ...],
) -> jax_export.Exported:
    """Return the exported program of the lookups followed by the model."""
    # A program for any batch size looks up one example at a time, which has no output_shape.
    plain = [dataclasses.replace(feature, output_shape=None) for feature in declared.features]
    flat = dataclasses.replace(declared, features=tuple(plain))

    def served(tables: dict, features: dict, weights: dict, *inputs: PyTree) -> PyTree:
        given = {name: Stored(arrays) for name, arrays in tables.items()}
        activations = _by_example(flat, given, features, weights)
        # Without the barrier XLA could fuse lookups with the model, and change their last bits.
        activations = jax.lax.optimization_barrier(activations)
        return model(declared.unflatten(activations), *inputs)

    shapes = {
        name: {part: jax.ShapeDtypeStruct(a.shape, a.dtype) for part, a in table.arrays.items()}
        for name, table in zip(declared.table_names, stored, strict=True)
    }
    try:
        # Plain XLA operations, without kernels of our own and without what JAX cannot serialize.
        with dispatch.reference_only(), _checks.unchecked_programs():
            exported = jax_export.export(jax.jit(served), platforms=platforms)(
                shapes, arguments.features, arguments.weights, *arguments.inputs
            )
    except Exception as error:
        if arguments.batch is None:
            error.add_note("if the model needs one batch size, say which: batch=…")
        raise
    if exported.nr_devices != 1:
        remedy = "take its shardings and shard_maps out of what is exported"
        expected, got = "a program of one device", f"one of {exported.nr_devices}"
        raise ValueError(message("model", expected=expected, got=got, remedy=remedy))
    return exported


def _by_example(
    declared: Structure,
    tables: Mapping[str, Stored],
    features: dict[str, Array],
    weights: dict[str, Array],
) -> list[Array | Jagged]:
    """Look up one example, vmapped over the batch, so that the batch size can stay symbolic."""
    found: dict[str, Array | Jagged] = {}
    # Features of one batch size together: each size is a loop of its own.
    for size in dict.fromkeys(array.shape[0] for array in features.values()):
        mine = [path for path in declared.paths if features[path].shape[0] == size]
        part = declared.only(mine)
        stored = tuple(tables[name] for name in part.table_names)
        scales = {path: weights[path] for path in mine if path in weights}
        ids = {path: features[path] for path in mine}
        one = functools.partial(_one_example, server_of(part), stored, mine)
        found |= dict(zip(mine, jax.vmap(one)(ids, scales), strict=True))
    return [_in_one_replica(found[path]) for path in declared.paths]


def _one_example(
    server: Server,
    tables: tuple[Stored, ...],
    paths: Sequence[str],
    ids: dict[str, Array],
    scales: dict[str, Array],
) -> list[Array | Jagged]:
    """Return the activations of one example, `[…, D]` per feature, or a `Jagged` of `[L, D]`."""
    # [H] -> [1, H]: a batch of one example; its activations [1, …, D] -> […, D]. A jagged one has
    # room for the L ids that it can have: values [1, L, D] -> [L, D], splits [1, 2] -> [2].
    given = [ids[path][None] for path in paths]
    found = [scales[path][None] if path in scales else None for path in paths]
    activations, _ = server.activations(tables, server.traced(given, found))
    return jax.tree.map(lambda leaf: leaf[0], activations)


def _in_one_replica(found: Array | Jagged) -> Array | Jagged:
    """Return an activation whose examples are together, where a `Jagged` has a replica for each."""
    if not isinstance(found, Jagged):
        return found
    # Each example begins at its place 0, so values [b, L, D] are padded rows of these lengths.
    return Jagged.from_padded(found.values, found.row_splits[:, 1], 1)


def _serialized(exported: jax_export.Exported) -> bytes:
    try:
        return bytes(exported.serialize())
    except ValueError as error:
        remedy = "return arrays in them, or register the type with jax.export"
        expected, got = "inputs and outputs in dicts, lists and tuples", f"{exported.out_tree}"
        raise ValueError(message("model", expected=expected, got=got, remedy=remedy)) from error
