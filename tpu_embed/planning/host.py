"""What tables on the host take at home, and what travels between home and the devices in a step.

How many rows of a batch are found on the devices can be counted on a sample: the map that gives
rows their places runs over its ids, as it would in an engine. So the count is exact for these
batches in this order.

Input: the layout and the distinct rows of a batch; or batches of ids. Output: a `HostPlan` for each
table on the host; or a `HitCount`.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tpu_embed._checks import (
    check_int,
    check_integers,
    did_you_mean,
    is_number,
    local_path,
    refuse,
)
from tpu_embed._types import PADDING_ID
from tpu_embed.core.layout import Layout, Stack
from tpu_embed.core.state import row_fields
from tpu_embed.kernels import dispatch
from tpu_embed.planning.costs import Size
from tpu_embed.storage import HostRows, HostStorage, RowField
from tpu_embed.vocabulary import DynamicVocabulary, VocabularyMap

_SEEN = {"seen": RowField((1,), np.dtype(np.uint8))}


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
    # The places on the devices, and which rows have been at home.
    places, home = VocabularyMap(rules, storage.device_rows, lookahead), HostRows(_SEEN)
    counts: dict[str, int] = collections.Counter()
    taken = touched = 0
    for ids in _read(batches):
        # In order of first appearance, in which the map gives unknown keys their places.
        distinct = dispatch.host_kernels().distinct_keys(_keys(ids)).keys
        found = places.find(distinct)
        known = found[found >= 0]
        moved = places.take(known, distinct[found < 0])
        if moved.unseen:
            # As `EmbeddingEngine.place` does.
            many = "a batch" if not lookahead else f"{lookahead + 1} batches"
            got = storage.device_rows + moved.unseen
            refuse(
                "batches",
                expected=f"at most {storage.device_rows} distinct ids in {many}",
                got=got,
                remedy=f"give HostStorage(device_rows={got}) or more, or smaller batches",
            )
        places.forget(places.step)
        brought, left = int(home.contains(moved.new_keys).sum()), moved.evicted_keys
        drawn = moved.new_keys.size - brought
        home.write(left, {"seen": np.zeros((left.size, 1), np.uint8)})
        taken, touched = taken + 1, touched + drawn
        if taken > warm_up:
            counted = {"rows": distinct.size, "hits": known.size, "sent": left.size}
            counts.update(counted, brought=brought, drawn=drawn)
    if taken <= warm_up:
        refuse(
            "batches",
            expected=f"more than {warm_up} batches, those of warm_up",
            got=f"{taken}",
        )
    return HitCount(batches=taken - warm_up, touched_rows=touched, **counts)


def _read(batches: Iterable[Any] | str | os.PathLike[str]) -> Iterable[Any]:
    """Return batches; those of a file are read from it one by one."""
    if not isinstance(batches, (str, os.PathLike)):
        return batches
    path, expected = local_path(batches, "batches"), "a .npy file of ids [batches, …]"
    array: Any = None
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        got = f"shape {getattr(array, 'shape', 'of an archive')}"
    except (OSError, ValueError, EOFError) as error:
        got = f"{error}"
    if getattr(array, "ndim", 0) < 2:
        refuse(f"{path}", expected=expected, got=got, remedy="numpy.save makes one")
    return array


def _keys(ids: Any) -> np.ndarray:
    """Return the ids of a batch that are not padding, uint64 `[n]` in batch order."""
    numbers = np.asarray(ids).reshape(-1)
    check_integers("batches", numbers.dtype, expected="ids of an integer dtype")
    if numbers.dtype.kind == "i":
        numbers = numbers[numbers != PADDING_ID]
    bad = numbers[(numbers < 0) | (numbers >= np.uint64(2**63))]
    if bad.size:
        refuse(
            "batches",
            expected="ids from 0 to 2**63 - 1, or -1 for padding",
            got=f"{bad[0]}",
        )
    return np.ascontiguousarray(numbers.astype(np.uint64))


INDEX_BYTES = 20
"""What a row takes beside its bytes: id and mark 12, and up to 8 in the index that finds it.

`HostRows.nbytes` of a million rows has 19.3 to 19.7. It also counts the whole segment, of up to 16
MiB, that the next rows will fill."""

HitRate = float | HitCount
"""The share of a batch's distinct rows that are on the devices; or what a sample has counted."""


