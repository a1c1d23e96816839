"""Check what a server is asked, by the description of the exported model.

Ids and weights are read and validated by the same code as in training, in all the same forms.

Input: features, weights and inputs as the caller gives them. Output: what the program takes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tpu_embed._checks import message
from tpu_embed._types import PADDING_ID, PyTree, Tracer
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
from tpu_embed.io.delta import SHARED_ROW
from tpu_embed.io.serving.first_rows import FirstRows
from tpu_embed.io.serving.served_keys import ServedKeys
from tpu_embed.storage import HostStorage
from tpu_embed.vocabulary import DynamicVocabulary


def rules_of(path: str, described: Mapping[str, Any], metadata: Mapping[str, Any]) -> FeatureRules:
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


def by_feature(
    features: PyTree, weights: PyTree, described: Mapping[str, Mapping[str, Any]]
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
    check_paths("features", given, described)
    check_paths("weights", weighted, [path for path, one in described.items() if one["weights"]])
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
        found |= _by_path(child, paths, f"{path}/{key}" if path else str(key))
    return found


def check_paths(what: str, given: Collection[str], described: Collection[str]) -> None:
    """Check that exactly what the metadata describes was given, by path."""
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


def program_ids(
    feature: FeatureRules,
    described: Mapping[str, Any],
    given: tuple[Any, Any],
    keys: ServedKeys | None,
    first: FirstRows | None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return validated ids, or the rows of keys, and weights or None, as the program takes them.

    Ids become rows, and sequences are cut, as for a lookup. So positions count ids that are left
    out, and what the program is given it need not cut again.

    Args:
      feature: the rules of the feature.
      described: its description in the metadata.
      given: the ids and the weights that the server was given.
      keys: those of its table; None if ids are row numbers.
      first: the first rows of ids that nobody has trained, of a table on the host.
    """
    if isinstance(given[0], Tracer):
        expected, remedy = "ids whose values are known", "inside a jit, call .exported"
        raise TypeError(message(feature.path, expected=expected, got="a tracer", remedy=remedy))
    shape = _shape_in_program(feature, given[0], described["shape"])
    host = host_ids(feature.path, feature.config, feature.table_name, *given)
    if keys is not None:
        assert host.keys is not None, "its rules say that ids are keys"
        rows = keys.find(host.keys)
        if first is not None:
            rows[rows == SHARED_ROW] = first.number(host.keys[rows == SHARED_ROW])
        elif not keys.unseen_share:
            rows[rows == SHARED_ROW] = PADDING_ID
        host = give_rows(host, rows)
    ids, weights = _padded(host, shape)
    if host.rows is not None:
        _mark_ends(feature, ids, np.diff(host.rows.row_splits))
    return ids, weights


def _shape_in_program(feature: FeatureRules, given: Any, shape: Sequence[Any]) -> tuple[int, ...]:
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
    fits = len(found) == len(shape)
    if not fits or any(n not in (None, m) for n, m in zip(shape, found, strict=True)):
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
        at = host.bags, np.arange(host.bags.size) - np.searchsorted(host.bags, host.bags)
    else:
        at = np.divmod(host.bags, each)

    def padded(values: np.ndarray | None, fill: int) -> np.ndarray | None:
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
    is_cut = (ends == feature.length) & (ends < ids.shape[1]) & (feature.config.keep == "first")
    if not is_cut.all():
        expected = 'rows that do not end in a missing id, under on_bad_id="clip"'
        got, remedy = f"one in example {rows[~is_cut][0]}", "leave missing ids out where a row ends"
        raise feature.error(expected=expected, got=got, remedy=remedy)
    ids[rows, ends] = 0
