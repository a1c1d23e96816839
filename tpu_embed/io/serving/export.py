"""Export a trained model as a directory for serving: a StableHLO program with its tables.

The tables are arguments of the program, not constants in it, so that a server can memory-map them
and replace rows. `load_model` loads the directory; JAX and NumPy alone can do so, too. Of tables
with keys, only rows that keys have are exported, sorted by key:

    row 0             the row that unseen keys share, or zeros
    rows 1 … n        those of the n keys, which ascend
    rows n + 1 …      room for keys that deltas bring

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
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from tpu_embed._checks import (
    check_choice,
    check_int,
    check_integers,
    check_type,
    refuse,
    unchecked_programs,
)
from tpu_embed._types import Array, PyTree
from tpu_embed.core.ids import Structure, dense_shape, structure
from tpu_embed.core.lookup import Jagged
from tpu_embed.io import directory
from tpu_embed.io.delta import SHARED_ROW
from tpu_embed.io.serving import model_files
from tpu_embed.io.serving.lookup import (
    FIRST,
    HostTable,
    RowSource,
    Stored,
    all_keys,
    server_of,
    stored_tables,
    tables_on_host,
)
from tpu_embed.io.serving.served_tables import with_room
from tpu_embed.io.store import place_of
from tpu_embed.kernels import dispatch, storage
from tpu_embed.touched import Version
from tpu_embed.vocabulary import FixedVocabulary, Vocabularies

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
    vocabularies: Any = None,
) -> None:
    """Export a program that computes `model(activations, *inputs)` from ids.

    The directory is either complete or absent, and is on disk when this returns. The lookups of the
    program are plain XLA operations; on CPU they give the same bits as in training.

    Args:
      path: the directory to write; it must not exist yet.
      model: called with the activations in the structure of the features, and the inputs. Arrays
        that it closes over, such as its parameters, become constants of the program.
      tables: as for `serving_lookup`; of a table on the host whose ids are row numbers, what
        `host_table` returned.
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
      vocabularies: as for `serving_lookup`, of tables with a dynamic vocabulary. What is exported
        takes keys; it has the rows of these keys alone, and room for those that deltas bring.

    Raises:
      ImportError: flatbuffers is missing.
      FileExistsError: something exists at `path`.
      ValueError: the path is a bad URL; ids are not dense; a first dimension is not the batch size;
        the model needs several devices; the results are not in dicts, lists and tuples; a platform
        is unknown; whatever `serving_lookup` refuses about tables; `version` is not that of
        `vocabularies`.
      TypeError: `version` is no `Version`; ids are not integers.
    """
    chosen = (platforms,) if isinstance(platforms, str) else tuple(platforms)
    for platform in chosen or (None,):
        check_choice("platforms: each", platform, ("cpu", "cuda", "rocm", "tpu"))
    directory.check_free(root := place_of(path))
    declared = structure.flatten(feature_config)
    drawn = tables_on_host(declared, given := stored_tables(tables, declared))
    keys = all_keys(vocabularies, declared)
    keys |= {
        name: FixedVocabulary(table.ids, table.ids) for name, table in drawn.items()
    }
    _check_version(version, vocabularies)
    # The program takes row numbers; `load_model` has the map.
    plain = _by_row_number(declared, keys)
    arguments = _arguments_of(plain, keys, features, weights, inputs, batch)
    written = _written_tables(declared, given, keys)
    exported = _exported(model, plain, written, arguments, chosen)
    if (
        importlib.util.find_spec("flatbuffers") is None
    ):  # wrong arguments are told of first
        refuse(
            "export_model",
            expected="flatbuffers",
            got="none",
            remedy='pip install "tpu-embed[export]"',
            error=ImportError,
        )
    outputs = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    described = {
        "platforms": list(exported.platforms),
        "batch": arguments.batch,
        "version": None if version is None else version._asdict(),
        "features": arguments.described,
        "inputs": model_files.describe_leaves(arguments.inputs),
        "outputs": model_files.describe_leaves(outputs),
    }
    first = {name: _first_rows(table, chosen) for name, table in drawn.items()}
    with directory.written(root) as temporary:
        model_files.write(temporary, _serialized(exported), written, first, described)


def _first_rows(table: HostTable, platforms: tuple[str, ...]) -> bytes:
    """Return the serialized program that draws the first rows of a table on the host."""
    (n,) = jax_export.symbolic_shape("n")
    draw = jax_export.export(jax.jit(table.first_rows), platforms=platforms)
    with dispatch.reference_only():
        return _serialized(draw(jax.ShapeDtypeStruct((n, 2), jnp.uint32)))


def _check_version(version: Any, vocabularies: Any) -> None:
    """Check that a version is one, and that of the keys that were read before."""
    if version is None:
        return
    check_type(
        "version",
        version,
        Version,
        expected="a Version, or None",
        remedy="give what touched.version(state) returned",
    )
    if isinstance(vocabularies, Vocabularies):
        now = vocabularies.admitted
        if version.keys != now:
            refuse(
                "version",
                expected=f"that of {now} admitted batches, as vocabularies",
                got=f"{version.keys}",
                remedy="export tables, keys and version of one state: admit no batch in between",
            )


# -- tables --------------------------------------------------------------------------------------


def _by_row_number(declared: Structure, names: Collection[str]) -> Structure:
    """Return a feature configuration whose keys are the numbers of exported rows.

    Args:
      declared: the configuration.
      names: the tables with keys.
    """
    changes = {"vocabulary_size": _INT32_MAX, "vocabulary": None, "storage": None}
    plain = {
        id(table): dataclasses.replace(
            table, name=name, **(changes if name in names else {})
        )
        for name, table in declared.configs.items()
    }

    def renumbered(feature):
        bad = feature.on_bad_id if feature.table.vocabulary is None else "drop"
        return dataclasses.replace(
            feature, table=plain[id(feature.table)], on_bad_id=bad
        )

    return structure.flatten(
        declared.unflatten([renumbered(one) for one in declared.features])
    )


def _written_tables(
    declared: Structure,
    given: Sequence[Stored | RowSource],
    keys: Mapping[str, FixedVocabulary],
) -> dict[str, directory.Table]:
    """Return the tables as they are written, by name: bfloat16 as its bits in uint16."""
    found = {}
    for (name, config), table in zip(declared.configs.items(), given, strict=True):
        mine, unseen = keys.get(name), None
        if mine is not None:
            unseen = directory.rule_without_row(config.vocabulary)
            arrays = {model_files.KEYS: mine.keys}
            arrays |= _sorted(
                table, mine.rows, config.vocabulary_size, unseen == "shared"
            )
        else:
            assert isinstance(table, Stored), (
                "rows of a table on the host are sorted by key"
            )
            arrays = {part: np.asarray(array) for part, array in table.arrays.items()}
        if arrays["values"].dtype == jnp.bfloat16:
            arrays["values"] = arrays["values"].view(np.uint16)
        form = config.vocabulary_size, config.dim, config.dtype
        found[name] = directory.Table(*form, unseen, arrays)
    return found


def _sorted(
    table: Stored | RowSource, rows: np.ndarray, capacity: int, shared: bool
) -> dict[str, np.ndarray]:
    """Return the arrays of a table with keys, by part, in the order of an export.

    Args:
      table: as it was given.
      rows: int64 `[n]`, the rows, or ids at home, of its keys, which ascend.
      capacity: how many keys may have a row.
      shared: whether unseen keys share the last row.
    """
    n, arrays = rows.size, {}
    room = 1 + min(capacity, _INT32_MAX - 1, with_room(n))
    for part, found in table.read(
        np.append(rows, capacity - 1) if shared else rows
    ).items():
        arrays[part] = np.zeros((room, *found.shape[1:]), found.dtype)
        arrays[part][1 : n + 1] = found[:n]
        if shared:
            arrays[part][SHARED_ROW] = found[n]
    return arrays


# -- the program ---------------------------------------------------------------------------------


def _exported(
    model: Callable[..., PyTree],
    declared: Structure,
    tables: Mapping[str, directory.Table],
    arguments: _Arguments,
    platforms: tuple[str, ...],
) -> jax_export.Exported:
    """Return the exported program of the lookups followed by the model."""
    # A program for any batch size looks up one example at a time, which has no output_shape.
    plain = [
        dataclasses.replace(feature, output_shape=None) for feature in declared.features
    ]
    flat = dataclasses.replace(declared, features=tuple(plain))

    def served(tables, features, weights, *inputs):
        activations = _by_example(flat, tables, features, weights)
        # Without the barrier XLA could fuse lookups with the model, and change their last bits.
        activations = jax.lax.optimization_barrier(activations)
        return model(declared.unflatten(activations), *inputs)

    shapes = {
        name: _shapes_of(table, i, arguments.scope)
        for i, (name, table) in enumerate(tables.items())
    }
    try:
        # Plain XLA operations, without kernels of our own and without what JAX cannot serialize.
        with dispatch.reference_only(), unchecked_programs():
            exported = jax_export.export(jax.jit(served), platforms=platforms)(
                shapes, arguments.features, arguments.weights, *arguments.inputs
            )
    except Exception as error:
        if arguments.batch is None:
            error.add_note("if the model needs one batch size, say which: batch=…")
        raise
    if exported.nr_devices != 1:
        refuse(
            "model",
            expected="a program of one device",
            got=f"one of {exported.nr_devices}",
            remedy="take its shardings and shard_maps out of what is exported",
        )
    return exported


def _by_example(
    declared: Structure,
    tables: dict[str, dict[str, Array]],
    features: dict[str, Array],
    weights: dict[str, Array],
) -> list[Array | Jagged]:
    """Look up one example, vmapped over the batch, so that the batch size can stay symbolic."""

    def one_example(server, tables, ids, weights):
        # [H] -> [1, H]: a batch of one example; its activations [1, …, D] -> […, D]. A jagged one
        # has room for the L ids that it can have: values [1, L, D] -> [L, D], splits [1, 2] -> [2].
        given, scales = jax.tree.map(lambda leaf: leaf[None], (ids, weights))
        activations, _ = server.activations(tables, server.traced(given, scales))
        return jax.tree.map(lambda leaf: leaf[0], activations)

    found: dict[str, Array | Jagged] = {}
    # Features of one batch size together: each size is a loop of its own.
    for size in dict.fromkeys(array.shape[0] for array in features.values()):
        mine = [path for path in declared.paths if features[path].shape[0] == size]
        part = declared.only(mine)
        stored = tuple(Stored(tables[name]) for name in part.table_names)
        one = jax.vmap(functools.partial(one_example, server_of(part), stored))
        activations = one(
            [features[path] for path in mine], [weights.get(path) for path in mine]
        )
        found |= dict(zip(mine, activations, strict=True))
    # A `Jagged` has a replica for each example, which begins at its place 0: its values [b, L, D]
    # are padded rows of these lengths, of one replica.
    return [
        Jagged.from_padded(one.values, one.row_splits[:, 1], 1)
        if isinstance(one, Jagged)
        else one
        for one in (found[path] for path in declared.paths)
    ]


def _serialized(exported: jax_export.Exported) -> bytes:
    try:
        return bytes(exported.serialize())
    except ValueError as error:
        refuse(
            "model",
            expected="inputs and outputs in dicts, lists and tuples",
            got=f"{exported.out_tree}",
            remedy="return arrays in them, or register the type with jax.export",
            cause=error,
        )


# -- the arguments of the program ----------------------------------------------------------------


class _Arguments(NamedTuple):
    """The shapes of the program's arguments, whose first dimension is a batch size.

    Attributes:
      batch: the only batch size, or None for any; first dimensions are symbols then, one for all
        features of one size.
      features: ids of each feature by path, int32 or int64.
      weights: weights of each weighted feature by path, floats.
      described: the features by path, for `metadata.json`.
      inputs: the other arguments of the model.
      scope: of the symbols.
    """

    batch: int | None
    features: dict[str, jax.ShapeDtypeStruct]
    weights: dict[str, jax.ShapeDtypeStruct]
    described: dict[str, dict[str, Any]]
    inputs: tuple[PyTree, ...]
    scope: jax_export.SymbolicScope


def _shapes_of(
    table: directory.Table, number: int, scope: jax_export.SymbolicScope
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of those arrays of a table that the program takes, by part.

    The number of rows of a table with keys stays open, and so does that of first rows.
    """
    rows, drawn = jax_export.symbolic_shape(f"r{number}, f{number}", scope=scope)
    found = {}
    for part, array in table.arrays.items():
        if part != model_files.KEYS:
            first = array.shape[0] if table.unseen is None else rows
            found[part] = jax.ShapeDtypeStruct((first, *array.shape[1:]), array.dtype)
    if table.unseen == "initial":
        stored = storage.stored_dtype(table.dtype)
        found[FIRST] = jax.ShapeDtypeStruct((drawn, table.dim), stored)
    return found


