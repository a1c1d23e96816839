"""Validate sparse and ragged ids on the host, and bring them into the flat layout.

Input: the rules of a feature, and its `SparseIds` or `RaggedIds`. Output: flat `HostIds`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tpu_embed._checks import message
from tpu_embed.core.ids import weights as weights_of
from tpu_embed.core.ids.bad_ids import FeatureRules, check_dtype, resolve_flat
from tpu_embed.core.ids.containers import RaggedIds, SparseIds
from tpu_embed.core.ids.cut_rows import after_cut
from tpu_embed.core.ids.feature_ids import FeatureShape, HostIds

_INT32_MAX = int(np.iinfo(np.int32).max)


def sparse_ids(feature: FeatureRules, ids: SparseIds, weights: Any) -> HostIds:
    """Return the flat `HostIds` of coordinates."""
    check_dtype(feature, ids.values)
    shape, indices = ids.dense_shape, ids.indices
    check_coordinates(feature.path, ids)
    if feature.length and len(shape) != 2:
        raise feature.error(expected="a sequence's dense_shape as (B, H)", got=f"{shape}")
    feature.check_output_shape(shape[:-1])
    # The bag is the row-major number of all coordinates but the last. In dense_shape (B, K, H)
    # the entry (e, k, h) belongs to bag e * K + k.
    bags = indices[:, 0].astype(np.int64)
    for size, column in zip(shape[1:-1], indices.T[1:-1], strict=True):
        bags = bags * size + column
    columns = indices[:, -1].astype(np.int64)
    check_order(feature, indices, bags, columns)
    numbers = weights_of.beside_sparse(feature.path, feature.config.table.dtype, ids, weights)

    def where(at: int) -> str:
        bag = tuple(indices[at, 1:-1].tolist())
        words = f", bag {bag[0] if len(bag) == 1 else bag}" if bag else ""
        return f"example {indices[at, 0]}{words}, position {indices[at, -1]}"

    if feature.length:
        # Each position of a sequence is a bag of its own; positions outside of [0, L) are cut off.
        feature_shape = FeatureShape(shape[0], (feature.length,), False, None, numbers is not None)
        lengths = np.zeros(shape[0], np.int64)
        # Columns ascend in a row, and of repeated numbers the last assignment counts.
        lengths[bags] = columns + 1
        columns, keep = after_cut(feature.config, columns, lengths, bags, feature.length)
        return flat_ids(
            feature,
            feature_shape,
            ids.values,
            bags * feature.length + columns,
            numbers,
            where,
            keep,
        )
    feature_shape = FeatureShape(shape[0], shape[1:-1], True, None, numbers is not None)
    return flat_ids(feature, feature_shape, ids.values, bags, numbers, where, None)


def check_order(
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


def check_coordinates(path: str, ids: SparseIds) -> None:
    """Check the shapes and dtype of coordinates, and that they lie inside `dense_shape`."""
    shape, indices, n = ids.dense_shape, ids.indices, ids.values.size
    if len(shape) < 2:
        expected = "SparseIds.dense_shape (B, H) or longer"
        raise ValueError(message(path, expected=expected, got=f"{shape}"))
    if ids.values.ndim != 1:
        got = f"shape {ids.values.shape}"
        raise ValueError(message(path, expected="SparseIds.values [N]", got=got))
    if indices.shape != (n, len(shape)) or indices.dtype.kind not in "iu":
        expected = f"SparseIds.indices [{n}, {len(shape)}] of integers"
        got = f"{indices.dtype} of shape {indices.shape}"
        raise ValueError(message(path, expected=expected, got=got))
    outside = (indices < 0).any(axis=1) | (indices >= np.asarray(shape)).any(axis=1)
    if outside.any():
        got = f"{indices[np.argmax(outside)].tolist()}"
        expected = f"SparseIds.indices inside dense_shape {shape}"
        raise ValueError(message(path, expected=expected, got=got))


def ragged_ids(feature: FeatureRules, ids: RaggedIds, weights: Any) -> HostIds:
    """Return the flat `HostIds` of ragged rows."""
    check_dtype(feature, ids.values)
    lengths = check_row_splits(feature.path, ids)
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
        return flat_ids(feature, feature_shape, ids.values, row, numbers, where, None)
    # Each of k = `first` ids of a row has bag row * k + position; the others are cut off.
    position, keep = positions_in_rows(ids, lengths), None
    if n and int(lengths.max()) > first:
        position, keep = after_cut(feature.config, position, lengths, row, first)
    bags = row * np.int64(first) + position
    return flat_ids(feature, feature_shape, ids.values, bags, numbers, where, keep)


def check_row_splits(path: str, ids: RaggedIds) -> np.ndarray:
    """Check the row splits `[R + 1]`, and return the lengths `[R]` of the rows."""
    splits, n = ids.row_splits, ids.values.size
    if ids.values.ndim != 1:
        got = f"shape {ids.values.shape}"
        raise ValueError(message(path, expected="RaggedIds.values [N]", got=got))
    if splits.ndim != 1 or not splits.size or splits.dtype.kind not in "iu":
        got = f"{splits.dtype} of shape {splits.shape}"
        expected = "RaggedIds.row_splits [B + 1] of integers"
        raise ValueError(message(path, expected=expected, got=got))
    lengths = np.diff(splits.astype(np.int64, copy=False))
    if splits[0] != 0 or splits[-1] != n or (lengths < 0).any():
        expected = f"RaggedIds.row_splits that rise from 0 to {n}"
        got = np.array2string(splits, threshold=8, edgeitems=3)
        raise ValueError(message(path, expected=expected, got=got))
    return lengths


def positions_in_rows(ids: RaggedIds, lengths: np.ndarray) -> np.ndarray:
    """Return the position of every id in its row, int64 `[N]`; `lengths` are those of the rows."""
    # Splits 0 2 2 3: positions 0 1 2 - 0 0 2 = 0 1 0.
    return np.arange(ids.values.size) - np.repeat(ids.row_splits[:-1].astype(np.int64), lengths)


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


def flat_ids(
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
    return HostIds(feature_shape, ids, bags.astype(np.int32, copy=False), weights, padded=False)
