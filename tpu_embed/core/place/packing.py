"""Ids become physical rows, in batch order, one line per replica.

The line of a replica holds the ids of one stack. In a dense stack every period
(`core/batch/bags.py`) has as many ids, so the bag of an id follows from its position. Otherwise
every id has a bag.

Input: one validated `HostIds` per feature. Output: the rows, bags and gains of every stack,
`[replicas, N]`, which are sent as they are (`line.py`) or routed first (`write_lines.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tpu_embed._types import PADDING_ID
from tpu_embed.core.batch import BatchSpec, Routed, StackSpec, StackView, view_stacks
from tpu_embed.core.ids import FeatureShape, HostIds, host_gains
from tpu_embed.core.layout import Layout, Stack
from tpu_embed.kernels.dispatch import host_kernels
from tpu_embed.kernels.host_reference import Column


class StackIds(NamedTuple):
    """The ids of one stack on the replicas of this process, in batch order.

    Attributes:
      row_ids: physical rows `[replicas, N]`, `PADDING_ID` for absent ids.
      bags: int32 `[replicas, N]`, the bag of each id on its replica; None in a dense stack. The bag
        of padding is one past the last.
      gains: `[replicas, N]`, finite; None for all ones.
      jagged: what is known besides of a stack with jagged features, whose examples count as bags
        in `bags`; otherwise None.
    """

    row_ids: np.ndarray
    bags: np.ndarray | None
    gains: np.ndarray | None
    jagged: JaggedIds | None = None


class JaggedIds(NamedTuple):
    """Where the ids of a stack with jagged features are looked up, on each replica.

    Attributes:
      places: int32 `[replicas, N]`, each id's place among those that are looked up: first the ids
        in bags, one after the other, then the places of each jagged feature; -1 for padding.
      targets: int32 `[replicas, N]`, the target of each id (`core/batch/bags.py`); T for padding.
      row_splits: by feature, int32 `[replicas, B/S + 1]`.
    """

    places: np.ndarray
    targets: np.ndarray
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
    if view.bags.is_dense:
        return view.num_ids
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


def pack(hosts: Sequence[HostIds], view: StackView, into: StackIds) -> None:
    """Write the ids of one stack.

    Args:
      hosts: the ids of every feature; they fit the view's spec.
      view: the stack, in which examples of jagged features count as bags; the capacities of its
        exchange are not used.
      into: the arrays to write to.
    """
    if into.bags is None:
        _pack_dense(hosts, view, into.row_ids, into.gains)
    else:
        _pack_flat(hosts, view, into.row_ids, into.bags, into.gains)


def pack_all(hosts: Sequence[HostIds], spec: BatchSpec, layout: Layout) -> list[StackIds]:
    """Return the ids of every stack, in new arrays."""
    found = []
    for view in view_stacks(spec, layout):
        shape, stack = (spec.replicas, view.num_ids), view.stack
        ids = StackIds(
            np.empty(shape, stack.index_dtype),
            None if view.bags.is_dense else np.empty(shape, np.int32),
            np.empty(shape, stack.compute_dtype) if view.has_gains else None,
        )
        pack(hosts, view, ids)
        found.append(
            ids._replace(jagged=pack_jagged(hosts, view, ids)) if view.bags.jagged else ids
        )
    return found


def by_place(ids: StackIds, values: np.ndarray, rest: int) -> np.ndarray:
    """Return numbers of ids in the order of their places; without jagged features, as they are.

    Args:
      ids: the ids.
      values: `[replicas, N]`, in batch order.
      rest: the number of a place without an id.
    """
    if ids.jagged is None:
        return values
    places, found = ids.jagged.places, np.full_like(values, rest)
    replica, position = np.nonzero(places >= 0)
    found[replica, places[replica, position]] = values[replica, position]
    return found


def pack_line(hosts: Sequence[HostIds], view: StackView, fields: Mapping[str, np.ndarray]) -> None:
    """Write the fields of a stack for a lookup alone; with jagged features, in order of the places.

    Args:
      hosts: the ids of every feature.
      view: the stack; its ids are not routed.
      fields: the fields of its line (`line.py`).
    """
    ids = StackIds(fields["row_ids"], fields.get("bags"), fields.get("gains"))
    pack(hosts, view, ids)
    if not view.bags.jagged:
        return
    ids = ids._replace(jagged=pack_jagged(hosts, view, ids))
    assert ids.jagged is not None
    row_ids = by_place(ids, ids.row_ids, PADDING_ID)
    if ids.gains is not None:
        ids.gains[:] = by_place(ids, ids.gains, 0)
    fields["bags"][:] = by_place(ids, ids.jagged.targets, view.bags.num_targets)
    fields["row_ids"][:] = row_ids
    positions = np.arange(row_ids.shape[1], dtype=np.int32)
    fields["positions"][:] = np.where(row_ids < 0, PADDING_ID, positions)
    for f, splits in ids.jagged.row_splits.items():
        fields[f"row_splits/{f}"][:] = splits


def pack_jagged(hosts: Sequence[HostIds], view: StackView, ids: StackIds) -> JaggedIds:
    """Return where the ids of a stack with jagged features are looked up.

    Args:
      hosts: the ids of every feature.
      view: the stack.
      ids: its ids, in batch order.
    """
    assert ids.bags is not None, "stacks with jagged features are flat"
    # Put the places in batch order in the same way as the ids. Ids in bags get theirs afterwards.
    columns, splits, in_bags = [], {}, -2  # -2 stands for "in a bag"
    for number, f in enumerate(view.features):
        host, size = hosts[f], view.bags.sizes[number]
        bags = _flatten(host, None)[1]
        if host.rows is None:
            columns.append(Column(np.full(bags.size, in_bags, np.int32), _in_one_piece(bags), None))
            continue
        # Places of all replicas become those of one: splits 0 2 | 5 9 of two replicas with one
        # example each are 0 2 and 0 4. `firsts` are 0 and 5 here.
        firsts = host.rows.row_splits[:-1:size]
        rows = np.arange(len(firsts))[:, None] * size + np.arange(size + 1)
        splits[f] = (host.rows.row_splits[rows] - firsts[:, None]).astype(np.int32)
        shift = view.num_bag_ids + view.bags.jagged_starts[number] - firsts
        places = host.rows.places + shift[bags // size].astype(np.int32)
        columns.append(Column(places, _in_one_piece(bags), None))
    places, bags = (np.empty(ids.row_ids.shape, np.int32) for _ in range(2))
    sizes = {"periods": view.bags.periods, "bag_features": view.bags.period.feature}
    host_kernels().interleave(columns, places, bags, None, **sizes)
    # Places n, n + 1, … of jagged features are the targets after the bags.
    targets = places + np.int32(view.bags.bag_layout.bags - view.num_bag_ids)
    targets = np.where(places == in_bags, _bags_alone(ids.bags, view), targets)
    targets[places == PADDING_ID] = view.bags.num_targets
    counted = np.cumsum(places == in_bags, axis=1, dtype=np.int32) - np.int32(1)
    return JaggedIds(np.where(places == in_bags, counted, places), targets, splits)


def _bags_alone(bags: np.ndarray, view: StackView) -> np.ndarray:
    """Return numbers of bags, int32, counted without the examples of jagged features."""
    # The bags of a period are of the features a b j b, j jagged: bags 0 1 2 3 become 0 1 - 2.
    feature = np.array(view.bags.period.feature)
    is_bag = ~np.isin(feature, view.bags.jagged)
    period, bag = np.divmod(bags, feature.size)
    rank = np.cumsum(is_bag) - 1
    return (period * np.count_nonzero(is_bag) + rank[bag]).astype(np.int32)


def _pack_dense(
    hosts: Sequence[HostIds], view: StackView, row_ids: np.ndarray, gains: np.ndarray | None
) -> None:
    """Write the ids of a dense stack, the bags in batch order.

    With features of 2 and 3 ids per example, a line is a0 a0 b0 b0 b0 | a1 a1 b1 b1 b1 | … by
    period.
    """
    if not view.bags.bag_layout.widths:
        row_ids.fill(PADDING_ID)
        return
    for number, f in enumerate(view.features):
        host, places = hosts[f], view.bags.id_places(number)
        if not places.size:
            continue
        bags = view.bags.period.counts[number]
        shape = (view.spec.replicas, view.bags.periods, bags, places.size // bags)
        # The spec may be wider than this batch: the last positions of each bag become padding.
        ids = host.ids.reshape(*shape[:3], -1)
        given = np.s_[..., : ids.shape[-1]]
        with _ids_of_feature(row_ids, places, shape) as here:
            here[..., ids.shape[-1] :] = PADDING_ID
            here[given] = _physical(ids, view.layout, f)
            if host.padded:
                here[given][ids < 0] = PADDING_ID
        if gains is not None:
            mine = _gains(host, view, number)
            with _ids_of_feature(gains, places, shape) as here:
                here[..., ids.shape[-1] :] = 0
                here[given] = 1 if mine is None else mine.reshape(ids.shape)


@contextlib.contextmanager
def _ids_of_feature(
    line: np.ndarray, places: np.ndarray, shape: tuple[int, ...]
) -> Iterator[np.ndarray]:
    """Give one feature's part of a dense stack, to be written in its own shape.

    Args:
      line: the stack's ids or gains `[replicas, N]`.
      places: the places of the feature's ids in a period, ascending.
      shape: `[replicas, periods, bags, width]`.
    """
    by_period, first = line.reshape(*shape[:2], -1), places[0]
    # With features of equal batch size, the places are adjacent: a view of the line.
    if places[-1] - first + 1 == places.size:
        yield by_period[:, :, first : first + places.size].reshape(shape)
        return
    here = np.empty(shape, line.dtype)
    yield here
    by_period[:, :, places] = here.reshape(*shape[:2], -1)


def _physical(ids: np.ndarray, layout: Layout, f: int) -> np.ndarray:
    """Return the physical rows of feature f's ids; for padding the result is meaningless."""
    feature = layout.features[f]
    stack: Stack = layout.stacks[feature.stack]
    return stack.physical(ids.astype(stack.index_dtype, copy=False), feature.table)