@dataclasses.dataclass(frozen=True)
class HostPlan:
    """What one table on the host has there, and what it moves in a step, on all hosts together.

    Attributes:
      device_rows: C, the rows that the devices hold together.
      evict: which of them leave first.
      path: the folder of the scratch file with the rows; None: they are in memory.
      row_bytes: bytes of a row: its values, and its part of each slot.
      touched_rows: rows at home that are planned for.
      row_store_bytes: bytes of these rows, in memory or in the file.
      index_bytes: bytes of memory of what finds them.
      batch_rows: distinct rows of a batch.
      hit_rate: the share of them that the devices hold; None if it is not known. Then the rows and
        bytes that move are not known either.
      rows_in: rows that a step brings from home.
      rows_out: rows that it sends home.
      bytes_in: bytes of the former.
      bytes_out: bytes of the latter.
    """

    device_rows: int
    evict: str
    path: str | None
    row_bytes: int
    touched_rows: int
    row_store_bytes: int
    index_bytes: int
    batch_rows: int
    hit_rate: float | None = None
    rows_in: int | None = None
    rows_out: int | None = None
    bytes_in: int | None = None
    bytes_out: int | None = None


def host_plans(
    layout: Layout,
    batch_rows: Mapping[str, int],
    hit_rates: HitRate | Mapping[str, HitRate] | None,
    touched_rows: Mapping[str, int] | None,
) -> dict[str, HostPlan]:
    """Return the plan of each table on the host.

    Args:
      layout: where the rows live.
      batch_rows: distinct rows of a batch, by table.
      hit_rates: one for all tables on the host, or by table; None: not known.
      touched_rows: by table; None: all rows.

    Raises:
      ValueError: there is no such table on the host, or a number is outside its range.
    """
    sizes = {table.name: table.declared_size for _, table in layout.on_host}
    if not isinstance(hit_rates, Mapping):
        hit_rates = {} if hit_rates is None else dict.fromkeys(sizes, hit_rates)
    touched = touched_rows or {}
    for what, given in {"hit_rates": hit_rates, "touched_rows": touched}.items():
        for name in given:
            if name not in sizes:
                refuse(
                    what,
                    expected=f"tables on the host, of {sorted(sizes)}",
                    got=repr(name),
                    remedy=did_you_mean(name, sizes),
                )
    plans = {}
    for stack, table in layout.on_host:
        name, size = table.name, row_bytes(stack)
        storage: Any = table.storage
        rows = check_int(
            f"touched_rows[{name!r}]", touched.get(name, sizes[name]), minimum=0
        )
        rows, asked = (
            min(sizes[name], rows),
            min(batch_rows[name], table.vocabulary_size),
        )
        known, moved = hit_rates.get(name), {}
        if known is not None:
            if isinstance(known, HitCount):
                counts = known.rows, known.brought, known.sent
                asked, came, left = (
                    math.ceil(count / known.batches) for count in counts
                )
                hit_rate = known.hit_rate
            else:
                if not (is_number(known) and 0 <= known <= 1):
                    refuse(
                        f"hit_rates[{name!r}]",
                        expected="a share from 0 to 1, or what count_hits returned",
                        got=repr(known),
                    )
                # Each miss comes from home and displaces a row, as when all rows were touched.
                hit_rate = float(known)
                came = left = math.ceil(round(asked * (1 - hit_rate), 6))
            moved = {
                "hit_rate": hit_rate,
                "rows_in": came,
                "rows_out": left,
                "bytes_in": came * size,
                "bytes_out": left * size,
            }
        plans[name] = HostPlan(
            device_rows=table.vocabulary_size,
            evict=storage.evict,
            path=storage.path,
            row_bytes=size,
            touched_rows=rows,
            row_store_bytes=rows * size,
            index_bytes=rows * INDEX_BYTES,
            batch_rows=asked,
            **moved,
        )
    return plans


def row_bytes(stack: Stack) -> int:
    """Return the bytes of a row of a stack: its values, and its part of each slot."""
    return sum(field.nbytes for field in row_fields(stack).values())


def moving_bytes(layout: Layout, plans: Mapping[str, HostPlan], size: Size) -> int:
    """Return bytes per device of the rows that come and go in a step, as far as they are known."""
    total = 0
    for stack, table in layout.on_host:
        known = plans[table.name]
        for rows in (known.rows_in or 0, known.rows_out or 0):
            mine = -(-rows // stack.num_shards)
            for field in row_fields(stack).values():
                total += size((mine, *field.shape), field.dtype)
    return total
