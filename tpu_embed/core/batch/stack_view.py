"""One stack as one batch uses it: how many ids it has room for, and how its bags are numbered.

A batch has one static shape (`BatchSpec`), and an engine has one layout. Whatever works on one
stack needs a part of both: the features that look it up, their bags, the room for ids and rows.
A `StackView` is that part, so that functions take one argument instead of three.

The bags of a stack are numbered in batch order: by example, then by feature, then by inner dims.
With one bag of feature a and two of feature b per example, example 0 has the bags 0 (a) and
1 2 (b), and example 1 has the bags 3 (a) and 4 5 (b).

Input: a spec, a layout, and the number of a stack. Output: everything static about the stack.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from tpu_embed.core.batch.spec import BatchSpec, StackSpec, worst_room
from tpu_embed.core.ids import FeatureShape
from tpu_embed.core.layout import ROW_MULTIPLE, Layout, Stack, round_up

Way = Literal["local", "psum", "gather", "exchange"]
"""How gradients come to the shards that own their rows, see `StackView.way`."""


@dataclasses.dataclass(frozen=True)
class BagLayout:
    """The bags of one stack on one device; static.

    Attributes:
      examples: the number of examples on a device.
      combiners: how each bag of an example combines its rows: "sum", "mean" or "sqrtn".
      columns: the number of bags per example of each feature.
    """

    examples: int
    combiners: tuple[str, ...]
    columns: tuple[int, ...]

    @property
    def bags(self) -> int:
        """The number of bags on a device."""
        return self.examples * len(self.combiners)


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
    def worst_room(self) -> StackSpec:
        """What suffices for any ids."""
        return worst_room(self.spec, self.layout, self.number)

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
    def is_dense(self) -> bool:
        """Whether the ids are packed as `[examples, columns]`, padding included."""
        return self.spec.is_dense(self.number)

    @functools.cached_property
    def is_weighted(self) -> bool:
        """Whether the ids have weights."""
        return self.spec.is_weighted(self.number)

    @property
    def columns(self) -> tuple[int, ...]:
        """The number of id columns of each feature; of a dense stack only."""
        return self.spec.columns(self.number)

    @functools.cached_property
    def bags_per_example(self) -> int:
        """The number of bags of one example, of all features."""
        return sum(shape.bags for shape in self.shapes)

    @property
    def bag_offsets(self) -> tuple[int, ...]:
        """The first bag, within an example, of each feature."""
        # Features with 1, 3 and 2 bags per example have the offsets 0, 1 and 4.
        ends = np.cumsum([0, *(shape.bags for shape in self.shapes)]).tolist()
        return tuple(ends[:-1])

    @property
    def accumulates(self) -> bool:
        """Whether the gradients of a row are summed before one update."""
        optimizer = self.stack.optimizer
        return optimizer is None or optimizer.use_gradient_accumulation

    @property
    def is_routed(self) -> bool:
        """Whether the host has routed the ids; ids whose gradients are not summed are exempt."""
        placed = self.spec.routed != "nothing"
        return placed and self.layout.routes_on_host and self.accumulates

    @property
    def routes_update(self) -> bool:
        """Whether the host has routed the update too."""
        return self.is_routed and self.spec.routed == "update" and self.stack.optimizer is not None

    @property
    def merges_on_host(self) -> bool:
        """Whether the host has routed what every owner receives: it knows the whole batch."""
        return self.routes_update and self.layout.axes.one_process

    @property
    def global_batch(self) -> int:
        """B of the global batch, also where the spec is of this process's part."""
        return self.spec.local_batch * self.layout.axes.replicas

    @property
    def blocks(self) -> int:
        """G, the number of blocks of the global batch."""
        return self.layout.blocks(self.global_batch)

    @functools.cached_property
    def way(self) -> Way:
        """How gradients come to the shards that own their rows.

        - "local": one device has all ids and all rows;
        - "psum": dense sums of a replicated stack that has no more rows than the batch has ids;
        - "gather": every device gets the gradients of all bags, and sums those of its own rows;
        - "exchange": every device sends each shard partial sums of the gradients of its rows.
        """
        stack, replicas = self.stack, self.layout.axes.replicas
        if stack.num_shards == 1 and replicas == 1:
            return "local"
        if stack.num_shards == 1 and self.accumulates:
            if self.blocks * stack.num_rows <= self.num_ids * replicas:
                return "psum"
        return "gather" if self._gather_is_less else "exchange"

    @property
    def may_gather(self) -> bool:
        """Whether gathering gradients is possible: on CPUs, where the host knows all ids.

        With fewer shards than replicas devices hold copies of rows, and the device of each copy
        would sum the whole batch.
        """
        axes, stack = self.layout.axes, self.stack
        several = stack.num_shards > 1 and stack.num_shards >= axes.replicas
        return self.merges_on_host and axes.on_cpu and several

    @property
    def _gather_is_less(self) -> bool:
        """Whether all bags' gradients are fewer bytes than the partial sums would be."""
        if not self.may_gather or not self.room.entries:
            return False
        # Every device receives a gradient per bag of the batch; or C' partial sums from S devices.
        gradients = self.layout.axes.replicas * self.bag_layout.bags
        return gradients < self.stack.num_shards * self.room.partials

    @property
    def num_partials(self) -> int:
        """P, the partial sums that one owner has room for, of all sources."""
        parcel = max(1, self.room.partials)
        if self.way == "local":
            return parcel
        if self.way == "gather":
            return self.layout.axes.replicas * parcel
        return self.layout.axes.batch_order(self.stack.shard_axes).size * parcel

    @property
    def num_merged(self) -> int:
        """U, the distinct rows that one shard updates, a multiple of `ROW_MULTIPLE`."""
        stack = self.stack
        most = stack.num_rows if self.way == "psum" else self.num_partials
        if self.merges_on_host and self.way != "psum":
            most = min(most, max(1, self.room.merged))
        return round_up(min(most, stack.num_rows), ROW_MULTIPLE)

    @functools.cached_property
    def bag_layout(self) -> BagLayout:
        """The bags of one device, and how each combines its rows."""
        combiners: list[str] = []
        for f, shape in zip(self.features, self.shapes, strict=True):
            # The sum of a bag with one id is its row, times its weight: no combiner at all.
            combiner = self.layout.features[f].config.table.combiner if shape.combines else "sum"
            combiners += [combiner] * shape.bags
        columns = tuple(shape.bags for shape in self.shapes)
        return BagLayout(self.spec.local_batch, tuple(combiners), columns)

    def dense_bags(self, xp: Any = jnp) -> Any:
        """Return the bag of every id of a dense stack on one device, int32 `[N]`.

        In a dense stack it follows from the id's position: N is examples · columns.

        Args:
          xp: `jnp` in a program, `np` on the host.
        """
        if not sum(self.columns):
            return xp.zeros(self.num_ids, xp.int32)
        # The bag, within its example, of every column. Feature a with one bag of 2 ids and feature
        # b with two bags of 1 id: 0 0 1 2. Example e then adds 3 e.
        column = np.concatenate(
            [
                offset + np.repeat(np.arange(shape.bags), shape.width or 0)
                for shape, offset in zip(self.shapes, self.bag_offsets, strict=True)
            ]
        )
        examples = xp.arange(self.spec.local_batch, dtype=xp.int32)
        column = column.astype(np.int32)[None]
        return (examples[:, None] * self.bags_per_example + column).reshape(-1)


def view_stacks(spec: BatchSpec, layout: Layout) -> tuple[StackView, ...]:
    """Return the view of every stack, in their order.

    Args:
      spec: the batch's static shape.
      layout: the engine's layout.
    """
    return tuple(StackView(spec, layout, g) for g in range(len(layout.stacks)))