def _pack_flat(
    hosts: Sequence[HostIds],
    view: StackView,
    row_ids: np.ndarray,
    bags: np.ndarray,
    gains: np.ndarray | None,
) -> None:
    """Write the ids of a flat stack in batch order."""
    columns = []
    for number, f in enumerate(view.features):
        mine = None if gains is None else _gains(hosts[f], view, number)
        ids, bag, gain = _flatten(hosts[f], mine)
        columns.append(
            Column(
                _in_one_piece(_physical(ids, view.layout, f)),
                _in_one_piece(bag),
                None if gain is None else _in_one_piece(gain),
            )
        )
    sizes = {"periods": view.bags.periods, "bag_features": view.bags.period.feature}
    host_kernels().interleave(columns, row_ids, bags, gains, **sizes)


def _in_one_piece(line: np.ndarray) -> np.ndarray:
    """Return a line as compiled loops read it: numbers side by side, at even addresses.

    What users give may be strided, such as a column of a matrix, or a field of records.
    """
    return np.require(line, requirements=["C", "A"])


def _gains(host: HostIds, view: StackView, number: int) -> np.ndarray | None:
    """Return the gains of a feature's ids, by its number in the stack; None for all ones."""
    return host_gains(host, view.bags.combiners[number], view.stack.compute_dtype)


def _flatten(
    host: HostIds, gains: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return ids, global bags and gains of one feature, in batch order without padding."""
    if host.bags is not None:
        return host.ids, host.bags, gains
    # Dense ids [B, bags, width]: the flat index of an id, divided by the width, is its bag.
    index = np.flatnonzero(host.ids >= 0)
    gains = None if gains is None else gains.reshape(-1)[index]
    bags = (index // max(1, host.ids.shape[-1])).astype(np.int32)
    return host.ids.reshape(-1)[index], bags, gains
