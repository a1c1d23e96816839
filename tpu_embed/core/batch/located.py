"""The ids of one device, located: which physical row each is, and which bag it falls into.

What `Batch` and `TracedIds` become inside `shard_map`; what `lookup.py` and `update.py` work on.
The bags of a stack are numbered by example, then feature, then inner dims: batch order.
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
      row_ids: physical rows `[N]`, `PADDING_ID` for none.
      bags: int32 `[N]`, the bag of each id on this device, non-decreasing.
      weights: float `[N]` or None (all ones).
    """

    row_ids: Array
    bags: Array
    weights: Array | None


class Located(NamedTuple):
    """All ids of a batch on one device.

    Attributes:
      ids: of every stack.
      bad_ids: int32 `[F]`, this device's ids that no policy allows, by feature.
    """

    ids: tuple[LocalIds, ...]
    bad_ids: Array


@dataclasses.dataclass(frozen=True)
class BagLayout:
    """The bags of one stack on one device; static.

    Attributes:
      examples: examples a device holds.
      combiners: what each bag of an example does with its rows: "sum", "mean" or "sqrtn".
      columns: bags an example has of each feature.
    """

    examples: int
    combiners: tuple[str, ...]
    columns: tuple[int, ...]

    @property
    def bags(self) -> int:
        """Bags a device holds."""
        return self.examples * len(self.combiners)


def bag_layout(spec: BatchSpec, layout: Layout, g: int) -> BagLayout:
    """Return how the ids of stack g combine on one device."""
    combiners: list[str] = []
    for f in spec.stacks[g].features:
        form, config = spec.feature_shapes[f], layout.features[f].config
        combiners += [config.table.combiner if form.combines else "sum"] * form.bags
    columns = tuple(spec.feature_shapes[f].bags for f in spec.stacks[g].features)
    return BagLayout(spec.local_batch, tuple(combiners), columns)


def bag_offsets(spec: BatchSpec, g: int) -> tuple[tuple[int, ...], int]:
    """Return the first bag, within an example, of every feature of a stack; and their number."""
    sizes = [spec.feature_shapes[f].bags for f in spec.stacks[g].features]
    ends = np.cumsum([0, *sizes]).tolist()
    return tuple(ends[:-1]), ends[-1]


def dense_bags(spec: BatchSpec, g: int) -> Array:
    """Return the bag of every id of a dense stack on one device, `[N]`, from its column."""
    offsets, per_example = bag_offsets(spec, g)
    if not sum(spec.columns(g)):
        return jnp.zeros(spec.ids(g), jnp.int32)
    column = np.concatenate(
        [
            offset
            + np.repeat(np.arange(spec.feature_shapes[f].bags), spec.feature_shapes[f].width or 0)
            for f, offset in zip(spec.stacks[g].features, offsets, strict=True)
        ]
    )
    examples = jnp.arange(spec.local_batch, dtype=jnp.int32)
    return (examples[:, None] * per_example + column.astype(np.int32)).reshape(-1)