def _arguments_of(
    declared: Structure,
    keyed: Collection[str],
    features: PyTree,
    weights: PyTree | None,
    inputs: Any,
    batch: int | None,
) -> _Arguments:
    """Return the shapes of the arguments of a program, from examples.

    Args:
      declared: the feature configuration, by row number.
      keyed: the tables that have keys outside of the program.
      features, weights, inputs, batch: as for `export_model`.

    Raises:
      ValueError, TypeError: as for `export_model`.
    """
    given = declared.match(features, what="features")
    none = [None] * len(given)
    scales = none if weights is None else declared.match(weights, what="weights")
    labels = [f"feature {label!r}" for label in declared.labels]
    shapes = [
        _dense(label, ids, any_key=feature.table.name in keyed)
        for label, ids, feature in zip(labels, given, declared.features, strict=True)
    ]
    scope = jax_export.SymbolicScope()
    fixed, firsts = _first_dimensions(
        declared, [shape[0] for shape in shapes], batch, scope
    )
    ids, numbers, described = {}, {}, {}
    every = zip(declared.paths, labels, declared.features, shapes, scales, strict=True)
    for path, label, feature, example, scale in every:
        dense_shape(label, feature, example, weighted=scale is not None)
        shape = (firsts[example[0]], *example[1:])
        big = feature.table.vocabulary_size > _INT32_MAX
        ids[path] = jax.ShapeDtypeStruct(shape, np.int64 if big else np.int32)
        if scale is not None:
            got = getattr(scale, "shape", type(scale).__name__)
            if len(example) == 1 or got != example:
                refuse(
                    f"weights of {label}",
                    expected=f"shape {example}"
                    if len(example) > 1
                    else "None for ids [B]",
                    got=got,
                )
            double = feature.table.dtype == "float64"
            numbers[path] = jax.ShapeDtypeStruct(
                shape, np.float64 if double else np.float32
            )
        described[path] = {
            "table": feature.table.name,
            **model_files.describe(ids[path]),
            "weights": None if scale is None else str(numbers[path].dtype),
            "max_sequence_length": feature.max_sequence_length,
            "jagged": feature.jagged,
            "keep": feature.keep,
            "on_bad_id": feature.on_bad_id,
        }
    others = _shapes_of_inputs(inputs, firsts)
    return _Arguments(fixed, ids, numbers, described, others, scope)


