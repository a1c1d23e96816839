"""Ids become physical rows, feature after feature, one line per replica.

The line of a replica holds the ids of one stack. In a dense stack every feature has as many ids on
every replica, padding included, so the bag of an id follows from its position
(`core/batch/stack_view.py`). Otherwise ids stand side by side without padding, and every id has a
bag. A jagged feature has all its places in either; where one has no id there is padding.

Input: one validated `HostIds` per feature. Output: the rows, bags and gains of every stack,
`[replicas, N]`, which are sent as they are (`line.py`) or routed first (`write_lines.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tpu_embed._types import PADDING_ID
from tpu_embed.core.batch import (
    ROW_SPLITS,
    BatchSpec,
    Routed,
    StackSpec,
    StackView,
    view_stacks,
)
from tpu_embed.core.ids import FeatureShape, HostIds, host_gains
from tpu_embed.core.layout import Layout


class StackIds(NamedTuple):
    """The ids of one stack on the replicas of this process, feature after feature.

    Attributes:
      row_ids: physical rows `[replicas, N]`, `PADDING_ID` for absent ids.
      bags: int32 `[replicas, N]`, the bag of each id on its replica, one past the last for padding
        after the last id; None in a dense stack.
      gains: `[replicas, N]`, finite; None for all ones.
      blocks: int32 `[replicas, N]`, the block of the batch that each id's example is in; None where
        the examples of a replica are in one block, or nobody asks.
      row_splits: by jagged feature, int32 `[replicas, B/S + 1]`, where the row of each example
        begins among the feature's places.
    """

    row_ids: np.ndarray
    bags: np.ndarray | None
    gains: np.ndarray | None
    blocks: np.ndarray | None
    row_splits: dict[int, np.ndarray]


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
    shapes = tuple(host.shape for host in hosts)
    bare = [StackSpec(layout.features_of(g), 0, 0, 0) for g in range(len(layout.stacks))]
    spec = BatchSpec(replicas, shapes, tuple(bare), routed)
    spec.check_batch([feature.path for feature in layout.features])
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
            per_device += np.count_nonzero(host.ids.reshape(spec.replicas, -1) >= 0, axis=1)
        else:
            bounds = np.arange(spec.replicas + 1) * bags
            per_device += np.diff(np.searchsorted(host.bags, bounds))
    return int(per_device.max())


def pack_all(
    hosts: Sequence[HostIds], spec: BatchSpec, layout: Layout, replicas: np.ndarray
) -> list[StackIds]:
    """Return the ids of every stack, in new arrays.

    Args:
      hosts: the ids of every feature; they fit the spec.
      spec: of the part of the batch that the replicas have; the capacities of the exchange are not
        used.
      layout: the engine's layout.
      replicas: the numbers of the replicas in the global batch.
    """
    found = []
    for view in view_stacks(spec, layout):
        shape, stack = (spec.replicas, view.num_ids), view.stack
        ids = StackIds(
            np.empty(shape, stack.index_dtype),
            None if view.is_dense else np.empty(shape, np.int32),
            np.empty(shape, stack.compute_dtype) if view.has_gains else None,
            np.empty(shape, np.int32) if view.needs_blocks else None,
            _row_splits(hosts, view),
        )
        _pack(hosts, view, ids, replicas)
        found.append(ids)
    return found


def pack_line(hosts: Sequence[HostIds], view: StackView, fields: Mapping[str, np.ndarray]) -> None:
    """Write the fields of a stack for a lookup alone.

    Args:
      hosts: the ids of every feature.
      view: the stack; its ids are not routed.
      fields: the fields of its line (`line.py`).
    """
    given = fields["row_ids"], fields.get("bags"), fields.get("gains")
    ids = StackIds(*given, None, _row_splits(hosts, view))
    _pack(hosts, view, ids, np.arange(len(ids.row_ids)))
    for f, splits in ids.row_splits.items():
        fields[f"{ROW_SPLITS}{f}"][:] = splits


def _row_splits(hosts: Sequence[HostIds], view: StackView) -> dict[int, np.ndarray]:
    """Return the row splits of the jagged features of a stack; see `StackIds`."""
    found = {}
    for f, size in zip(view.features, view.sizes, strict=True):
        rows = hosts[f].rows
        if rows is not None:
            # Splits 0 2 | 5 9 of two replicas with one example each are 0 2 and 0 4.
            first = rows.row_splits[:-1:size]
            at = np.arange(len(first))[:, None] * size + np.arange(size + 1)
            found[f] = (rows.row_splits[at] - first[:, None]).astype(np.int32)
    return found


def _pack(hosts: Sequence[HostIds], view: StackView, into: StackIds, replicas: np.ndarray) -> None:
    """Write the ids of one stack; see `pack_all`."""
    # Features a and b with the ids 7 3 | 5 on replica 0 and 2 | 9 4 on replica 1 give the lines
    # 7 3 5 and 2 9 4, with the bags 0 0 1 and 0 1 1 if each is one example.
    ends = [0] * len(into.row_ids)
    for number, f in enumerate(view.features):
        ids = _ids_of_feature(hosts[f], view, number, replicas)
        for r, rows in enumerate(ids.row_ids):
            here = np.s_[r, ends[r] : ends[r] + rows.size]
            ends[r] += rows.size
            into.row_ids[here] = rows
            if into.bags is not None and ids.bags is not None:
                np.add(ids.bags[r], view.starts[number], out=into.bags[here])
            if into.gains is not None:
                into.gains[here] = 1 if ids.gains is None else ids.gains[r]
            if into.blocks is not None and ids.blocks is not None:
                into.blocks[here] = ids.blocks[r]
    arrays = into.row_ids, into.bags, into.gains, into.blocks
    for r, end in enumerate(ends):
        for array, rest in zip(arrays, (PADDING_ID, view.starts[-1], 0, 0), strict=True):
            if array is not None:
                array[r, end:] = rest


_Lines = np.ndarray | Sequence[np.ndarray]
"""One array per replica: `[replicas, n]`, or a list of arrays of different lengths."""


class _FeatureIds(NamedTuple):
    """The ids of one feature on every replica; `StackIds` says what they are.

    Bags are those of the feature, counted from 0 on every replica.
    """

    row_ids: _Lines
    bags: _Lines | None
    gains: _Lines | None
    blocks: _Lines | None


def _ids_of_feature(
    host: HostIds, view: StackView, number: int, replicas: np.ndarray
) -> _FeatureIds:
    """Return the ids of one feature, by its number in the stack."""
    feature, size = view.layout.features[view.features[number]], view.sizes[number]
    blocks = gains = None
    if view.needs_blocks:
        # Example e of B is in block e · G // B.
        examples, axes = (replicas[:, None] * size + np.arange(size)).reshape(-1), view.layout.axes
        blocks = (examples * view.layout.blocks // (size * axes.replicas)).astype(np.int32)
    if view.has_gains:
        gains = host_gains(host, feature.config.table.combiner, view.stack.compute_dtype)
    ids = host.ids.astype(view.stack.index_dtype, copy=False)
    rows = view.stack.physical(ids, feature.table)
    if host.bags is None and host.padded:
        rows = np.where(ids < 0, ids.dtype.type(PADDING_ID), rows)
    if host.rows is not None:
        return _in_places(host, view, number, rows, gains, blocks)
    count = view.counts[number]
    if view.is_dense:
        # [B, bags, width] -> [replicas, bags, width], with padding where the spec is wider.
        shape, width = (len(replicas), count, ids.shape[-1]), view.shapes[number].width or 0
        wider = ((0, 0), (0, 0), (0, width - shape[-1]))

        def widened(array: np.ndarray, fill: int) -> np.ndarray:
            array = array.reshape(shape)
            if width > shape[-1]:
                array = np.pad(array, wider, constant_values=fill)
            return array.reshape(len(replicas), -1)

        gains = None if gains is None else widened(gains, 0)
        if blocks is not None:
            blocks = np.repeat(blocks.reshape(len(replicas), -1), count // size * width, axis=1)
        return _FeatureIds(widened(rows, PADDING_ID), None, gains, blocks)
    bags = host.bags
    if bags is None:
        # The flat index of an id, divided by the width, is its bag.
        index = np.flatnonzero(ids >= 0)
        gains = None if gains is None else gains.reshape(-1)[index]
        rows = rows.reshape(-1)[index]
        bags = (index // max(1, ids.shape[-1])).astype(np.int32)
    # Ids of 2 bags per example in the bags 0 1 1 4 are of the examples 0 0 0 2.
    if blocks is not None:
        blocks = blocks[bags // view.shapes[number].bags]
    # Replica r has the bags from r · count on; they are sorted, so bisect.
    ends = np.searchsorted(bags, np.arange(1, len(replicas)) * count)
    local = bags % count if len(replicas) > 1 else bags
    rest = (None if x is None else np.split(x, ends) for x in (local, gains, blocks))
    return _FeatureIds(np.split(rows, ends), *rest)


def _in_places(
    host: HostIds,
    view: StackView,
    number: int,
    rows: np.ndarray,
    gains: np.ndarray | None,
    blocks: np.ndarray | None,
) -> _FeatureIds:
    """Return the ids of a jagged feature, each at its place among C.

    Args:
      host: the feature.
      view: the stack.
      number: the feature's number in the stack.
      rows: `[n]`, the physical rows of its ids.
      gains: `[n]`, or None.
      blocks: `[B]`, the block of every example.
    """
    assert host.rows is not None
    assert host.bags is not None
    size, count = view.sizes[number], view.counts[number]
    replicas = host.shape.batch // size
    # Places of all replicas become those of one: splits 0 2 | 5 9 of two replicas with one example
    # each begin at 0 and 5, and place 7 is place 2 of the second one.
    replica = host.bags // size
    place = host.rows.places - host.rows.row_splits[:-1:size][replica]

    def put(values: np.ndarray, fill: int) -> np.ndarray:
        found = np.full((replicas, count), fill, values.dtype)
        found[replica, place] = values
        return found

    return _FeatureIds(
        put(rows, PADDING_ID),
        [np.arange(count, dtype=np.int32)] * replicas,
        None if gains is None else put(gains, 0),
        None if blocks is None else put(blocks[host.bags], 0),
    )
