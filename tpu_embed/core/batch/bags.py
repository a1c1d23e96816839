"""How the bags of one stack are numbered in one batch: feature after feature.

The bags of a feature are those of its examples, in their order. Of a jagged feature every place is
a bag of one id. With features of 2 and 3 examples of one bag each, the bags are 0 1 | 2 3 4. A bag
is a row of the stack's activations, which is where its gradient comes from.

Where all features have a width, a device has as many ids in every bag of a feature, padding
included, and the bag of an id follows from its position. Otherwise ids are packed without padding,
and each has the number of its bag.

Input: the shapes of the features of a stack. Output: numbers of bags, ids and blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np

from tpu_embed._types import Array
from tpu_embed.core.ids import FeatureShape
from tpu_embed.kernels.operands import GradientLayout, SumLayout


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
    def sizes(self) -> tuple[int, ...]:
        """The examples of each feature on one device."""
        return tuple(shape.batch // self.replicas for shape in self.shapes)

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """The bags of each feature on one device."""
        return tuple(s.bags_of(size) for s, size in zip(self.shapes, self.sizes, strict=True))

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
        widths = [shape.room_per_bag or 0 for shape in self.shapes] if self.is_dense else []
        return tuple(widths) if any(map(np.multiply, widths, self.counts)) else ()

    @property
    def sums(self) -> SumLayout:
        """The bags as a kernel takes them that sums the rows of each."""
        return SumLayout(self.counts, self.widths)

    @property
    def gradients(self) -> GradientLayout:
        """The bags as a kernel takes them that sums their gradients by row."""
        return GradientLayout(self.counts)

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

    def block_starts(self, number: int, blocks: int, row_splits: Array | None) -> Any:
        """Return the first bag of the second and all later blocks of the only device, `[G - 1]`.

        It is a NumPy array unless it depends on row splits.

        Args:
          number: of the feature, among those of the stack.
          blocks: G, the blocks of the batch: example e of B is in block ⌊e · G / B⌋.
          row_splits: of a jagged feature, whose places are its bags.
        """
        # The first example of block k is ⌈k · B / G⌉: of 10 examples in 4 blocks 3, 5 and 8.
        size, start = self.sizes[number], self.starts[number]
        examples = np.array([-(-k * size // blocks) for k in range(1, blocks)], np.int32)
        if row_splits is not None:
            return start + row_splits[examples]
        return (start + examples * self.shapes[number].bags).astype(np.int32)
