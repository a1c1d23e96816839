"""Count on a sample how many rows of a batch are found on the devices, without any device.

The map that gives rows of a table on the host their places runs over the ids of the sample, as it
would in an engine. So the count is exact for these batches in this order.

Input: batches of ids. Output: a `HitCount`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from tpu_embed._checks import check_int, local_path, message
from tpu_embed._types import PADDING_ID
from tpu_embed.kernels import dispatch
from tpu_embed.storage import HostRows, HostStorage, RowField
from tpu_embed.vocabulary import DynamicVocabulary, VocabularyMap

_SEEN = {"seen": RowField((1,), np.dtype(np.uint8))}
_MOST_ROWS = 2**63


@dataclasses.dataclass(frozen=True, kw_only=True)
class HitCount:
    """What the batches of a sample found on the devices, and what moved for them.

    Attributes:
      batches: the batches that were counted.
      rows: the distinct rows of each batch, summed over the batches.
      hits: how many of them were on the devices.
      brought: how many came from home.
      drawn: how many no batch had before: they are drawn on the devices and do not travel.
      sent: rows that were displaced, and sent home.
      touched_rows: distinct rows of the whole sample, with those of the batches that were left out.

    Example:
      >>> HitCount(
      ...     batches=2, rows=10, hits=4, brought=1, drawn=5, sent=3, touched_rows=5
      ... ).hit_rate
      0.4
    """

    batches: int
    rows: int
    hits: int
    brought: int
    drawn: int
    sent: int
    touched_rows: int

    @property
    def hit_rate(self) -> float:
        """The share of a batch's distinct rows that are on the devices; 1 if there are no rows."""
        return self.hits / self.rows if self.rows else 1.0


def count_hits(
    batches: Iterable[Any] | str | os.PathLike[str],
    storage: HostStorage,
    *,
    lookahead: int = 0,
    warm_up: int = 0,
) -> HitCount:
    """Count how many rows of each batch the devices would hold, and how many would move.

    Args:
      batches: the ids that each training batch looks up in the table, integer arrays of any shape
        in batch order, in which -1 is padding; or the name of a `.npy` file of such an array, whose
        first axis counts the batches. Ids of several features `[B, …]` stand next to each other,
        `[B, H + K]`.
      storage: how many rows the devices hold, and which of them leave first.
      lookahead: that of the engine: the batches before a batch whose rows stay, too.
      warm_up: the first batches, which find nothing on empty devices, are taken but not counted.

    Returns:
      The counts of the batches after the first `warm_up` ones.

    Raises:
      TypeError: ids that are not integers.
      ValueError: an id is negative or too large; no batch is left to count; a batch has no room on
        the devices, and the message says which `device_rows` it needs; or the file is no array of
        batches.

    Example:
      >>> ids = np.array([[0, 1], [1, 2], [0, 1]])
      >>> found = count_hits(ids, HostStorage(device_rows=2))
      >>> found.rows, found.hits, found.brought, found.drawn, found.sent
      (6, 2, 1, 3, 2)
    """
    warm_up = check_int("warm_up", warm_up, minimum=0)
    rules = DynamicVocabulary(evict=storage.evict)
    cache = _Cache(VocabularyMap(rules, storage.device_rows, lookahead), HostRows(_SEEN))
    total, taken = np.zeros(5, np.int64), 0
    for ids in _read(batches):
        counts = cache.take(_keys(ids), lookahead, storage)
        taken += 1
        if taken > warm_up:
            total += counts
    if taken <= warm_up:
        expected, got = f"more than {warm_up} batches, those of warm_up", f"{taken}"
        raise ValueError(message("batches", expected=expected, got=got))
    rows, hits, brought, drawn, sent = total.tolist()
    return HitCount(
        batches=taken - warm_up,
        rows=rows,
        hits=hits,
        brought=brought,
        drawn=drawn,
        sent=sent,
        touched_rows=cache.touched,
    )


@dataclasses.dataclass
class _Cache:
    """The places on the devices, and which rows have been at home; `touched`: drawn so far."""

    places: VocabularyMap
    home: HostRows
    touched: int = 0

    def take(self, keys: np.ndarray, lookahead: int, storage: HostStorage) -> list[int]:
        """Take a batch of keys, uint64 `[n]`; return rows, hits, brought, drawn and sent."""
        # In order of first appearance, in which the map gives unknown keys their places.
        distinct = dispatch.host_kernels().distinct_keys(keys).keys
        found = self.places.find(distinct)
        known = found[found >= 0]
        moved = self.places.take(known, distinct[found < 0])
        if moved.unseen:
            _refuse(storage.device_rows, moved.unseen, lookahead)
        self.places.forget(self.places.step)
        brought = int(self.home.contains(moved.new_keys).sum())
        drawn = moved.new_keys.size - brought
        self.touched += drawn
        left = moved.evicted_keys
        self.home.write(left, {"seen": np.zeros((left.size, 1), np.uint8)})
        return [distinct.size, known.size, brought, drawn, left.size]


def _refuse(device_rows: int, more: int, lookahead: int) -> None:
    """Refuse a batch as `EmbeddingEngine.place` does."""
    many = "a batch" if not lookahead else f"{lookahead + 1} batches"
    expected, got = f"at most {device_rows} distinct ids in {many}", f"{device_rows + more}"
    remedy = f"give HostStorage(device_rows={device_rows + more}) or more, or smaller batches"
    raise ValueError(message("batches", expected=expected, got=got, remedy=remedy))


def _read(batches: Iterable[Any] | str | os.PathLike[str]) -> Iterable[Any]:
    """Return batches; those of a file are read from it one by one."""
    if not isinstance(batches, (str, os.PathLike)):
        return batches
    path, expected = local_path(batches, "batches"), "a .npy file of ids [batches, …]"
    remedy = "numpy.save makes one"
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        text = message(f"{path}", expected=expected, got=f"{error}", remedy=remedy)
        raise ValueError(text) from error
    if not isinstance(array, np.ndarray) or array.ndim < 2:
        got = f"shape {getattr(array, 'shape', 'of an archive')}"
        raise ValueError(message(f"{path}", expected=expected, got=got, remedy=remedy))
    return array


def _keys(ids: Any) -> np.ndarray:
    """Return the ids of a batch that are not padding, uint64 `[n]` in batch order."""
    numbers = np.asarray(ids).reshape(-1)
    if numbers.dtype.kind not in "iu":
        got = f"{numbers.dtype}"
        raise TypeError(message("batches", expected="ids of an integer dtype", got=got))
    if numbers.dtype.kind == "i":
        numbers = numbers[numbers != PADDING_ID]
    bad = numbers[(numbers < 0) | (numbers >= np.uint64(_MOST_ROWS))]
    if bad.size:
        expected, got = "ids from 0 to 2**63 - 1, or -1 for padding", f"{bad[0]}"
        raise ValueError(message("batches", expected=expected, got=got))
    return np.ascontiguousarray(numbers.astype(np.uint64))
