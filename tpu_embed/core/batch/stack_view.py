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

import jax.numpy as jnp
import numpy as np

from tpu_embed._types import Array
from tpu_embed.core.batch.spec import BatchSpec, StackSpec, worst_room
from tpu_embed.core.ids import FeatureShape
from tpu_embed.core.layout import Layout, Stack


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

    @property
    def shapes(self) -> tuple[FeatureShape, ...]:
        """The shapes of these features."""
        return tuple(self.spec.feature_shapes[f] for f in self.features)

    @property
    def num_ids(self) -> int:
        """N, the ids that one device has room for, padding included; at least 1."""
        return self.spec.ids(self.number)

    @property
    def is_dense(self) -> bool:
        """Whether the ids are packed as `[examples, columns]`, padding included."""
        return self.spec.is_dense(self.number)

    @property
    def is_weighted(self) -> bool:
        """Whether the ids have weights."""
        return self.spec.is_weighted(self.number)

    @property
    def columns(self) -> tuple[int, ...]:
        """The number of id columns of each feature; of a dense stack only."""
        return self.spec.columns(self.number)

    @property
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
    def bag_layout(self) -> BagLayout:
        """The bags of one device, and how each combines its rows."""
        combiners: list[str] = []
        for f, shape in zip(self.features, self.shapes, strict=True):
            # The sum of a bag with one id is its row, times its weight: no combiner at all.
            combiner = self.layout.features[f].config.table.combiner if shape.combines else "sum"
            combiners += [combiner] * shape.bags
        columns = tuple(shape.bags for shape in self.shapes)
        return BagLayout(self.spec.local_batch, tuple(combiners), columns)

    def dense_bags(self) -> Array:
        """Return the bag of every id of a dense stack on one device, int32 `[N]`.

        In a dense stack it follows from the id's position: N is examples · columns.
        """
        if not sum(self.columns):
            return jnp.zeros(self.num_ids, jnp.int32)
        # The bag, within its example, of every column. Feature a with one bag of 2 ids and feature
        # b with two bags of 1 id: 0 0 1 2. Example e then adds 3 e.
        column = np.concatenate(
            [
                offset + np.repeat(np.arange(shape.bags), shape.width or 0)
                for shape, offset in zip(self.shapes, self.bag_offsets, strict=True)
            ]
        )
        examples = jnp.arange(self.spec.local_batch, dtype=jnp.int32)
        return (examples[:, None] * self.bags_per_example + column.astype(np.int32)).reshape(-1)


def view_stacks(spec: BatchSpec, layout: Layout) -> tuple[StackView, ...]:
    """Return the view of every stack, in their order.

    Args:
      spec: the batch's static shape.
      layout: the engine's layout.
    """
    return tuple(StackView(spec, layout, g) for g in range(len(layout.stacks)))
