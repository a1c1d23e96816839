"""Validate the ids of one feature on the host: any form that users give becomes `HostIds`.

A dense array stays one. Sparse, ragged and jagged ids become flat: the ids in batch order, the row
of each, and its position in that row. A row is a bag whose ids are combined, or a sequence, in
which every id has a bag of its own: position p of row r is bag r * L + p. So it is with ragged rows
that give their first L ids.

Sequences that are too long are cut, at their end or at their beginning, as `FeatureConfig.keep`
says. With L = 2, of the row [7, 3, 5] the first ids 7 3 are kept, or the last ids 3 5, which then
stand at the positions 0 1.

A jagged feature has a row of ids per example, and each id has a place of its own, with room for ids
that are left out; rows have no common length.

Input: a dense array, `SparseIds` or `RaggedIds`, or a column that is read as one of them; weights
inside the container or beside it.
Output: `HostIds`, in which every id is valid: bad ids were treated as the feature's `on_bad_id`
says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import message
from tpu_embed._types import PADDING_ID, Array, Tracer
from tpu_embed.columns import is_column
from tpu_embed.config import FeatureConfig
from tpu_embed.core.ids.containers import (
    RaggedIds,
    SparseIds,
    positions_in_rows,
    read_ids,
    values_of,
)
from tpu_embed.core.ids.feature_ids import (
    FeatureRules,
    FeatureShape,
    HostIds,
    JaggedRows,
    check_dtype,
    dense_shape,
    resolve_ids,
)
from tpu_embed.core.ids.gains import read_weights
from tpu_embed.core.ids.keys import hash_ids, number_ids, number_keys, with_keys


def host_ids(
    path: str, config: FeatureConfig, table_name: str, ids: Any, weights: Any
) -> HostIds:
    """Return the validated ids and weights of one feature.

    Args:
      path: the feature's path, for messages.
      config: the feature's config.
      table_name: the name of its table, for messages.
      ids: [B], [B, H] or [B, K, …, H] integers, `SparseIds` or `RaggedIds`; or a column of a data
        set (see `columns.py`): one of integers is [B], one of lists of integers is `RaggedIds`.
        What is masked, or missing from a column, is padding. For a table with a dynamic vocabulary
        they may be strings, which are hashed as `hash_ids(ids, None)` does.
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
    living = config.table.vocabulary is not None
    read: Any = read_ids(path, ids)
    if living and values_of(read).dtype.kind in "SUOT":
        try:
            # Of a dictionary-encoded column, `hash_ids` hashes equal strings once.
            read = read_ids(path, hash_ids(ids, None))
        except TypeError as error:
            raise TypeError(f"{path}: {error}") from error
    values = values_of(read)
    check_dtype(feature, values)
    validate = flat_ids if config.jagged or values is not read else _dense
    if living:
        read, distinct = number_keys(read)
        return with_keys(validate(feature, read, weights), distinct)
    host = validate(feature, read, weights)
    return host if config.table.storage is None else number_ids(host)


def _check_readable(feature: FeatureRules, ids: Any) -> None:
    """Check that ids are of a kind whose values can be read on the host."""
    first = next(iter(ids), None) if isinstance(ids, list) else ids
    if isinstance(first, Tracer):
        remedy = "place outside the jitted function, or give the ids to lookup and update inside it"
        raise feature.error(
            expected="ids whose values are known", got="a tracer", remedy=remedy
        )
    # Of a global array, this process can read only its own part.
    if not getattr(ids, "is_fully_addressable", True):
        raise feature.error(
            expected="this process's part of the batch, on the host",
            got="an array that is spread over several processes",
            remedy="give NumPy arrays; global arrays go to lookup and update inside a jit",
        )
    if not is_column(ids) and not isinstance(ids, (list, SparseIds, RaggedIds)):
        raise feature.error(
            expected="an array of ids, SparseIds or RaggedIds",
            got=type(ids).__name__,
            remedy="SparseIds and RaggedIds have constructors for lists, scipy, BCOO and Arrow",
        )