def _shapes_of_inputs(inputs: Any, firsts: dict[int, Any]) -> tuple[PyTree, ...]:
    """Return the shapes of the model's other arguments, with symbols for batch sizes."""

    def as_input(key, leaf):
        shape = np.shape(leaf)
        if not shape:
            return jax.ShapeDtypeStruct(
                (), jax.dtypes.canonicalize_dtype(jnp.result_type(leaf))
            )
        if shape[0] not in firsts:
            what, sizes = (
                f"inputs{jax.tree_util.keystr(key)}",
                " or ".join(map(str, firsts)),
            )
            refuse(
                what,
                expected=f"batch size {sizes} as first dimension",
                got=f"shape {shape}",
                remedy="what does not depend on the example belongs in the model",
            )
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.ShapeDtypeStruct((firsts[shape[0]], *shape[1:]), dtype)

    return jax.tree_util.tree_map_with_path(as_input, tuple(inputs))


def _dense(label: str, ids: Any, *, any_key: bool) -> tuple[int, ...]:
    check_type(
        label,
        ids,
        (np.ndarray, np.generic, jax.Array, jax.ShapeDtypeStruct),
        expected="an array of ids, or its ShapeDtypeStruct",
        remedy="a program has static shapes: give jax.ShapeDtypeStruct((2, H), np.int32), "
        "where H is the most ids of a bag that you will serve, or (2,) for one id per example",
        error=ValueError,
    )
    if not (any_key and np.dtype(ids.dtype).kind in "SUOT"):
        check_integers(label, ids.dtype, expected="ids of an integer dtype")
    if not ids.shape:
        refuse(label, expected="[B] or [B, H]", got="rank 0")
    return tuple(ids.shape)


