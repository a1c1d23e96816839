"""Validate sparse, ragged and jagged ids on the host, and bring them into the flat layout.

All forms become one: the ids in batch order, the row of each, and its position in that row. A row
is a bag whose ids are combined, or a sequence, in which every id has a bag of its own: position p
of row r is bag r * L + p. So it is with ragged rows that give their first L ids.

Sequences that are too long are cut, at their end or at their beginning, as `FeatureConfig.keep`
says. With L = 2, of the row [7, 3, 5] the first ids 7 3 are kept, or the last ids 3 5, which then
stand at the positions 0 1.

A jagged feature has a row of ids per example, and each id has a place of its own, with room for ids
that are left out; rows have no common length.

Input: the rules of a feature, and its ids in a container, or in an array if it is jagged. Output:
flat `HostIds`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import message
from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.ids.bad_ids import FeatureRules, resolve_ids
from tpu_embed.core.ids.containers import RaggedIds, SparseIds, positions_in_rows, values_of
from tpu_embed.core.ids.feature_ids import FeatureShape, HostIds, JaggedRows, dense_shape
from tpu_embed.core.ids.weights import read_weights

_INT32_MAX = int(np.iinfo(np.int32).max)
_PLACES_PER_ID, _FEW_PLACES = 1000, 2**20
"""Rows with more places than so many for each id, and than so many in all, are a mistake."""


def flat_ids(feature: FeatureRules, ids: Any, weights: Any) -> HostIds:
    """Return the flat `HostIds` of a feature.

    Args:
      feature: the feature.
      ids: `SparseIds` or `RaggedIds` of integers; or integers `[B, H]` if the feature is jagged.
      weights: one per id, inside the container or beside it.

    Raises:
      TypeError, ValueError: as `host_ids`, but for ids that are not integers.
    """
    config, length, jagged = feature.config, feature.length, feature.config.jagged
    values = values_of(ids)
    read = {SparseIds: _of_sparse, RaggedIds: _of_ragged}.get(type(ids), _of_dense)
    counts, rows, positions_of, lengths = read(feature, ids)
    numbers = read_weights(feature.path, config.table.dtype, ids, weights)
    if values is ids:
        at = rows, positions_of()
        values, numbers = ids[at], None if numbers is None else numbers[at]
    # The activation's shape without D; one row of a jagged feature counts as one.
    shape = counts if jagged else (*counts, length) if length else config.output_shape or counts
    num_rows, num_bags = math.prod(counts), math.prod(shape)
    if num_bags > _INT32_MAX:
        got = f"{shape[0]} x {math.prod(shape[1:])}"
        raise feature.error(expected=f"at most {_INT32_MAX} bags in a batch", got=got)

    def where(at: int) -> Iterable[Any]:
        return *np.unravel_index(rows[at], counts), positions_of()[at]

    of_row = "example" if counts[0] == shape[0] else "row"
    valid, absent = resolve_ids(feature, values, where, lowest=0, first=of_row)
    bags, places, kept = rows, None, valid >= 0 if absent else True
    combines = not (length or jagged) and num_bags == num_rows
    if not combines:
        positions = positions_of()
        if lengths is None:
            # Positions ascend in a row, and of repeated numbers the last assignment counts.
            lengths = np.zeros(num_rows, np.int64)
            lengths[rows] = positions + 1
        limit = length or (_INT32_MAX if jagged else num_bags // max(1, num_rows))
        if lengths.max(initial=0) > limit:
            inside = positions < limit
            if config.keep == "last":
                positions = positions - np.maximum(lengths - limit, 0)[rows]
                inside = positions >= 0
            kept = kept & inside
        if jagged:
            splits = _row_splits(feature, np.minimum(lengths, limit), values.size)
            places = JaggedRows(splits, (splits[rows] + positions).astype(np.int32))
        else:
            bags = rows * np.int64(limit) + positions
    # The number of places on a device is counted when the number of devices is known.
    capacity = 0 if jagged else None
    form = FeatureShape(shape[0], shape[1:], combines, None, numbers is not None, capacity)
    bags = bags.astype(np.int32, copy=False)
    host = HostIds(form, valid, bags, numbers, padded=False, rows=places)
    return host if kept is True else host.only(kept)


def _row_splits(feature: FeatureRules, lengths: np.ndarray, num_ids: int) -> np.ndarray:
    """Return where the rows of a jagged feature begin and end among its places, int64 `[B + 1]`."""
    splits = np.concatenate([[0], np.cumsum(lengths)])
    most = min(_INT32_MAX, max(_FEW_PLACES, _PLACES_PER_ID * num_ids))
    if splits[-1] > most:
        longest = int(lengths.argmax())
        raise feature.error(
            expected=f"at most {most} places, as every place takes memory",
            got=f"{splits[-1]} places for {num_ids} ids: example {longest} has an id in "
            f"column {lengths[longest] - 1}",
            remedy="max_sequence_length=L of the FeatureConfig cuts rows; columns are positions in "
            "a history, not other numbers such as times",
        )
    return splits


# -- forms -----------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """The rows of a feature's ids, before they are cut.

    Attributes:
      counts: how the rows are numbered, row-major: (B,), or (B, K, …) with K rows per example.
      rows: integers `[N]`, the row of each id, ascending.
      positions_of: returns the position of each id in its row, int64 `[N]`.
      lengths: int64 `[R]`; None: each row ends after its last id.
    """

    counts: tuple[int, ...]
    rows: np.ndarray
    positions_of: Callable[[], np.ndarray]
    lengths: np.ndarray | None


def _of_dense(feature: FeatureRules, ids: np.ndarray) -> _Rows:
    """Return the rows of a jagged feature's array `[B, H]`, without padding."""
    dense_shape(feature.path, feature.config, ids.shape, weighted=False)  # checks the rank
    rows, positions = np.nonzero(np.ma.filled(ids != PADDING_ID, False))
    return _Rows((len(ids),), rows, lambda: positions, None)


