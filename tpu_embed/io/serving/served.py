"""Load an exported model, call it, and apply deltas to its tables while it serves.

A server needs no training code, mesh or optimizer. Ids and weights are read, in all the same forms,
and checked by the same code as in training, from the description of each feature in
`metadata.json`.

Input: the directory that `export_model` wrote; then batches of ids on the host, and deltas. Output:
what the model returns.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from tpu_embed._checks import local_path, refuse
from tpu_embed._types import PADDING_ID, Array, PyTree, Tracer, snapshot
from tpu_embed.config import FeatureConfig, TableConfig
from tpu_embed.core.ids import (
    FeatureRules,
    HostIds,
    RaggedIds,
    SparseIds,
    check_row_splits,
    give_rows,
    host_ids,
    read_ids,
    structure,
)
from tpu_embed.io.commits import download, find
from tpu_embed.io.delta import SHARED_ROW, delta_files
from tpu_embed.io.schema import Json
from tpu_embed.io.serving import model_files
from tpu_embed.io.serving.lookup import FIRST
from tpu_embed.io.serving.served_tables import Prepared, ServedKeys, write, writing_of
from tpu_embed.io.store import Bucket
from tpu_embed.kernels import storage
from tpu_embed.storage import HostStorage
from tpu_embed.touched import Version
from tpu_embed.vocabulary import DynamicVocabulary


@dataclasses.dataclass(frozen=True, eq=False)
class ServedModel:
    """A loaded model; call it with `(features, *inputs, weights=None)`.

    Attributes:
      metadata: the contents of `metadata.json`, with the version after the last delta.
      tables: the first argument of the program: table name -> part -> array.
      exported: the program, for use inside a jit: `exported.call(tables, features, weights,
        *inputs)`, with ids and weights in dicts by path. It takes row numbers where this takes
        keys, and the largest number of the dtype for a key that is left out, which keeps its
        position in a sequence; a table on the host needs another part "first", `[m, D]`, the rows
        of the numbers after those of its values.
    """

    metadata: Mapping[str, Any]
    tables: dict[str, dict[str, jax.Array]]
    exported: jax_export.Exported
    _program: Callable[..., PyTree] = dataclasses.field(repr=False)
    _features: Mapping[str, FeatureRules] = dataclasses.field(repr=False)
    _keys: Mapping[str, ServedKeys] = dataclasses.field(repr=False)
    _first: Mapping[str, Callable[..., Any]] = dataclasses.field(repr=False)
    # Copied from files.
    _own: frozenset[str] = dataclasses.field(default=frozenset(), repr=False)

    @property
    def version(self) -> Version | None:
        """The version of the tables; None if the model was exported without one."""
        known = self.metadata.get("version")
        return None if known is None else Version(**known)

    def keys(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys of a table with a dynamic vocabulary, and their rows in `tables`.

        Returns:
          The keys, uint64 `[n]`, ascending; and their rows, int32 `[n]`. Row 0 is nobody's: keys
          without a row share it, or are left out.

        Raises:
          ValueError: the ids of the table are row numbers, or there is no such table.
        """
        if name not in self._keys:
            refuse(
                "table",
                expected=f"a table with keys, of {sorted(self._keys)}",
                got=repr(name),
            )
        return self._keys[name].all()

    def apply(self, path: str | os.PathLike[str]) -> ServedModel:
        """Return a model with the rows of a delta set; this one is unchanged and stays callable.

        Tables whose rows change are copied first; other tables, the program and everything compiled
        are shared. Rows for a quantized table are quantized. A delta that is older than the tables
        changes nothing; with keys, it is refused, and so is one that was applied already.

        Args:
          path: what `export_delta` wrote.

        Raises:
          FileNotFoundError: a file is missing.
          ValueError: the path is a bad URL; a file is damaged; the version of the model is unknown,
            of another run, or before the first step of the delta; the delta lacks a table, or has
            it with another shape or dtype; with keys, the model is not older than the delta.
        """
        prepared = self.prepare(path)
        return (
            self if prepared is None else self.with_prepared(prepared, in_place=False)
        )

    def apply_in_place(self, path: str | os.PathLike[str]) -> ServedModel:
        """Apply a delta in the memory of this model's tables, and return a model to use instead.

        This model cannot be called afterwards. Meanwhile no other thread may call it, nor a model
        from which `apply` made this one, because they share tables. Tables that are still
        memory-mapped files are copied, so the first call costs as much as `apply`. If `apply` would
        raise, or a copy fails, the model is unchanged.
        """
        prepared = self.prepare(path)
        return self if prepared is None else self.with_prepared(prepared)

    def prepare(self, path: str | os.PathLike[str]) -> Prepared | None:
        """Return what a delta writes to this model's tables.

        Args:
          path: what `export_delta` wrote.

        Returns:
          None if the tables are newer, and nothing is to be written.

        Raises:
          ValueError: as for `apply`.
        """
        self._check_there()
        root, described = find(path), self.metadata["tables"]
        delta = delta_files.read(root)
        if not delta_files.follows(delta, root, self.version):
            return None
        delta_files.check_declared(delta, root, described)
        changed = {
            name: writing_of(
                delta.tables[name], self.tables[name], self._keys.get(name)
            )
            for name in described
            if any(array.size for array in delta.tables[name].arrays.values())
        }
        return Prepared(delta.version, changed)

    def with_own_tables(self) -> ServedModel:
        """Return a copy of this model, none of whose tables are in files."""
        tables = jax.tree.map(jnp.copy, self.tables)
        keys = {name: one.copy() for name, one in self._keys.items()}
        return dataclasses.replace(
            self, tables=tables, _keys=keys, _own=frozenset(tables)
        )

    def with_prepared(
        self, prepared: Prepared, *, in_place: bool = True
    ) -> ServedModel:
        """Return a model with what was prepared for this one, or for one with equal tables.

        Args:
          prepared: what `prepare` returned.
          in_place: whether to write to tables that are no files, which this model has no more then.
        """
        own = self._own if in_place else frozenset()
        new, keys = write(self.tables, self._keys, prepared.tables, own)
        written = {name for name, one in prepared.tables.items() if one.rows.size}
        return dataclasses.replace(
            self,
            metadata={**self.metadata, "version": prepared.version._asdict()},
            tables={**self.tables, **new},
            _keys={**self._keys, **keys},
            _own=self._own | written,
        )

    def _check_there(self) -> None:
        if any(array.is_deleted() for array in jax.tree.leaves(self.tables)):
            refuse(
                "model",
                expected="one whose tables are there",
                got="one whose tables apply_in_place has taken",
                remedy="use the model that it returned",
            )

    def __call__(
        self, features: PyTree, *inputs: PyTree, weights: PyTree | None = None
    ) -> PyTree:
        """Return the outputs of the model.

        Args:
          features: ids in every form that `serving_lookup` takes outside of a jit, in the structure
            of the features, or in a dict or a frame by path. Bags and sequences may be shorter than
            those of the exported examples. Of a table with a dynamic vocabulary, keys, or strings.
          inputs: the other arguments of the model.
          weights: in the same structure, for the features that were exported with weights.

        Raises:
          ValueError: features, inputs, shapes or batch sizes differ from the exported ones; a bag
            or sequence is longer than there; ids or weights are bad, as for `serving_lookup`; a row
            of a jagged feature ends in an id that is missing, under `on_bad_id="clip"`;
            `apply_in_place` has taken the tables.
          TypeError: ids are not integers; the call is inside a jit.
        """
        self._check_there()
        described = self.metadata["features"]
        given = _by_feature(features, weights, described)
        first = {}
        for name, draw in self._first.items():
            table, values = self.metadata["tables"][name], self.tables[name]["values"]
            blank = np.zeros((1, table["dim"]), storage.stored_dtype(table["dtype"]))
            first[name] = _FirstRows(draw, len(values), blank)
        ids, numbers = {}, {}
        for path, one in described.items():
            rows = self._keys.get(one["table"]), first.get(one["table"])
            rules = self._features[path]
            ids[path], scale = _program_ids(rules, one["shape"], given[path], *rows)
            if scale is not None:
                numbers[path] = scale
        _check_inputs(inputs, self.metadata["inputs"], _batch_sizes(ids, described))
        tables: dict[str, dict[str, Any]] = {**self.tables}
        for name, one in first.items():
            tables[name] = {**tables[name], FIRST: one.rows()}
        return self._program(tables, ids, numbers, *jax.tree.map(snapshot, inputs))


