"""What tables on the host take at home, and what travels between home and the devices in a step.

Input: the layout, the distinct rows of a batch, and how many of them the devices hold. Output: a
`HostPlan` for each table on the host.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from tpu_embed._checks import check_int, did_you_mean, is_number, message
from tpu_embed.core.layout import Layout, Stack, TableSlice
from tpu_embed.core.state import row_fields
from tpu_embed.planning.hits import HitCount
from tpu_embed.planning.sizes import Size

INDEX_BYTES = 20
"""What a row takes beside its bytes: id and mark 12, and up to 8 in the index that finds it.

`HostRows.nbytes` of a million rows has 19.3 to 19.7. It also counts the whole segment, of up to 16
MiB, that the next rows will fill."""

HitRate = float | HitCount
"""The share of a batch's distinct rows that are on the devices; or what a sample has counted."""


class HostUse(NamedTuple):
    """How tables on the host are used, by table.

    Attributes:
      hit_rates: of tables for which it is known.
      touched_rows: the rows that training will have touched; all of them where it is not given.
    """

    hit_rates: Mapping[str, HitRate]
    touched_rows: Mapping[str, int]


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


def read_use(
    layout: Layout,
    hit_rates: HitRate | Mapping[str, HitRate] | None,
    touched_rows: Mapping[str, int] | None,
) -> HostUse:
    """Return what a user says of the tables on the host, checked.

    Args:
      layout: where the rows live.
      hit_rates: one for all tables on the host, or by table; None: not known.
      touched_rows: by table; None: all rows.

    Raises:
      ValueError: there is no such table on the host, or a number is outside its range.
    """
    sizes = {table.name: table.declared_size for _, table in layout.on_host}
    if hit_rates is None:
        hit_rates = {}
    elif not isinstance(hit_rates, Mapping):
        hit_rates = dict.fromkeys(sizes, hit_rates)
    touched = dict(touched_rows or {})
    for what, given in {"hit_rates": hit_rates, "touched_rows": touched}.items():
        for name in given:
            if name not in sizes:
                expected, remedy = f"tables on the host, of {sorted(sizes)}", ""
                remedy = did_you_mean(f"{name}", sizes)
                text = message(what, expected=expected, got=repr(name), remedy=remedy)
                raise ValueError(text)
    for name, rate in hit_rates.items():
        if not isinstance(rate, HitCount) and not (is_number(rate) and 0 <= rate <= 1):
            expected, got = "a share from 0 to 1, or what count_hits returned", repr(rate)
            raise ValueError(message(f"hit_rates[{name!r}]", expected=expected, got=got))
    for name, rows in touched.items():
        touched[name] = min(sizes[name], check_int(f"touched_rows[{name!r}]", rows, minimum=0))
    return HostUse(hit_rates, touched)


def host_plans(layout: Layout, batch_rows: Mapping[str, int], use: HostUse) -> dict[str, HostPlan]:
    """Return the plan of each table on the host.

    Args:
      layout: where the rows live.
      batch_rows: distinct rows of a batch, by table.
      use: what is known of the tables.
    """
    return {
        table.name: _host_plan(stack, table, batch_rows[table.name], use)
        for stack, table in layout.on_host
    }


def _host_plan(stack: Stack, table: TableSlice, batch_rows: int, use: HostUse) -> HostPlan:
    assert table.storage is not None, "a table on the host"
    touched = use.touched_rows.get(table.name, table.declared_size)
    row_bytes = sum(field.nbytes for field in row_fields(stack).values())
    planned = HostPlan(
        device_rows=table.vocabulary_size,
        evict=table.storage.evict,
        path=table.storage.path,
        row_bytes=row_bytes,
        touched_rows=touched,
        row_store_bytes=touched * row_bytes,
        index_bytes=touched * INDEX_BYTES,
        batch_rows=batch_rows,
    )
    rate = use.hit_rates.get(table.name)
    if rate is None:
        return planned
    if isinstance(rate, HitCount):
        counts, held = (rate.rows, rate.brought, rate.sent), rate.hit_rate
        batch_rows, rows_in, rows_out = (math.ceil(one / rate.batches) for one in counts)
    else:
        # Each miss comes from home and displaces a row, as when all rows were touched long ago.
        held = float(rate)
        rows_in = rows_out = math.ceil(round(batch_rows * (1 - held), 6))
    return dataclasses.replace(
        planned,
        batch_rows=batch_rows,
        hit_rate=held,
        rows_in=rows_in,
        rows_out=rows_out,
        bytes_in=rows_in * row_bytes,
        bytes_out=rows_out * row_bytes,
    )


def moving_bytes(layout: Layout, plans: Mapping[str, HostPlan], size: Size) -> int:
    """Return bytes per device of the rows that come and go in a step, as far as they are known."""
    total = 0
    for stack, table in layout.on_host:
        known = plans[table.name]
        for rows in (known.rows_in or 0, known.rows_out or 0):
            mine = -(-rows // stack.num_shards)
            for field in row_fields(stack).values():
                total += size((mine, *field.shape), np.dtype(field.dtype)) if mine else 0
    return total
