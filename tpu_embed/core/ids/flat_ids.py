"""Validate sparse, ragged and jagged ids on the host, and bring them into the flat layout.

Rows of sequences that are too long are cut, at their end or at their beginning, as
`FeatureConfig.keep` says. With L = 2, of the row [7, 3, 5] the first ids 7 3 are kept, or the last
ids 3 5, which then stand at the positions 0 1.

A jagged feature has a row of ids per example, and each id has a place of its own, with room for ids
that are left out; rows have no common length.

Input: the rules of a feature, and its ids in a container, or in an array if it is jagged. Output:
flat `HostIds`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import message
from tpu_embed._types import PADDING_ID, Array
from tpu_embed.config import FeatureConfig
from tpu_embed.core.ids import weights as weights_of
from tpu_embed.core.ids.bad_ids import (
    FeatureRules,
    check_dtype,
    dense_position,
    resolve_dense,
    resolve_flat,
)
from tpu_embed.core.ids.containers import RaggedIds, SparseIds
from tpu_embed.core.ids.feature_ids import FeatureShape, HostIds, JaggedRows, dense_shape

# -- rows that are cut -----------------------------------------------------------------------------


def dense_lengths(present: np.ndarray) -> np.ndarray:
    """Return the lengths of rows, int64 `[B]`: a row ends after its last id that is present.

    Args:
      present: bool `[B, H]`.
    """
    examples, width = present.shape
    if not width:
        return np.zeros(examples, np.int64)
    # [0, 1, 1, 0]: reversed 0 1 1 0, whose first 1 is at 1, so the length is 4 - 1.
    lengths = width - present[:, ::-1].argmax(axis=1)
    return np.where(present.any(axis=1), lengths, 0).astype(np.int64)


def ids_before(config: FeatureConfig, lengths: np.ndarray) -> np.ndarray:
    """Return how many positions are cut off the beginning of each row, int64 `[B]`.

    Args:
      config: of a sequence.
      lengths: int64 `[B]`, of the rows.
    """
    if config.keep == "first" or not config.max_sequence_length:
        return np.zeros_like(lengths)
    return np.maximum(lengths - config.max_sequence_length, 0)


def after_cut(
    config: FeatureConfig, positions: np.ndarray, lengths: np.ndarray, rows: np.ndarray, limit: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of ids after their rows are cut, and which of them are kept, bool `[N]`.

    Args:
      config: of a sequence.
      positions: int64 `[N]`, the position of each id in its row.
      lengths: int64 `[B]`, of the rows.
      rows: integers `[N]`, the row of each id.
      limit: how many positions a row may have.
    """
    if config.keep == "first":
        return positions, positions < limit
    positions = positions - ids_before(config, lengths)[rows]
    return positions, (positions >= 0) & (positions < limit)


def shift_rows(ids: Array, weights: Array | None, length: int) -> tuple[Array, Array | None]:
    """Move the last L ids of each row that is longer to the row's beginning; inside a jit.

    Args:
      ids: integers `[B, H]`, -1 for padding.
      weights: `[B, H]`, or None.
      length: L.

    Returns:
      Both, `[B, H]`; what was before the last L ids of a row is gone.
    """
    width = ids.shape[1]
    places = jnp.arange(1, width + 1, dtype=jnp.int32)
    lengths = jnp.max(jnp.where(ids != PADDING_ID, places, 0), axis=1, initial=0)
    before = jnp.maximum(lengths - length, 0)[:, None]  # [B, 1]
    # A shift by 5 = 4 + 1 is one by 4 and one by 1. A gather of single numbers would cost more on
    # a TPU than these few passes.
    for bit in range(max(0, width - length).bit_length()):
        step = 2**bit
        moves = (before & step) > 0
        ids = jnp.where(moves, _shifted(ids, step, PADDING_ID), ids)
        if weights is not None:
            weights = jnp.where(moves, _shifted(weights, step, 0), weights)
    return ids, weights


def _shifted(rows: Array, step: int, fill: int) -> Array:
    """Return rows `[B, H]` moved to the left by a number of places."""
    return jnp.pad(rows[:, step:], ((0, 0), (0, min(step, rows.shape[1]))), constant_values=fill)


# -- sparse and ragged ids -------------------------------------------------------------------------


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


# -- jagged ids ------------------------------------------------------------------------------------


_INT32_MAX = int(np.iinfo(np.int32).max)
_PLACES_PER_ID, _FEW_PLACES = 1000, 2**20
"""Rows with more places than so many for each id, and than so many in all, are a mistake."""


class _Given(NamedTuple):
    """Ids in batch order, before rows are cut.

    Attributes:
      ids: integers `[N]`.
      examples: int64 `[N]`, the example of each.
      positions: int64 `[N]`, the position of each in its row.
      weights: `[N]`; None for all ones.
      lengths: int64 `[B]`, the length of every row.
    """

    ids: np.ndarray
    examples: np.ndarray
    positions: np.ndarray
    weights: np.ndarray | None
    lengths: np.ndarray