def load_model(
    path: str | os.PathLike[str],
    *,
    check: bool = True,
    cache: str | os.PathLike[str] | None = None,
) -> ServedModel:
    """Load a model that `export_model` wrote. Its program runs here, so load only what you trust.

    Tables are memory-mapped. On CPU, rows are read from the files as they are needed, and processes
    on one machine share the memory; on other platforms tables are copied to the default device.

    Args:
      path: the directory; or the URL of a place in a bucket.
      cache: a folder that keeps what is downloaded from a bucket, so that files are there to be
        memory-mapped, and a model is downloaded once.
      check: whether to read every byte of the tables once, for their checksums. With False only
        sizes, shapes and dtypes are compared: a table with a damaged byte, or one that was put in
        the place of another of the same shape, is served as it is. All other files are always
        checked.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a URL of another scheme, or without a cache; a file is damaged, in the place of
        another, or of another format.
      ImportError: flatbuffers is missing.
    """
    root = find(path)
    if isinstance(root, Bucket):
        if cache is None:
            refuse(
                "cache",
                expected="a folder, for a URL",
                got="None",
                remedy="give a folder on a disk, in which models are kept",
            )
        root = download(root, local_path(cache, "cache"))
    metadata, program, drawn, tables = model_files.read(root, check=check)
    exported = _deserialized(root / model_files.PROGRAM, program, metadata)
    first = {
        name: jax.jit(_deserialized(root / f"first rows of {name}", one, metadata).call)
        for name, one in drawn.items()
    }
    _check_program(root, exported, metadata)
    described = metadata["features"].items()
    features = {path: _rules_of(path, one, metadata) for path, one in described}
    keys = {
        name: ServedKeys(arrays.pop(model_files.KEYS))
        for name, arrays in tables.items()
        if model_files.KEYS in arrays
    }
    placed, call = jax.device_put(tables), jax.jit(exported.call)
    return ServedModel(metadata, placed, exported, call, features, keys, first)


