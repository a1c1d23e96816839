"""How the bags of one stack are numbered in one batch.

The bags of a stack are numbered in batch order: example e of a feature with B examples comes at
e / B of the batch; then by feature, then by inner dims. The order of the bags repeats: a period is
the smallest part of a device's batch after which it does. Features of equal batch size have one
example each in a period. With one bag of feature a and two of feature b per example, period 0 has
the bags 0 (a) and 1 2 (b), and period 1 has the bags 3 (a) and 4 5 (b). If instead a has 2 examples
of one bag per device and b has 6, there are 2 periods, of one example of a and 3 of b.

An example of a jagged feature counts as one bag in this order, but its ids are not combined: each
has a target of its own. The targets of a stack are its activations' rows, which is where its
gradients come from: first its bags, in their order, then the places of each jagged feature.

Input: the shapes of the features of a stack. Output: numbers of bags, targets and examples.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from tpu_embed.core.ids import FeatureShape
from tpu_embed.kernels.operands import GradientLayout, SumLayout


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

    @property
    def sums(self) -> SumLayout:
        """The bags as a kernel takes them that sums the rows of each."""
        return SumLayout(self.bags_per_period, self.periods, self.order, self.widths)

    @property
    def gradients(self) -> GradientLayout:
        """The bags as a kernel takes them that sums their gradients by row."""
        return GradientLayout(self.bags_per_period, self.periods, self.order)


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
class Bags:
    """The bags of one stack in a batch.

    What takes a loop over the features is computed once.

    Attributes:
      shapes: the shapes of the features that look the stack up.
      combiners: how the table of each combines rows.
      replicas: the number of parts into which the batch is split: those of this process, perhaps.
    """

    shapes: tuple[FeatureShape, ...]
    combiners: tuple[str, ...]
    replicas: int

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
        return bool(self.shapes) and all(shape.width is not None for shape in self.shapes)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The examples of each feature on one device."""
        return tuple(shape.batch // self.replicas for shape in self.shapes)

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

    def block_starts(self, blocks: int, replicas: int) -> np.ndarray:
        """Return the first bag of each block of the batch, and the last one's end, int64 `[G + 1]`.

        Bags are numbered here through all replicas, one after the other; examples of jagged
        features are among them.

        Args:
          blocks: G.
          replicas: those of the global batch, of which these bags may be a process's part.
        """
        # Block k begins at k / G of the batch. In periods that is k · periods · replicas / G: a
        # whole number q, and a rest / G. In period q, the first bag at the rest or after it is
        # the first one whose example e of n has e / n >= rest / G.
        all_periods = self.periods * replicas
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
    def bag_layout(self) -> BagLayout:
        """The bags of one device without those of jagged features; how each combines its rows."""
        kinds, sizes, shapes = [], [], []
        for combiner, shape, size in zip(self.combiners, self.shapes, self.sizes, strict=True):
            if shape.has_places:
                continue
            # The sum of a bag with one id is its row, times its weight: no combiner at all.
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
            return xp.zeros(1, xp.int32)
        # The bag, within its period, of every id. Feature a with one bag of 2 ids and feature b
        # with two bags of 1 id: 0 0 1 2. Period k then adds 3 k.
        within = np.repeat(np.arange(len(widths)), widths).astype(np.int32)
        periods = xp.arange(self.periods, dtype=xp.int32)
        return (periods[:, None] * len(widths) + within[None]).reshape(-1)
