"""Ids that the host has not routed: the owners of their rows gather them.

Nobody knows how many of such ids go to which shard. So every shard gets the ids of all devices and
keeps those of its own rows. They stand device after device: of T bags each, bag b of device d has
the number d T + b.

Input: inside `shard_map`, what one device has of a stack. Output: what several have.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from tpu_embed._types import Array
from tpu_embed.core.batch.located import LocalIds
from tpu_embed.core.batch.stack_view import StackView
from tpu_embed.core.exchange import RowRoute, collectives, route


def gather_ids(ids: LocalIds, view: StackView, names: Sequence[str]) -> LocalIds:
    """Return the ids of the devices along some axes, with local rows of this shard.

    Args:
      ids: the ids of this device.
      view: the stack in its batch.
      names: axes that split the batch.
    """
    # With T = 3 bags on each of two devices, ids of the bags 0 0 2 | 1 2 2 get 0 0 2 4 5 5: still
    # non-decreasing, as the kernels need it.
    bags = ids.bags + collectives.axis_index(names) * view.bags.starts[-1]
    given = ids.rows.index, bags, ids.gains, ids.blocks
    row_ids, *others = jax.tree.map(lambda x: gather(x, names), given)
    return LocalIds(RowRoute(None, route.rows_of_shard(row_ids, view.stack)), *others)


def gather(values: Array, names: Sequence[str]) -> Array:
    """Return `[n N, …]`: the values `[N, …]` of n devices, one device after the other."""
    return collectives.all_gather(values, names).reshape(-1, *values.shape[1:])
