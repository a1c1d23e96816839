"""Remember the shapes of earlier batches, so that few programs serve all of them.

A batch that fits an earlier spec gets it; otherwise a spec grows to hold it too. If there were only
one such spec, the union of all, then a single outlier would slow every later step. So there are
tiers of them. Each holds all smaller ones, and a batch gets the smallest tier that it fits. A batch
that needs more than twice the room of all tiers starts a new one. All of their programs stay
compiled, so going up for an outlier and down again costs no compilation after the first.

    Batches need about 8,000 ids: tiers [8,704]. An outlier needs 400,000: tiers [8,704, 425,984].
    The next batch needs 8,000 again, and gets the first tier.

A tier may be far too large, for example if the very first batch was an outlier. So each tier is
reviewed after every `REVIEW_AFTER` batches: if they needed less than half of it, then what they
needed becomes a smaller tier.

All this is decided from specs that the processes agreed on, so all processes have the same tiers.

Input: the spec that a batch needs. Output: the spec that it gets.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import operator
import threading
from typing import Any

from tpu_embed.core.batch import BatchSpec, StackSpec
from tpu_embed.core.layout import Layout

REVIEW_AFTER = 64
"""Batches of a tier after which it is reviewed."""

RATIO = 2
"""A spec with more than this many times the room of another one is worth a program of its own."""

SMALL = 2**14
"""Specs with room for fewer ids and rows on a device count as if they had this much."""


@dataclasses.dataclass
class Tier:
    """One of the specs that batches of a kind get.

    Attributes:
      spec: the union of what its batches needed, and of all smaller tiers.
      uses: how many batches got it since its last review, in all processes alike.
      needed: the union of what this process's batches since then needed, of those that no smaller
        tier holds; None without any.
    """

    spec: BatchSpec
    uses: int = 0
    needed: BatchSpec | None = None


class Tiers:
    """The specs that batches of one engine get, unions of what they needed. Threads may share them.

    Batches of another size, or with other activation shapes, are of another kind and have tiers of
    their own.

    Args:
      layout: the engine's layout.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        # `kind_of` a spec -> its tiers, the smallest first.
        self._tiers: dict[Any, list[Tier]] = collections.defaultdict(list)
        self._lock = threading.RLock()

    def copy(self) -> list[list[Tier]]:
        """Return a copy of the tiers of all kinds, as they are now."""
        with self._lock:
            return [[dataclasses.replace(tier) for tier in kind] for kind in self._tiers.values()]

    def set(self, kinds: list[list[Tier]]) -> None:
        """Take what `copy` returned in place of the tiers of the same kinds."""
        # A spec says of which kind it is, so a copy has no keys. Kinds that are missing in it keep
        # their tiers.
        with self._lock:
            for tiers in kinds:
                if tiers:
                    copied = [dataclasses.replace(tier) for tier in tiers]
                    self._tiers[kind_of(tiers[0].spec)] = copied

    def settle(self, needed: BatchSpec) -> BatchSpec:
        """Return the spec that a batch gets if this process alone decides it.

        Args:
          needed: what the batch needs exactly.
        """
        with self._lock:
            return self.accept(self.propose(needed))

    def guess(self, needed: BatchSpec) -> BatchSpec:
        """Return a spec that holds the batch, most likely the one it will get; change nothing."""
        with self._lock:
            tiers = self._tiers[kind_of(needed)]
            holding = _first_that_holds(tiers, needed)
            return self._grown(tiers, needed) if holding is None else holding.spec

    def propose(self, needed: BatchSpec) -> BatchSpec:
        """Return the spec that this process asks for: a tier, one that grew, or a reviewed one.

        Args:
          needed: what this process's part of the batch needs exactly.
        """
        with self._lock:
            tiers = self._tiers[kind_of(needed)]
            holding = _first_that_holds(tiers, needed)
            if holding is None:
                return self._grown(tiers, needed)
            if holding.needed is None:
                holding.needed = needed
            elif not holds(holding.needed, needed):
                holding.needed = BatchSpec.union(holding.needed, needed)
            reviewed = _reviewed(tiers)
            if reviewed is None or not holds(reviewed.spec, needed):
                return holding.spec
            # All processes review the same tier for the same batch: each asks for what its batches
            # needed of it, with room to spare, and for the tier before.
            below = [tier.spec for tier in tiers[: tiers.index(reviewed)]][-1:]
            recent = [reviewed.needed] if reviewed.needed else []
            roomy = [_within(one.bucketed(), reviewed.spec) for one in recent]
            return BatchSpec.union(*below, *roomy)

    def accept(self, agreed: BatchSpec) -> BatchSpec:
        """Return the spec that a batch gets, after all processes have agreed on what they want.

        Args:
          agreed: the union of what `propose` returned in all processes.
        """
        with self._lock:
            tiers = self._tiers[kind_of(agreed)]
            reviewed = _reviewed(tiers)
            if reviewed is not None and holds(reviewed.spec, agreed):
                reviewed.uses, reviewed.needed = 0, None
            same = (tier for tier in tiers if tier.spec is agreed or tier.spec == agreed)
            tier = next(same, None) or self._join(tiers, agreed)
            tier.uses += 1
            return tier.spec

    def _grown(self, tiers: list[Tier], needed: BatchSpec) -> BatchSpec:
        """Return the first tier that holds the batch after growing a little, or a new one.

        The batch gets room to spare, so that the next ones fit, too.
        """
        roomy = needed.bucketed()
        grown = [BatchSpec.union(tier.spec, roomy) for tier in tiers]
        for tier, spec in zip(tiers, grown, strict=True):
            if self._is_near(spec, tier.spec):
                return spec
        return grown[-1] if grown else roomy

    def _join(self, tiers: list[Tier], agreed: BatchSpec) -> Tier:
        """Return the tier of a spec; it may be a new one, or a larger one that is near enough."""
        holding = _first_that_holds(tiers, agreed)
        if holding is not None and self._is_near(holding.spec, agreed):
            return holding
        below = [tier for tier in tiers if holds(agreed, tier.spec)]
        above = tiers[len(below) :]
        for tier in above:
            tier.spec = BatchSpec.union(tier.spec, agreed)
        if below and self._is_near(agreed, below[-1].spec):
            below.pop()  # it has grown
        elif tiers:
            self._tell(agreed, tiers)
        new = Tier(agreed)
        tiers[:] = [*below, new, *(tier for tier in above if tier.spec != agreed)]
        return new

    def _is_near(self, larger: BatchSpec, smaller: BatchSpec) -> bool:
        """Tell whether a batch of the smaller spec may as well run the larger one's program."""
        return self._room(larger) <= RATIO * max(self._room(smaller), SMALL)

    def _room(self, spec: BatchSpec) -> int:
        """Return the places for ids and rows that a device has in a spec."""
        total = 0
        for g, (stack, one) in enumerate(zip(self._layout.stacks, spec.stacks, strict=True)):
            exchanged = stack.num_shards * (one.row_capacity + one.partials)
            total += spec.ids(g) + exchanged + one.merged
        return total

    def _tell(self, spec: BatchSpec, tiers: list[Tier]) -> None:
        """Log that a spec much larger or smaller than the others gets a program of its own."""
        rooms = ", ".join(f"{self._room(tier.spec):,}" for tier in tiers)
        logging.getLogger("tpu_embed").warning(
            "place: room for %s ids and rows on a device is far from that of earlier batches (%s); "
            "such batches get a program of their own",
            f"{self._room(spec):,}",
            rooms,
        )


