"""Rows that a batch brings along to be looked up: those of tables on the host.

A training batch gives its rows places on the devices. One that is only looked up moves nothing. So
it brings the rows that have no place there, and the lookup reads a small table instead of the
large one, with the rows of this batch alone. Of the rows 7, 8 and 9, of which the devices hold 8,

    cached      small row 1 <- the large table's place of 8
    stored      small row 0 <- 7, as it is at home
    drawn       small row 2 <- 9, which no training batch has had

Input, output: arrays of one stack, a line per shard of it.
"""

from __future__ import annotations

from typing import NamedTuple

from tpu_embed._types import Array


class Visits(NamedTuple):
    """What the small stack of a batch is made of.

    Attributes:
      cached: `[S, R]`, by local row of the small stack, the local row of the large one; -1: none.
      places: uint32 `[S, 2, e]`, the local rows that come from home (`Parcels.rows`).
      stored: `[S, e, D]`, their values as they are stored.
      drawn: uint32 `[S, 5, d]`, the rows that are drawn (`Parcels.keyed`).
    """

    cached: Array
    places: Array
    stored: Array
    drawn: Array
