"""The static shape of a batch: the shapes of its features, and the capacities of its stacks.

A compiled program needs to know every array size beforehand. A `BatchSpec` holds all sizes of a
batch; it is frozen and hashable, and batches with equal specs run the same program.

Input: counts of the ids in a batch; or several specs, for a spec that fits all of their batches.
Output: a `BatchSpec`, and the array sizes that follow from it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Literal

from tpu_embed._checks import refuse
from tpu_embed.core.ids import FeatureShape
from tpu_embed.core.layout import ROW_MULTIPLE, Layout, roomy, round_up

Routed = Literal["nothing", "lookup", "update"]
"""What of a batch the host routes: nothing (it was not placed), its lookup, or its update too.

On a single CPU it leaves that to the kernels, see `Layout.places_routes`.
"""


@dataclasses.dataclass(frozen=True)
class StackSpec:
    """The capacities of one stack on one device.

    Attributes:
      features: the indices of the features that look up the stack.
      ids: the number of ids in bags that a device has room for if they are packed flat.
      row_capacity: C, the number of distinct rows that a device may ask one shard for; 0 if
        nothing is exchanged.
      partials: the number of partial sums that a device may send to one shard; 0 if nothing is
        exchanged.
      merged: the number of distinct rows that one shard may update; 0 if the host does not know.
    """

    features: tuple[int, ...]
    ids: int
    row_capacity: int
    partials: int
    merged: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """All capacities."""
        return self.ids, self.row_capacity, self.partials, self.merged

    def bucketed(self) -> StackSpec:
        """Return larger capacities, padded for random variation and rounded up to buckets."""
        ids, asked, partials, merged = map(roomy, self.sizes)
        # A small bucket would be outgrown more often here, where counts of all devices add up. And
        # merged sums are padded to a multiple of `ROW_MULTIPLE` anyway.
        merged = round_up(merged, ROW_MULTIPLE) if merged else 0
        return StackSpec(self.features, ids, asked, partials, merged)


@dataclasses.dataclass(frozen=True)
class BatchSpec:
    """What a compiled program knows of a batch.

    Attributes:
      replicas: the number of parts into which the batch is split.
      feature_shapes: the shape of every feature, in flattening order.
      stacks: the capacities of every stack.
      routed: what of it the host routes.

    Example:
      >>> a = BatchSpec(1, (), (StackSpec((), ids=8, row_capacity=0, partials=0),))
      >>> b = BatchSpec(1, (), (StackSpec((), ids=16, row_capacity=4, partials=4),))
      >>> BatchSpec.union(a, b).stacks[0].ids
      16
    """

    replicas: int
    feature_shapes: tuple[FeatureShape, ...]
    stacks: tuple[StackSpec, ...]
    routed: Routed = "nothing"

    @staticmethod
    def bare(
        shapes: Sequence[FeatureShape],
        layout: Layout,
        replicas: int,
        routed: Routed = "nothing",
    ) -> BatchSpec:
        """Return the spec of a batch of an engine, without capacities.

        Raises:
          ValueError: the batch size of a feature is no positive multiple of the replicas.
        """
        stacks = tuple(StackSpec(mine, 0, 0, 0) for mine in layout.features_by_stack)
        for feature, shape in zip(layout.features, shapes, strict=True):
            if shape.batch % replicas or not shape.batch:
                expected = (
                    f"a positive multiple of {replicas}, the devices that share it"
                )
                what = f"feature {feature.path!r}: batch size"
                remedy = f"use tpu_embed.pad_batch(features, {replicas})"
                if not shape.batch:  # nothing is padded to a multiple: it is one
                    remedy = "examples whose bags are empty will do"
                refuse(what, expected=expected, got=f"{shape.batch}", remedy=remedy)
        return BatchSpec(replicas, tuple(shapes), stacks, routed)

    @staticmethod
    def union(*specs: BatchSpec) -> BatchSpec:
        """Return the smallest spec that every batch of the given specs fits.

        Raises:
          ValueError: no spec is given, or the specs are of different engines, batch sizes or
            activation shapes.
        """
        if not specs:
            refuse("BatchSpec.union", expected="at least one spec", got="none")
        return functools.reduce(_union, specs)

    def bucketed(self) -> BatchSpec:
        """Return a spec with larger capacities, so that similar batches share one program."""
        # They depend on lengths alone, so features of equal lengths keep equal capacities.
        shapes = tuple(
            one.with_capacity(roomy(one.capacity or 0)) for one in self.feature_shapes
        )
        stacks = tuple(stack.bucketed() for stack in self.stacks)
        return dataclasses.replace(self, feature_shapes=shapes, stacks=stacks)

    def over(self, replicas: int) -> BatchSpec:
        """Return the same per-device shape for another number of replicas."""
        if replicas == self.replicas:
            return self
        # 64 examples on 8 replicas are 8 per device, so 16 on 2 replicas.
        sizes = [size * replicas for size in self.local_sizes]
        pairs = zip(self.feature_shapes, sizes, strict=True)
        resized = tuple(dataclasses.replace(shape, batch=size) for shape, size in pairs)
        return dataclasses.replace(self, replicas=replicas, feature_shapes=resized)

    @property
    def sizes(self) -> tuple[int, ...]:
        """B of every feature: its examples in the global batch, in flattening order."""
        return tuple(shape.batch for shape in self.feature_shapes)

    @property
    def local_sizes(self) -> tuple[int, ...]:
        """The examples of every feature on one device."""
        return tuple(size // self.replicas for size in self.sizes)

    def activation_rows(self, f: int) -> int:
        """Return the rows of feature f's activation on one device."""
        return self.feature_shapes[f].bags_of(self.local_sizes[f])

    def ids(self, stack: int) -> int:
        """Return N, the places for ids of a stack on one device.

        It is at least 1, so that no array of a compiled program is empty.
        """
        one = self.stacks[stack]
        shapes = [self.feature_shapes[f] for f in one.features]
        flat = any(shape.room_per_bag is None for shape in shapes)
        # Bags that are packed flat share the room of the stack; jagged features have their own.
        rooms = (
            shape.bags_of(shape.batch // self.replicas) * (shape.room_per_bag or 0)
            for shape in shapes
            if shape.has_places or not flat
        )
        return max(1, sum(rooms, one.ids if flat else 0))


def _union(a: BatchSpec, b: BatchSpec) -> BatchSpec:
    """Return the smallest spec that the batches of both specs fit: the maximum of every size."""
    if a == b:
        return a
    # What the specs of one engine's batches have in common.
    kinds = [
        (
            one.replicas,
            one.routed,
            len(one.feature_shapes),
            [g.features for g in one.stacks],
        )
        for one in (a, b)
    ]
    if kinds[0] != kinds[1]:
        refuse("BatchSpec.union", expected="specs of one engine", got=f"{a} and {b}")
    stacks = (
        StackSpec(g.features, *map(max, g.sizes, h.sizes))
        for g, h in zip(a.stacks, b.stacks, strict=True)
    )
    shapes = map(_union_shape, itertools.count(), a.feature_shapes, b.feature_shapes)
    return dataclasses.replace(a, feature_shapes=tuple(shapes), stacks=tuple(stacks))


def _union_shape(i: int, a: FeatureShape, b: FeatureShape) -> FeatureShape:
    """Return the smallest shape of feature i that fits both shapes."""
    if a == b:
        return a
    kinds = [
        (one.batch, one.inner, one.combines, one.capacity is None) for one in (a, b)
    ]
    if kinds[0] != kinds[1]:
        refuse(
            f"BatchSpec: feature {i}",
            expected=f"batch {a.batch}, activation shape {a.inner}, combined {a.combines}",
            got=f"batch {b.batch}, activation shape {b.inner}, combined {b.combines}",
            remedy="use one spec per kind of batch",
        )
    # A dense batch can be packed flat, but not the other way round. Of two dense ones, the
    # narrower gets padding.
    return dataclasses.replace(
        a,
        width=_larger(a.width, b.width),
        weighted=a.weighted or b.weighted,
        capacity=_larger(a.capacity, b.capacity),
    )


def _larger(a: int | None, b: int | None) -> int | None:
    """Return the larger of two sizes; None if one is unknown."""
    return None if a is None or b is None else max(a, b)
