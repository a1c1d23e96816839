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
from tpu_embed.core.exchange import MergeRoute, RowRoute, SumRoute, collectives, route


class LocalIds(NamedTuple):
    """The ids of one stack on one device, feature after feature.

    Attributes:
      rows: how each id gets its row. Where nothing is asked of other shards, its index is the
        physical row of each id, `PADDING_ID` for absent ones.
      bags: int32 `[N]`, the bag of each id, numbered on this device, non-decreasing.
      gains: float `[N]`, finite; None for all ones.
      blocks: int32 `[N]`, the block of the batch that the example of each id is in, where the host
        has numbered them for the device.
      sums: how partial sums of gradients are made, where the host has routed the update.
      merge: how the partial sums that arrive here are merged, where it knows what arrives.
      sent: `[S, C']`, the local row of each partial sum that is sent, where it does not.
      physical: `[N]`, physical rows, where the host has routed the lookup, but not the update.
    """

    rows: RowRoute
    bags: Array
    gains: Array | None
    blocks: Array | None = None
    sums: SumRoute | None = None
    merge: MergeRoute | None = None
    sent: Array | None = None
    physical: Array | None = None

    @property
    def row_ids(self) -> Array:
        """The physical rows `[N]`, where the host has not routed the update."""
        return self.rows.index if self.physical is None else self.physical


def gather_ids(ids: LocalIds, view: StackView, names: Sequence[str]) -> LocalIds:
    """Return the ids of the devices along some axes, with local rows of this shard.

    Args:
      ids: the ids of this device.
      view: the stack in its batch.
      names: axes that split the batch.
    """
    # With T = 3 bags on each of two devices, ids of the bags 0 0 2 | 1 2 2 get 0 0 2 4 5 5: still
    # non-decreasing, as the kernels need it.
    bags = ids.bags + collectives.axis_index(names) * view.bags.starts[-1]
    given = ids.row_ids, bags, ids.gains, ids.blocks
    row_ids, *others = jax.tree.map(lambda x: gather(x, names), given)
    return LocalIds(RowRoute(None, route.rows_of_shard(row_ids, view.stack)), *others)


def gather(values: Array, names: Sequence[str]) -> Array:
    """Return `[n N, …]`: the values `[N, …]` of n devices, one device after the other."""
    return collectives.all_gather(values, names).reshape(-1, *values.shape[1:])
