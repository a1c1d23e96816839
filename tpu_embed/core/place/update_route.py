"""Write the route of an update: the order of its sums, on the replicas and at the owners.

A row's gradients are summed within each block of the batch, on the device that has the block's
examples. These partial sums go to the row's owner, which adds them in the order of the blocks. So
every device carries two orders: that of its ids, sorted by the partial sum that each is added to,
and, as an owner, that of the partial sums that arrive, sorted by row.

Input: the sorted ids of all replicas. Output: the fields `sum_index` to `merged` of a line.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tpu_embed._types import PADDING_ID
from tpu_embed.core.batch import Psum, StackView, Transport, transport_of
from tpu_embed.core.exchange import host_route
from tpu_embed.core.layout import Stack
from tpu_embed.core.place.host_stack import Devices, HostStack, bags_of
from tpu_embed.kernels.dispatch import host_kernels
from tpu_embed.kernels.host_reference import Take

Fields = dict[str, np.ndarray]
"""The fields of a stack, each `[devices, …]`."""


def write_update(out: Fields, view: StackView, host: HostStack, devices: Devices) -> None:
    """Write the fields of an update.

    Args:
      out: the fields of this process's devices.
      view: the stack.
      host: its ids.
      devices: these devices.
    """
    transport = transport_of(view)
    sums = _cells if isinstance(transport, Psum) else _partials
    host_kernels().take(sums(out, transport, host, devices))


class _Sums(NamedTuple):
    """The order in which one device sums gradients.

    Attributes:
      bags: int32, the bag of each id.
      gains: the gain of each id; None: all ones.
      order: int32 `[n]`, the positions of the ids, sorted by the sum that each is added to.
      numbers: int32 `[n]`, for each id the number of its run; ids of one sum are a run.
      places: int32, for each run the number of its sum.
    """

    bags: np.ndarray
    gains: np.ndarray | None
    order: np.ndarray
    numbers: np.ndarray
    places: np.ndarray

    def lines(self, out: Fields, d: int, absent: int) -> list[Take]:
        """Return the lines `sum_index`, `sum_segments`, `sum_gains` of device d.

        Args:
          out: the fields.
          d: the device.
          absent: what fills the rest of `sum_segments`: a number past those of all sums.
        """
        sums = Take(out["sum_segments"][d], self.places, self.numbers, absent)
        lines = [Take(out["sum_index"][d], self.bags, self.order, 0), sums]
        if self.gains is not None:
            lines.append(Take(out["sum_gains"][d], self.gains, self.order, 0))
        return lines


def _partials(out: Fields, transport: Transport, host: HostStack, devices: Devices) -> list[Take]:
    """Return the order in which every device makes its partial sums, and owners merge them."""
    view, stack = transport.view, transport.view.stack
    parcel_size = max(1, view.room.partials)
    places = [host_route.places(at, parcel_size) for at in host.sums_at]
    ordered = [(one.order, one.sum, to) for one, to in zip(host.replicas, places, strict=True)]
    lines = _lines(out, view, host, devices, ordered, stack.num_shards * parcel_size)
    return lines + _merges(out, transport, host, devices) if "merged" in out else lines


def _cells(out: Fields, transport: Transport, host: HostStack, devices: Devices) -> list[Take]:
    """Return the order of the sums of a psum: row r in block b is added to cell b · R + r."""
    view, numbers = transport.view, host.ids.row_ids
    rows = view.stack.num_rows
    blocks = host.ids.blocks
    if blocks is None:
        replicas = view.layout.axes.replicas
        blocks = (host.numbers * view.layout.blocks // replicas).astype(np.int32)[:, None]
    cells = np.where(numbers < 0, PADDING_ID, numbers + blocks * rows).astype(np.int32)
    by_cell = host_kernels().sort_ids(cells)
    if "merged" in out:
        touched = host.owners[0].sums.rows
        out["merged"].fill(PADDING_ID)
        out["merged"][:, touched] = touched
    ordered = [(one.order, one.row, one.rows) for one in by_cell]
    return _lines(out, view, host, devices, ordered, transport.num_partials)


def _lines(
    out: Fields,
    view: StackView,
    host: HostStack,
    devices: Devices,
    ordered: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
    absent: int,
) -> list[Take]:
    """Return the lines of all devices, which sum the ids of their replicas.

    Args:
      out: the fields.
      view: the stack.
      host: its ids.
      devices: the devices.
      ordered: by replica, `order`, `numbers` and `places` of `_Sums`.
      absent: a number past those of all sums.
    """
    ids = host.ids
    bags = bags_of(ids, view)
    lines = []
    for d, r in enumerate(devices.replica):
        gains = None if ids.gains is None else ids.gains[r]
        lines += _Sums(bags[r], gains, *ordered[r]).lines(out, d, absent)
    return lines


def _merges(out: Fields, transport: Transport, host: HostStack, devices: Devices) -> list[Take]:
    """Return how every owner merges what it receives; owners of one shard all do the same."""
    view = transport.view
    stack, parcel_size, lines = view.stack, max(1, view.room.partials), []
    # [S, replicas]: where each replica's parcel begins in what each owner receives.
    first = host_route.parcel_places(view.layout.axes, stack.shard_axes) * parcel_size
    for owner in np.unique(devices.shard):
        sizes, sums = host.owners[owner]
        # Where the parcel of each replica arrives, and in it each of its partial sums: parcels of
        # 2 and 3 sums that begin at 0 and 8 have the places 0 1 8 9 10.
        shift = first[owner] - (sizes.cumsum() - sizes)
        arrived = np.arange(sizes.sum(), dtype=np.int32) + shift.astype(np.int32).repeat(sizes)
        rows = _local(sums.rows, stack, owner)
        for d in np.flatnonzero(devices.shard == owner):
            if "merge_index" in out:
                lines.append(Take(out["merge_index"][d], arrived, sums.order, 0))
            if "merge_segments" in out:
                lines.append(Take(out["merge_segments"][d], sums.row, None, transport.num_merged))
            lines.append(Take(out["merged"][d], rows, None, PADDING_ID))
    return lines


def _local(rows: np.ndarray, stack: Stack, owner: int) -> np.ndarray:
    """Return the local rows of physical rows on one shard."""
    return rows - rows.dtype.type(owner * stack.num_rows)
