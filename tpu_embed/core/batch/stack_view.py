"""One stack as one batch uses it: how many ids it has room for, and how its bags are numbered.

A batch has one static shape (`BatchSpec`), and an engine has one layout. Whatever works on one
stack needs a part of both: the features that look it up, their bags, the room for ids and rows.
A `StackView` is that part, so that functions take one argument instead of three.

The bags of a stack are numbered in batch order: example e of a feature with B examples comes at
e / B of the batch; then by feature, then by inner dims. The order of the bags repeats: a period is
the smallest part of a device's batch after which it does. Features of equal batch size have one
example each in a period. With one bag of feature a and two of feature b per example, period 0 has
the bags 0 (a) and 1 2 (b), and period 1 has the bags 3 (a) and 4 5 (b). If instead a has 2 examples
of one bag per device and b has 6, there are 2 periods, of one example of a and 3 of b.

An example of a jagged feature counts as one bag in this order, but its ids are not combined: each
has a target of its own. The targets of a stack are its activations' rows, which is where its
gradients come from: first its bags, in their order, then the places of each jagged feature.

Input: a spec, a layout, and the number of a stack. Output: everything static about the stack.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

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
      periods: the number of periods on a device.
      combiners: how each bag of a period combines its rows: "sum", "mean" or "sqrtn".
      bags_per_period: for each feature, the number of its bags in a period.
      widths: the number of ids of each bag of a period, if all periods are alike; otherwise ().
      order: of each bag of a period, its number if the bags were counted feature by feature; () if
        that is batch order already.
    """

    periods: int
    combiners: tuple[str, ...]
    bags_per_period: tuple[int, ...]
    widths: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    @property
    def bags(self) -> int:
        """The number of bags on a device."""
        return self.periods * len(self.combiners)


class Period(NamedTuple):
    """The bags of one period, in batch order.

    Attributes:
      feature: the number of each bag's feature, among those of the stack.
      example: the example of each bag, among those of its feature in the period.
      counts: the number of bags of each feature.
      order: see `BagLayout.order`.
    """

    feature: tuple[int, ...]
    example: tuple[int, ...]
    counts: tuple[int, ...]
    order: tuple[int, ...]


