"""Validate the ids of a jagged sequence on the host.

The activation of a jagged feature holds the rows of all examples, one after the other. Each id has
a place in it, and an id that is left out leaves its place empty: nothing moves up. The dense ids
[7, -1, 3, -1] and [-1, -1, -1, -1] are rows of 3 and 0 places, and 7 and 3 stand at 0 and 2.

Input: the rules of a feature, and its ids as `[B, H]`, `SparseIds` or `RaggedIds`. Output: flat
`HostIds` with their `rows`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tpu_embed._types import PADDING_ID
from tpu_embed.core.ids import weights as weights_of
from tpu_embed.core.ids.bad_ids import (
    FeatureRules,
    check_dtype,
    dense_position,
    resolve_dense,
    resolve_flat,
)
from tpu_embed.core.ids.containers import RaggedIds, SparseIds
from tpu_embed.core.ids.cut_rows import after_cut, dense_lengths
from tpu_embed.core.ids.feature_ids import FeatureShape, HostIds, JaggedRows, dense_shape
from tpu_embed.core.ids.flat_ids import (
    check_coordinates,
    check_order,
    check_row_splits,
    positions_in_rows,
)

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