def jagged_ids(feature: FeatureRules, ids: Any, weights: Any) -> HostIds:
    """Return the `HostIds` of a jagged feature.

    Args:
      feature: the feature.
      ids: integers `[B, H]`, `SparseIds` or `RaggedIds`.
      weights: one per id, inside the container or beside it; each scales its row.

    Raises:
      TypeError, ValueError: as `host_ids`.
    """
    check_dtype(feature, ids if isinstance(ids, np.ndarray) else ids.values)
    if isinstance(ids, SparseIds):
        given = _of_sparse(feature, ids, weights)
    elif isinstance(ids, RaggedIds):
        given = _of_ragged(feature, ids, weights)
    else:
        given = _of_dense(feature, ids, weights)
    limit = feature.length or _INT32_MAX
    lengths = np.minimum(given.lengths, limit)
    splits = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=splits[1:])
    if splits[-1] > _INT32_MAX:
        expected = f"at most {_INT32_MAX} places in a batch"
        raise feature.error(expected=expected, got=f"{splits[-1]}")
    if splits[-1] > max(_FEW_PLACES, _PLACES_PER_ID * given.ids.size):
        longest = int(lengths.argmax())
        raise feature.error(
            expected=f"at most {_PLACES_PER_ID} places for each id, as every place takes memory",
            got=f"{splits[-1]} places for {given.ids.size} ids: example {longest} has an id in "
            f"column {lengths[longest] - 1}",
            remedy="max_sequence_length=L of the FeatureConfig cuts rows; columns are positions in "
            "a history, not other numbers such as times",
        )
    at = given.positions, given.lengths, given.examples
    positions, inside = after_cut(feature.config, *at, limit)
    kept: Any = np.s_[:] if inside.all() else inside
    examples = given.examples[kept]
    places = (splits[examples] + positions[kept]).astype(np.int32)
    scale = None if given.weights is None else given.weights[kept]
    # The number of places on a device is counted when the number of devices is known.
    shape = FeatureShape(lengths.size, (), False, None, scale is not None, capacity=0)
    bags = examples.astype(np.int32)
    rows = JaggedRows(splits, places)
    return HostIds(shape, given.ids[kept], bags, scale, padded=False, rows=rows)


def _of_dense(feature: FeatureRules, ids: np.ndarray, weights: Any) -> _Given:
    """Return the ids of an array `[B, H]`; padding after a row's last id is not part of the row."""
    dense_shape(feature.path, feature.config, ids.shape, weighted=False)  # checks the rank
    numbers = weights_of.beside_dense(feature.path, feature.config.table.dtype, ids, weights)
    present = (np.ma.getdata(ids) != PADDING_ID) & ~np.ma.getmaskarray(ids)
    lengths = dense_lengths(present)
    valid, _ = resolve_dense(feature, ids, lambda at: dense_position(ids.shape, at))
    examples, positions = np.nonzero(valid != PADDING_ID)
    scale = None if numbers is None else numbers[examples, positions]
    return _Given(valid[examples, positions], examples, positions, scale, lengths)


def _of_sparse(feature: FeatureRules, ids: SparseIds, weights: Any) -> _Given:
    """Return the ids of coordinates; a row ends after its last column."""
    check_coordinates(feature.path, ids)
    if len(ids.dense_shape) != 2:
        got = f"{ids.dense_shape}"
        raise feature.error(expected="a sequence's dense_shape as (B, H)", got=got)
    examples, positions = ids.indices.astype(np.int64).T
    check_order(feature, ids.indices, examples, positions)
    numbers = weights_of.beside_sparse(feature.path, feature.config.table.dtype, ids, weights)
    lengths = np.zeros(ids.dense_shape[0], np.int64)
    # Columns ascend in a row, and of repeated numbers the last assignment counts.
    lengths[examples] = positions + 1
    return _valid(feature, _Given(ids.values, examples, positions, numbers, lengths))


def _of_ragged(feature: FeatureRules, ids: RaggedIds, weights: Any) -> _Given:
    """Return the ids of ragged rows."""
    lengths = check_row_splits(feature.path, ids)
    numbers = weights_of.beside_ragged(feature.path, feature.config.table.dtype, ids, weights)
    examples = np.repeat(np.arange(lengths.size), lengths)
    positions = positions_in_rows(ids, lengths)
    return _valid(feature, _Given(ids.values, examples, positions, numbers, lengths))


def _valid(feature: FeatureRules, given: _Given) -> _Given:
    """Return flat ids without bad ones, whose places stay empty."""

    def where(at: int) -> str:
        return f"example {given.examples[at]}, position {given.positions[at]}"

    ids, valid = resolve_flat(feature, given.ids, where)
    kept: Any = np.s_[:] if valid is None else valid
    scale = None if given.weights is None else given.weights[kept]
    return _Given(ids[kept], given.examples[kept], given.positions[kept], scale, given.lengths)
