"""How the gradients of a stack come to the shards that own its rows.

There are three ways, each with room for other sums and other arrays in a device's line:

- `Local`: one device has all ids and all rows;
- `Psum`: every device makes dense sums of a replicated stack that has no more rows than the batch
  has ids, and a psum adds them;
- `Exchange`: every device sends each shard partial sums of the gradients of its rows.

Input: a `StackView`. Output: its `Transport`.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, final

import numpy as np

from tpu_embed.core.batch.stack_view import StackView
from tpu_embed.core.layout import ROW_MULTIPLE, round_up

INT32 = np.dtype(np.int32)

Shape = tuple[str, tuple[int, ...], Any]
"""Name, shape and dtype of an array in a line (`line.py`)."""


@dataclasses.dataclass(frozen=True)
class Transport(abc.ABC):
    """How gradients come to the owners of their rows.

    Attributes:
      view: the stack in a batch.
    """

    view: StackView

    @property
    @abc.abstractmethod
    def num_partials(self) -> int:
        """P, the partial sums that one owner has room for, of all sources."""

    @property
    def num_merged(self) -> int:
        """U, the distinct rows that one shard updates, a multiple of `ROW_MULTIPLE`."""
        most = self.num_partials
        if self.view.merges_on_host:
            most = min(most, max(1, self.view.room.merged))
        return round_up(min(most, self.view.stack.num_rows), ROW_MULTIPLE)

    @property
    def merge_arrays(self) -> list[Shape]:
        """What a line holds for the merge at the owner, or for the owner to route it."""
        view, dtype = self.view, self.view.stack.index_dtype
        if not view.merges_on_host:
            return [("sent", (view.stack.num_shards, self._parcel_size), dtype)]
        segments = ("merge_segments", (self.num_partials,), INT32)
        return [segments, ("merged", (self.num_merged,), dtype)]

    @property
    def _parcel_size(self) -> int:
        """The partial sums of one source for one owner."""
        return max(1, self.view.room.partials)


@final
class Local(Transport):
    """One device has all ids and all rows."""

    @property
    def num_partials(self) -> int:
        return self._parcel_size


@final
class Psum(Transport):
    """Dense sums of all rows, which a psum adds over the devices."""

    @property
    def num_partials(self) -> int:
        # A sum for every block and row; row r in block b is number b · R + r.
        return self.view.layout.blocks * self.view.stack.num_rows

    @property
    def num_merged(self) -> int:
        return round_up(self.view.stack.num_rows, ROW_MULTIPLE)

    @property
    def merge_arrays(self) -> list[Shape]:
        merged = ("merged", (self.num_merged,), self.view.stack.index_dtype)
        return [merged] if self.view.merges_on_host else []


@final
class Exchange(Transport):
    """Owners get partial sums of all devices."""

    @property
    def num_partials(self) -> int:
        sources = self.view.layout.axes.batch_order(self.view.stack.shard_axes)
        return sources.size * self._parcel_size

    @property
    def merge_arrays(self) -> list[Shape]:
        arrays, index = super().merge_arrays, ("merge_index", (self.num_partials,), INT32)
        return [index, *arrays] if self.view.merges_on_host else arrays


def transport_of(view: StackView) -> Transport:
    """Return how the gradients of a stack come to the owners of its rows."""
    stack, replicas = view.stack, view.layout.axes.replicas
    if stack.num_shards == 1 and replicas == 1:
        return Local(view)
    # A psum would add the sums of all blocks unrounded.
    if stack.num_shards == 1 and view.accumulates and stack.exchange_dtype is None:
        if view.layout.blocks * stack.num_rows <= view.num_ids * replicas:
            return Psum(view)
    return Exchange(view)
