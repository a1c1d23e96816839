"""Keys of a living vocabulary: numbers of 64 bits instead of row numbers.

A batch of keys is validated before anyone knows the keys' rows, because a batch that is refused
must not change the map from keys to rows. So each key is first replaced by its position among the
feature's distinct keys, which is treated like a row id that is always valid. Once the rows are
known, they take the places of the positions. The bags [k, m] and [k], whose keys k and m have the
rows 8 and -1 (none), are

    distinct keys [k, m]     positions [[0, 1], [0, -1]]     rows [[8, -1], [8, -1]]

Input: integers of any dtype; later the row of each key. Output: positions and keys; then `HostIds`
as those of any other table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tpu_embed._types import PADDING_ID
from tpu_embed.columns import mask_missing
from tpu_embed.core.ids.containers import values_of
from tpu_embed.core.ids.feature_ids import HostIds
from tpu_embed.kernels import dispatch
from tpu_embed.kernels.host_reference import DistinctKeys


class Split(NamedTuple):
    """The keys that one feature of a batch looks up.

    Attributes:
      known: int32 `[k]`, the rows of keys that have one, each once.
      absent: int32 `[m]`, the positions of the keys without a row, each once, in batch order.
      keys: uint64 `[m]`, these keys.
      examples: int64 `[m]`, the first example of each.
    """

    known: np.ndarray
    absent: np.ndarray
    keys: np.ndarray
    examples: np.ndarray


def number_keys(ids: Any) -> tuple[Any, DistinctKeys]:
    """Replace the keys of a feature by their positions among the distinct ones.

    Args:
      ids: an array or a container of integers; -1 is padding in dense arrays of a signed dtype, and
        a key like any other elsewhere.

    Returns:
      The same array or container with positions int32, those of padding masked; and the distinct
      keys, with what stands at padding among them.
    """
    values = values_of(ids)
    numbers, absent = np.ma.getdata(values), np.ma.getmask(values)
    signed = numbers.dtype.kind == "i"
    if values is ids and signed:
        absent = absent | (numbers == PADDING_ID)
    wide = np.int64 if signed else np.uint64
    distinct = _distinct(numbers.astype(wide, copy=False).reshape(-1))
    numbered = mask_missing(distinct.positions.reshape(values.shape), absent)
    if values is not ids:
        numbered = dataclasses.replace(ids, values=numbered)
    return numbered, distinct


def with_keys(host: HostIds, distinct: DistinctKeys) -> HostIds:
    """Return the `HostIds` of a feature whose ids are positions, with the keys that these are of.

    Args:
      host: the feature.
      distinct: what `number_keys` returned.
    """
    # Nothing was left out of dense ids that are as many as before, and none of them is padding.
    whole = host.bags is None and not host.padded and host.ids.size == distinct.positions.size
    first = distinct.first if whole else None
    return dataclasses.replace(host, keys=distinct.keys, first=first)


def number_ids(host: HostIds) -> HostIds:
    """Replace the ids of a table on the host, which were validated, by positions among them."""
    if not host.padded:
        keys, numbered, first = _distinct(host.ids.reshape(-1).astype(np.int64, copy=False))
        numbered = numbered.reshape(host.ids.shape)
    else:
        chosen, first = host.ids >= 0, None
        numbered = np.full(host.ids.shape, PADDING_ID, np.int32)
        keys, numbered[chosen], _ = _distinct(host.ids[chosen].astype(np.int64))
    return dataclasses.replace(host, ids=numbered, keys=keys, first=first)


def _distinct(numbers: np.ndarray) -> DistinctKeys:
    """Return the distinct keys among integers of 64 bits `[n]`; a signed -1 is the key 2⁶⁴ - 1."""
    return dispatch.host_kernels().distinct_keys(np.ascontiguousarray(numbers).view(np.uint64))


def _positions(host: HostIds) -> np.ndarray:
    return np.ascontiguousarray(host.ids.reshape(-1), np.int32)


def looked_up(host: HostIds) -> np.ndarray:
    """Return the positions of the keys that a feature looks up, `[m]` in batch order."""
    positions = host.ids.reshape(-1)
    return positions[positions >= 0] if host.padded else positions


def split_keys(host: HostIds, rows: np.ndarray) -> Split:
    """Split the keys that a feature looks up into those with a row and those without.

    Args:
      host: the feature, with positions for ids.
      rows: int32 `[n]`, the row of each key; -1: none.
    """
    assert host.keys is not None, "positions are those of keys"
    positions = _positions(host)
    if host.first is None:
        known, places = dispatch.host_kernels().split_by_row(positions, rows)
    else:
        # Faster than `rows[rows >= 0]`: NumPy reads a mask twice, to count and to copy.
        known = rows.take(np.flatnonzero(rows >= 0))
        places = host.first.take(np.flatnonzero(rows < 0))
    if host.bags is not None:
        examples = host.bags[places].astype(np.int64) // host.shape.bags
    else:  # positions [B, bags, width]: the index of an id, divided by bags · width
        examples = places // max(1, positions.size // host.shape.batch)
    absent = positions[places]
    return Split(known, absent, host.keys[absent], examples)


def batch_order(features: Sequence[tuple[np.ndarray, int]]) -> np.ndarray:
    """Return the order in which the keys of several features stand in the batch.

    Args:
      features: for each feature in flattening order, the example of each of its keys, int64
        `[m]`, ascending, and the number of its examples in the global batch.

    Returns:
      int `[all m]`, the order of the keys, counted through all features.
    """
    # Example e of B comes at e / B of the batch. The fractions of batches of 2 and 3 examples
    # become the integers 0 3 and 0 2 4. A stable sort keeps the features, and the keys of one
    # example, in order. Python's integers are as large as need be.
    whole = math.lcm(*(size for _, size in features))
    dtype = np.int64 if whole < 2**63 else object
    places = [index.astype(dtype) * (whole // size) for index, size in features]
    return np.argsort(np.concatenate([np.zeros(0, dtype), *places]), kind="stable")


def give_rows(host: HostIds, rows: np.ndarray) -> HostIds:
    """Return a feature's ids with the rows of its keys; what has no row is as a dropped id.

    Args:
      host: the feature, with positions for ids.
      rows: int32 `[n]`, the row of each key; -1: none.
    """
    ids = dispatch.host_kernels().rows_at(rows, _positions(host)).reshape(host.ids.shape)
    found = dataclasses.replace(host, ids=ids, keys=None, first=None)
    return found.only(ids >= 0) if host.padded or (rows < 0).any() else found