def _dense(feature: FeatureRules, ids: np.ndarray, weights: Any) -> HostIds:
    """Return the `HostIds` of a dense array `[B]`, `[B, H]` or `[B, K, …, H]`."""
    config, length = feature.config, feature.length
    form = dense_shape(feature.path, config, ids.shape, weighted=weights is not None)
    numbers = read_weights(feature.path, config.table.dtype, ids, weights)

    def cut(array):
        """Return `[B, L]`, the columns of a sequence `[B, H]` that are kept."""
        width = array.shape[1]
        if length > width:
            return np.pad(
                array, ((0, 0), (0, length - width)), constant_values=PADDING_ID
            )
        if config.keep == "first":
            return array[:, :length]
        # A row ends after its last id that is present: [-1, 7, 3, -1] after the third.
        present = np.ma.filled(ids != PADDING_ID, False)
        ends = np.max(present * np.arange(1, width + 1), axis=1, initial=0)
        before = np.maximum(ends - length, 0)[:, None]
        return np.take_along_axis(array, before + np.arange(length), axis=1)

    valid, padded = resolve_ids(
        feature, ids, lambda at: np.unravel_index(at, ids.shape), lowest=PADDING_ID
    )
    if length:
        valid, padded = cut(valid), padded or ids.shape[1] < length
    # All inner dims become one: [B, K₁, K₂, H] -> [B, K₁ · K₂, H]; a sequence [B, L] -> [B, L, 1].
    shape = (form.batch, form.bags, form.width or 0)
    if numbers is not None:
        numbers = (cut(numbers) if length else numbers).reshape(shape)
    host = HostIds(form, valid.reshape(shape), None, numbers, padded)
    return host.only(host.ids >= 0) if padded and form.weighted else host


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
    shape = (
        counts
        if jagged
        else (*counts, length)
        if length
        else config.output_shape or counts
    )
    num_rows, num_bags = math.prod(counts), math.prod(shape)
    if num_bags > _INT32_MAX:
        got = f"{shape[0]} x {math.prod(shape[1:])}"
        raise feature.error(expected=f"at most {_INT32_MAX} bags in a batch", got=got)

    def where(at):
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
    form = FeatureShape(
        shape[0], shape[1:], combines, None, numbers is not None, capacity
    )
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
    # Checks the rank.
    dense_shape(feature.path, feature.config, ids.shape, weighted=False)
    rows, positions = np.nonzero(np.ma.filled(ids != PADDING_ID, False))
    return _Rows((len(ids),), rows, lambda: positions, None)


def _of_sparse(feature: FeatureRules, ids: SparseIds) -> _Rows:
    """Return the rows of coordinates; see `check_coordinates`."""
    check_coordinates(feature.path, ids)
    shape, indices = ids.dense_shape, ids.indices
    if (feature.length or feature.config.jagged) and len(shape) != 2:
        raise feature.error(
            expected="a sequence's dense_shape as (B, H)", got=f"{shape}"
        )
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
            expected=expected,
            got=f"{first} before {second}",
            remedy="SparseIds.from_scipy sorts",
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
        raise _error(
            path,
            ids,
            f"indices inside dense_shape {shape}",
            indices[outside][0].tolist(),
        )


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
    return _Rows(
        (lengths.size,), rows, lambda: positions_in_rows(ids.row_splits), lengths
    )


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


def _error(
    path: str, ids: SparseIds | RaggedIds, expected: str, got: Any
) -> ValueError:
    return ValueError(
        message(path, expected=f"{type(ids).__name__}.{expected}", got=got)
    )


# -- inside a jit ----------------------------------------------------------------------------------


def shift_rows(
    ids: Array, weights: Array | None, length: int
) -> tuple[Array, Array | None]:
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
    return jnp.pad(
        rows[:, step:], ((0, 0), (0, min(step, rows.shape[1]))), constant_values=fill
    )
