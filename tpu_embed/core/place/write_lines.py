"""Route a batch on the host: sort its ids once, count the room they need, write the route.

The static shape of a batch depends on its ids, and several processes must agree on it. So the work
has two steps. First the ids of every stack are sorted, and the room for their exchange is counted:
for each pair of a device and a shard the distinct rows that the device asks for and the partial
sums that it sends, and for each shard the rows that it updates. Then, with the agreed shape, the
positions are written into the packed array (`line.py` lists the fields).

Input: the ids of every stack of this process's replicas. Output: their spec with its capacities,
and the packed array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tpu_embed.core.batch import (
    BatchSpec,
    StackView,
    fields_of,
    line_length,
    line_of,
    view_stacks,
)
from tpu_embed.core.layout import Layout
from tpu_embed.core.place.host_stack import Devices, HostStack, ids_at
from tpu_embed.core.place.lookup_route import LookupWriter
from tpu_embed.core.place.update_route import write_update


def with_capacities(
    stacks: Sequence[HostStack], natural: BatchSpec, packed_as: BatchSpec, layout: Layout
) -> BatchSpec:
    """Return the spec that a batch fits exactly: its own, with the room for its exchange counted.

    Args:
      stacks: the sorted ids of every stack.
      natural: the batch's own spec, without capacities.
      packed_as: the spec that its ids were packed in.
      layout: the engine's layout.
    """
    views = view_stacks(packed_as, layout)
    counted = [
        dataclasses.replace(one, **_room(view, stack))
        for view, one, stack in zip(views, natural.stacks, stacks, strict=True)
    ]
    return dataclasses.replace(natural, stacks=tuple(counted))


def _room(view: StackView, host: HostStack) -> dict[str, int]:
    """Return the capacities that a stack's ids need."""
    if not host.replicas:
        return {}
    # Without accumulation nothing is summed: the gradient of every id is sent by itself.
    sent = host.sums_at if view.accumulates else ids_at(host)
    room = {
        "row_capacity": int(np.diff(host.rows_at, axis=1).max()),
        "partials": int(np.diff(sent, axis=1).max()),
    }
    if view.merges_on_host:
        room["merged"] = max(one.sums.rows.size for one in host.owners)
    return room


def write_lines(stacks: Sequence[HostStack], spec: BatchSpec, layout: Layout) -> np.ndarray:
    """Return the packed array of this process's devices, int32 `[devices, L]`.

    Args:
      stacks: the ids of every stack; they fit the spec.
      spec: the agreed shape, of this process's replicas.
      layout: the engine's layout.
    """
    views, fields = view_stacks(spec, layout), line_of(spec, layout)
    num_devices = layout.axes.local_parts(layout.axes.names).size
    packed = np.empty((num_devices, line_length(fields)), np.int32)
    for view, host, mine in zip(views, stacks, fields, strict=True):
        out, devices = fields_of(packed, mine), Devices.of(view)
        LookupWriter(view, host, devices).write(out)
        if "sum_index" in out:
            write_update(out, view, host, devices)
    return packed
