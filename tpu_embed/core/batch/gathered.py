"""Ids that the host has not routed: the owners of their rows gather them.

Nobody knows how many of such ids go to which shard. So every shard gets the ids of all devices and
keeps those of its own rows. It then has ids as of one device, whose batch is that of all of them.

Where bags have widths, ids stand and bags are numbered feature after feature, as in such a batch.
Where ids are packed flat, they stand device after device: of T bags each, bag b of device d has the
number d T + b.

Input: inside `shard_map`, what one device has of a stack. Output: what several have.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import Array
from tpu_embed.core.batch.located import LocalIds
from tpu_embed.core.batch.stack_view import StackView
from tpu_embed.core.exchange import collectives, route


def gather_ids(ids: LocalIds, view: StackView, names: Sequence[str]) -> tuple[LocalIds, StackView]:
    """Return the ids of the devices along some axes, with local rows of this shard, and their view.

    Args:
      ids: the ids of this device.
      view: the stack in its batch.
      names: axes that split the batch.
    """
    bags, joined = view.bags, view.joined(view.layout.axes.size(names))
    sizes = np.multiply(bags.widths, bags.counts) if bags.widths else ()

    def of_all(x: Array) -> Array:
        return jnp.concatenate(_gather(x, sizes, names))

    row_ids, gains, blocks = jax.tree.map(of_all, (ids.row_ids, ids.gains, ids.blocks))
    if bags.widths:
        numbers = joined.bags.dense_bags()
    else:
        numbers = of_all(ids.bags + collectives.axis_index(names) * bags.starts[-1])
    own = route.rows_of_shard(row_ids, view.stack)
    return LocalIds(own, numbers, gains, blocks), joined


def gather_gradients(
    gradients: Sequence[Array], view: StackView, names: Sequence[str]
) -> tuple[Array, ...]:
    """Return the gradients of the bags of these ids: by feature, or device after device.

    Args:
      gradients: `[bags, D]` per feature, of this device.
      view: the stack in its batch.
      names: as for `gather_ids`.
    """
    bags = view.bags
    return _gather(jnp.concatenate(gradients), bags.counts if bags.widths else (), names)


def _gather(values: Array, sizes: Sequence[int], names: Sequence[str]) -> tuple[Array, ...]:
    """Return `values` `[N, …]` of n devices in parts of some sizes, `[n * size, …]` each.

    Without sizes there is one part.
    """
    gathered = collectives.all_gather(values, names)
    parts = jnp.split(gathered, np.cumsum(sizes)[:-1], axis=1) if len(sizes) else [gathered]
    return tuple(part.reshape(-1, *values.shape[1:]) for part in parts)
