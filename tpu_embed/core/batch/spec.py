"""The static shape of a batch: forms of the features, capacities of the stacks.

A `BatchSpec` is frozen and hashable: it is the part of a batch that a compiled program depends on.
Made by `batch.py` and `capacity.py` from the ids, or by a user with `BatchSpec.union`; read by
`lookup.py` and `update.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from tpu_embed._checks import message
from tpu_embed.core.ids import FeatureShape
from tpu_embed.core.layout import Layout, roomy


@dataclasses.dataclass(frozen=True)
class StackSpec:
    """Capacities of one stack on one device.

    Attributes:
      features: numbers of its features.
      ids: N, ids a device has room for when they are packed flat.
      row_capacity: C, distinct rows a device may ask one shard for; 0 where nothing is exchanged.
      partials: partial sums a device may send one shard; 0 where nothing is exchanged.
    """

    features: tuple[int, ...]
    ids: int
    row_capacity: int
    partials: int


@dataclasses.dataclass(frozen=True)
class BatchSpec:
    """What a compiled program knows of a batch.

    Attributes:
      replicas: parts the batch is split into.
      feature_shapes: the shape of every feature, in flattening order.
      stacks: the capacities of every stack.

    Example:
      >>> a = BatchSpec(1, (), (StackSpec((), ids=8, row_capacity=0, partials=0),))
      >>> b = BatchSpec(1, (), (StackSpec((), ids=16, row_capacity=4, partials=4),))
      >>> BatchSpec.union(a, b).stacks[0].ids
      16
    """

    replicas: int
    feature_shapes: tuple[FeatureShape, ...]
    stacks: tuple[StackSpec, ...]

    @staticmethod
    def union(*specs: BatchSpec) -> BatchSpec:
        """Return the least spec that every batch of the given specs fits.

        Raises:
          ValueError: none given, or specs of different engines, batch sizes or activation shapes.
        """
        if not specs:
            raise ValueError(message("BatchSpec.union", expected="at least one spec", got="none"))
        return functools.reduce(_union, specs)

    def bucketed(self) -> BatchSpec:
        """Return capacities with room for chance, rounded up: like batches share one program."""
        stacks = tuple(
            StackSpec(g.features, roomy(g.ids), roomy(g.row_capacity), roomy(g.partials))
            for g in self.stacks
        )
        return dataclasses.replace(self, stacks=stacks)

    def over(self, replicas: int) -> BatchSpec:
        """Return the spec of as large parts of a batch, in another number of them."""
        if replicas == self.replicas:
            return self
        sizes = [form.batch // self.replicas * replicas for form in self.feature_shapes]
        forms = zip(self.feature_shapes, sizes, strict=True)
        resized = tuple(dataclasses.replace(form, batch=size) for form, size in forms)
        return dataclasses.replace(self, replicas=replicas, feature_shapes=resized)

    def check_batch(self, paths: Sequence[str]) -> None:
        """Check that all features have one batch size, and that it divides over the replicas.

        Args:
          paths: the features' paths, in flattening order.

        Raises:
          ValueError: they differ, or it does not divide.
        """
        size = self.feature_shapes[0].batch
        for path, form in zip(paths, self.feature_shapes, strict=True):
            if form.batch != size:
                what, first = f"feature {path!r}", f"batch size {size}, as feature {paths[0]!r} has"
                raise ValueError(message(what, expected=first, got=f"{form.batch}"))
        if size % self.replicas or not size:
            raise ValueError(
                message(
                    "batch size",
                    expected=f"a positive multiple of {self.replicas}, the devices that share it",
                    got=f"{size}",
                    remedy=f"use tpu_embed.pad_batch(features, {self.replicas})",
                )
            )

    @property
    def batch(self) -> int:
        """B, examples of the global batch."""
        return self.feature_shapes[0].batch

    @property
    def local_batch(self) -> int:
        """Examples a device holds; 0 without features."""
        return self.feature_shapes[0].batch // self.replicas if self.feature_shapes else 0

    def is_dense(self, stack: int) -> bool:
        """Tell whether the ids of a stack are packed as `[examples, columns]`, padding included."""
        widths = [self.feature_shapes[f].width for f in self.stacks[stack].features]
        return bool(widths) and all(width is not None for width in widths)

    def is_weighted(self, stack: int) -> bool:
        """Tell whether the ids of a stack have weights."""
        return any(self.feature_shapes[f].weighted for f in self.stacks[stack].features)

    def columns(self, stack: int) -> tuple[int, ...]:
        """Return the number of id columns of every feature of a dense stack."""
        return self._columns[stack]

    @functools.cached_property
    def _columns(self) -> tuple[tuple[int, ...], ...]:
        widths = [form.bags * (form.width or 0) for form in self.feature_shapes]
        return tuple(tuple(widths[f] for f in stack.features) for stack in self.stacks)

    def ids(self, stack: int) -> int:
        """Return N, the length of the packed ids of a stack on one device; at least 1."""
        if self.is_dense(stack):
            return max(1, self.local_batch * sum(self.columns(stack)))
        return max(1, self.stacks[stack].ids)


def worst_case(spec: BatchSpec, layout: Layout) -> BatchSpec:
    """Return the spec whose exchange capacities suffice for any ids."""
    stacks = []
    for g, stack in enumerate(layout.stacks):
        n = spec.ids(g)
        blocks = layout.blocks_per_device(spec.feature_shapes[0].batch)
        accumulates = stack.optimizer is None or stack.optimizer.use_gradient_accumulation
        partials = min(n, stack.num_rows * blocks) if accumulates else n
        exact = dataclasses.replace(
            spec.stacks[g], row_capacity=min(n, stack.num_rows), partials=partials
        )
        stacks.append(exact)
    return dataclasses.replace(spec, stacks=tuple(stacks))


def _union(a: BatchSpec, b: BatchSpec) -> BatchSpec:
    if a == b:
        return a
    same_engine = a.replicas == b.replicas and [g.features for g in a.stacks] == [
        g.features for g in b.stacks
    ]
    if not same_engine or len(a.feature_shapes) != len(b.feature_shapes):
        raise ValueError(
            message("BatchSpec.union", expected="specs of one engine", got=f"{a} and {b}")
        )
    return BatchSpec(
        a.replicas,
        tuple(
            _union_shape(i, f, g)
            for i, (f, g) in enumerate(zip(a.feature_shapes, b.feature_shapes, strict=True))
        ),
        tuple(
            StackSpec(
                g.features,
                max(g.ids, h.ids),
                max(g.row_capacity, h.row_capacity),
                max(g.partials, h.partials),
            )
            for g, h in zip(a.stacks, b.stacks, strict=True)
        ),
    )


def _union_shape(i: int, a: FeatureShape, b: FeatureShape) -> FeatureShape:
    if a == b:
        return a
    if (a.batch, a.inner, a.combines) != (b.batch, b.inner, b.combines):
        raise ValueError(
            message(
                f"BatchSpec: feature {i}",
                expected=f"batch {a.batch}, activation shape {a.inner}, combined {a.combines}",
                got=f"batch {b.batch}, activation shape {b.inner}, combined {b.combines}",
                remedy="use a spec a kind of batch",
            )
        )
    flat = a.width is None or b.width is None
    width = None if flat else max(a.width or 0, b.width or 0)
    return dataclasses.replace(a, width=width, weighted=a.weighted or b.weighted)
