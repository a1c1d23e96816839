"""The ids of one stack on one device, as a lookup and an update take them.

Inside `shard_map`, a `Batch` and `TracedIds` both become these, one per stack. How bags are
numbered, `stack_view.py` says.

Of ids that the host has not routed, nobody knows how many go to which shard. So every shard gathers
the ids of all devices and keeps those of its own rows. They stand device after device: of T bags
each, bag b of device d has the number d T + b.

Input: the arrays of one device. Output: one type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

from tpu_embed._types import Array
from tpu_embed.core.batch.stack_view import StackView
from tpu_embed.core.exchange import collectives, route


class LocalIds(NamedTuple):
    """The ids of one stack on one device, feature after feature.

    What the host has routed is here under its name in the line (`line.py`); otherwise it is None.

    Attributes:
      index: `[N]`, the position of each id's row among the `[S * C]` that come back; where nothing
        is asked, the physical row of each id. Out of range for absent ids, `PADDING_ID` in rows.
      bags: int32 `[N]`, the bag of each id, numbered on this device, non-decreasing.
      gains: float `[N]`, finite; None for all ones.
      blocks: int32 `[N]`, the block of the batch that the example of each id is in, where the host
        has numbered them for the device.
      asked: `[S, C]`, the local rows that the devices ask this owner for, by source; `PADDING_ID`
        where nothing is asked. None with one shard: every row is here.
      row_ids: `[N]`, physical rows, where the host has routed the lookup, but not the update.
      sum_index: int32 `[N]`, the bags whose gradients are added, in order.
      sum_segments: int32 `[N]`, the partial sum that each is added to, non-decreasing; past the
        last one for what is left out.
      sum_gains: `[N]`, what each is multiplied with; None: all ones.
      sent: `[S, C']`, the local row of each partial sum, where the host does not know what arrives.
      merge_index: as in `RowSums` of what arrives here, and so are the next two.
      merge_segments: its segments.
      merged: its rows.
    """

    index: Array
    bags: Array
    gains: Array | None
    blocks: Array | None = None
    asked: Array | None = None
    row_ids: Array | None = None
    sum_index: Array | None = None
    sum_segments: Array | None = None
    sum_gains: Array | None = None
    sent: Array | None = None
    merge_index: Array | None = None
    merge_segments: Array | None = None
    merged: Array | None = None

    @property
    def rows(self) -> Array:
        """The physical rows `[N]`, where the host has not routed the update."""
        return self.index if self.row_ids is None else self.row_ids


def gather_ids(ids: LocalIds, view: StackView, names: Sequence[str]) -> LocalIds:
    """Return the ids of the devices along some axes, with local rows of this shard.

    Args:
      ids: the ids of this device.
      view: the stack in its batch.
      names: axes that split the batch.
    """
    # With T = 3 bags on each of two devices, ids of the bags 0 0 2 | 1 2 2 get 0 0 2 4 5 5: still
    # non-decreasing, as the kernels need it.
    bags = ids.bags + collectives.axis_index(names) * view.starts[-1]
    every = LocalIds(ids.rows, bags, ids.gains, ids.blocks)
    every = jax.tree.map(lambda x: gather(x, names), every)
    return every._replace(index=route.rows_of_shard(every.index, view.stack))


def gather(values: Array, names: Sequence[str]) -> Array:
    """Return `[n N, …]`: the values `[N, …]` of n devices, one device after the other."""
    return collectives.all_gather(values, names).reshape(-1, *values.shape[1:])
