"""The static shape of a batch: forms of the features, capacities of the groups.

A `BatchSpec` is frozen and hashable: it is the part of a batch that a compiled program depends on.
Made by `batch.py` and `capacity.py` from the ids, or by a user with `BatchSpec.union`; read by
`lookup.py` and `update.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from tpu_embed._checks import message
from tpu_embed.core.ids import FeatureForm
from tpu_embed.core.layout import Layout


@dataclasses.dataclass(frozen=True)
class GroupSpec:
    """Capacities of one stack on one device.

    Attributes:
      features: numbers of its features.
      ids: N, ids a device has room for when they are packed flat.
      rows: C, distinct rows a device may ask one shard for; 0 where nothing is exchanged.
      partials: partial sums a device may send one shard; 0 where nothing is exchanged.
    """

    features: tuple[int, ...]
    ids: int
    rows: int
    partials: int


@dataclasses.dataclass(frozen=True)
class BatchSpec:
    """What a compiled program knows of a batch.

    Attributes:
      replicas: parts the batch is split into.
      forms: the form of every feature, in flattening order.
      groups: the capacities of every stack.

    Example:
      >>> a = BatchSpec(1, (), (GroupSpec((), ids=8, rows=0, partials=0),))
      >>> b = BatchSpec(1, (), (GroupSpec((), ids=16, rows=4, partials=4),))
      >>> BatchSpec.union(a, b).groups[0].ids
      16
    """

    replicas: int
    forms: tuple[FeatureForm, ...]
    groups: tuple[GroupSpec, ...]

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
        groups = tuple(
            GroupSpec(g.features, roomy(g.ids), roomy(g.rows), roomy(g.partials))
            for g in self.groups
        )
        return dataclasses.replace(self, groups=groups)

    def over(self, replicas: int) -> BatchSpec:
        """Return the spec of as large parts of a batch, in another number of them."""
        if replicas == self.replicas:
            return self
        sizes = [form.batch // self.replicas * replicas for form in self.forms]
        forms = zip(self.forms, sizes, strict=True)
        resized = tuple(dataclasses.replace(form, batch=size) for form, size in forms)
        return dataclasses.replace(self, replicas=replicas, forms=resized)

    def check_batch(self, paths: Sequence[str]) -> None:
        """Check that all features have one batch size, and that it divides over the replicas.

        Args:
          paths: the features' paths, in flattening order.

        Raises:
          ValueError: they differ, or it does not divide.
        """
        size = self.forms[0].batch
        for path, form in zip(paths, self.forms, strict=True):
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
        return self.forms[0].batch

    @property
    def local_batch(self) -> int:
        """Examples a device holds; 0 without features."""
        return self.forms[0].batch // self.replicas if self.forms else 0

    def is_dense(self, group: int) -> bool:
        """Tell whether the ids of a stack are packed as `[examples, columns]`, padding included."""
        widths = [self.forms[f].width for f in self.groups[group].features]
        return bool(widths) and all(width is not None for width in widths)

    def is_weighted(self, group: int) -> bool:
        """Tell whether the ids of a stack have weights."""
        return any(self.forms[f].weighted for f in self.groups[group].features)

    def columns(self, group: int) -> tuple[int, ...]:
        """Return the number of id columns of every feature of a dense stack."""
        return self._columns[group]

    @functools.cached_property
    def _columns(self) -> tuple[tuple[int, ...], ...]:
        widths = [form.bags * (form.width or 0) for form in self.forms]
        return tuple(tuple(widths[f] for f in group.features) for group in self.groups)

    def ids(self, group: int) -> int:
        """Return N, the length of the packed ids of a stack on one device; at least 1."""
        if self.is_dense(group):
            return max(1, self.local_batch * sum(self.columns(group)))
        return max(1, self.groups[group].ids)


def bucket(n: int) -> int:
    """Round up so that at most one part in eight is padding: eight sizes an octave.

    Example:
      >>> [bucket(n) for n in (0, 7, 9, 100, 1000)]
      [0, 8, 9, 104, 1024]
    """
    if n == 0:
        return 0
    step = max(1, 2 ** max(0, n.bit_length() - 4))
    return max(8, -(-n // step) * step)


def roomy(n: int) -> int:
    """Return a bucket with room for the next batches.

    A count of n independent draws varies by about √n from batch to batch; twice that is added.

    Example:
      >>> [roomy(n) for n in (0, 20, 1000, 100_000)]
      [0, 28, 1152, 106496]
    """
    return bucket(n + 2 * math.isqrt(n))


def worst_case(spec: BatchSpec, layout: Layout) -> BatchSpec:
    """Return the spec whose exchange capacities suffice for any ids."""
    groups = []
    for g, group in enumerate(layout.groups):
        n = spec.ids(g)
        blocks = layout.blocks_per_device(spec.forms[0].batch)
        accumulates = group.optimizer is None or group.optimizer.use_gradient_accumulation
        partials = min(n, group.rows * blocks) if accumulates else n
        exact = dataclasses.replace(spec.groups[g], rows=min(n, group.rows), partials=partials)
        groups.append(exact)
    return dataclasses.replace(spec, groups=tuple(groups))


def _union(a: BatchSpec, b: BatchSpec) -> BatchSpec:
    if a == b:
        return a
    same_engine = a.replicas == b.replicas and [g.features for g in a.groups] == [
        g.features for g in b.groups
    ]
    if not same_engine or len(a.forms) != len(b.forms):
        raise ValueError(
            message("BatchSpec.union", expected="specs of one engine", got=f"{a} and {b}")
        )
    return BatchSpec(
        a.replicas,
        tuple(_union_form(i, f, g) for i, (f, g) in enumerate(zip(a.forms, b.forms, strict=True))),
        tuple(
            GroupSpec(
                g.features, max(g.ids, h.ids), max(g.rows, h.rows), max(g.partials, h.partials)
            )
            for g, h in zip(a.groups, b.groups, strict=True)
        ),
    )


def _union_form(i: int, a: FeatureForm, b: FeatureForm) -> FeatureForm:
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