def _first_dimensions(
    declared: Structure,
    sizes: Sequence[int],
    batch: int | None,
    scope: jax_export.SymbolicScope,
) -> tuple[int | None, dict[int, Any]]:
    """Return the only batch size, and the first dimension of arguments by that of their examples.

    Args:
      declared: the feature configuration.
      sizes: of the features' examples.
      batch: as for `export_model`.
      scope: of the symbols.

    Returns:
      The only batch size, the first of several, or None if any sizes are allowed: then each first
      dimension is a symbol.

    Raises:
      ValueError: `batch` is not the size of the examples.
    """
    different = list(dict.fromkeys(sizes))
    if batch is not None:
        check_int("batch", batch, minimum=1)
    if batch is not None and different != [batch]:
        known = ", ".join(map(str, different))
        expected, remedy = (
            f"that of features, {known}",
            "give examples of the size that is served",
        )
        if len(different) > 1:
            expected = f"None for features of the sizes {known}"
            remedy = "leave it out, and pad what you serve to a few sizes"
        refuse("batch", expected=expected, got=batch, remedy=remedy)
    if batch is not None or any(feature.output_shape for feature in declared.features):
        return different[0], {size: size for size in different}
    names = [f"b{i}" for i in range(len(different))] if len(different) > 1 else ["b"]
    symbols = jax_export.symbolic_shape(", ".join(names), scope=scope)
    return None, dict(zip(different, symbols, strict=True))