def _deserialized(path: Path, program: bytes, metadata: Json) -> jax_export.Exported:
    try:
        return jax_export.deserialize(bytearray(program))
    except ImportError:
        raise
    except Exception as error:
        refuse(
            f"{path}",
            expected=f"a program that JAX {jax.__version__} reads",
            got=f"one that JAX {metadata['jax']} wrote",
            remedy="export the model again with a JAX that is not newer than this one",
            cause=error,
        )


def _check_program(root: Path, exported: jax_export.Exported, metadata: Json) -> None:
    """Check that a program takes the arguments that the metadata describes.

    Raises:
      ValueError: it takes other arguments.
    """
    features = metadata["features"].items()
    unknown = [
        one["table"] for _, one in features if one["table"] not in metadata["tables"]
    ]
    said = {
        "tables": {name: _taken(table) for name, table in metadata["tables"].items()},
        "features": _forms(metadata["features"]),
        "weights": {
            path: (f["weights"], f["shape"]) for path, f in features if f["weights"]
        },
        "inputs": metadata["inputs"],
    }
    given, _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    tables, ids, weights = jax.tree.map(
        lambda a: (str(a.dtype), model_files.shape(a)), given[:3]
    )
    leaves = model_files.describe_leaves(given[3:])
    taken = {"tables": tables, "features": ids, "weights": weights, "inputs": leaves}
    if unknown or taken != said:
        refuse(
            f"{root / model_files.PROGRAM}",
            expected=f"a program of {said}",
            got=f"features of tables {unknown}" if unknown else f"one of {taken}",
            remedy="export the model again, or copy the directory whole",
        )


