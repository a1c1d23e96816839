"""The ids of one stack on one device, as a lookup and an update take them.

Inside `shard_map`, a `Batch` and `TracedIds` both become these, one per stack. How bags are
numbered, `bags.py` says.

Input: the arrays of one device. Output: one type.
"""

from __future__ import annotations

from typing import NamedTuple

from tpu_embed._types import Array
from tpu_embed.core.exchange import MergeRoute, RowRoute, SumRoute


class LocalIds(NamedTuple):
    """The ids of one stack on one device, feature after feature.

    Attributes:
      rows: how each id gets its row. Where the host has routed nothing (`StackView.is_routed`), the
        index is the physical row of each id, `PADDING_ID` for absent ones.
      bags: int32 `[N]`, the bag of each id, numbered on this device, non-decreasing.
      gains: float `[N]`, finite; None for all ones.
      blocks: int32 `[N]`, the block of the batch that the example of each id is in, where the host
        has numbered them for the device.
      sums: how partial sums of gradients are made, where the host has routed the update.
      merge: how the partial sums that arrive here are merged, where it knows what arrives.
      sent: `[S, C']`, the local row of each partial sum that is sent, where it does not.
    """

    rows: RowRoute
    bags: Array
    gains: Array | None
    blocks: Array | None = None
    sums: SumRoute | None = None
    merge: MergeRoute | None = None
    sent: Array | None = None
