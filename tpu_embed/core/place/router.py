"""Route batches: pack and sort their ids, find them a shape, and send them to the devices.

Several processes do this together for their parts of a batch: where one refuses its part, all raise
its error. Every new shape means a new compilation, so `rooms.py` remembers the shapes of earlier
batches: a batch that fits one of them is packed in it.

Input: validated ids, with rows in the place of keys. Output: a `Batch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tpu_embed._checks import refuse
from tpu_embed.core.batch import Batch, BatchSpec, Routed
from tpu_embed.core.ids import HostIds
from tpu_embed.core.layout import Layout, send_lines
from tpu_embed.core.place.agreement import Agreement
from tpu_embed.core.place.packing import natural_spec
from tpu_embed.core.place.rooms import Rooms
from tpu_embed.core.place.write_lines import sort_stacks, with_capacities, write_lines


def exact_spec(hosts: Sequence[HostIds], layout: Layout) -> BatchSpec:
    """Return the spec that a training batch fits exactly; no process and no device is asked.

    Args:
      hosts: the ids of every feature, of the global batch.
      layout: the engine's layout.
    """
    replicas = np.arange(layout.axes.replicas)
    natural = natural_spec(hosts, layout, replicas.size, "update")
    return with_capacities(sort_stacks(hosts, natural, layout, replicas), natural, layout)


def route(
    hosts: Sequence[HostIds],
    requested: BatchSpec | None,
    routed: Routed,
    *,
    rooms: Rooms,
    agreement: Agreement,
) -> Batch:
    """Return the batch in the requested spec, or in one of earlier batches, on the devices.

    Several processes route their parts together, and agree on the spec of each batch.

    Args:
      hosts: the ids of every feature, of this process's part of the batch.
      requested: the spec to use. None: the smallest spec of earlier batches that it fits; one
        of them grows if it fits none.
      routed: what of the batch is routed.
      rooms: the specs of earlier batches.
      agreement: with the other processes.

    Raises:
      ValueError: the batch does not fit the requested spec; the message says which it fits. Or
        this process has no device of the mesh.
    """
    layout, axes = rooms.layout, rooms.layout.axes
    replicas = axes.local_parts(axes.batch_axes)
    with agreement.refusals():
        if not replicas.size:
            refuse(
                "place",
                expected="a mesh with devices of this process",
                got="none",
                remedy="make it of jax.devices()",
            )
        # `exact` is what the ids need, of this process's part, and of a batch of such parts.
        here = natural_spec(hosts, layout, replicas.size, routed)
        exact = here.over(axes.replicas)
        # Pack and sort first, in a spec with room for the ids, then count capacities. The order
        # does not depend on the capacities; the positions, which do, are written when all
        # agree.
        packed_as = BatchSpec.union(requested or rooms.propose(exact), exact)
        stacks = sort_stacks(hosts, packed_as, layout, replicas)
        exact = with_capacities(stacks, here, layout).over(axes.replicas)
        wanted = requested or rooms.propose(exact)
        if requested and (fitting := BatchSpec.union(packed_as, exact)) != requested:
            refuse(
                "spec",
                expected="one that the batch fits",
                got=f"{requested}",
                remedy=f"use {fitting}, or BatchSpec.union of the specs of all batches",
            )
    spec, as_requested = agreement.agree(wanted, exact=requested is not None)
    if not as_requested:
        spec = rooms.accept(spec)
    if _ids_of(spec) != _ids_of(packed_as):  # another process or thread needed more ids
        stacks = sort_stacks(hosts, spec, layout, replicas)
    packed = write_lines(stacks, spec.over(replicas.size), layout)
    sharding = axes.sharding(axes.names)
    if axes.one_process:
        array = send_lines(packed, sharding)  # takes half the time of the general call below
    else:
        whole = (axes.size(axes.names), packed.shape[1])
        array = jax.make_array_from_process_local_data(sharding, packed, whole)
    return Batch.of(array, spec, layout)


def _ids_of(spec: BatchSpec) -> tuple[Any, ...]:
    """Return what the packed ids depend on: everything but the exchange capacities."""
    return spec.feature_shapes, [stack.ids for stack in spec.stacks]
