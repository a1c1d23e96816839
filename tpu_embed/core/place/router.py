"""Route batches: pack and sort their ids, find them a shape, and send them to the devices.

Several processes do this together for their parts of a batch: where one refuses its part, all raise
its error. Every new shape means a new compilation, so `rooms.py` remembers the shapes of earlier
batches: a batch that fits one of them is packed in it.

The line of a replica holds the ids of one stack, feature after feature. In a dense stack every
feature has as many ids on every replica, padding included, so the bag of an id follows from its
position (`core/batch/stack_view.py`). Otherwise ids stand side by side without padding, and every
id has a bag. A jagged feature has all its places in either; where one has no id there is padding.

The static shape of a batch depends on its ids, and several processes must agree on it. So the work
has three steps. The ids of every stack are sorted by row, on each replica: the distinct rows are
what the replica asks the shards for, and the partial sums, one for each row and block of the batch,
are what it sends them; an owner merges those of all replicas for one row, in the order of the
blocks. `core/exchange/route.py` gives the same numbers where only the device knows the ids. The
room for that is counted. Then, with the agreed shape, the line of each device is written
(`batch.py` lists its fields): where each id's row comes back, in which order the device sums
gradients, and in which order, as an owner, it adds up the partial sums that arrive.

Input: validated ids, with rows in the place of keys. Output: a `Batch`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tpu_embed._checks import refuse
from tpu_embed._types import PADDING_ID
from tpu_embed.core.batch import (
    ROW_SPLITS,
    Batch,
    BatchSpec,
    Routed,
    StackView,
    fields_of,
    line_length,
    line_of,
    view_stacks,
)
from tpu_embed.core.ids import FeatureShape, HostIds, host_gains
from tpu_embed.core.layout import Layout, MeshAxes, Stack, send_lines
from tpu_embed.core.place.rooms import Agreement, Rooms
from tpu_embed.kernels.dispatch import host_kernels
from tpu_embed.kernels.host_reference import Pieces, Put, SortedIds, Take

# -- routes: arithmetic of sorted rows -------------------------------------------------------------
#
# For example, S = 2 shards of R = 10 rows, and a replica with the rows 13 4 -1 13 7:
#
#     order      1 4 0 3       the ids that are present, by row; equal rows in the order of the line
#     rows       4 7 13        the distinct rows
#     row        0 1 2 2       the distinct row of each sorted id
#     places     0 1 2         in a send buffer of C = 2 rows per shard: shard * C + rank


def bounds(lines: Sequence[np.ndarray], stack: Stack) -> np.ndarray:
    """Return where the rows of each shard begin on every line, int `[lines, S + 1]`.

    Args:
      lines: rows, ascending, all of one dtype.
      stack: the stack.
    """
    found = np.empty((len(lines), stack.num_shards + 1), np.int64)
    for at, rows in zip(found, lines, strict=True):
        # The first rows have the rows' dtype (the end of the last shard may not fit it): otherwise
        # NumPy converts all rows to a common one before it searches.
        firsts = np.arange(stack.num_shards, dtype=rows.dtype) * rows.dtype.type(
            stack.num_rows
        )
        at[:-1], at[-1] = rows.searchsorted(firsts), rows.size
    return found


def buffer_places(at: np.ndarray, capacity: int) -> np.ndarray:
    """Return each row's place in a buffer `[S * C]`, int32: shard · C + its rank in the shard.

    Args:
      at: int `[S + 1]`, where the rows of each shard begin among ascending rows.
      capacity: C, the rows that the buffer has room for per shard.
    """
    # The rows of one shard are adjacent, so place - number is one constant for each shard.
    shift = np.arange(at.size - 1) * capacity - at[:-1]
    return np.arange(at[-1], dtype=np.int32) + shift.astype(np.int32).repeat(
        at[1:] - at[:-1]
    )


def merge_sums(sum_rows: Sequence[np.ndarray], at: np.ndarray) -> list[SortedIds]:
    """Return the partial sums that each shard gets from all replicas, sorted by physical row.

    Args:
      sum_rows: by replica, in batch order: the physical rows of its partial sums, ascending.
      at: int `[replicas, S + 1]`, where those of each shard begin.
    """
    # A parcel is what one replica sends to one shard; those for one shard are joined. A plain slice
    # is faster than `np.split`.
    received = [
        np.concatenate(
            [line[i:j] for line, i, j in zip(sum_rows, begins, ends, strict=True)]
        )
        for begins, ends in itertools.pairwise(at.T.tolist())
    ]
    return host_kernels().sort_ids(received)


@functools.cache
def parcel_places(axes: MeshAxes, shard_axes: tuple[str, ...]) -> np.ndarray:
    """Return where each replica's parcel is among those that each owner receives, `[S, replicas]`.

    Parcels arrive as `[rest, S]`: from S devices along the shard axes (an all-to-all), gathered
    over the batch axes that do not split the rows (an all-gather). Along an axis that splits the
    rows but not the batch, all devices hold the same ids; only the one at the owner's coordinate
    counts.
    """
    # On a mesh of x = 2 and y = 3 that both split the batch, with rows split over x, parcels arrive
    # as [y, x]: that of replica (x, y) is at 2 y + x, for every owner.
    arrival = (*axes.other_batch_axes(shard_axes), *shard_axes)
    sizes = [axes.mesh.shape[name] for name in arrival]
    batch = [axes.mesh.shape[name] for name in axes.batch_axes]
    rows = [axes.mesh.shape[name] for name in shard_axes]
    of_replica = np.unravel_index(np.arange(axes.replicas), batch or [1])
    of_owner = np.unravel_index(np.arange(axes.size(shard_axes)), rows or [1])
    part = np.zeros((axes.size(shard_axes), axes.replicas), np.int64)
    for name, size in zip(arrival, sizes, strict=True):
        if name in axes.batch_axes:
            coordinate = of_replica[axes.batch_axes.index(name)]
        else:
            coordinate = of_owner[shard_axes.index(name)][:, None]
        part = part * size + coordinate
    return part


# -- ids of a line ---------------------------------------------------------------------------------


def natural_spec(
    hosts: Sequence[HostIds], layout: Layout, replicas: int, routed: Routed = "nothing"
) -> BatchSpec:
    """Return the spec that fits these ids exactly, before its exchange capacities are counted.

    Args:
      hosts: the ids of every feature.
      layout: the engine's layout.
      replicas: how many parts the ids are split into: the replicas of this process.
      routed: what of the batch the host will route.

    Raises:
      ValueError: a feature's batch size does not divide over the replicas.
    """
    spec = BatchSpec.bare([host.shape for host in hosts], layout, replicas, routed)
    pairs = zip(hosts, spec.local_sizes, strict=True)
    shapes = tuple(_with_capacity(host, size) for host, size in pairs)
    spec = dataclasses.replace(spec, feature_shapes=shapes)
    sized = tuple(
        dataclasses.replace(view.room, ids=_ids_per_device(hosts, view))
        for view in view_stacks(spec, layout)
    )
    return dataclasses.replace(spec, stacks=sized)


def _with_capacity(host: HostIds, size: int) -> FeatureShape:
    """Return the shape of a feature, with C if it is jagged: the places of the fullest device."""
    if host.rows is None:
        return host.shape
    # At least 1, so that no array of a compiled program is empty.
    places = np.diff(host.rows.row_splits[::size])
    return host.shape.with_capacity(max(1, int(places.max())))


def _ids_per_device(hosts: Sequence[HostIds], view: StackView) -> int:
    """Return the number of ids in bags of a stack on the device that has the most."""
    if view.is_dense:  # places of jagged features are counted by themselves
        shapes = zip(view.shapes, view.counts, strict=True)
        return sum(n * (s.room_per_bag or 0) for s, n in shapes if not s.has_places)
    spec = view.spec
    per_device = np.zeros(spec.replicas, np.int64)
    for f in view.features:
        host = hosts[f]
        if host.rows is not None:
            continue
        bags = spec.local_sizes[f] * host.shape.bags
        # A dense feature of a flat stack is packed without its padding. In a flat feature, device
        # d holds the bags from d * bags to (d + 1) * bags; they are sorted, so bisect.
        if host.bags is None:
            per_device += np.count_nonzero(
                host.ids.reshape(spec.replicas, -1) >= 0, axis=1
            )
        else:
            bounds = np.arange(spec.replicas + 1) * bags
            per_device += np.diff(np.searchsorted(host.bags, bounds))
    return int(per_device.max())


def pack(
    hosts: Sequence[HostIds], view: StackView, replicas: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the ids of one stack in new arrays `[replicas, …]`, by the names of `batch.py`.

    Args:
      hosts: the ids of every feature; they fit the view.
      view: the stack, in the part of the batch that the replicas have; the capacities of the
        exchange are not used.
      replicas: the numbers of the replicas in the global batch.

    Returns:
      Physical rows `row_ids`, `PADDING_ID` for absent ids; `bags`, one past the last for padding
      after the last id, unless the stack is dense; `gains`, finite, unless all are 1; `blocks`,
      unless the examples of a replica are in one block, or nobody asks; `row_splits/f` of jagged
      features.
    """
    shape, stack = (view.spec.replicas, view.num_ids), view.stack
    ids = {"row_ids": np.empty(shape, stack.index_dtype)}
    if not view.is_dense:
        ids["bags"] = np.empty(shape, np.int32)
    if view.has_gains:
        ids["gains"] = np.empty(shape, stack.compute_dtype)
    if view.needs_blocks:
        ids["blocks"] = np.empty(shape, np.int32)
    for f, size in zip(view.features, view.sizes, strict=True):
        if hosts[f].rows is not None:
            ids[f"{ROW_SPLITS}{f}"] = np.empty((shape[0], size + 1), np.int32)
    pack_line(hosts, view, ids, replicas)
    return ids