def _of_sparse(feature: FeatureRules, ids: SparseIds) -> _Rows:
    """Return the rows of coordinates; see `check_coordinates`."""
    check_coordinates(feature.path, ids)
    shape, indices = ids.dense_shape, ids.indices
    if (feature.length or feature.config.jagged) and len(shape) != 2:
        raise feature.error(expected="a sequence's dense_shape as (B, H)", got=f"{shape}")
    feature.check_output_shape(shape[:-1])
    # In dense_shape (B, K, H) the entry (e, k, h) belongs to row e * K + k. Numbers are signed
    # here: a difference of unsigned ones is never negative, and would hide a wrong order.
    rows, *_, columns = indices.T.astype(np.int64)
    for size, column in zip(shape[1:-1], indices.T[1:-1], strict=True):
        rows = rows * size + column
    steps = np.diff(rows)
    ascend = (steps > 0) | ((steps == 0) & (np.diff(columns) > 0))
    if not ascend.all():
        first, second = indices[ascend.argmin() :][:2].tolist()
        expected = "SparseIds.indices sorted by row, then column, none twice"
        raise feature.error(
            expected=expected, got=f"{first} before {second}", remedy="SparseIds.from_scipy sorts"
        )
    return _Rows(shape[:-1], rows, lambda: columns, None)


def check_coordinates(path: str, ids: SparseIds) -> None:
    """Check the shapes and dtype of coordinates, and that they lie inside `dense_shape`."""
    shape, indices = ids.dense_shape, ids.indices
    if len(shape) < 2:
        raise _error(path, ids, "dense_shape (B, H) or longer", shape)
    wanted = _num_values(path, ids), len(shape)
    if indices.shape != wanted or indices.dtype.kind not in "iu":
        got = f"{indices.dtype} of shape {indices.shape}"
        raise _error(path, ids, f"indices {list(wanted)} of integers", got)
    outside = ((indices < 0) | (indices >= np.asarray(shape))).any(axis=1)
    if outside.any():
        raise _error(path, ids, f"indices inside dense_shape {shape}", indices[outside][0].tolist())


def _of_ragged(feature: FeatureRules, ids: RaggedIds) -> _Rows:
    """Return the rows of `RaggedIds`; see `check_row_splits`."""
    lengths, shape = check_row_splits(feature.path, ids), feature.config.output_shape
    # With 6 rows, output_shape (3, 2) makes each row a bag, and (3, 2, 4) takes its first 4 ids.
    if shape and (not lengths.size or math.prod(shape) % lengths.size):
        raise feature.error(
            expected=f"output_shape with a product of R or kR for {lengths.size} rows",
            got=f"{shape}, product {math.prod(shape)}",
        )
    # Row splits 0 2 2 3, that is lengths 2 0 1: rows of the ids 0 0 2.
    rows = np.repeat(np.arange(lengths.size, dtype=np.int32), lengths)
    return _Rows((lengths.size,), rows, lambda: positions_in_rows(ids.row_splits), lengths)


def check_row_splits(path: str, ids: RaggedIds) -> np.ndarray:
    """Check the row splits `[R + 1]`, and return the lengths `[R]` of the rows."""
    splits, n = ids.row_splits, _num_values(path, ids)
    if splits.ndim != 1 or not splits.size or splits.dtype.kind not in "iu":
        got = f"{splits.dtype} of shape {splits.shape}"
        raise _error(path, ids, "row_splits [B + 1] of integers", got)
    lengths = np.diff(splits.astype(np.int64, copy=False))
    if splits[0] != 0 or splits[-1] != n or (lengths < 0).any():
        got = np.array2string(splits, threshold=8, edgeitems=3)
        raise _error(path, ids, f"row_splits that rise from 0 to {n}", got)
    return lengths


def _num_values(path: str, ids: SparseIds | RaggedIds) -> int:
    """Return the number of ids in a container, after checking that they are a list."""
    if ids.values.ndim != 1:
        raise _error(path, ids, "values [N]", f"shape {ids.values.shape}")
    return ids.values.size


def _error(path: str, ids: SparseIds | RaggedIds, expected: str, got: Any) -> ValueError:
    return ValueError(message(path, expected=f"{type(ids).__name__}.{expected}", got=got))


# -- inside a jit ----------------------------------------------------------------------------------


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
