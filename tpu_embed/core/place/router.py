"""Route validated ids and send them to the devices, in as few different shapes as possible.

Every new shape means a new compilation. So `rooms.py` remembers the shapes of earlier batches: a
batch that fits one of them is packed in it. After a few batches they rarely change.

Input: `HostIds` of all features, of this process's part of the batch. Output: a `Batch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tpu_embed._checks import message
from tpu_embed.core.batch import Batch, BatchSpec, Routed, view_stacks
from tpu_embed.core.ids import HostIds
from tpu_embed.core.layout import Layout, send_lines
from tpu_embed.core.place.agreement import Agreement, Alone
from tpu_embed.core.place.packing import natural_spec, pack_all
from tpu_embed.core.place.rooms import Rooms
from tpu_embed.core.place.write_lines import (
    HostStack,
    sort_stack,
    with_capacities,
    write_lines,
)


def exact_spec(hosts: Sequence[HostIds], layout: Layout) -> BatchSpec:
    """Return the spec that a training batch fits exactly; no process and no device is asked.

    Args:
      hosts: the ids of every feature, of the global batch.
      layout: the engine's layout.
    """
    replicas = np.arange(layout.axes.replicas)
    natural = natural_spec(hosts, layout, replicas.size, "update")
    return with_capacities(_sorted(hosts, natural, layout, replicas), natural, natural, layout)


class _Fitted(NamedTuple):
    """This process's part of a batch, sorted, with the spec that it needs.

    Attributes:
      hosts: the ids of every feature.
      stacks: the ids of every stack, packed in the spec `packed_as` and sorted.
      packed_as: a spec of the global batch.
      needed: the spec of the global batch that this part needs exactly.
    """

    hosts: Sequence[HostIds]
    stacks: Sequence[HostStack]
    packed_as: BatchSpec
    needed: BatchSpec


class Router:
    """Routes batches and sends them, in specs of earlier batches where they fit.

    Several processes route their parts together, and agree on the spec of each batch.

    Args:
      layout: the engine's layout.
      agreement: with the other processes.
      replicas: the numbers of this process's replicas in the global batch.

    Attributes:
      rooms: the specs of earlier batches.
    """

    def __init__(self, layout: Layout, agreement: Agreement | Alone, replicas: np.ndarray) -> None:
        self._layout, self._agreement, self._replicas = layout, agreement, replicas
        self.rooms = Rooms(layout)

    def route(self, hosts: Sequence[HostIds], requested: BatchSpec | None, routed: Routed) -> Batch:
        """Return the batch in the requested spec, or in one of earlier batches.

        Args:
          hosts: the ids of every feature.
          requested: the spec to use. None: the smallest spec of earlier batches that it fits; one
            of them grows if it fits none.
          routed: what of the batch is routed.

        Raises:
          ValueError: the batch does not fit the requested spec; the message says which it fits.
        """
        with self._agreement.refusals():
            fitted = self._fit(hosts, requested, routed)
        return self._send(fitted, self._agreement.settle(fitted.needed, requested, self.rooms))

    def _fit(
        self, hosts: Sequence[HostIds], requested: BatchSpec | None, routed: Routed
    ) -> _Fitted:
        """Sort this process's part in a spec that it fits, and count its exchange capacities.

        Raises:
          ValueError: this process has no device of the mesh, or its part does not fit `requested`.
        """
        if not self._replicas.size:
            expected, remedy = "a mesh with devices of this process", "make it of jax.devices()"
            raise ValueError(message("place", expected=expected, got="none", remedy=remedy))
        # `exact` is what the ids need, of this process's part, and of a batch of such parts.
        here = natural_spec(hosts, self._layout, len(self._replicas), routed)
        exact = here.over(self._layout.axes.replicas)
        # Pack and sort first, in a spec with room for the ids, then count capacities. The order
        # does not depend on the capacities; the positions, which do, are written when all agree.
        likely = self.rooms.propose(exact) if requested is None else requested
        rounded = BatchSpec.union(likely, exact)
        stacks = self._sorted(hosts, rounded)
        local = self._local(rounded)
        exact = with_capacities(stacks, here, local, self._layout).over(exact.replicas)
        if requested is None:
            return _Fitted(hosts, stacks, rounded, exact)
        fitting = BatchSpec.union(rounded, exact)
        if fitting != requested:
            expected, got = "one that the batch fits", f"{requested}"
            remedy = f"use {fitting}, or BatchSpec.union of the specs of all batches"
            raise ValueError(message("spec", expected=expected, got=got, remedy=remedy))
        return _Fitted(hosts, stacks, requested, requested)

    def _local(self, spec: BatchSpec) -> BatchSpec:
        """Return the spec of this process's part of a batch."""
        return spec.over(len(self._replicas))

    def _send(self, fitted: _Fitted, spec: BatchSpec) -> Batch:
        """Write the route and send it; sort again if another process or thread needed more ids."""
        stacks = fitted.stacks
        if _ids_of(spec) != _ids_of(fitted.packed_as):
            stacks = self._sorted(fitted.hosts, spec)
        packed = write_lines(stacks, self._local(spec), self._layout)
        axes = self._layout.axes
        sharding = axes.sharding(axes.names)
        if axes.one_process:
            array = send_lines(packed, sharding)  # takes half the time of the general call below
        else:
            whole = (axes.size(axes.names), packed.shape[1])
            array = jax.make_array_from_process_local_data(sharding, packed, whole)
        return Batch.of(array, spec, self._layout)

    def _sorted(self, hosts: Sequence[HostIds], spec: BatchSpec) -> list[HostStack]:
        """Pack this process's part in a spec of the global batch, and sort it by row."""
        return _sorted(hosts, self._local(spec), self._layout, self._replicas)


def _sorted(
    hosts: Sequence[HostIds], spec: BatchSpec, layout: Layout, replicas: np.ndarray
) -> list[HostStack]:
    """Pack ids in a spec and sort them by row.

    Args:
      hosts: the ids of every feature.
      spec: of the part of the batch that the replicas have.
      layout: the engine's layout.
      replicas: the numbers of the replicas in the global batch.
    """
    packed = pack_all(hosts, spec, layout, replicas)
    return [
        sort_stack(ids, view, replicas)
        for ids, view in zip(packed, view_stacks(spec, layout), strict=True)
    ]


def _ids_of(spec: BatchSpec) -> tuple[Any, ...]:
    """Return what the packed ids depend on: everything but the exchange capacities."""
    return spec.feature_shapes, [stack.ids for stack in spec.stacks]
