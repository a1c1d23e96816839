"""Write the route of a lookup: where each id's row comes back, and what is asked of whom.

Input: the sorted ids of all replicas. Output: the fields of a line (`core/batch/line.py`) up to
`gains`; the bags and gains of ids, where those are not routed.
"""

from __future__ import annotations

import numpy as np

from tpu_embed._types import PADDING_ID
from tpu_embed.core.batch import StackView
from tpu_embed.core.exchange import host_route
from tpu_embed.core.place.host_stack import Devices, HostStack
from tpu_embed.kernels.dispatch import host_kernels
from tpu_embed.kernels.host_reference import Pieces, Put


class LookupWriter:
    """Writes the fields of one stack, those of its sums excepted.

    Args:
      view: the stack, in the agreed shape.
      host: its ids.
      devices: this process's devices.
    """

    def __init__(self, view: StackView, host: HostStack, devices: Devices) -> None:
        self.view, self.stack, self.host = view, view.stack, host
        self.replica, self.shard = devices
        replicas = len(host.numbers)
        self._one_each = np.array_equal(self.replica, np.arange(replicas))

    def write(self, out: dict[str, np.ndarray]) -> None:
        """Write the fields, each `[devices, …]`."""
        ids = self.host.ids
        if "row_ids" in out:
            out["row_ids"][:] = self._of_devices(ids.row_ids)
        for name in {"bags", "gains", "blocks"} & out.keys():
            out[name][:] = self._of_devices(getattr(ids, name))
        for f, splits in self.host.row_splits.items():
            out[f"row_splits/{f}"][:] = self._of_devices(splits)
        if "index" in out:
            self._write_lookup(out)
        if "sent" in out:
            sum_rows = [one.sum_rows for one in self.host.replicas]
            self._write_parcels(out["sent"], sum_rows, self.host.sums_at)

    def _of_devices(self, by_replica: np.ndarray) -> np.ndarray:
        """Return `[devices, …]` from `[replicas, …]`; a view if every device is a replica."""
        return by_replica if self._one_each else by_replica[self.replica]

    def _write_lookup(self, out: dict[str, np.ndarray]) -> None:
        """Write where each id's row comes back, and what is asked of whom."""
        stack = self.stack
        if stack.num_shards == 1:
            out["index"][:] = self._of_devices(self.host.ids.row_ids)
            return
        capacity = out["asked"].shape[-1]
        numbers = [host_route.places(at, capacity) for at in self.host.rows_at]
        lines = []
        for line, r in zip(out["index"], self.replica, strict=True):
            one, absent = self.host.replicas[r], stack.num_shards * capacity
            lines.append(Put(line, one.order, numbers[r], one.row, absent))
        host_kernels().put(lines)
        rows = [one.rows for one in self.host.replicas]
        self._write_parcels(out["asked"], rows, self.host.rows_at)

    def _write_parcels(self, out: np.ndarray, rows: list[np.ndarray], at: np.ndarray) -> None:
        """Write the local rows that devices send to shards.

        Args:
          out: `[devices, S, C]`. If this process knows all devices, what each gets as an owner,
            from the S devices along the shard axes; otherwise what each sends to the S shards.
          rows: by replica, the physical rows that it sends, ascending.
          at: int `[replicas, S + 1]`, where those of each shard begin.
        """
        stack = self.stack
        # Both are [devices, S]: for each parcel, the shard that owns its rows, and the replica that
        # sends it. 2 devices that each send to 2 shards: shards 0 1 | 0 1, senders 0 0 | 1 1; what
        # the same devices receive as owners: shards 0 0 | 1 1, senders 0 1 | 0 1.
        shards = np.broadcast_to(np.arange(stack.num_shards), out.shape[:2])
        senders = np.broadcast_to(self.replica[:, None], out.shape[:2])
        if self.view.layout.axes.one_process:
            shards = np.broadcast_to(self.shard[:, None], out.shape[:2])
            senders = self.replica[self._sources()]
        host_kernels().put_pieces(
            out,
            rows,
            Pieces(senders, at[senders, shards], at[senders, shards + 1], shards * stack.num_rows),
            PADDING_ID,
        )

    def _sources(self) -> np.ndarray:
        """Return the devices that send to each device along the shard axes, `[devices, S]`."""
        axes, shards = self.view.layout.axes, self.stack.num_shards
        rest = tuple(name for name in axes.names if name not in self.stack.shard_axes)
        # Devices with equal coordinates on all other axes exchange with each other; in mesh order
        # they are the sources 0 … S - 1.
        peers = axes.parts_of_devices(rest)
        together = np.argsort(peers, kind="stable").reshape(-1, shards)
        return together[peers]
