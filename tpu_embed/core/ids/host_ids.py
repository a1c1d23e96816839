"""Validate the ids of one feature on the host, and bring them into one of two layouts.

Users give ids in many ways; the rest of the package knows only two. Dense ids are an array
`[B, bags, H]` in which -1 is padding. Flat ids are an array `[N]` in batch order without padding,
beside an array that says which bag each id belongs to. The bags [7, 3], [] and [5] are

    dense:  ids [[[7, 3]], [[-1, -1]], [[5, -1]]]
    flat:   ids [7, 3, 5], bags [0, 0, 2]

Input: a dense array, `SparseIds` or `RaggedIds`, or a column that is read as one of them; weights
inside the container or beside it.
Output: `HostIds`, in which every id is valid: bad ids were treated as the feature's `on_bad_id`
says.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tpu_embed._types import PADDING_ID, Tracer
from tpu_embed.config import FeatureConfig
from tpu_embed.core.ids import weights as weights_of
from tpu_embed.core.ids.bad_ids import FeatureRules, check_dtype, resolve_dense, resolve_flat
from tpu_embed.core.ids.containers import RaggedIds, SparseIds, read_ids
from tpu_embed.core.ids.keys import number_keys
from tpu_embed.core.ids.rescale import rescale_dense_bags, rescale_flat_bags

__all__ = ["FeatureShape", "HostIds", "dense_shape", "host_ids", "is_mean"]

_INT32_MAX = int(np.iinfo(np.int32).max)


@dataclasses.dataclass(frozen=True)
class FeatureShape:
    """The static shape of one feature of a batch; hashable.

    Args:
      batch: B, number of examples.
      inner: the activation's shape between B and D: () for one bag per example, (K, …) for many,
        (L,) for a sequence.
      combines: whether the ids of a bag are combined. False: every id has a bag of its own, and
        its weight scales its row (rank-1 ids, sequences, ragged rows that keep their first k ids).
      width: H, ids per bag of a dense feature; None for flat ids.
      weighted: whether the ids have weights.
    """

    batch: int
    inner: tuple[int, ...]
    combines: bool
    width: int | None
    weighted: bool

    @property
    def bags(self) -> int:
        """Bags per example, the product of `inner`."""
        return math.prod(self.inner)


@dataclasses.dataclass(frozen=True, eq=False)
class HostIds:
    """The validated ids of one feature of one batch.

    Args:
      shape: the static shape.
      ids: int32, or int64 if the vocabulary needs it. Dense: [B, bags, width], where -1 is
        padding. Flat: [N] in batch order, none of them -1.
      bags: for flat ids, int32 [N], the bag of each id, in [0, B · bags), non-decreasing; None for
        dense ids.
      weights: shaped like `ids`, float32 (float64 for a float64 table), 0 at dense padding; None
        for all ones. Weights of means are brought near 1 (`rescale.py`).
      padded: whether -1 may be among dense ids.
      keys: for a living vocabulary, uint64 [n], until rows are known: `ids` are positions in it.
    """

    shape: FeatureShape
    ids: np.ndarray
    bags: np.ndarray | None
    weights: np.ndarray | None
    padded: bool
    keys: np.ndarray | None = None


def host_ids(path: str, config: FeatureConfig, table_name: str, ids: Any, weights: Any) -> HostIds:
    """Return the validated ids and weights of one feature.

    Args:
      path: the feature's path, for messages.
      config: the feature's config.
      table_name: the name of its table, for messages.
      ids: [B], [B, H] or [B, K, …, H] integers, `SparseIds` or `RaggedIds`; or a column of a data
        set (see `columns.py`): one of integers is [B], one of lists of integers is `RaggedIds`.
        What is masked, or missing from a column, is padding.
      weights: None (all ones, or the weights inside `ids`), an array shaped like the ids or like
        `ids.values`, or a container with the same indices that holds floats.

    Raises:
      TypeError: ids that are not integers, or masked weights.
      ValueError: a bad id under `on_bad_id="error"`, or ids, weights or shapes that are not
        allowed for this kind of input.

    Example:
      >>> from tpu_embed.config import TableConfig
      >>> config = FeatureConfig(TableConfig(10, 4))
      >>> host_ids("x", config, "table_0", np.array([[3, -1], [4, 5]]), None).ids.tolist()
      [[[3, -1]], [[4, 5]]]
    """
    feature = FeatureRules(path, config, table_name)
    _check_readable(feature, ids)
    ids, keys = read_ids(path, ids), None
    if config.table.vocabulary is not None:
        ids, keys = number_keys(feature, ids)
    if isinstance(ids, SparseIds):
        host = _sparse(feature, ids, weights)
    elif isinstance(ids, RaggedIds):
        host = _ragged(feature, ids, weights)
    else:
        host = _dense(feature, ids, weights)
    return host if keys is None else dataclasses.replace(host, keys=keys)


def _check_readable(feature: FeatureRules, ids: Any) -> None:
    """Check that ids are of a kind whose values can be read on the host."""
    first = next(iter(ids), None) if isinstance(ids, list) else ids
    if isinstance(first, Tracer):
        remedy = "place outside the jitted function, or give the ids to lookup and update inside it"
        raise feature.error(expected="ids whose values are known", got="a tracer", remedy=remedy)
    # Of a global array, this process can read only its own part.
    if not getattr(ids, "is_fully_addressable", True):
        raise feature.error(
            expected="this process's part of the batch, on the host",
            got="an array that is spread over several processes",
            remedy="give NumPy arrays; global arrays go to lookup and update inside a jit",
        )
    # The class np.ndarray itself has `__array__`, too, but it is not an array.
    is_array = hasattr(ids, "__array__") and not isinstance(ids, type)
    if not is_array and not isinstance(ids, (list, SparseIds, RaggedIds)):
        raise feature.error(
            expected="an array of ids, SparseIds or RaggedIds",
            got=type(ids).__name__,
            remedy="SparseIds and RaggedIds have constructors for lists, scipy, BCOO and Arrow",
        )


# -- dense ---------------------------------------------------------------------------------------


def dense_shape(
    path: str, config: FeatureConfig, shape: Sequence[int], *, weighted: bool
) -> FeatureShape:
    """Return the static shape of a feature whose ids are a dense array of shape `shape`.

    The values of the ids are not needed, so this also works for ids traced inside a jit.

    Raises:
      ValueError: the rank is 0, a sequence's rank is not 2, or the shape does not agree with the
        declared output_shape.
    """
    feature, length = FeatureRules(path, config, ""), config.max_sequence_length
    if not shape:
        raise feature.error(expected="ids of rank 1 or more", got="rank 0")
    if length and len(shape) != 2:
        raise feature.error(expected="a sequence's ids as [B, H]", got=f"rank {len(shape)}")
    # [B] has one bag per example that is not combined; [B, H] has inner (), [B, K, H] has (K,).
    # A sequence [B, H] is cut or padded to L bags of one id each: inner (L,), width 1.
    combines = len(shape) > 1 and not length
    feature.check_output_shape(tuple(shape[: max(1, len(shape) - 1)]))
    inner = (length,) if length else tuple(shape[1:-1])
    return _shared_shape(shape[0], inner, combines, shape[-1] if combines else 1, weighted)


_shared_shape = functools.lru_cache(4096)(FeatureShape)
"""`FeatureShape`, but equal arguments give the same object, so that comparing batches is fast."""


def _dense(feature: FeatureRules, ids: np.ndarray, weights: Any) -> HostIds:
    """Return the `HostIds` of a dense array `[B]`, `[B, H]` or `[B, K, …, H]`."""
    check_dtype(feature, ids)
    weighted = weights is not None
    feature_shape = dense_shape(feature.path, feature.config, ids.shape, weighted=weighted)
    numbers = weights_of.beside_dense(feature.path, feature.config.table.dtype, ids, weights)
    ids, padded = resolve_dense(feature, ids, functools.partial(_dense_position, ids.shape))
    # A weight at a padded position may be any number; it must not decide how its bag is rescaled.
    if numbers is not None and padded:
        numbers = np.where(ids == PADDING_ID, numbers.dtype.type(0), numbers)
    if feature.length:
        padded = padded or ids.shape[1] < feature.length
        ids = _first_columns(ids, feature.length, PADDING_ID)
        numbers = None if numbers is None else _first_columns(numbers, feature.length, 0)
    # All inner dims become one: [B, K₁, K₂, H] -> [B, K₁ · K₂, H]; a sequence [B, L] -> [B, L, 1].
    shape = (feature_shape.batch, feature_shape.bags, feature_shape.width or 0)
    scale = None if numbers is None else numbers.reshape(shape)
    if scale is not None and _is_mean(feature, feature_shape):
        scale = rescale_dense_bags(scale)
    return HostIds(feature_shape, ids.reshape(shape), None, scale, padded)


def _dense_position(shape: tuple[int, ...], at: int) -> str:
    """Return in words where flat index `at` of a dense array is, such as "example 2, bag 1, …"."""
    place = [int(i) for i in np.unravel_index(at, shape)]
    words = [f"example {place[0]}"]
    if len(place) > 2:
        words.append(f"bag {place[1] if len(place) == 3 else tuple(place[1:-1])}")
    if len(place) > 1:
        words.append(f"position {place[-1]}")
    return ", ".join(words)


def _first_columns(array: np.ndarray, length: int, fill: int) -> np.ndarray:
    """Return `[B, length]`: the first columns of an array `[B, H]`, padded with `fill`."""
    missing = length - array.shape[1]
    if missing > 0:
        return np.pad(array, ((0, 0), (0, missing)), constant_values=fill)
    return array[:, :length]


# -- sparse and ragged ---------------------------------------------------------------------------


def _sparse(feature: FeatureRules, ids: SparseIds, weights: Any) -> HostIds:
    """Return the flat `HostIds` of coordinates."""
    check_dtype(feature, ids.values)
    shape, indices = ids.dense_shape, ids.indices
    _check_coordinates(feature, ids)
    if feature.length and len(shape) != 2:
        raise feature.error(expected="a sequence's dense_shape as (B, H)", got=f"{shape}")
    feature.check_output_shape(shape[:-1])
    # The bag is the row-major number of all coordinates but the last. In dense_shape (B, K, H)
    # the entry (e, k, h) belongs to bag e * K + k.
    bags = indices[:, 0].astype(np.int64)
    for size, column in zip(shape[1:-1], indices.T[1:-1], strict=True):
        bags = bags * size + column
    columns = indices[:, -1].astype(np.int64)
    _check_order(feature, indices, bags, columns)
    numbers = weights_of.beside_sparse(feature.path, feature.config.table.dtype, ids, weights)

    def where(at: int) -> str:
        bag = tuple(indices[at, 1:-1].tolist())
        words = f", bag {bag[0] if len(bag) == 1 else bag}" if bag else ""
        return f"example {indices[at, 0]}{words}, position {indices[at, -1]}"

    if feature.length:
        # Each position of a sequence is a bag of its own; positions from L on are cut off.
        feature_shape = FeatureShape(shape[0], (feature.length,), False, None, numbers is not None)
        keep = columns < feature.length
        return _flat(
            feature,
            feature_shape,
            ids.values,
            bags * feature.length + columns,
            numbers,
            where,
            keep,
        )
    feature_shape = FeatureShape(shape[0], shape[1:-1], True, None, numbers is not None)
    return _flat(feature, feature_shape, ids.values, bags, numbers, where, None)


def _check_order(
    feature: FeatureRules, indices: np.ndarray, bags: np.ndarray, columns: np.ndarray
) -> None:
    """Check that the entries are sorted by bag, then by column, without duplicates.

    `bags` and `columns` are signed: the difference of unsigned numbers is never negative, so
    `np.diff` of unsigned ones would hide a wrong order.
    """
    order = (np.diff(bags) > 0) | ((np.diff(bags) == 0) & (np.diff(columns) > 0))
    if not order.all():
        entry = int(np.argmin(order))
        got = f"{indices[entry].tolist()} before {indices[entry + 1].tolist()}"
        raise feature.error(
            expected="SparseIds.indices sorted by row, then column, none twice",
            got=got,
            remedy="SparseIds.from_scipy sorts",
        )


def _check_coordinates(feature: FeatureRules, ids: SparseIds) -> None:
    """Check the shapes and dtype of coordinates, and that they lie inside `dense_shape`."""
    shape, indices, n = ids.dense_shape, ids.indices, ids.values.size
    if len(shape) < 2:
        raise feature.error(expected="SparseIds.dense_shape (B, H) or longer", got=f"{shape}")
    if ids.values.ndim != 1:
        raise feature.error(expected="SparseIds.values [N]", got=f"shape {ids.values.shape}")
    if indices.shape != (n, len(shape)) or indices.dtype.kind not in "iu":
        raise feature.error(
            expected=f"SparseIds.indices [{n}, {len(shape)}] of integers",
            got=f"{indices.dtype} of shape {indices.shape}",
        )
    outside = (indices < 0).any(axis=1) | (indices >= np.asarray(shape)).any(axis=1)
    if outside.any():
        got = f"{indices[np.argmax(outside)].tolist()}"
        raise feature.error(expected=f"SparseIds.indices inside dense_shape {shape}", got=got)


def _ragged(feature: FeatureRules, ids: RaggedIds, weights: Any) -> HostIds:
    """Return the flat `HostIds` of ragged rows."""
    check_dtype(feature, ids.values)
    lengths = _row_lengths(feature, ids)
    rows, n = len(lengths), ids.values.size
    numbers = weights_of.beside_ragged(feature.path, feature.config.table.dtype, ids, weights)
    batch, inner, first = _ragged_shape(feature, rows)
    # Row splits 0 2 2 3, that is lengths 2 0 1: rows of the ids 0 0 2.
    row = np.repeat(np.arange(rows, dtype=np.int32), lengths)

    def where(at: int) -> str:
        word = "example" if batch == rows else "row"
        return f"{word} {row[at]}, position {at - int(ids.row_splits[row[at]])}"

    feature_shape = FeatureShape(batch, inner, not first, None, numbers is not None)
    if not first:
        return _flat(feature, feature_shape, ids.values, row, numbers, where, None)
    # Each of the first k = `first` ids of a row has bag row * k + position; later ids are cut off.
    # Positions in the example above: 0 1 2 - 0 0 2 = 0 1 0.
    position = np.arange(n) - np.repeat(ids.row_splits[:-1].astype(np.int64), lengths)
    keep = position < first if n and int(lengths.max()) > first else None
    bags = row * np.int64(first) + position
    return _flat(feature, feature_shape, ids.values, bags, numbers, where, keep)


def _row_lengths(feature: FeatureRules, ids: RaggedIds) -> np.ndarray:
    """Check the row splits `[R + 1]`, and return the lengths `[R]` of the rows."""
    splits, n = ids.row_splits, ids.values.size
    if ids.values.ndim != 1:
        raise feature.error(expected="RaggedIds.values [N]", got=f"shape {ids.values.shape}")
    if splits.ndim != 1 or not splits.size or splits.dtype.kind not in "iu":
        got = f"{splits.dtype} of shape {splits.shape}"
        raise feature.error(expected="RaggedIds.row_splits [B + 1] of integers", got=got)
    lengths = np.diff(splits.astype(np.int64, copy=False))
    if splits[0] != 0 or splits[-1] != n or (lengths < 0).any():
        raise feature.error(
            expected=f"RaggedIds.row_splits that rise from 0 to {n}",
            got=np.array2string(splits, threshold=8, edgeitems=3),
        )
    return lengths


def _ragged_shape(feature: FeatureRules, rows: int) -> tuple[int, tuple[int, ...], int]:
    """Return (B, inner, k) of ragged rows.

    k is the number of ids per row that have bags of their own; 0 if each row is one bag. With
    R = 6 rows, output_shape (3, 2) gives k = 0 (each row is a bag) and (3, 2, 4) gives k = 4.
    """
    if feature.length:
        return rows, (feature.length,), feature.length
    shape = feature.config.output_shape
    if shape is None:
        return rows, (), 0
    product = math.prod(shape)
    if not rows or product % rows:
        raise feature.error(
            expected=f"output_shape with a product of R or kR for {rows} rows",
            got=f"{shape}, product {product}",
        )
    return shape[0], shape[1:], 0 if product == rows else product // rows


def _flat(
    feature: FeatureRules,
    feature_shape: FeatureShape,
    ids: np.ndarray,
    bags: np.ndarray,
    weights: np.ndarray | None,
    where: Callable[[int], str],
    keep: np.ndarray | None,
) -> HostIds:
    """Return flat `HostIds`: resolve bad ids, then leave out what is not to be kept.

    An id is kept if `keep` (bool [N], None for all) and the feature's `on_bad_id` both keep it.
    """
    if feature_shape.batch * feature_shape.bags > _INT32_MAX:
        got = f"{feature_shape.batch} x {feature_shape.bags}"
        raise feature.error(expected=f"at most {_INT32_MAX} bags in a batch", got=got)
    ids, valid = resolve_flat(feature, ids, where)
    if keep is not None and valid is not None:
        keep = keep & valid
    elif keep is None:
        keep = valid
    if keep is not None:
        ids, bags = ids[keep], bags[keep]
        weights = None if weights is None else weights[keep]
    if weights is not None and _is_mean(feature, feature_shape):
        weights = rescale_flat_bags(weights, bags)
    return HostIds(feature_shape, ids, bags.astype(np.int32, copy=False), weights, padded=False)


def _is_mean(feature: FeatureRules, shape: FeatureShape) -> bool:
    """Tell whether bags are means, so that scaling all weights of a bag changes nothing."""
    # The weights of keys are rescaled when it is known which keys have rows (`keys.py`).
    return feature.config.table.vocabulary is None and is_mean(feature.config, shape)


def is_mean(config: FeatureConfig, shape: FeatureShape) -> bool:
    """Tell whether a feature's bags are means (mean, sqrtn) of their rows."""
    return shape.combines and config.table.combiner != "sum"