def pack_line(
    hosts: Sequence[HostIds],
    view: StackView,
    into: Mapping[str, np.ndarray],
    replicas: np.ndarray | Sequence[int] = (0,),
) -> None:
    """Write the ids of one stack into arrays, or into the fields of a line that is not routed.

    Args:
      hosts, view, replicas: see `pack`.
      into: what `pack` returns, to be written.
    """
    # Features a and b with the ids 7 3 | 5 on replica 0 and 2 | 9 4 on replica 1 give the lines
    # 7 3 5 and 2 9 4, with the bags 0 0 1 and 0 1 1 if each is one example.
    ends, starts = [0] * view.spec.replicas, view.starts
    for number, f in enumerate(view.features):
        lines, jagged = _ids_of_feature(hosts[f], view, number, replicas), hosts[f].rows
        for r, rows in enumerate(lines["row_ids"]):
            here = np.s_[r, ends[r] : ends[r] + rows.size]
            ends[r] += rows.size
            for name, of_replicas in lines.items():
                if name == "bags":
                    np.add(of_replicas[r], starts[number], out=into[name][here])
                else:
                    into[name][here] = of_replicas[r]
        if jagged is not None:
            # Splits 0 2 | 5 9 of two replicas with one example each are 0 2 and 0 4.
            size = view.sizes[number]
            first = jagged.row_splits[:-1:size, None]
            at = np.add.outer(np.arange(len(first)) * size, np.arange(size + 1))
            into[f"{ROW_SPLITS}{f}"][:] = jagged.row_splits[at] - first
    rest = {"row_ids": PADDING_ID, "bags": starts[-1], "gains": 0, "blocks": 0}
    for name in rest.keys() & into.keys():
        for r, end in enumerate(ends):
            into[name][r, end:] = rest[name]


