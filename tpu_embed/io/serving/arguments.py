"""The shapes of what an exported program takes: ids, weights, other inputs, and tables.

Input: a feature configuration and examples. Output: shapes, in which batch sizes may be symbols.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from tpu_embed import _checks
from tpu_embed._checks import message
from tpu_embed._types import PyTree
from tpu_embed.core.ids import Structure, dense_shape
from tpu_embed.io.serving import model_files
from tpu_embed.io.serving.first_rows import PART as FIRST
from tpu_embed.io.serving.model_files import WrittenTable
from tpu_embed.kernels import storage

_INT32_MAX = int(np.iinfo(np.int32).max)


@dataclasses.dataclass(frozen=True, eq=False)
class Arguments:
    """The shapes of the program's arguments, whose first dimension is a batch size.

    Attributes:
      batch: the only batch size, or None for any; first dimensions are symbols then, one for all
        features of one size.
      features: ids of each feature by path, int32 or int64.
      weights: weights of each weighted feature by path, floats.
      inputs: the other arguments of the model.
      num_rows: of each table with keys, by name, the symbol of its number of rows.
      num_first: of each table on the host, by name, the symbol of the number of rows that nobody
        has trained.
    """

    batch: int | None
    features: dict[str, jax.ShapeDtypeStruct]
    weights: dict[str, jax.ShapeDtypeStruct]
    inputs: tuple[PyTree, ...]
    num_rows: dict[str, Any]
    num_first: dict[str, Any]

    def shapes_of(self, name: str, table: WrittenTable) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of those arrays of a table that the program takes, by part."""
        found = {}
        for part, array in table.in_program.items():
            first = self.num_rows.get(name, array.shape[0])
            found[part] = jax.ShapeDtypeStruct((first, *array.shape[1:]), array.dtype)
        if name in self.num_first:
            stored = storage.stored_dtype(table.dtype)
            found[FIRST] = jax.ShapeDtypeStruct((self.num_first[name], table.dim), stored)
        return found

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


def arguments_of(
    declared: Structure,
    keyed: Collection[str],
    drawn: Collection[str],
    features: PyTree,
    weights: PyTree | None,
    inputs: Any,
    batch: int | None,
) -> Arguments:
    """Return the shapes of the arguments of a program, from examples.

    Args:
      declared: the feature configuration, by row number.
      keyed: the tables that have keys outside of the program, whose number of rows stays open.
      drawn: those of them that have rows nobody has trained.
      features, weights, inputs, batch: as for `export_model`.

    Raises:
      ValueError, TypeError: as for `export_model`.
    """
    given = declared.match(features, what="features")
    scales = [None] * len(given)
    if weights is not None:
        scales = declared.match(weights, what="weights")
    shapes = [
        _dense(path, ids, any_key=feature.table.name in keyed)
        for path, ids, feature in zip(declared.labels, given, declared.features, strict=True)
    ]
    fixed = _fixed(declared, [shape[0] for shape in shapes], batch)
    scope = jax_export.SymbolicScope()
    firsts = _first_dimensions([shape[0] for shape in shapes], fixed is not None, scope)
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
    open_sizes = [
        {n: jax_export.symbolic_shape(f"{letter}{i}", scope=scope)[0] for i, n in enumerate(names)}
        for letter, names in (("r", keyed), ("f", drawn))
    ]
    return Arguments(fixed, ids, numbers, _shapes_of_inputs(inputs, firsts), *open_sizes)


def _shapes_of_inputs(inputs: Any, firsts: dict[int, Any]) -> tuple[PyTree, ...]:
    """Return the shapes of the model's other arguments, with symbols for batch sizes."""

    def as_input(key: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        if not np.shape(leaf):
            return jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(jnp.result_type(leaf)))
        first = _first(f"inputs{jax.tree_util.keystr(key)}", np.shape(leaf), firsts)
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.ShapeDtypeStruct((first, *np.shape(leaf)[1:]), dtype)

    return jax.tree_util.tree_map_with_path(as_input, tuple(inputs))


def _dense(label: str, ids: Any, *, any_key: bool) -> tuple[int, ...]:
    if not isinstance(ids, (np.ndarray, np.generic, jax.Array, jax.ShapeDtypeStruct)):
        what, remedy = f"feature {label!r}", "a program has static shapes: pad bags with -1"
        expected, got = "an array of ids, or its ShapeDtypeStruct", type(ids).__name__
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))
    is_text = any_key and np.dtype(ids.dtype).kind in "SUOT"
    if not is_text and not jnp.issubdtype(ids.dtype, jnp.integer):
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


def _first_dimensions(
    sizes: Sequence[int], fixed: bool, scope: jax_export.SymbolicScope
) -> dict[int, Any]:
    """Return the first dimension of the arguments whose examples have each size.

    Args:
      sizes: of the features' examples.
      fixed: whether the program has these sizes; otherwise each becomes a symbol.
      scope: of the symbols.
    """
    different = list(dict.fromkeys(sizes))
    if fixed:
        return {size: size for size in different}
    names = [f"b{i}" for i in range(len(different))] if len(different) > 1 else ["b"]
    symbols = jax_export.symbolic_shape(", ".join(names), scope=scope)
    return dict(zip(different, symbols, strict=True))


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