def _taken(table: Json) -> dict[str, tuple[str, list[int | None]]]:
    """Return dtype and shape of the arrays of a table that a program takes, by name."""
    forms = _forms(table["files"])
    if table["unseen"] is None:
        return forms
    # The program has any number of rows, and no keys.
    del forms[model_files.KEYS]
    taken = {
        part: (dtype, [None, *shape[1:]]) for part, (dtype, shape) in forms.items()
    }
    if table["unseen"] == "initial":
        stored = storage.stored_dtype(table["dtype"]).name
        taken[FIRST] = stored, [None, table["dim"]]
    return taken


def _forms(described: Json) -> dict[str, tuple[str, list[int | None]]]:
    """Return dtype and shape of the arrays that the metadata describes, by name."""
    return {name: (one["dtype"], one["shape"]) for name, one in described.items()}


# -- requests --------------------------------------------------------------------------------------


class _FirstRows:
    """The first rows that one call needs of a table on the host, of ids that nobody had trained.

    Args:
      draw: takes uint32 `[m, 2]`, low and high halves of ids, and returns `[m, D]`.
      num_rows: how many rows the table has in arrays.
      blank: `[1, D]`, what the program gets if there are none.
    """

    def __init__(
        self, draw: Callable[[np.ndarray], Array], num_rows: int, blank: np.ndarray
    ) -> None:
        self._draw, self._num_rows, self._blank = draw, num_rows, blank
        self._ids = np.zeros(0, np.uint64)

    def number(self, ids: np.ndarray) -> np.ndarray:
        """Return the numbers of ids, uint64 `[n]`, as int32 `[n]`; they follow the table's rows."""
        distinct, at = np.unique(ids, return_inverse=True)
        first = self._num_rows + self._ids.size
        self._ids = np.append(self._ids, distinct)
        return (first + at).astype(np.int32)

    def rows(self) -> Array | np.ndarray:
        """Return the rows of all numbered ids, in order of their numbers, and perhaps some more."""
        ids, n = self._ids, self._ids.size
        if not n:
            return self._blank
        # Rounded up to a power of two, so that few programs compile.
        halves = np.zeros((1 << (n - 1).bit_length(), 2), np.uint32)
        halves[:n] = np.stack([ids, ids >> np.uint64(32)], axis=1).astype(np.uint32)
        return self._draw(halves)


def _rules_of(path: str, described: Json, metadata: Json) -> FeatureRules:
    """Return the rules by which the ids of a feature are validated."""
    name = described["table"]
    table = metadata["tables"][name]
    unseen = table["unseen"]
    rows: dict[str, Any] = {}
    if unseen == "initial":
        # Ids of a table on the host may have 64 bits; how many rows devices hold is not asked.
        rows = {"storage": HostStorage(device_rows=1)}
    elif unseen is not None:
        rows = {"vocabulary": DynamicVocabulary(unseen=unseen)}
    size, dim, dtype = table["vocabulary_size"], table["dim"], table["dtype"]
    config = FeatureConfig(
        # The program combines rows. Of a sum, it gets the weights as they were given.
        TableConfig(size, dim, combiner="sum", dtype=dtype, **rows),
        max_sequence_length=described["max_sequence_length"],
        on_bad_id=described["on_bad_id"],
        jagged=described["jagged"],
        keep=described["keep"],
    )
    return FeatureRules(f"feature {path!r}", config, name)


def _by_feature(
    features: PyTree, weights: PyTree, described: Mapping[str, Json]
) -> dict[str, tuple[Any, Any]]:
    """Return the ids of each feature, and its weights or None, by path.

    Args:
      features, weights: what the server was given.
      described: the features in the metadata.

    Raises:
      ValueError: other features than those of the model, or others with weights.
    """
    given, beside = _by_path(features, described), _by_path(weights, described)
    weighted = {path for path, scales in beside.items() if scales is not None}
    for path, ids in given.items():
        if isinstance(ids, (SparseIds, RaggedIds)) and ids.weights is not None:
            weighted.add(path)
    _check_paths("features", given, described)
    _check_paths(
        "weights", weighted, [path for path, one in described.items() if one["weights"]]
    )
    return {path: (given[path], beside.get(path)) for path in described}


