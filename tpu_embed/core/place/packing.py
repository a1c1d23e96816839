"""Ids become physical rows, feature after feature, one line per replica.

The line of a replica holds the ids of one stack. In a dense stack every feature has as many ids on
every replica, padding included, so the bag of an id follows from its position
(`core/batch/stack_view.py`). Otherwise ids stand side by side without padding, and every id has a
bag. A jagged feature has all its places in either; where one has no id there is padding.

Input: one validated `HostIds` per feature. Output: the rows, bags and gains of every stack,
`[replicas, N]`, which are sent as they are (`batch.py`) or routed first (`router.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tpu_embed._types import PADDING_ID
from tpu_embed.core.batch import (
    ROW_SPLITS,
    BatchSpec,
    Routed,
    StackView,
    view_stacks,
)
from tpu_embed.core.ids import FeatureShape, HostIds, host_gains
from tpu_embed.core.layout import Layout


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
            per_device += np.count_nonzero(host.ids.reshape(spec.replicas, -1) >= 0, axis=1)
        else:
            bounds = np.arange(spec.replicas + 1) * bags
            per_device += np.diff(np.searchsorted(host.bags, bounds))
    return int(per_device.max())


def pack(hosts: Sequence[HostIds], view: StackView, replicas: np.ndarray) -> dict[str, np.ndarray]:
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
        gains = host_gains(host, feature.config.table.combiner, view.stack.compute_dtype)
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
        examples = np.add.outer(np.multiply(replicas, size), np.arange(size)).reshape(-1)
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
