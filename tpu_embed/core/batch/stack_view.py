"""One stack as one batch uses it: its features, the room for its ids, and what the host routes.

A batch has one static shape (`BatchSpec`), and an engine has one layout. Whatever works on one
stack needs a part of both: the features that look it up, their bags, the room for ids and rows.
A `StackView` is that part, so that functions take one argument instead of three.

Bags are numbered feature after feature; those of a feature are those of its examples, in their
order. With features of 2 and 3 examples of one bag each, the bags are 0 1 | 2 3 4. Of a jagged
feature every place is a bag of one id. A bag is a row of the stack's activations, which is where
its gradient comes from. Where all features have a width, a device has as many ids in every bag of a
feature, padding included, and the bag of an id follows from its position. Otherwise ids are packed
without padding, and each has the number of its bag.

The gradients of a stack come to the shards that own its rows in one of three ways. If one device
has all ids and all rows, nothing moves. Of a replicated stack with no more rows than the batch has
ids, every device makes dense sums, which a psum adds. Otherwise every device sends each shard
partial sums of the gradients of its rows.

Inside `shard_map`, a `Batch` and `TracedIds` both become `LocalIds`, one per stack. Of ids that the
host has not routed, nobody knows how many go to which shard. So every shard gathers the ids of all
devices and keeps those of its own rows. They stand device after device: of T bags each, bag b of
device d has the number d T + b.

Input: a spec, a layout, and the number of a stack; the arrays of one device. Output: everything
static about the stack; its ids, as a lookup and an update take them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import Array
from tpu_embed.core.batch.spec import BatchSpec, StackSpec
from tpu_embed.core.exchange import collectives, route
from tpu_embed.core.ids import FeatureShape
from tpu_embed.core.layout import ROW_MULTIPLE, Layout, Stack, round_up
from tpu_embed.kernels.operands import SumLayout


@dataclasses.dataclass(frozen=True)
class StackView:
    """One stack of a layout, in a batch of one static shape.

    What takes a loop over the features is computed once.

    Attributes:
      spec: the batch's static shape.
      layout: the engine's layout.
      number: the number of the stack.
    """

    spec: BatchSpec
    layout: Layout
    number: int

    @property
    def stack(self) -> Stack:
        """The stack."""
        return self.layout.stacks[self.number]

    @property
    def room(self) -> StackSpec:
        """What the batch has room for: ids, distinct rows, partial sums."""
        return self.spec.stacks[self.number]

    @property
    def features(self) -> tuple[int, ...]:
        """The numbers of the features that look the stack up, ascending."""
        return self.room.features

    @functools.cached_property
    def shapes(self) -> tuple[FeatureShape, ...]:
        """The shapes of these features."""
        return tuple(self.spec.feature_shapes[f] for f in self.features)

    @functools.cached_property
    def num_ids(self) -> int:
        """N, the ids that one device has room for, padding included; at least 1."""
        return self.spec.ids(self.number)

    @functools.cached_property
    def has_gains(self) -> bool:
        """Whether some ids may have another gain than 1 (`ids/gains.py`)."""
        configs = (self.layout.features[f].config for f in self.features)
        pairs = zip(self.shapes, configs, strict=True)
        return any(
            s.weighted or (s.combines and one.table.combiner != "sum")
            for s, one in pairs
        )

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The examples of each feature on one device."""
        return tuple(shape.batch // self.spec.replicas for shape in self.shapes)

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """The bags of each feature on one device."""
        return tuple(
            s.bags_of(size) for s, size in zip(self.shapes, self.sizes, strict=True)
        )

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """The first bag of each feature, and the end of all bags."""
        return tuple(itertools.accumulate(self.counts, initial=0))

    @functools.cached_property
    def is_dense(self) -> bool:
        """Whether all features have a width, so that ids have places, padding included."""
        return all(shape.room_per_bag is not None for shape in self.shapes)

    @functools.cached_property
    def widths(self) -> tuple[int, ...]:
        """The ids of each bag of each feature of a dense stack; () if there are no ids at all."""
        widths = (
            [shape.room_per_bag or 0 for shape in self.shapes] if self.is_dense else []
        )
        return tuple(widths) if any(map(np.multiply, widths, self.counts)) else ()

    @property
    def sum_layout(self) -> SumLayout:
        """The bags as a kernel takes them that sums the rows of each."""
        return SumLayout(self.counts, self.widths)

    def dense_bags(self, xp: Any = jnp) -> Any:
        """Return the bag of every id of a dense stack on one device, int32 `[N]`.

        Args:
          xp: `jnp` in a program, `np` on the host.
        """
        if not self.widths:
            return xp.zeros(1, xp.int32)
        # Widths 2 2 1 and counts 1 1 2: features of equal width are one range, 0 0 1 1 | 2 3.
        parts, first = [], 0
        each = zip(self.widths, self.counts, strict=True)
        for width, some in itertools.groupby(each, key=lambda pair: pair[0]):
            count = sum(count for _, count in some)
            if width:
                parts.append(first + xp.arange(count * width, dtype=xp.int32) // width)
            first += count
        return xp.concatenate(parts) if len(parts) > 1 else parts[0]

    def block_starts(self, number: int, row_splits: Mapping[int, Array]) -> Any:
        """Return the first bag of the second and all later blocks of the only device, `[G - 1]`.

        It is a NumPy array unless it depends on row splits.

        Args:
          number: of the feature, among those of the stack.
          row_splits: `[1, B/S + 1]` of every jagged feature, whose places are its bags.
        """
        # The first example of block k is ⌈k · B / G⌉: of 10 examples in 4 blocks 3, 5 and 8.
        size, start, blocks = (
            self.sizes[number],
            self.starts[number],
            self.layout.blocks,
        )
        examples = np.array(
            [-(-k * size // blocks) for k in range(1, blocks)], np.int32
        )
        if self.shapes[number].has_places:
            return start + row_splits[self.features[number]][0, examples]
        return (start + examples * self.shapes[number].bags).astype(np.int32)

    @property
    def accumulates(self) -> bool:
        """Whether the gradients of a row are summed before one update."""
        optimizer = self.stack.optimizer
        return optimizer is None or optimizer.use_gradient_accumulation

    @property
    def updates(self) -> bool:
        """Whether a batch is placed for an update of the stack."""
        return self.spec.routed == "update" and self.stack.optimizer is not None

    @property
    def is_routed(self) -> bool:
        """Whether the host has routed the lookup."""
        return self.spec.routed != "nothing" and self.layout.places_routes

    @property
    def routes_update(self) -> bool:
        """Whether the host has routed the update too; not if gradients are not summed."""
        return self.is_routed and self.updates and self.accumulates

    @property
    def is_merged(self) -> bool:
        """Whether the host has routed what every owner receives: it knows the whole batch."""
        return self.routes_update and self.layout.axes.one_process

    @property
    def needs_blocks(self) -> bool:
        """Whether the host numbers the block of every id: to route it, or for the device to."""
        sorts = self.routes_update or not self.accumulates
        return self.updates and sorts and self.blocks_per_device > 1

    @property
    def is_local(self) -> bool:
        """Whether one device has all ids and all rows."""
        return self.stack.num_shards == 1 and self.layout.axes.replicas == 1

    @functools.cached_property
    def by_psum(self) -> bool:
        """Whether the devices make dense sums of all rows, which a psum adds."""
        stack, replicas = self.stack, self.layout.axes.replicas
        # A psum would add the sums of all blocks unrounded.
        if (
            self.is_local
            or stack.num_shards > 1
            or not self.accumulates
            or stack.exchange_dtype
        ):
            return False
        return self.layout.blocks * stack.num_rows <= self.num_ids * replicas

    @property
    def parcel_size(self) -> int:
        """C', the room for partial sums of one source for one owner."""
        return max(1, self.room.partials)

    @property
    def num_partials(self) -> int:
        """P, the partial sums that one owner has room for, of all sources."""
        if (
            self.by_psum
        ):  # a sum for every block and row; row r in block b is number b · R + r
            return self.layout.blocks * self.stack.num_rows
        sources = self.layout.axes.batch_order(self.stack.shard_axes)
        return (1 if self.is_local else sources.size) * self.parcel_size

    @property
    def num_merged(self) -> int:
        """U, the distinct rows that one shard updates, a multiple of `ROW_MULTIPLE`."""
        most = self.stack.num_rows
        if not self.by_psum:
            most = min(most, self.num_partials)
            most = min(most, max(1, self.room.merged)) if self.is_merged else most
        return round_up(most, ROW_MULTIPLE)

    @functools.cached_property
    def blocks_per_device(self) -> int:
        """The largest number of blocks that one device's examples fall into."""
        return self.layout.blocks_per_device(self.sizes)


def view_stacks(spec: BatchSpec, layout: Layout) -> tuple[StackView, ...]:
    """Return the view of every stack, in their order.

    Args:
      spec: the batch's static shape.
      layout: the engine's layout.
    """
    return tuple(StackView(spec, layout, g) for g in range(len(layout.stacks)))


class LocalIds(NamedTuple):
    """The ids of one stack on one device, feature after feature.

    What the host has routed is here under its name in the line (`batch.py`); otherwise it is None.

    Attributes:
      index: `[N]`, the position of each id's row among the `[S * C]` that come back; where nothing
        is asked, the physical row of each id. Out of range for absent ids, `PADDING_ID` in rows.
      bags: int32 `[N]`, the bag of each id, numbered on this device, non-decreasing.
      gains: float `[N]`, finite; None for all ones.
      blocks: int32 `[N]`, the block of the batch that the example of each id is in, where the host
        has numbered them for the device.
      asked: `[S, C]`, the local rows that the devices ask this owner for, by source; `PADDING_ID`
        where nothing is asked. None with one shard: every row is here.
      row_ids: `[N]`, physical rows, where the host has routed the lookup, but not the update.
      sum_index: int32 `[N]`, the bags whose gradients are added, in order.
      sum_segments: int32 `[N]`, the partial sum that each is added to, non-decreasing; past the
        last one for what is left out.
      sum_gains: `[N]`, what each is multiplied with; None: all ones.
      sent: `[S, C']`, the local row of each partial sum, where the host does not know what arrives.
      merge_index: as in `RowSums` of what arrives here, and so are the next two.
      merge_segments: its segments.
      merged: its rows.
    """

    index: Array
    bags: Array
    gains: Array | None
    blocks: Array | None = None
    asked: Array | None = None
    row_ids: Array | None = None
    sum_index: Array | None = None
    sum_segments: Array | None = None
    sum_gains: Array | None = None
    sent: Array | None = None
    merge_index: Array | None = None
    merge_segments: Array | None = None
    merged: Array | None = None

    @property
    def rows(self) -> Array:
        """The physical rows `[N]`, where the host has not routed the update."""
        return self.index if self.row_ids is None else self.row_ids


def gather_ids(ids: LocalIds, view: StackView, names: Sequence[str]) -> LocalIds:
    """Return the ids of the devices along some axes, with local rows of this shard.

    Args:
      ids: the ids of this device.
      view: the stack in its batch.
      names: axes that split the batch.
    """
    # With T = 3 bags on each of two devices, ids of the bags 0 0 2 | 1 2 2 get 0 0 2 4 5 5: still
    # non-decreasing, as the kernels need it.
    bags = ids.bags + collectives.axis_index(names) * view.starts[-1]
    every = LocalIds(ids.rows, bags, ids.gains, ids.blocks)
    every = jax.tree.map(lambda x: gather(x, names), every)
    return every._replace(index=route.rows_of_shard(every.index, view.stack))


def gather(values: Array, names: Sequence[str]) -> Array:
    """Return `[n N, …]`: the values `[N, …]` of n devices, one device after the other."""
    return collectives.all_gather(values, names).reshape(-1, *values.shape[1:])