def _by_path(values: PyTree, paths: Collection[str], path: str = "") -> dict[str, Any]:
    """Return the leaves by path, as `structure.flatten` names them.

    Args:
      values: features or weights, nested as they were exported, or in a dict or a frame by path.
      paths: those of the features, where lists are columns.
      path: where `values` stand.
    """
    if not path and "feature" not in paths:
        values = structure.select_columns(values, paths)
    inner = structure.children(values)
    is_column = isinstance(values, (list, tuple)) and (path or "feature") in paths
    if inner is None or is_column:
        return {path or "feature": values}
    found: dict[str, Any] = {}
    for key, child in inner:
        found |= _by_path(child, paths, structure.join_path(path, key))
    return found


def _check_paths(what: str, given: Collection[str], described: Collection[str]) -> None:
    """Check that exactly what the metadata describes was given, by path."""
    if set(given) != set(described):
        refuse(
            what,
            expected=f"exactly {sorted(described)}",
            got=f"{sorted(given)}",
            remedy="the model was exported so; metadata.json lists them",
        )


def _batch_sizes(
    given: Mapping[str, np.ndarray], described: Mapping[str, Json]
) -> dict[str, int]:
    """Return the batch sizes by name; features that share one must agree."""
    found: dict[str, tuple[str, int]] = {}
    for path, ids in given.items():
        size = ids.shape[0]
        first, expected = found.setdefault(described[path]["size"], (path, size))
        if size != expected or not size:
            refuse(
                f"feature {path!r}",
                expected=f"a positive batch size, {expected} as of feature {first!r}",
                got=f"{size}",
            )
    return {name: size for name, (_, size) in found.items()}


def _check_inputs(
    inputs: tuple[PyTree, ...], described: Sequence[Json], sizes: Mapping[str, int]
) -> None:
    """Check the other arguments of the model against those it was exported with."""
    leaves = jax.tree_util.tree_leaves_with_path(inputs)
    given = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    exported = {one["path"]: one for one in described}
    _check_paths("inputs", given, exported)
    for path, leaf in given.items():
        one = exported[path]
        shape = [sizes[one["size"]] if n is None else n for n in one["shape"]]
        expected = f"{one['dtype']} of shape {shape}"
        dtype = leaf.dtype if isinstance(leaf, jax.Array) else np.asarray(leaf).dtype
        if dtype.kind not in "OSUMm":  # of these JAX has none
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        got = f"{dtype} of shape {list(np.shape(leaf))}"
        if got != expected:
            refuse(
                f"inputs{path}",
                expected=expected,
                got=got,
                remedy="cast it; shapes are static but for the batch",
            )


