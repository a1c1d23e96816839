"""Validate the ids of one feature on the host: any form that users give becomes `HostIds`.

Here are the entrance for all forms, and dense arrays; sparse and ragged ids are in `flat_ids.py`,
jagged sequences in `flat_ids.py`.

Input: a dense array, `SparseIds` or `RaggedIds`, or a column that is read as one of them; weights
inside the container or beside it.
Output: `HostIds`, in which every id is valid: bad ids were treated as the feature's `on_bad_id`
says.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tpu_embed._types import PADDING_ID, Tracer
from tpu_embed.columns import is_column
from tpu_embed.config import FeatureConfig
from tpu_embed.core.ids import weights as weights_of
from tpu_embed.core.ids.bad_ids import FeatureRules, check_dtype, dense_position, resolve_dense
from tpu_embed.core.ids.containers import RaggedIds, SparseIds, read_ids
from tpu_embed.core.ids.feature_ids import HostIds, dense_shape
from tpu_embed.core.ids.flat_ids import (
    dense_lengths,
    ids_before,
    jagged_ids,
    ragged_ids,
    sparse_ids,
)
from tpu_embed.core.ids.hashing import hash_ids
from tpu_embed.core.ids.keys import number_ids, number_keys, with_keys


def host_ids(path: str, config: FeatureConfig, table_name: str, ids: Any, weights: Any) -> HostIds:
    """Return the validated ids and weights of one feature.

    Args:
      path: the feature's path, for messages.
      config: the feature's config.
      table_name: the name of its table, for messages.
      ids: [B], [B, H] or [B, K, …, H] integers, `SparseIds` or `RaggedIds`; or a column of a data
        set (see `columns.py`): one of integers is [B], one of lists of integers is `RaggedIds`.
        What is masked, or missing from a column, is padding. For a table with a living vocabulary
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
    read = read_ids(path, ids)
    if config.table.vocabulary is None:
        plain = _read(feature, read, weights)
        return plain if config.table.storage is None else number_ids(plain)
    numbered, distinct = number_keys(feature, hashed(path, ids, read))
    return with_keys(_read(feature, numbered, weights), distinct)


def hashed(path: str, given: Any, read: Any) -> Any:
    """Return ids, hashed if they are strings.

    Args:
      path: the feature's path.
      given: the ids as they were given, of which `hash_ids` hashes equal ones once.
      read: what `read_ids` made of them.

    Raises:
      TypeError: some of them are neither strings nor integers.
    """
    values = read.values if isinstance(read, (SparseIds, RaggedIds)) else read
    if np.ma.getdata(values).dtype.kind not in "SUOT":
        return read
    try:
        return read_ids(path, hash_ids(given, None))
    except TypeError as error:
        raise TypeError(f"{path}: {error}") from error


def _read(feature: FeatureRules, ids: Any, weights: Any) -> HostIds:
    """Return the `HostIds` of an array or a container."""
    if feature.config.jagged:
        return jagged_ids(feature, ids, weights)
    if isinstance(ids, SparseIds):
        return sparse_ids(feature, ids, weights)
    if isinstance(ids, RaggedIds):
        return ragged_ids(feature, ids, weights)
    return _dense(feature, ids, weights)


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
    if not is_column(ids) and not isinstance(ids, (list, SparseIds, RaggedIds)):
        raise feature.error(
            expected="an array of ids, SparseIds or RaggedIds",
            got=type(ids).__name__,
            remedy="SparseIds and RaggedIds have constructors for lists, scipy, BCOO and Arrow",
        )


def _dense(feature: FeatureRules, ids: np.ndarray, weights: Any) -> HostIds:
    """Return the `HostIds` of a dense array `[B]`, `[B, H]` or `[B, K, …, H]`."""
    check_dtype(feature, ids)
    weighted = weights is not None
    feature_shape = dense_shape(feature.path, feature.config, ids.shape, weighted=weighted)
    numbers = weights_of.beside_dense(feature.path, feature.config.table.dtype, ids, weights)
    given, config = ids, feature.config
    ids, padded = resolve_dense(feature, ids, functools.partial(dense_position, ids.shape))
    # A weight at a padded position may be any number; it must not count in its bag.
    if numbers is not None and padded:
        numbers = np.where(ids == PADDING_ID, numbers.dtype.type(0), numbers)
    if feature.length:
        padded = padded or ids.shape[1] < feature.length
        if config.keep == "last" and ids.shape[1] > feature.length:
            present = (np.ma.getdata(given) != PADDING_ID) & ~np.ma.getmaskarray(given)
            before, padded = ids_before(config, dense_lengths(present)), True
            ids = _columns_after(ids, before, feature.length)
            numbers = None if numbers is None else _columns_after(numbers, before, feature.length)
        ids = _first_columns(ids, feature.length, PADDING_ID)
        numbers = None if numbers is None else _first_columns(numbers, feature.length, 0)
    # All inner dims become one: [B, K₁, K₂, H] -> [B, K₁ · K₂, H]; a sequence [B, L] -> [B, L, 1].
    shape = (feature_shape.batch, feature_shape.bags, feature_shape.width or 0)
    scale = None if numbers is None else numbers.reshape(shape)
    return HostIds(feature_shape, ids.reshape(shape), None, scale, padded)


def _columns_after(array: np.ndarray, before: np.ndarray, length: int) -> np.ndarray:
    """Return `[B, L]`: of each row of `[B, H]` the L columns after those that are cut off."""
    return np.take_along_axis(array, before[:, None] + np.arange(length), axis=1)


def _first_columns(array: np.ndarray, length: int, fill: int) -> np.ndarray:
    """Return `[B, length]`: the first columns of an array `[B, H]`, padded with `fill`."""
    missing = length - array.shape[1]
    if missing > 0:
        return np.pad(array, ((0, 0), (0, missing)), constant_values=fill)
    return array[:, :length]
