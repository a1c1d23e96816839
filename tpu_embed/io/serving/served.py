"""Load an exported model, call it, and apply deltas to its tables while it serves.

A server needs no training code, mesh or optimizer. Ids and weights are checked by the same rules as
in training, from the description of each feature in `metadata.json`.

Input: the directory that `export_model` wrote; then batches of ids on the host, and deltas. Output:
what the model returns.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export as jax_export

from tpu_embed._checks import message
from tpu_embed._snapshot import snapshot
from tpu_embed._types import PADDING_ID, PyTree, Tracer
from tpu_embed.columns import read_column
from tpu_embed.config import FeatureConfig, TableConfig
from tpu_embed.core.ids import bad_ids as valid_ids
from tpu_embed.core.ids import structure
from tpu_embed.core.ids import weights as weights_of
from tpu_embed.io.delta import check_numbered, delta_files, set_rows, set_rows_in_place
from tpu_embed.io.serving import model_files
from tpu_embed.touched import Version


@dataclasses.dataclass(frozen=True, eq=False)
class ServedModel:
    """A loaded model; call it with `(features, *inputs, weights=None)`.

    Attributes:
      metadata: the contents of `metadata.json`, with the version after the last delta.
      tables: the first argument of the program: table name -> part -> array.
      exported: the program, for use inside a jit: `exported.call(tables, features, weights,
        *inputs)`, with ids and weights in dicts by path.
    """

    metadata: Mapping[str, Any]
    tables: dict[str, dict[str, jax.Array]]
    exported: jax_export.Exported
    _program: Callable[..., PyTree] = dataclasses.field(repr=False)
    _features: Mapping[str, valid_ids.FeatureRules] = dataclasses.field(repr=False)
    _own: frozenset[str] = dataclasses.field(default=frozenset(), repr=False)  # copied from files

    @property
    def version(self) -> Version | None:
        """The version of the tables; None if the model was exported without one."""
        known = self.metadata.get("version")
        return None if known is None else Version(**known)

    def apply(self, path: str | os.PathLike[str]) -> ServedModel:
        """Return a model with the rows of a delta set; this one is unchanged and stays callable.

        Tables whose rows change are copied first; other tables, the program and everything compiled
        are shared. Rows for a quantized table are quantized. A delta that is older than the tables
        changes nothing.

        Args:
          path: what `export_delta` wrote.

        Raises:
          FileNotFoundError: a file is missing.
          ValueError: a file is damaged; the version of the model is unknown, of another run, or
            before the first step of the delta; the delta lacks a table, or has it with another
            shape or dtype.
        """
        return self._with(path, frozenset())

    def apply_in_place(self, path: str | os.PathLike[str]) -> ServedModel:
        """Apply a delta in the memory of this model's tables, and return a model to use instead.

        This model cannot be called afterwards. Meanwhile no other thread may call it, nor a model
        from which `apply` made this one, because they share tables. Tables that are still
        memory-mapped files are copied, so the first call costs as much as `apply`. If `apply` would
        raise, or a copy fails, the model is unchanged.
        """
        return self._with(path, self._own)

    def _with(self, path: str | os.PathLike[str], own: frozenset[str]) -> ServedModel:
        """Return the model with the rows of a delta; tables named in `own` are updated in place."""
        self._check_there()
        root, described = Path(path), self.metadata["tables"]
        delta = delta_files.read(root)
        if not delta_files.follows(delta, root, self.version):
            return self
        delta_files.check_declared(delta, root, described)
        changed = {name: delta.tables[name] for name in described if delta.tables[name].ids.size}
        parts = {name: rows.parts(self.tables[name]) for name, rows in changed.items()}

        # Check every table before the first is updated in place: an error must change nothing.
        for name in changed:
            for array in self.tables[name].values():
                check_numbered(array)

        def written(name: str, write: Callable[..., jax.Array]) -> dict[str, jax.Array]:
            return {
                part: write(array, changed[name].ids, parts[name][part])
                for part, array in self.tables[name].items()
            }

        # Copies first, because they may fail for lack of memory; then the updates in place.
        copies = {name: written(name, set_rows) for name in changed if name not in own}
        jax.block_until_ready(copies)
        new = copies | {name: written(name, set_rows_in_place) for name in changed if name in own}
        return dataclasses.replace(
            self,
            metadata={**self.metadata, "version": delta.version._asdict()},
            tables=jax.block_until_ready({**self.tables, **new}),
            _own=self._own | set(new),
        )

    def _check_there(self) -> None:
        if any(array.is_deleted() for parts in self.tables.values() for array in parts.values()):
            expected, got = (
                "one whose tables are there",
                "one whose tables apply_in_place has taken",
            )
            remedy = "use the model that it returned"
            raise ValueError(message("model", expected=expected, got=got, remedy=remedy))

    def __call__(self, features: PyTree, *inputs: PyTree, weights: PyTree | None = None) -> PyTree:
        """Return the outputs of the model.

        Args:
          features: arrays of ids in the structure of the features, or in a dict by path.
          inputs: the other arguments of the model.
          weights: in the same structure, for the features that were exported with weights.

        Raises:
          ValueError: features, inputs, shapes or batch sizes differ from the exported ones; ids or
            weights are bad, as for `serving_lookup`; `apply_in_place` has taken the tables.
          TypeError: ids are not integers; the call is inside a jit.
        """
        self._check_there()
        given = _by_path(features)
        scales = {} if weights is None else _by_path(weights)
        scales = {path: scale for path, scale in scales.items() if scale is not None}
        described = self.metadata["features"]
        _check_paths("features", given, described)
        _check_paths("weights", scales, {p: d for p, d in described.items() if d["weights"]})
        ids = {path: _ids(self._features[path], d, given[path]) for path, d in described.items()}
        sizes = _batch_sizes({p: a.shape[0] for p, a in ids.items()}, described)
        _check_inputs(inputs, self.metadata["inputs"], sizes)
        numbers = {
            path: weights_of.beside_dense(
                f"feature {path!r}",
                self._features[path].config.table.dtype,
                ids[path],
                snapshot(scale),
            )
            for path, scale in scales.items()
        }
        return self._program(self.tables, ids, numbers, *jax.tree.map(snapshot, inputs))


def load_model(path: str | os.PathLike[str], *, check: bool = True) -> ServedModel:
    """Load a model that `export_model` wrote. Its program runs here, so load only what you trust.

    Tables are memory-mapped. On CPU, rows are read from the files as they are needed, and processes
    on one machine share the memory; on other platforms tables are copied to the default device.

    Args:
      path: the directory.
      check: whether to read every byte of the tables once, for their checksums. With False only
        sizes, shapes and dtypes are compared: a table with a damaged byte, or one that was put in
        the place of another of the same shape, is served as it is. All other files are always
        checked.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, in the place of another, or of another format.
      ImportError: flatbuffers is missing.
    """
    root = Path(path)
    metadata = model_files.read_metadata(root)
    program = model_files.read_program(root, metadata)
    tables = model_files.read_tables(root, metadata, check=check)
    exported = _deserialized(root, program, metadata)
    _check_program(root, exported, metadata)
    features = {path: _feature(path, one, metadata) for path, one in metadata["features"].items()}
    return ServedModel(metadata, jax.device_put(tables), exported, jax.jit(exported.call), features)


def _deserialized(root: Path, program: bytes, metadata: Mapping[str, Any]) -> jax_export.Exported:
    try:
        return jax_export.deserialize(bytearray(program))
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(
            message(
                f"{root / model_files.PROGRAM}",
                expected=f"a program that JAX {jax.__version__} reads",
                got=f"one that JAX {metadata['jax']} wrote",
                remedy="export the model again with a JAX that is not newer than this one",
            )
        ) from error


def _check_program(root: Path, exported: jax_export.Exported, metadata: Mapping[str, Any]) -> None:
    """Check that a program takes the arguments that the metadata describes.

    Raises:
      ValueError: it takes other arguments.
    """
    features = metadata["features"].items()
    unknown = [one["table"] for _, one in features if one["table"] not in metadata["tables"]]
    said = {
        "tables": {name: _forms(table["files"]) for name, table in metadata["tables"].items()},
        "features": _forms(metadata["features"]),
        "weights": {path: (f["weights"], f["shape"]) for path, f in features if f["weights"]},
        "inputs": metadata["inputs"],
    }
    given, _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    tables, ids, weights = jax.tree.map(lambda a: (str(a.dtype), model_files.shape(a)), given[:3])
    taken = {"tables": tables, "features": ids, "weights": weights}
    taken["inputs"] = model_files.describe_leaves(given[3:])
    if unknown or taken != said:
        what, expected = f"{root / model_files.PROGRAM}", f"a program of {said}"
        got = f"features of tables {unknown}" if unknown else f"one of {taken}"
        remedy = "export the model again, or copy the directory whole"
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))


def _forms(described: Mapping[str, Any]) -> dict[str, tuple[str, list[int | None]]]:
    """Return dtype and shape of the arrays that the metadata describes, by name."""
    return {name: (one["dtype"], one["shape"]) for name, one in described.items()}


def _feature(path: str, described: Mapping[str, Any], metadata: Mapping[str, Any]) -> Any:
    """Return the rules by which the ids of a feature are validated."""
    name = described["table"]
    table = metadata["tables"][name]
    config = FeatureConfig(
        TableConfig(table["vocabulary_size"], table["dim"], dtype=table["dtype"]),
        max_sequence_length=described["max_sequence_length"],
        on_bad_id=described["on_bad_id"],
        jagged=described["jagged"],
        keep=described["keep"],
    )
    return valid_ids.FeatureRules(f"feature {path!r}", config, name)


def _by_path(values: PyTree, path: str = "") -> dict[str, Any]:
    """Return the leaves by path, as `structure.flatten` names them."""
    inner = structure.children(values)
    if inner is None:
        return {path or "feature": values}
    found: dict[str, Any] = {}
    for key, child in inner:
        found |= _by_path(child, f"{path}/{key}" if path else str(key))
    return found


def _check_paths(what: str, given: Mapping[str, Any], described: Mapping[str, Any]) -> None:
    if set(given) != set(described):
        expected, got = f"exactly {sorted(described)}", f"{sorted(given)}"
        remedy = "the model was exported so; metadata.json lists them"
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))


def _batch_sizes(
    given: Mapping[str, int], described: Mapping[str, Mapping[str, Any]]
) -> dict[str, int]:
    """Return the batch sizes by name; features that share one must agree."""
    found: dict[str, tuple[str, int]] = {}
    for path, size in given.items():
        first, expected = found.setdefault(described[path]["size"], (path, size))
        if size != expected or not size:
            expected = f"a positive batch size, {expected} as of feature {first!r}"
            raise ValueError(message(f"feature {path!r}", expected=expected, got=f"{size}"))
    return {name: size for name, (_, size) in found.items()}


def _check_inputs(
    inputs: tuple[PyTree, ...], described: Sequence[Mapping[str, Any]], sizes: Mapping[str, int]
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
        got = f"{_dtype(leaf)} of shape {list(np.shape(leaf))}"
        if got != expected:
            remedy = "cast it; shapes are static but for the batch"
            raise ValueError(message(f"inputs{path}", expected=expected, got=got, remedy=remedy))


def _dtype(leaf: Any) -> str:
    """Return the dtype that JAX gives a leaf, or its NumPy dtype if JAX has none for it."""
    dtype = np.asarray(leaf).dtype if not isinstance(leaf, jax.Array) else leaf.dtype
    return str(dtype if dtype.kind in "OSUMm" else jax.dtypes.canonicalize_dtype(dtype))


def _ids(feature: valid_ids.FeatureRules, described: Mapping[str, Any], given: Any) -> np.ndarray:
    """Return validated ids in the dtype of the program."""
    if isinstance(given, Tracer):
        expected, remedy = "ids whose values are known", "inside a jit, call .exported"
        raise TypeError(message(feature.path, expected=expected, got="a tracer", remedy=remedy))
    if not hasattr(given, "__array__"):
        expected, got = "an array of ids", type(given).__name__
        raise feature.error(expected=expected, got=got, remedy="pad bags with -1")
    ids = read_column(feature.path, given)
    valid_ids.check_dtype(feature, ids)
    shape = described["shape"]
    fits = ids.ndim == len(shape)
    if not fits or any(n not in (None, m) for n, m in zip(shape, ids.shape, strict=True)):
        expected = f"shape {['B' if n is None else n for n in shape]}".replace("'", "")
        remedy = "the program has static shapes: pad with -1"
        raise feature.error(expected=expected, got=f"{list(ids.shape)}", remedy=remedy)

    def where(at: int) -> str:
        return f"index {[int(i) for i in np.unravel_index(at, ids.shape)]}"

    checked = valid_ids.resolve_dense(feature, ids, where)[0]
    if feature.config.jagged:
        # An id that is dropped keeps its place: V is neither a row nor padding, so the program
        # gives it a row of zeros. Here -1 would end the row before it.
        given = (np.ma.getdata(ids) != PADDING_ID) & ~np.ma.getmaskarray(ids)
        checked = np.where(given & (checked == PADDING_ID), feature.vocabulary_size, checked)
    return checked.astype(described["dtype"])  # a copy, as `snapshot` makes