def _program_ids(
    feature: FeatureRules,
    described: Sequence[Any],
    given: tuple[Any, Any],
    keys: ServedKeys | None,
    first: _FirstRows | None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return validated ids, or the rows of keys, and weights or None, as the program takes them.

    Ids become rows, and sequences are cut, as for a lookup. So positions count ids that are left
    out, and what the program is given it need not cut again.

    Args:
      feature: the rules of the feature.
      described: the shape in the metadata, with None for any batch size.
      given: the ids and the weights that the server was given.
      keys: those of its table; None if ids are row numbers.
      first: the first rows of ids that nobody has trained, of a table on the host.
    """
    if isinstance(given[0], Tracer):
        refuse(
            feature.path,
            expected="ids whose values are known",
            got="a tracer",
            remedy="inside a jit, call .exported",
            error=TypeError,
        )
    shape = _shape_in_program(feature, given[0], described)
    host = host_ids(feature.path, feature.config, feature.table_name, *given)
    if keys is not None:
        assert host.keys is not None, "its rules say that ids are keys"
        rows, rules = keys.find(host.keys), feature.config.table.vocabulary
        unseen = rows == SHARED_ROW
        if first is not None:
            rows[unseen] = first.number(host.keys[unseen])
        elif rules is None or rules.unseen != "shared":
            rows[unseen] = PADDING_ID
        host = give_rows(host, rows)
    found = _padded(host, shape)
    if host.rows is not None:
        _mark_ends(feature, found[0], np.diff(host.rows.row_splits))
    return found


def _shape_in_program(
    feature: FeatureRules, given: Any, shape: Sequence[Any]
) -> tuple[int, ...]:
    """Return the shape in which the program gets ids, whose rows may be given shorter than there.

    Args:
      feature: the rules of the feature.
      given: its ids.
      shape: that in the metadata, with None for any batch size.
    """
    ids = read_ids(feature.path, given)
    if isinstance(ids, SparseIds):
        got = ids.dense_shape
    elif isinstance(ids, RaggedIds):
        lengths = check_row_splits(feature.path, ids)
        got = lengths.size, int(lengths.max(initial=0))
    else:
        got = ids.shape
    # Ids [B] have no rows.
    may_pad = len(got) == len(shape) > 1 and got[-1] <= shape[-1]
    found = (*got[:-1], shape[-1]) if may_pad else got
    differs = (n not in (None, m) for n, m in zip(shape, found, strict=False))
    if len(found) != len(shape) or any(differs):
        expected = f"shape {['B' if n is None else n for n in shape]}".replace("'", "")
        remedy = (
            "the program has static shapes: cut longer rows, or export the model with wider "
            "examples; to a batch of a fixed size, pad with -1"
        )
        raise feature.error(expected=expected, got=f"{list(got)}", remedy=remedy)
    return found


def _padded(host: HostIds, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return new arrays of a shape, padded: the ids, and the weights or None."""
    given, at = host.shape, None
    width = shape[-1] if len(shape) > 1 else 1
    # A bag that is combined is a row of the arrays; so is a sequence, whose ids are a bag each.
    rows, each = given.batch, given.bags
    if given.combines:
        rows, each = given.batch * given.bags, given.width or 0
    if host.bags is None:
        at = np.s_[:, : min(each, width)]
    elif host.rows is not None:
        at = host.bags, host.rows.places - host.rows.row_splits[host.bags]
    elif given.combines:
        # In the bags 0 0 2 the first ids are those at 0 0 2, so the columns 0 1 2 - 0 0 2 = 0 1 0.
        at = (
            host.bags,
            np.arange(host.bags.size) - np.searchsorted(host.bags, host.bags),
        )
    else:
        at = np.divmod(host.bags, each)

    def padded(values, fill):
        if values is None:
            return None
        found = np.full((rows, width), fill, values.dtype)
        found[at] = values.reshape(rows, each)[at] if host.bags is None else values
        return found.reshape(shape)

    return padded(host.ids, PADDING_ID), padded(host.weights, 0)


def _mark_ends(feature: FeatureRules, ids: np.ndarray, lengths: np.ndarray) -> None:
    """Mark in `ids`, `[B, H]`, the ends of jagged rows whose last id is left out.

    There -1 would end the row before. The largest number is neither a row nor padding, so the
    program gives it a row of zeros; but it clips it, where bad ids are clipped. There an id after
    the first L marks the end, which the program cuts off: with L = 2, [3, -1, 0] are two places.
    """
    rows = np.flatnonzero(lengths)
    rows = rows[ids[rows, lengths[rows] - 1] == PADDING_ID]
    ends = lengths[rows]
    if feature.config.on_bad_id != "clip":
        ids[rows, ends - 1] = np.iinfo(ids.dtype).max
        return
    is_cut = (
        (ends == feature.length)
        & (ends < ids.shape[1])
        & (feature.config.keep == "first")
    )
    if not is_cut.all():
        expected = 'rows that do not end in a missing id, under on_bad_id="clip"'
        got, remedy = (
            f"one in example {rows[~is_cut][0]}",
            "leave missing ids out where a row ends",
        )
        raise feature.error(expected=expected, got=got, remedy=remedy)
    ids[rows, ends] = 0