def _ids_of_feature(
    host: HostIds, view: StackView, number: int, replicas: np.ndarray | Sequence[int]
) -> dict[str, Any]:
    """Return the ids of one feature: by field, the numbers of each replica.

    Args:
      host: the feature.
      view: the stack.
      number: the feature's number in the stack; bags are counted from its first one.
      replicas: see `pack`.
    """
    feature, size = view.layout.features[view.features[number]], view.sizes[number]
    parts, count, bags = view.spec.replicas, view.counts[number], host.bags
    ids = host.ids.astype(view.stack.index_dtype, copy=False)
    rows = view.stack.physical(ids, feature.table)
    if bags is None and host.padded:
        rows = np.where(ids < 0, ids.dtype.type(PADDING_ID), rows)
    lines: dict[str, Any] = {}
    found = {"row_ids": rows}
    if view.has_gains:
        gains = host_gains(
            host, feature.config.table.combiner, view.stack.compute_dtype
        )
        if gains is None:
            lines["gains"] = [1] * parts
        else:
            found["gains"] = gains
    if bags is None and not view.is_dense:
        # The flat index of an id, divided by the width, is its bag.
        index = np.flatnonzero(ids >= 0)
        found = {name: one.reshape(-1)[index] for name, one in found.items()}
        bags = (index // max(1, ids.shape[-1])).astype(np.int32)
    if view.needs_blocks:
        # Example e of B is in block e · G // B.
        examples = np.add.outer(np.multiply(replicas, size), np.arange(size)).reshape(
            -1
        )
        whole = size * view.layout.axes.replicas
        blocks = (examples * view.layout.blocks // whole).astype(np.int32)
        if bags is None:
            found["blocks"] = np.repeat(blocks, ids.size // blocks.size)
        else:
            # Ids of 2 bags per example in the bags 0 1 1 4 are of the examples 0 0 0 2.
            found["blocks"] = blocks[bags // host.shape.bags]
    if bags is None:
        given, width = ids.shape[-1], view.shapes[number].width or 0
        if width == given:
            return lines | {name: one.reshape(parts, -1) for name, one in found.items()}
        # The spec is wider: [B, bags, given] -> [replicas, bags, width], with padding.
        found = {name: one.reshape(parts, count, given) for name, one in found.items()}
        shape, at = (parts, count, width), np.s_[:, :, :given]
    elif host.rows is None:
        # Replica r has the bags from r · count on; they are sorted, so bisect.
        ends = np.searchsorted(bags, np.arange(1, parts) * count)
        found["bags"] = bags % count if parts > 1 else bags
        return lines | {name: np.split(one, ends) for name, one in found.items()}
    else:
        # Each id of a jagged feature has a place among C. Places of all replicas become those of
        # one: splits 0 2 | 5 9 of two replicas with one example each begin at 0 and 5, and place 7
        # is place 2 of the second one.
        replica = bags // size
        place = host.rows.places - host.rows.row_splits[:-1:size][replica]
        shape, at = (parts, count), (replica, place)
        if not view.is_dense:
            lines["bags"] = [np.arange(count, dtype=np.int32)] * parts
    for name, one in found.items():
        whole = np.full(shape, PADDING_ID if name == "row_ids" else 0, one.dtype)
        whole[at] = one
        lines[name] = whole.reshape(parts, -1)
    return lines


# -- routes and lines ------------------------------------------------------------------------------

Fields = dict[str, np.ndarray]
"""The fields of a stack, each `[devices, …]`."""


class HostStack(NamedTuple):
    """One stack of a batch on the host.

    Attributes:
      ids: the ids of this process's replicas (`pack`).
      replicas: the sorted ids of each of these replicas; [] if the devices sort them.
      rows_at: int `[replicas, S + 1]`, where the distinct rows of each shard begin.
      sums_at: int `[replicas, S + 1]`, where the partial sums of each shard begin.
      owners: the partial sums that every shard gets from all replicas, one replica's after
        another's, sorted by row; [] if the host does not know the whole batch.
    """

    ids: Fields
    replicas: list[SortedIds]
    rows_at: np.ndarray
    sums_at: np.ndarray
    owners: list[SortedIds]


def sort_stacks(
    hosts: Sequence[HostIds], spec: BatchSpec, layout: Layout, replicas: np.ndarray
) -> list[HostStack]:
    """Pack the ids of every stack in a spec, and sort them by row on every replica.

    Args:
      hosts: the ids of every feature.
      spec: of a batch; the capacities of its exchange are not used.
      layout: the engine's layout.
      replicas: the numbers of the replicas whose ids they are in the global batch.
    """
    views = view_stacks(spec.over(replicas.size), layout)
    return [_sort(pack(hosts, view, replicas), view) for view in views]


def _sort(ids: Fields, view: StackView) -> HostStack:
    """Sort the ids of one stack."""
    # If they are not routed, the devices do that.
    ordered = (
        host_kernels().sort_ids(ids["row_ids"], ids.get("blocks"))
        if view.is_routed
        else []
    )
    sum_rows = [one.sum_rows for one in ordered]
    rows_at = sums_at = bounds([one.rows for one in ordered], view.stack)
    if "blocks" in ids:
        sums_at = bounds(sum_rows, view.stack)
    owners = merge_sums(sum_rows, sums_at) if view.is_merged else []
    return HostStack(ids, ordered, rows_at, sums_at, owners)


def with_capacities(
    stacks: Sequence[HostStack], natural: BatchSpec, layout: Layout
) -> BatchSpec:
    """Return the spec that a batch fits exactly: its own, with the room for its exchange counted.

    Args:
      stacks: the sorted ids of every stack.
      natural: the batch's own spec, without capacities.
      layout: the engine's layout.
    """
    counted = []
    for view, host in zip(view_stacks(natural, layout), stacks, strict=True):
        rows, sums = (
            int(np.diff(at, axis=1).max(initial=0))
            for at in (host.rows_at, host.sums_at)
        )
        merged = max((one.rows.size for one in host.owners), default=0)
        room = {
            "row_capacity": rows,
            "partials": sums if view.accumulates else 0,
            "merged": merged,
        }
        counted.append(dataclasses.replace(view.room, **room))
    return dataclasses.replace(natural, stacks=tuple(counted))


def write_lines(
    stacks: Sequence[HostStack], spec: BatchSpec, layout: Layout
) -> np.ndarray:
    """Return the packed array of this process's devices, int32 `[devices, L]`.

    Args:
      stacks: the ids of every stack; they fit the spec.
      spec: the agreed shape, of this process's replicas.
      layout: the engine's layout.
    """
    line, axes = line_of(spec, layout), layout.axes
    mine, replicas = axes.local_parts(axes.names), axes.local_parts(axes.batch_axes)
    # The replica whose ids each device has, a number among this process's, and the shard it owns.
    replica = np.searchsorted(replicas, axes.parts_of_devices(axes.batch_axes)[mine])
    packed = np.empty((mine.size, line_length(line)), np.int32)
    for (view, own), host in zip(line, stacks, strict=True):
        shard = axes.parts_of_devices(view.stack.shard_axes)[mine]
        _Writer(view, host, replica, shard).write(fields_of(packed, own))
    return packed


class _Writer(NamedTuple):
    """Writes the fields of one stack.

    Attributes:
      view: the stack, in the agreed shape.
      host: its ids.
      replica: int `[devices]`, the number of the replica whose ids each device has.
      shard: int `[devices]`, which shard each device owns.
    """

    view: StackView
    host: HostStack
    replica: np.ndarray
    shard: np.ndarray

    def write(self, out: Fields) -> None:
        """Write all fields."""
        for name in self.host.ids.keys() & out.keys():
            out[name][:] = self._of_devices(self.host.ids[name])
        if "index" in out:
            self._write_lookup(out)
        if "sent" in out:
            sum_rows = [one.sum_rows for one in self.host.replicas]
            self._write_parcels(out["sent"], sum_rows, self.host.sums_at)
        if "sum_index" in out:
            takes = self._cells(out) if self.view.by_psum else self._partials(out)
            host_kernels().take(takes)

    def _of_devices(self, by_replica: np.ndarray) -> np.ndarray:
        """Return `[devices, …]` from `[replicas, …]`; a view if every device is a replica."""
        one_each = np.array_equal(self.replica, np.arange(len(by_replica)))
        return by_replica if one_each else by_replica[self.replica]

    def _write_lookup(self, out: Fields) -> None:
        """Write where each id's row comes back, and what is asked of whom."""
        stack = self.view.stack
        if stack.num_shards == 1:
            out["index"][:] = self._of_devices(self.host.ids["row_ids"])
            return
        capacity = out["asked"].shape[-1]
        numbers = [buffer_places(at, capacity) for at in self.host.rows_at]
        lines = []
        for line, r in zip(out["index"], self.replica, strict=True):
            one, absent = self.host.replicas[r], stack.num_shards * capacity
            lines.append(Put(line, one.order, numbers[r], one.row, absent))
        host_kernels().put(lines)
        rows = [one.rows for one in self.host.replicas]
        self._write_parcels(out["asked"], rows, self.host.rows_at)

    def _write_parcels(
        self, out: np.ndarray, rows: list[np.ndarray], at: np.ndarray
    ) -> None:
        """Write the local rows that devices send to shards.

        Args:
          out: `[devices, S, C]`. If this process knows all devices, what each gets as an owner,
            from the S devices along the shard axes; otherwise what each sends to the S shards.
          rows: by replica, the physical rows that it sends, ascending.
          at: int `[replicas, S + 1]`, where those of each shard begin.
        """
        stack = self.view.stack
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
            Pieces(
                senders,
                at[senders, shards],
                at[senders, shards + 1],
                shards * stack.num_rows,
            ),
            PADDING_ID,
        )

    def _sources(self) -> np.ndarray:
        """Return the devices that send to each device along the shard axes, `[devices, S]`."""
        axes, stack = self.view.layout.axes, self.view.stack
        rest = tuple(name for name in axes.names if name not in stack.shard_axes)
        # Devices with equal coordinates on all other axes exchange with each other; in mesh order
        # they are the sources 0 … S - 1.
        peers = axes.parts_of_devices(rest)
        together = np.argsort(peers, kind="stable").reshape(-1, stack.num_shards)
        return together[peers]

    def _partials(self, out: Fields) -> list[Take]:
        """Return the order in which every device makes its partial sums, and owners merge them."""
        view = self.view
        places = [buffer_places(at, view.parcel_size) for at in self.host.sums_at]
        pairs = zip(self.host.replicas, places, strict=True)
        ordered = [(one.order, one.sum, to) for one, to in pairs]
        lines = self._sums(out, ordered, view.stack.num_shards * view.parcel_size)
        return lines + self._merges(out) if "merged" in out else lines

    def _cells(self, out: Fields) -> list[Take]:
        """Return the order of the sums of a psum: row r in block b is added to cell b · R + r."""
        axes, blocks = self.view.layout.axes, self.host.ids.get("blocks")
        if blocks is None:
            replicas = axes.local_parts(axes.batch_axes)
            blocks = (replicas * self.view.layout.blocks // axes.replicas)[:, None]
        row_ids, rows = self.host.ids["row_ids"], self.view.stack.num_rows
        cells = np.where(row_ids < 0, PADDING_ID, row_ids + blocks * rows).astype(
            np.int32
        )
        by_cell = host_kernels().sort_ids(cells)
        if "merged" in out:
            touched = self.host.owners[0].rows
            out["merged"].fill(PADDING_ID)
            out["merged"][:, touched] = touched
        ordered = [(one.order, one.row, one.rows) for one in by_cell]
        return self._sums(out, ordered, self.view.num_partials)

    def _sums(
        self,
        out: Fields,
        ordered: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
        absent: int,
    ) -> list[Take]:
        """Return the lines `sum_index`, `sum_segments`, `sum_gains` of all devices.

        Args:
          out: the fields.
          ordered: by replica, int32 `[n]` the positions of the ids, sorted by the sum that each is
            added to; int32 `[n]` for each of them the number of its run, as ids of one sum are a
            run; and, for each run, the number of its sum.
          absent: what fills the rest of `sum_segments`: a number past those of all sums.
        """
        ids, lines = self.host.ids, []
        bags = ids["bags"] if "bags" in ids else self.view.dense_bags(np)
        bags = np.broadcast_to(bags, ids["row_ids"].shape)
        for d, r in enumerate(self.replica):
            order, runs, sums = ordered[r]
            lines.append(Take(out["sum_index"][d], bags[r], order, 0))
            lines.append(Take(out["sum_segments"][d], sums, runs, absent))
            if "gains" in ids:
                lines.append(Take(out["sum_gains"][d], ids["gains"][r], order, 0))
        return lines

    def _merges(self, out: Fields) -> list[Take]:
        """Return how every owner merges what it receives; owners of one shard all do the same."""
        view, stack, lines = self.view, self.view.stack, []
        # [S, replicas]: where each replica's parcel begins in what each owner receives.
        first = parcel_places(view.layout.axes, stack.shard_axes) * view.parcel_size
        sent = np.diff(
            self.host.sums_at, axis=1
        ).T  # [S, replicas], the sums in each parcel
        for owner in np.unique(self.shard):
            sums, sizes = self.host.owners[owner], sent[owner]
            # Where the parcel of each replica arrives, and in it each of its partial sums: parcels
            # of 2 and 3 sums that begin at 0 and 8 have the places 0 1 8 9 10.
            shift = first[owner] - (sizes.cumsum() - sizes)
            arrived = np.arange(sizes.sum(), dtype=np.int32) + shift.astype(
                np.int32
            ).repeat(sizes)
            rows = sums.rows - sums.rows.dtype.type(owner * stack.num_rows)
            for d in np.flatnonzero(self.shard == owner):
                if "merge_index" in out:
                    lines.append(Take(out["merge_index"][d], arrived, sums.order, 0))
                lines.append(
                    Take(out["merge_segments"][d], sums.row, None, view.num_merged)
                )
                lines.append(Take(out["merged"][d], rows, None, PADDING_ID))
        return lines


# -- batches ---------------------------------------------------------------------------------------


def exact_spec(hosts: Sequence[HostIds], layout: Layout) -> BatchSpec:
    """Return the spec that a training batch fits exactly; no process and no device is asked.

    Args:
      hosts: the ids of every feature, of the global batch.
      layout: the engine's layout.
    """
    replicas = np.arange(layout.axes.replicas)
    natural = natural_spec(hosts, layout, replicas.size, "update")
    return with_capacities(
        sort_stacks(hosts, natural, layout, replicas), natural, layout
    )


def route(
    hosts: Sequence[HostIds],
    requested: BatchSpec | None,
    routed: Routed,
    *,
    rooms: Rooms,
    agreement: Agreement,
) -> Batch:
    """Return the batch in the requested spec, or in one of earlier batches, on the devices.

    Several processes route their parts together, and agree on the spec of each batch.

    Args:
      hosts: the ids of every feature, of this process's part of the batch.
      requested: the spec to use. None: the smallest spec of earlier batches that it fits; one
        of them grows if it fits none.
      routed: what of the batch is routed.
      rooms: the specs of earlier batches.
      agreement: with the other processes.

    Raises:
      ValueError: the batch does not fit the requested spec; the message says which it fits. Or
        this process has no device of the mesh.
    """
    layout, axes = rooms.layout, rooms.layout.axes
    replicas = axes.local_parts(axes.batch_axes)
    with agreement.refusals():
        if not replicas.size:
            refuse(
                "place",
                expected="a mesh with devices of this process",
                got="none",
                remedy="make it of jax.devices()",
            )
        # `exact` is what the ids need, of this process's part, and of a batch of such parts.
        here = natural_spec(hosts, layout, replicas.size, routed)
        exact = here.over(axes.replicas)
        # Pack and sort first, in a spec with room for the ids, then count capacities. The order
        # does not depend on the capacities; the positions, which do, are written when all
        # agree.
        packed_as = BatchSpec.union(requested or rooms.propose(exact), exact)
        stacks = sort_stacks(hosts, packed_as, layout, replicas)
        exact = with_capacities(stacks, here, layout).over(axes.replicas)
        wanted = requested or rooms.propose(exact)
        if requested and (fitting := BatchSpec.union(packed_as, exact)) != requested:
            refuse(
                "spec",
                expected="one that the batch fits",
                got=f"{requested}",
                remedy=f"use {fitting}, or BatchSpec.union of the specs of all batches",
            )
    spec, as_requested = agreement.agree(wanted, exact=requested is not None)
    if not as_requested:
        spec = rooms.accept(spec)
    if _ids_of(spec) != _ids_of(packed_as):  # another process or thread needed more ids
        stacks = sort_stacks(hosts, spec, layout, replicas)
    packed = write_lines(stacks, spec.over(replicas.size), layout)
    sharding = axes.sharding(axes.names)
    if axes.one_process:
        # Takes half the time of the general call below.
        array = send_lines(packed, sharding)
    else:
        whole = (axes.size(axes.names), packed.shape[1])
        array = jax.make_array_from_process_local_data(sharding, packed, whole)
    return Batch.of(array, spec, layout)


def _ids_of(spec: BatchSpec) -> tuple[Any, ...]:
    """Return what the packed ids depend on: everything but the exchange capacities."""
    return spec.feature_shapes, [stack.ids for stack in spec.stacks]