def kind_of(spec: BatchSpec) -> Any:
    """Return what specs must have in common to have a union."""
    shapes = (
        (shape.batch, shape.inner, shape.combines, shape.capacity is None)
        for shape in spec.feature_shapes
    )
    return spec.routed, tuple(shapes)


def _reviewed(tiers: list[Tier]) -> Tier | None:
    """Return the tier to review now: the smallest of those with enough batches."""
    return next((tier for tier in tiers if tier.uses >= REVIEW_AFTER), None)


def _first_that_holds(tiers: list[Tier], needed: BatchSpec) -> Tier | None:
    """Return the smallest tier that batches of a spec fit, if there is one."""
    return next((tier for tier in tiers if holds(tier.spec, needed)), None)


def holds(spec: BatchSpec, needed: BatchSpec) -> bool:
    """Tell whether every batch of `needed` fits `spec`, which is of the same kind.

    It is `BatchSpec.union(spec, needed) == spec`, but makes no spec: `place` asks it several times.
    """
    if spec is needed:
        return True
    for stack, other in zip(spec.stacks, needed.stacks, strict=True):
        if any(map(operator.lt, stack.sizes, other.sizes)):
            return False
    for shape, other in zip(spec.feature_shapes, needed.feature_shapes, strict=True):
        if (other.weighted and not shape.weighted) or (other.capacity or 0) > (shape.capacity or 0):
            return False
        # Flat ids have no width. They hold dense ones, but not the other way round.
        if shape.width is not None and (other.width is None or other.width > shape.width):
            return False
    return True


def _within(spec: BatchSpec, bound: BatchSpec) -> BatchSpec:
    """Return a spec with no capacity above that of the bound."""
    pairs = zip(spec.stacks, bound.stacks, strict=True)
    stacks = tuple(StackSpec(a.features, *map(min, a.sizes, b.sizes)) for a, b in pairs)
    shapes = tuple(
        a.with_capacity(min(a.capacity or 0, b.capacity or 0))
        for a, b in zip(spec.feature_shapes, bound.feature_shapes, strict=True)
    )
    return dataclasses.replace(spec, feature_shapes=shapes, stacks=stacks)
