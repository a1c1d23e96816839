"""The ids of one stack on one device: as physical rows, or as routes that the host has computed.

Inside `shard_map`, a `Batch` and `TracedIds` both become one of these per stack. How bags are
numbered, `bags.py` says.

Input: the arrays of one device. Output: the types that they are passed on in.
"""

from __future__ import annotations

from typing import NamedTuple

from tpu_embed._types import Array
from tpu_embed.core.exchange import MergeRoute, RowRoute, SumRoute


class LocalIds(NamedTuple):
    """The ids of one stack on one device, feature after feature, as the host did not route them.

    Attributes:
      row_ids: physical rows `[N]`, `PADDING_ID` for absent ids.
      bags: int32 `[N]`, the bag of each id, numbered on this device, non-decreasing.
      gains: float `[N]`, finite; None for all ones.
      blocks: int32 `[N]`, the block of the batch that the example of each id is in, where the host
        has numbered them.
    """

    row_ids: Array
    bags: Array
    gains: Array | None
    blocks: Array | None = None


class RoutedIds(NamedTuple):
    """The ids of one stack on one device, routed by the host.

    Attributes:
      rows: how each id gets its row.
      bags: int32 `[N]`, the bag of each id.
      gains: float `[N]`, finite; None for all ones.
      sums: how partial sums of gradients are made; None if the batch is not for an update.
      merge: how the partial sums that arrive here are merged; None without an update, and where
        the host does not know what arrives.
      sent: `[S, C']`, the local row of each partial sum that is sent; only if `merge` is needed and
        None.
    """

    rows: RowRoute
    bags: Array
    gains: Array | None
    sums: SumRoute | None
    merge: MergeRoute | None
    sent: Array | None


class Located(NamedTuple):
    """All ids of a batch on one device.

    Attributes:
      ids: the ids of every stack.
      bad_ids: int32 `[F]`, the number of bad ids per feature on this device, counted for the
        features whose `on_bad_id` is "error".
    """

    ids: tuple[LocalIds | RoutedIds, ...]
    bad_ids: Array
