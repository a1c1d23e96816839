"""Check what a server is asked, by the description of the exported model.

Ids and weights are checked by the same rules as in training; keys become rows.

Input: features, weights and inputs as the caller gives them. Output: what the program takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tpu_embed._checks import message
from tpu_embed._types import PADDING_ID, PyTree, Tracer
from tpu_embed.columns import is_column, read_column
from tpu_embed.config import FeatureConfig, TableConfig
from tpu_embed.core.ids import FeatureRules, bad_ids, check_dtype, hashed, keys_of_ids, structure
from tpu_embed.io.delta import SHARED_ROW
from tpu_embed.io.serving.first_rows import FirstRows
from tpu_embed.io.serving.served_keys import ServedKeys
from tpu_embed.storage import HostStorage

_INT32_MAX = int(np.iinfo(np.int32).max)


def rules_of(path: str, described: Mapping[str, Any], metadata: Mapping[str, Any]) -> FeatureRules:
    """Return the rules by which the ids of a feature are validated."""
    name = described["table"]
    table = metadata["tables"][name]
    # Keys are row numbers for the program, which has any number of rows.
    size = _INT32_MAX if table["unseen"] in ("zero", "shared") else table["vocabulary_size"]
    # Ids of a table on the host may have 64 bits; how many rows devices hold is not asked here.
    storage = HostStorage(device_rows=1) if table["unseen"] == "initial" else None
    config = FeatureConfig(
        TableConfig(size, table["dim"], dtype=table["dtype"], storage=storage),
        max_sequence_length=described["max_sequence_length"],
        on_bad_id=described["on_bad_id"],
        jagged=described["jagged"],
        keep=described["keep"],
    )
    return FeatureRules(f"feature {path!r}", config, name)


def by_path(values: PyTree, path: str = "") -> dict[str, Any]:
    """Return the leaves by path, as `structure.flatten` names them."""
    inner = structure.children(values)
    if inner is None:
        return {path or "feature": values}
    found: dict[str, Any] = {}
    for key, child in inner:
        found |= by_path(child, f"{path}/{key}" if path else str(key))
    return found


def check_paths(what: str, given: Mapping[str, Any], described: Mapping[str, Any]) -> None:
    """Check that exactly what the metadata describes was given."""
    if set(given) != set(described):
        expected, got = f"exactly {sorted(described)}", f"{sorted(given)}"
        remedy = "the model was exported so; metadata.json lists them"
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))


def batch_sizes(
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


def check_inputs(
    inputs: tuple[PyTree, ...], described: Sequence[Mapping[str, Any]], sizes: Mapping[str, int]
) -> None:
    """Check the other arguments of the model against those it was exported with."""
    leaves = jax.tree_util.tree_leaves_with_path(inputs)
    given = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    exported = {one["path"]: one for one in described}
    check_paths("inputs", given, exported)
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


def row_ids(
    feature: FeatureRules,
    described: Mapping[str, Any],
    given: Any,
    keys: ServedKeys | None,
    first: FirstRows | None,
) -> np.ndarray:
    """Return validated ids, or the rows of keys, in the dtype of the program.

    Args:
      feature: the rules of the feature.
      described: its description in the metadata.
      given: what the server was given.
      keys: those of its table; None if ids are row numbers.
      first: the first rows of ids that nobody has trained, of a table on the host.
    """
    ids = _read(feature, given, is_key=keys is not None and first is None)
    _check_shape(feature, ids, described["shape"])
    if keys is None:
        found = _valid_ids(feature, ids)
    elif first is None:
        found = _rows_of_keys(feature, ids, keys)
    else:
        found = _rows_of_ids(feature, ids, keys, first)
    return found.astype(described["dtype"])  # a copy, as `snapshot` makes


def _read(feature: FeatureRules, given: Any, *, is_key: bool) -> np.ndarray:
    """Return ids as an array of integers, masked where some are missing; strings become keys."""
    if isinstance(given, Tracer):
        expected, remedy = "ids whose values are known", "inside a jit, call .exported"
        raise TypeError(message(feature.path, expected=expected, got="a tracer", remedy=remedy))
    if not is_column(given):
        expected, got = "an array of ids", type(given).__name__
        raise feature.error(expected=expected, got=got, remedy="pad bags with -1")
    ids = read_column(feature.path, given)
    ids = hashed(feature.path, given, ids) if is_key else ids
    check_dtype(feature, ids)
    return ids


def _check_shape(feature: FeatureRules, ids: np.ndarray, shape: Sequence[int | None]) -> None:
    fits = ids.ndim == len(shape)
    if not fits or any(n not in (None, m) for n, m in zip(shape, ids.shape, strict=True)):
        expected = f"shape {['B' if n is None else n for n in shape]}".replace("'", "")
        remedy = "the program has static shapes: pad with -1"
        raise feature.error(expected=expected, got=f"{list(ids.shape)}", remedy=remedy)


def _resolved(feature: FeatureRules, ids: np.ndarray) -> np.ndarray:
    """Return ids with every bad one resolved; -1 for padding, and for those that are dropped."""

    def where(at: int) -> str:
        return f"index {[int(i) for i in np.unravel_index(at, ids.shape)]}"

    return bad_ids.resolve_dense(feature, ids, where)[0]


def _valid_ids(feature: FeatureRules, ids: np.ndarray) -> np.ndarray:
    """Return the row numbers of ids that are row numbers."""
    return _kept_place(feature, ids, _resolved(feature, ids), feature.vocabulary_size)


def _kept_place(feature: FeatureRules, ids: np.ndarray, found: np.ndarray, size: int) -> np.ndarray:
    """Return row numbers in which an id that was dropped from a jagged feature keeps its place.

    V of the program, the size, is neither a row nor padding, so the program gives it a row of
    zeros. Here -1 would end the row before it.
    """
    if not feature.config.jagged:
        return found
    _, absent = keys_of_ids(ids, padded=True)
    return np.where(~absent & (found == PADDING_ID), size, found)


def _rows_of_ids(
    feature: FeatureRules, ids: np.ndarray, keys: ServedKeys, first: FirstRows
) -> np.ndarray:
    """Return the rows of ids of a table on the host."""
    valid = _resolved(feature, ids).astype(np.int64)
    rows, absent = keys.find(valid.view(np.uint64).reshape(-1)), valid == PADDING_ID
    rows = rows.reshape(ids.shape)
    is_first = (rows == SHARED_ROW) & ~absent
    rows[is_first] = first.number(valid[is_first].view(np.uint64))
    rows[absent] = PADDING_ID
    return _kept_place(feature, ids, rows, _INT32_MAX)


def _rows_of_keys(feature: FeatureRules, ids: np.ndarray, keys: ServedKeys) -> np.ndarray:
    """Return the rows of keys; -1 for padding, and for a key without a row that is left out."""
    asked, absent = keys_of_ids(ids, padded=True)
    rows = keys.find(asked).reshape(ids.shape)
    if not keys.unseen_share:
        rows[rows == SHARED_ROW] = PADDING_ID
    rows[absent] = PADDING_ID
    return _kept_place(feature, ids, rows, _INT32_MAX)
