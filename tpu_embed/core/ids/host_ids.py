"""Validate the ids of one feature on the host: any form that users give becomes `HostIds`.

Here are the entrance for all forms, and dense arrays; sparse, ragged and jagged ids are in
`flat_ids.py`.

Input: a dense array, `SparseIds` or `RaggedIds`, or a column that is read as one of them; weights
inside the container or beside it.
Output: `HostIds`, in which every id is valid: bad ids were treated as the feature's `on_bad_id`
says.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tpu_embed._types import PADDING_ID, Tracer
from tpu_embed.columns import is_column
from tpu_embed.config import FeatureConfig
from tpu_embed.core.ids.bad_ids import FeatureRules, check_dtype, resolve_ids
from tpu_embed.core.ids.containers import RaggedIds, SparseIds, read_ids, values_of
from tpu_embed.core.ids.feature_ids import HostIds, dense_shape
from tpu_embed.core.ids.flat_ids import flat_ids
from tpu_embed.core.ids.hashing import hash_ids
from tpu_embed.core.ids.keys import number_ids, number_keys, with_keys
from tpu_embed.core.ids.weights import read_weights


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
    config, length = feature.config, feature.length
    form = dense_shape(feature.path, config, ids.shape, weighted=weights is not None)
    numbers = read_weights(feature.path, config.table.dtype, ids, weights)

    def cut(array: np.ndarray) -> np.ndarray:
        """Return `[B, L]`, the columns of a sequence `[B, H]` that are kept."""
        width = array.shape[1]
        if length > width:
            return np.pad(array, ((0, 0), (0, length - width)), constant_values=PADDING_ID)
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
