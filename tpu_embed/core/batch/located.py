"""Located ids: for each id on a device, its physical row and the bag that it belongs to.

Inside `shard_map`, a `Batch` and `TracedIds` both become located ids, and from there on it does not
matter how the ids were given. How bags are numbered, `stack_view.py` says.

Input: the arrays of one device. Output: the types that they are passed on in.
"""

from __future__ import annotations

from typing import NamedTuple

from tpu_embed._types import Array


class LocalIds(NamedTuple):
    """The ids of one stack on one device, in batch order.

    Attributes:
      row_ids: physical rows `[N]`, `PADDING_ID` for absent ids.
      bags: int32 `[N]`, the bag of each id, numbered on this device, non-decreasing.
      weights: float `[N]`, or None for all ones.
    """

    row_ids: Array
    bags: Array
    weights: Array | None


class Located(NamedTuple):
    """All ids of a batch on one device.

    Attributes:
      ids: the ids of every stack.
      bad_ids: int32 `[F]`, the number of bad ids per feature on this device, counted for the
        features whose `on_bad_id` is "error".
    """

    ids: tuple[LocalIds, ...]
    bad_ids: Array
