"""Load an exported model, call it, and apply deltas to its tables while it serves.

A server needs no training code, mesh or optimizer. Ids and weights are checked by the same rules as
in training, from the description of each feature in `metadata.json`.

Input: the directory that `export_model` wrote; then batches of ids on the host, and deltas. Output:
what the model returns.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from tpu_embed._checks import local_path, message
from tpu_embed._snapshot import snapshot
from tpu_embed._types import PyTree
from tpu_embed.core.ids import FeatureRules
from tpu_embed.io.delta import delta_files
from tpu_embed.io.serving import model_files, requests
from tpu_embed.io.serving.first_rows import PART as FIRST
from tpu_embed.io.serving.first_rows import FirstRows
from tpu_embed.io.serving.served_keys import ServedKeys
from tpu_embed.io.serving.written import Prepared, prepare, write
from tpu_embed.kernels import storage
from tpu_embed.touched import Version


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
    _keys: Mapping[str, ServedKeys] = dataclasses.field(default_factory=dict, repr=False)
    _first: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict, repr=False)
    _own: frozenset[str] = dataclasses.field(default=frozenset(), repr=False)  # copied from files

    @property
    def version(self) -> Version | None:
        """The version of the tables; None if the model was exported without one."""
        known = self.metadata.get("version")
        return None if known is None else Version(**known)

    def keys(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys of a table whose vocabulary lives, and their rows in `tables`.

        Returns:
          The keys, uint64 `[n]`, ascending; and their rows, int32 `[n]`. Row 0 is nobody's: keys
          without a row share it, or are left out.

        Raises:
          ValueError: the ids of the table are row numbers, or there is no such table.
        """
        if name not in self._keys:
            expected = f"a table with keys, of {sorted(self._keys)}"
            raise ValueError(message("table", expected=expected, got=repr(name)))
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
          ValueError: the path is a URL; a file is damaged; the version of the model is unknown, of
            another run, or before the first step of the delta; the delta lacks a table, or has it
            with another shape or dtype; with keys, the model is not older than the delta.
        """
        self._check_there()
        prepared = self.prepare(path)
        return self if prepared is None else self._with(prepared, frozenset())

    def apply_in_place(self, path: str | os.PathLike[str]) -> ServedModel:
        """Apply a delta in the memory of this model's tables, and return a model to use instead.

        This model cannot be called afterwards. Meanwhile no other thread may call it, nor a model
        from which `apply` made this one, because they share tables. Tables that are still
        memory-mapped files are copied, so the first call costs as much as `apply`. If `apply` would
        raise, or a copy fails, the model is unchanged.
        """
        self._check_there()
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
        root, described = local_path(path), self.metadata["tables"]
        delta = delta_files.read(root)
        if not delta_files.follows(delta, root, self.version):
            return None
        delta_files.check_declared(delta, root, described)
        changed = {name: delta.tables[name] for name in described}
        return prepare(self.tables, self._keys, changed, delta.version)

    def with_prepared(self, prepared: Prepared) -> ServedModel:
        """Return a model to use instead of this one, with what was prepared for it, or a copy."""
        return self._with(prepared, self._own)

    def with_own_tables(self) -> ServedModel:
        """Return a copy of this model, none of whose tables are in files."""
        tables = jax.tree.map(jnp.copy, self.tables)
        keys = {name: one.copy() for name, one in self._keys.items()}
        return dataclasses.replace(self, tables=tables, _keys=keys, _own=frozenset(tables))

    def _with(self, prepared: Prepared, own: frozenset[str]) -> ServedModel:
        """Return the model with new rows; tables named in `own` are updated in place."""
        new, keys = write(self.tables, self._keys, prepared.tables, own)
        copied = {n for n, parts in new.items() if parts["values"] is not self.tables[n]["values"]}
        return dataclasses.replace(
            self,
            metadata={**self.metadata, "version": prepared.version._asdict()},
            tables={**self.tables, **new},
            _keys={**self._keys, **keys},
            _own=self._own | copied,
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
          features: ids in every form that `serving_lookup` takes outside of a jit, in the structure
            of the features, or in a dict or a frame by path. Bags and sequences may be shorter than
            those of the exported examples. Of a table whose vocabulary lives, keys, or strings.
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
        given = requests.by_feature(features, weights, described)
        first = {name: self._first_rows(name) for name in self._first}
        ids, numbers = {}, {}
        for path, one in described.items():
            rows = self._keys.get(one["table"]), first.get(one["table"])
            mine = requests.program_ids(self._features[path], one, given[path], *rows)
            ids[path], numbers[path] = mine
        numbers = {path: scale for path, scale in numbers.items() if scale is not None}
        sizes = requests.batch_sizes({p: a.shape[0] for p, a in ids.items()}, described)
        requests.check_inputs(inputs, self.metadata["inputs"], sizes)
        drawn = {name: {FIRST: one.rows()} for name, one in first.items()}
        tables = {name: parts | drawn.get(name, {}) for name, parts in self.tables.items()}
        return self._program(tables, ids, numbers, *jax.tree.map(snapshot, inputs))

    def _first_rows(self, name: str) -> FirstRows:
        """Return the first rows of a table on the host, for one call."""
        described, num_rows = self.metadata["tables"][name], len(self.tables[name]["values"])
        blank = np.zeros((1, described["dim"]), storage.stored_dtype(described["dtype"]))
        return FirstRows(self._first[name], num_rows, blank)


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
      ValueError: the path is a URL; a file is damaged, in the place of another, or of another
        format.
      ImportError: flatbuffers is missing.
    """
    root = local_path(path)
    metadata = model_files.read_metadata(root)
    program = model_files.read_program(root, metadata)
    tables = model_files.read_tables(root, metadata, check=check)
    exported = _deserialized(root / model_files.PROGRAM, program, metadata)
    drawn = model_files.read_first_rows(root, metadata)
    first = {
        name: jax.jit(_deserialized(root / f"first rows of {name}", one, metadata).call)
        for name, one in drawn.items()
    }
    _check_program(root, exported, metadata)
    described = metadata["features"].items()
    features = {path: requests.rules_of(path, one, metadata) for path, one in described}
    unseen = {name: one["unseen"] for name, one in metadata["tables"].items()}
    keys = {
        name: ServedKeys(arrays.pop(model_files.KEYS), unseen_share=unseen[name] == "shared")
        for name, arrays in tables.items()
        if unseen[name] is not None
    }
    program = jax.jit(exported.call)
    placed = jax.device_put(tables)
    return ServedModel(metadata, placed, exported, program, features, keys, first)


def _deserialized(path: Path, program: bytes, metadata: Mapping[str, Any]) -> jax_export.Exported:
    try:
        return jax_export.deserialize(bytearray(program))
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(
            message(
                f"{path}",
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
        "tables": {name: _taken(table) for name, table in metadata["tables"].items()},
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


def _taken(table: Mapping[str, Any]) -> dict[str, tuple[str, list[int | None]]]:
    """Return dtype and shape of the arrays of a table that a program takes, by name."""
    forms = _forms(table["files"])
    if table["unseen"] is None:
        return forms
    # The program has any number of rows, and no keys.
    del forms[model_files.KEYS]
    taken = {part: (dtype, [None, *shape[1:]]) for part, (dtype, shape) in forms.items()}
    if table["unseen"] == "initial":
        stored = storage.stored_dtype(table["dtype"]).name
        taken[FIRST] = stored, [None, table["dim"]]
    return taken


def _forms(described: Mapping[str, Any]) -> dict[str, tuple[str, list[int | None]]]:
    """Return dtype and shape of the arrays that the metadata describes, by name."""
    return {name: (one["dtype"], one["shape"]) for name, one in described.items()}
