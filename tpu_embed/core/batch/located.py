"""The ids of one stack on one device: as physical rows, or as routes that the host has computed.

Inside `shard_map`, a `Batch` and `TracedIds` both become one of these per stack. How bags are
numbered, `bags.py` says.

Input: the arrays of one device. Output: the types that they are passed on in.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.core.batch.stack_view import StackView
from tpu_embed.core.exchange import MergeRoute, RowRoute, SumRoute


class LocalIds(NamedTuple):
    """The ids of one stack on one device, in batch order.

    Attributes:
      row_ids: physical rows `[N]`, `PADDING_ID` for absent ids.
      bags: int32 `[N]`, the bag of each id, numbered on this device, non-decreasing; with jagged
        features, its target.
      gains: float `[N]`, finite; None for all ones.
      positions: with jagged features, int32 `[N]`: the position in these arrays of the id of each
        place, -1 of a place without one.
    """

    row_ids: Array
    bags: Array
    gains: Array | None
    positions: Array | None = None

    def in_bags(self, view: StackView) -> LocalIds:
        """Return the ids that are in bags: the first ones, if there are jagged features too."""
        n = view.num_bag_ids
        gains = None if self.gains is None else self.gains[:n]
        return self._replace(row_ids=self.row_ids[:n], gains=gains)

    def by_place(self, view: StackView) -> LocalIds:
        """Return ids in the order of their places: those in bags, then those of jagged features.

        The bags of the result are those of the ids in bags, `[n]`.
        """
        at, n = self.positions, view.num_bag_ids
        if at is None:
            return self
        row_ids = jnp.where(at < 0, jnp.asarray(PADDING_ID, self.row_ids.dtype), self.row_ids[at])
        gains = None if self.gains is None else self.gains[at]
        bags = jnp.where(at[:n] < 0, view.bags.bag_layout.bags, self.bags[at[:n]])
        return LocalIds(row_ids, bags, gains)


class RoutedIds(NamedTuple):
    """The ids of one stack on one device, routed by the host.

    Attributes:
      rows: how each id gets its row.
      bags: int32 `[n]`, the bag of each id that is in one, in batch order; None without bags.
      gains: float `[N]`, finite, in the order of `rows`; None for all ones.
      sums: how partial sums of gradients are made; None if the batch is not for an update.
      merge: how the partial sums that arrive here are merged; None without an update, and where
        the host does not know what arrives.
      sent: `[S, C']`, the local row of each partial sum that is sent; only if `merge` is needed and
        None.
    """

    rows: RowRoute
    bags: Array | None
    gains: Array | None
    sums: SumRoute | None
    merge: MergeRoute | None
    sent: Array | None

    def in_bags(self, view: StackView) -> RoutedIds:
        """Return these ids with the gains of those in bags."""
        return self._replace(gains=None if self.gains is None else self.gains[: view.num_bag_ids])

    def by_place(self, view: StackView) -> RoutedIds:
        """Return these ids: they are in the order of their places already."""
        return self


class Located(NamedTuple):
    """All ids of a batch on one device.

    Attributes:
      ids: the ids of every stack.
      bad_ids: int32 `[F]`, the number of bad ids per feature on this device, counted for the
        features whose `on_bad_id` is "error".
    """

    ids: tuple[LocalIds | RoutedIds, ...]
    bad_ids: Array
