"""Located ids: for each id on a device, its physical row and the bag that it belongs to.

Inside `shard_map`, a `Batch` and `TracedIds` both become located ids, and from there on it does not
matter how the ids were given. The bags of a stack are numbered in batch order: by example, then by
feature, then by inner dims. With one bag of feature a and two of feature b per example, example 0
has the bags 0 (a) and 1 2 (b), and example 1 has the bags 3 (a) and 4 5 (b).

Input: the static shape of a batch. Output: the types of located ids, and the numbering of bags.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from tpu_embed._types import Array
from tpu_embed.core.batch.spec import BatchSpec
from tpu_embed.core.layout import Layout


class LocalIds(NamedTuple):
    """The ids of one stack on one device, in batch order.

    Attributes:
      row_ids: physical rows `[N]`, `PADDING_ID` for absent ids.
      bags: int32 `[N]`, the bag of each id, numbered on this device, non-decreasing.
      weights: float `[N]`, or None for all ones.
    """

    row_ids: Array
    bags: Array
    weights: Array | None


class Located(NamedTuple):
    """All ids of a batch on one device.

    Attributes:
      ids: the ids of every stack.
      bad_ids: int32 `[F]`, the number of bad ids per feature on this device, counted for the
        features whose `on_bad_id` is "error".
    """

    ids: tuple[LocalIds, ...]
    bad_ids: Array


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


def bag_layout(spec: BatchSpec, layout: Layout, g: int) -> BagLayout:
    """Return the bags of stack g on one device."""
    combiners: list[str] = []
    for f in spec.stacks[g].features:
        shape, config = spec.feature_shapes[f], layout.features[f].config
        # The sum of a bag with one id is its row, times its weight: no combiner at all.
        combiners += [config.table.combiner if shape.combines else "sum"] * shape.bags
    columns = tuple(spec.feature_shapes[f].bags for f in spec.stacks[g].features)
    return BagLayout(spec.local_batch, tuple(combiners), columns)


def bag_offsets(spec: BatchSpec, g: int) -> tuple[tuple[int, ...], int]:
    """Return each feature's first bag within an example, and the number of bags per example."""
    # Features with 1, 3 and 2 bags per example: offsets (0, 1, 4), 6 bags.
    sizes = [spec.feature_shapes[f].bags for f in spec.stacks[g].features]
    ends = np.cumsum([0, *sizes]).tolist()
    return tuple(ends[:-1]), ends[-1]


def dense_bags(spec: BatchSpec, g: int) -> Array:
    """Return the bag of every id of a dense stack on one device, int32 `[N]`.

    In a dense stack it follows from the id's position: N is examples · columns.
    """
    offsets, per_example = bag_offsets(spec, g)
    if not sum(spec.columns(g)):
        return jnp.zeros(spec.ids(g), jnp.int32)
    # The bag, within its example, of every column. Feature a with one bag of 2 ids and feature b
    # with two bags of 1 id: 0 0 1 2. Example e then adds 3 e.
    column = np.concatenate(
        [
            offset
            + np.repeat(np.arange(spec.feature_shapes[f].bags), spec.feature_shapes[f].width or 0)
            for f, offset in zip(spec.stacks[g].features, offsets, strict=True)
        ]
    )
    examples = jnp.arange(spec.local_batch, dtype=jnp.int32)
    return (examples[:, None] * per_example + column.astype(np.int32)).reshape(-1)