@functools.lru_cache(1024)
def arrange_period(examples: tuple[int, ...], bags: tuple[int, ...]) -> Period:
    """Return the bags of one period in batch order.

    Args:
      examples: the examples of each feature in a period.
      bags: the bags of each example of each feature.

    Example:
      >>> period = arrange_period((2, 3), (1, 1))  # at 0, 1/2 of the period; at 0, 1/3, 2/3
      >>> period.feature, period.example
      ((0, 1, 1, 0, 1), (0, 0, 1, 1, 2))
      >>> period.order
      (0, 2, 3, 1, 4)
    """
    # (feature, example) of each bag, feature by feature: examples 2 3 and one bag each give
    # (0, 0) (0, 1) (1, 0) (1, 1) (1, 2). A stable sort by e / n, in integers, puts them in batch
    # order, and keeps the features, and the bags of one example, as they are.
    pairs = [(f, e) for f, n in enumerate(examples) for e in range(n) for _ in range(bags[f])]
    whole = math.lcm(*examples)
    places = [(e * (whole // examples[f]), f) for f, e in pairs]
    ordered = sorted(range(len(pairs)), key=places.__getitem__)
    arranged = [pairs[i] for i in ordered]
    return Period(
        tuple(f for f, _ in arranged),
        tuple(e for _, e in arranged),
        tuple(n * b for n, b in zip(examples, bags, strict=True)),
        () if ordered == sorted(ordered) else tuple(ordered),
    )


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

    @property
    def num_bag_ids(self) -> int:
        """How many of them are for ids in bags; they come first, those of jagged features after."""
        return self.spec.bag_ids(self.number)

    @functools.cached_property
    def jagged(self) -> tuple[int, ...]:
        """The numbers, among those of the stack, of its features whose ids have places."""
        return tuple(number for number, shape in enumerate(self.shapes) if shape.has_places)

    @functools.cached_property
    def jagged_starts(self) -> dict[int, int]:
        """Where the places of each jagged feature begin among those of all of them."""
        starts, end = {}, 0
        for number in self.jagged:
            starts[number] = end
            end += self.shapes[number].capacity or 0
        return starts

    @functools.cached_property
    def num_targets(self) -> int:
        """T, the rows of the stack's activations on one device: bags, then jagged places."""
        places = sum(self.shapes[number].capacity or 0 for number in self.jagged)
        return self.bag_layout.bags + places

    @functools.cached_property
    def is_dense(self) -> bool:
        """Whether the ids are packed as `[periods, ids]`, padding included."""
        return self.spec.is_dense(self.number)

    @functools.cached_property
    def is_weighted(self) -> bool:
        """Whether the ids have weights."""
        return self.spec.is_weighted(self.number)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The examples of each feature on one device."""
        return tuple(shape.batch // self.spec.replicas for shape in self.shapes)

    @functools.cached_property
    def periods(self) -> int:
        """The number of periods on one device; 0 without features."""
        return math.gcd(*self.sizes)

    @functools.cached_property
    def period(self) -> Period:
        """The bags of one period."""
        examples = [size // self.periods for size in self.sizes]
        return arrange_period(tuple(examples), tuple(shape.bags for shape in self.shapes))

    @property
    def bags_in_order(self) -> int:
        """The bags on one device, examples of jagged features among them."""
        return self.periods * len(self.period.feature)

    @property
    def accumulates(self) -> bool:
        """Whether the gradients of a row are summed before one update."""
        optimizer = self.stack.optimizer
        return optimizer is None or optimizer.use_gradient_accumulation

    @property
    def is_routed(self) -> bool:
        """Whether the host has routed the ids; ids whose gradients are not summed are exempt."""
        placed = self.spec.routed != "nothing"
        # A single CPU's kernel, which sorts ids itself, knows bags but no places.
        routes = self.layout.routes_on_host or bool(self.jagged)
        return placed and routes and self.accumulates

    @property
    def routes_update(self) -> bool:
        """Whether the host has routed the update too."""
        return self.is_routed and self.spec.routed == "update" and self.stack.optimizer is not None

    @property
    def merges_on_host(self) -> bool:
        """Whether the host has routed what every owner receives: it knows the whole batch."""
        return self.routes_update and self.layout.axes.one_process

    @property
    def blocks(self) -> int:
        """G, the number of blocks of the global batch."""
        return self.layout.blocks

    @functools.cached_property
    def blocks_per_device(self) -> int:
        """The largest number of blocks that one device's examples fall into."""
        return self.layout.blocks_per_device(self.sizes)

    @functools.cached_property
    def block_starts(self) -> np.ndarray:
        """The first bag of every block, and the end of the last one, int64 `[G + 1]`.

        Bags are numbered here through all replicas, one after the other; examples of jagged
        features are among them.
        """
        # Block k begins at k / G of the batch. In periods that is k · periods · replicas / G: a
        # whole number q, and a rest / G. In period q, the first bag at the rest or after it is
        # the first one whose example e of n has e / n >= rest / G.
        blocks, all_periods = self.blocks, self.periods * self.layout.axes.replicas
        examples = np.array([size // self.periods for size in self.sizes])
        bags = self.period
        places = np.array(bags.example) * blocks  # [bags]: e · G, to be compared with rest · n
        counts = examples[list(bags.feature)]  # [bags]: n
        starts = []
        for block in range(blocks + 1):
            period, rest = divmod(block * all_periods, blocks)
            before = int(np.count_nonzero(places < rest * counts))
            starts.append(period * len(bags.feature) + before)
        return np.array(starts, np.int64)

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
        # Every device receives all gradients of the batch; or C' partial sums from S devices.
        gradients = self.layout.axes.replicas * self.num_targets
        return gradients < self.stack.num_shards * self.room.partials

    @property
    def num_partials(self) -> int:
        """P, the partial sums that one owner has room for, of all sources."""
        parcel_size = max(1, self.room.partials)  # of one source, for one owner
        if self.way == "local":
            return parcel_size
        if self.way == "gather":
            return self.layout.axes.replicas * parcel_size
        return self.layout.axes.batch_order(self.stack.shard_axes).size * parcel_size

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
        """The bags of one device without those of jagged features; how each combines its rows."""
        kinds, sizes, shapes = [], [], []
        for f, shape, size in zip(self.features, self.shapes, self.sizes, strict=True):
            if shape.has_places:
                continue
            # The sum of a bag with one id is its row, times its weight: no combiner at all.
            combiner = self.layout.features[f].config.table.combiner
            kinds.append(combiner if shape.combines else "sum")
            sizes.append(size // self.periods)
            shapes.append(shape)
        period = arrange_period(tuple(sizes), tuple(shape.bags for shape in shapes))
        widths = [shape.width or 0 for shape in shapes]
        alike = self.is_dense and any(widths[f] for f in period.feature)
        return BagLayout(
            self.periods,
            tuple(kinds[f] for f in period.feature),
            period.counts,
            tuple(widths[f] for f in period.feature) if alike else (),
            period.order,
        )

    @functools.cached_property
    def gradient_layout(self) -> BagLayout:
        """The bags of the gradients that are summed by row.

        With jagged features, the gradients of all targets are one array `[T, D]`, scaled already,
        as if it were the gradients of T bags of one feature.
        """
        if not self.jagged:
            return self.bag_layout
        return BagLayout(self.num_targets, ("sum",), (1,))

    def id_places(self, number: int) -> np.ndarray:
        """Return the places in a period of a feature's ids, ascending; of a dense stack.

        Args:
          number: the feature's number among those of the stack.
        """
        return np.flatnonzero(self.id_features == number)

    @functools.cached_property
    def id_features(self) -> np.ndarray:
        """The feature of each id of a period, among those of the stack; of a dense stack."""
        # Widths 2 1 1 of the features 0 1 0: the ids of a period are of the features 0 0 1 0.
        widths = [shape.width or 0 for shape in self.shapes]
        features = np.array(self.period.feature, np.int32)
        return features.repeat(np.array(widths, np.int64)[features])

    def dense_bags(self, xp: Any = jnp) -> Any:
        """Return the bag of every id of a dense stack on one device, int32 `[N]`.

        In a dense stack it follows from the id's position: every period has as many ids.

        Args:
          xp: `jnp` in a program, `np` on the host.
        """
        widths = self.bag_layout.widths
        if not widths:
            return xp.zeros(self.num_ids, xp.int32)
        # The bag, within its period, of every id. Feature a with one bag of 2 ids and feature b
        # with two bags of 1 id: 0 0 1 2. Period k then adds 3 k.
        within = np.repeat(np.arange(len(widths)), widths).astype(np.int32)
        periods = xp.arange(self.periods, dtype=xp.int32)
        return (periods[:, None] * len(widths) + within[None]).reshape(-1)


def view_stacks(spec: BatchSpec, layout: Layout) -> tuple[StackView, ...]:
    """Return the view of every stack, in their order.

    Args:
      spec: the batch's static shape.
      layout: the engine's layout.
    """
    return tuple(StackView(spec, layout, g) for g in range(len(layout.stacks)))
