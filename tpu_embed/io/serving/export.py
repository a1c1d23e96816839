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
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import export as jax_export

from tpu_embed import _checks
from tpu_embed._checks import check_choice, local_path, message
from tpu_embed._types import Array, PyTree
from tpu_embed.core.ids import Structure, structure
from tpu_embed.core.lookup import Jagged
from tpu_embed.io import directory
from tpu_embed.io.serving import model_files
from tpu_embed.io.serving.arguments import Arguments, arguments_of
from tpu_embed.io.serving.keyed import Keys, as_written, by_row_number, sort_rows
from tpu_embed.io.serving.keys import all_keys, ids_on_host
from tpu_embed.io.serving.lookup import Server, server_of
from tpu_embed.io.serving.model_files import WrittenTable
from tpu_embed.io.serving.stored import RowSource, Stored, stored_tables
from tpu_embed.kernels import dispatch
from tpu_embed.touched import Version
from tpu_embed.vocabulary import Vocabularies


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
      vocabularies: as for `serving_lookup`, of tables whose vocabularies live. What is exported
        takes keys; it has the rows of these keys alone, and room for those that deltas bring.

    Raises:
      ImportError: flatbuffers is missing.
      FileExistsError: something exists at `path`.
      ValueError: the path is a URL; ids are not dense; a first dimension is not the batch size;
        the model needs several devices; the results are not in dicts, lists and tuples; a platform
        is unknown; whatever `serving_lookup` refuses about tables; `version` is not that of
        `vocabularies`.
      TypeError: `version` is no `Version`; ids are not integers.
    """
    chosen = (platforms,) if isinstance(platforms, str) else tuple(platforms)
    for platform in chosen or (None,):
        check_choice("platforms: each", platform, ("cpu", "cuda", "rocm", "tpu"))
    directory.check_free(root := local_path(path))
    declared = structure.flatten(feature_config)
    drawn = ids_on_host(declared, given := stored_tables(tables, declared))
    keys = all_keys(vocabularies, declared) | drawn
    _check_version(version, vocabularies)
    # The program takes row numbers; `load_model` has the map.
    plain = by_row_number(declared, keys)
    arguments = arguments_of(plain, keys, drawn, features, weights, inputs, batch)
    written = _written_tables(declared, given, keys)
    exported = _exported(model, plain, written, arguments, chosen)
    _check_flatbuffers()  # what is wrong with the arguments is said first
    outputs = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    described = {
        "platforms": list(exported.platforms),
        "batch": arguments.batch,
        "version": None if version is None else version._asdict(),
        "features": arguments.described(plain),
        "inputs": model_files.describe_leaves(arguments.inputs),
        "outputs": model_files.describe_leaves(outputs),
    }
    first = _first_rows(dict(zip(declared.table_names, given, strict=True)), drawn, chosen)
    with directory.written(root) as temporary:
        model_files.write(temporary, _serialized(exported), written, first, described)


def _written_tables(
    declared: Structure, given: Sequence[Stored | RowSource], keys: Mapping[str, Keys]
) -> dict[str, WrittenTable]:
    """Return the tables as they are written, by name; those with keys are sorted by key."""
    found = {}
    for name, config, table in zip(declared.table_names, declared.tables, given, strict=True):
        mine = keys.get(name)
        sorted_table = as_written(table if mine is None else sort_rows(table, mine, config))
        found[name] = WrittenTable.of(config, sorted_table, mine)
    return found


def _first_rows(
    given: Mapping[str, Stored | RowSource], names: Collection[str], platforms: tuple[str, ...]
) -> dict[str, bytes]:
    """Return the serialized programs that draw the first rows of tables on the host, by name."""
    found = {}
    for name in names:
        table = given[name]
        assert isinstance(table, RowSource), "its rows are on the host"
        assert table.host_table is not None, "checked"
        (n,) = jax_export.symbolic_shape("n")
        draw = jax_export.export(jax.jit(table.host_table.first_rows), platforms=platforms)
        with dispatch.reference_only():
            exported = draw(jax.ShapeDtypeStruct((n, 2), jnp.uint32))
        found[name] = _serialized(exported)
    return found


def _check_version(version: Any, vocabularies: Any) -> None:
    """Check that a version is one, and that of the keys that were read before."""
    if version is not None and not isinstance(version, Version):
        expected, got = "a Version, or None", type(version).__name__
        remedy = "give what touched.version(state) returned"
        raise TypeError(message("version", expected=expected, got=got, remedy=remedy))
    if version is not None and isinstance(vocabularies, Vocabularies):
        now = vocabularies.admitted
        if version.keys != now:
            expected, got = f"that of {now} admitted batches, as vocabularies", f"{version.keys}"
            remedy = "export tables, keys and version of one state: admit no batch in between"
            raise ValueError(message("version", expected=expected, got=got, remedy=remedy))


def _check_flatbuffers() -> None:
    if importlib.util.find_spec("flatbuffers") is None:
        what, remedy = "export_model", 'pip install "tpu-embed[export]"'
        raise ImportError(message(what, expected="flatbuffers", got="none", remedy=remedy))


# -- the program ---------------------------------------------------------------------------------


def _exported(
    model: Callable[..., PyTree],
    declared: Structure,
    tables: Mapping[str, WrittenTable],
    arguments: Arguments,
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

    shapes = {name: arguments.shapes_of(name, table) for name, table in tables.items()}
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
