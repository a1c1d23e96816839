"""Place batches: validate ids, turn keys into rows, route, and send to the devices.

Several processes do this together for their parts of a batch: where one refuses its part, all raise
its error. Every new shape means a new compilation, so `rooms.py` remembers the shapes of earlier
batches: a batch that fits one of them is packed in it.

Input: features and weights in the user's nesting. Output: a `Batch`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tpu_embed._checks import message
from tpu_embed._types import PADDING_ID, PyTree
from tpu_embed.core.batch import Batch, BatchSpec, Routed, view_stacks
from tpu_embed.core.ids import HostIds, Structure, host_ids, part_of_feature
from tpu_embed.core.layout import Layout, send_lines
from tpu_embed.core.place.agreement import Agreement, Alone
from tpu_embed.core.place.keys import Keyed, KeyedBatches
from tpu_embed.core.place.packing import natural_spec, pack_all
from tpu_embed.core.place.rooms import Rooms, decode_shapes, encode_shapes
from tpu_embed.core.place.write_lines import (
    HostStack,
    sort_stack,
    with_capacities,
    write_lines,
)
from tpu_embed.vocabulary import Vocabularies

# -- routes, in few shapes -------------------------------------------------------------------------


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


# -- batches ---------------------------------------------------------------------------------------


class Placer:
    """Makes the batches of one engine, one after the other.

    Args:
      declared: the feature configuration.
      layout: the engine's layout.
      vocabularies: the maps of its living vocabularies; None without them.

    Attributes:
      agreement: with the other processes.
    """

    def __init__(
        self, declared: Structure, layout: Layout, vocabularies: Vocabularies | None
    ) -> None:
        self._declared, self._layout = declared, layout
        axes = layout.axes
        replicas = axes.local_parts(axes.batch_axes)
        # The features as they are in this process's part of a batch.
        self._configs = [
            part_of_feature(one.config, len(replicas), axes.replicas) for one in layout.features
        ]
        self.agreement = Agreement(layout) if jax.process_count() > 1 else Alone()
        self._router, self._replicas = Router(layout, self.agreement, replicas), replicas
        self._visited: dict[int, Router] = {}  # by the size of small tables
        self._keyed = None
        if vocabularies is not None:
            self._keyed = KeyedBatches(layout, vocabularies, self.agreement, replicas)

    def shapes(self) -> Any:
        """Return the shapes that batches get, as JSON; None if no feature is jagged."""
        jagged = any(feature.config.jagged for feature in self._layout.features)
        return encode_shapes(self._router.rooms.copy()) if jagged else None

    def expect(self, shapes: Any) -> None:
        """Give the next batches the shapes that `shapes` returned.

        Raises:
          ValueError: it did not.
        """
        self._router.rooms.set(decode_shapes(shapes, self._layout))

    def host_ids(self, features: PyTree, weights: PyTree | None) -> list[HostIds]:
        """Return the validated ids of every feature, of this process's part of the batch."""
        if isinstance(features, Batch):
            expected, got = "ids on the host", "a Batch, whose ids are on the devices"
            remedy = "give the features themselves; a Batch needs no Prefetcher"
            raise TypeError(message("features", expected=expected, got=got, remedy=remedy))
        given, scales = self._declared.match_weighted(features, weights)
        here = zip(self._layout.features, self._configs, given, scales, strict=True)
        return [
            host_ids(f"feature {feature.path!r}", config, feature.table.name, ids, scale)
            for feature, config, ids, scale in here
        ]

    def place(self, features: PyTree, weights: PyTree | None, requested: BatchSpec | None) -> Batch:
        """Return a training batch; living vocabularies learn from it.

        Args:
          features: the ids.
          weights: their weights, or None.
          requested: see `Router.route`.

        Raises:
          ValueError, TypeError: this process, or another one, refuses its part.
        """
        requested = _routed(requested, "update")
        with self.agreement.refusals():
            hosts = self.host_ids(features, weights)
        if self._keyed is None:
            return self._router.route(hosts, requested, "update")
        with self._keyed.learn(hosts) as keyed:
            return _stamp_placed(self._router.route(keyed.hosts, requested, "update"), keyed)

    def place_lookup(
        self, features: PyTree, weights: PyTree | None, requested: BatchSpec | None, step: int
    ) -> Batch:
        """Return a batch that is only looked up; no map changes.

        Args:
          features: the ids, of which mappings may leave out some.
          weights: their weights, or None.
          requested: see `Router.route`.
          step: of living vocabularies: the step whose rows the batch gets.

        Raises:
          ValueError, TypeError: as for `place`.
        """
        requested = _routed(requested, "lookup")
        with self.agreement.refusals():
            features, weights, left_out = self._filled(features, weights)
            hosts = self.host_ids(features, weights)
        batch = self._route_lookup(hosts, requested, step)
        return dataclasses.replace(batch, left_out=left_out)

    def _filled(
        self, features: PyTree, weights: PyTree | None
    ) -> tuple[PyTree, PyTree | None, tuple[str, ...]]:
        """Return features and weights with empty examples of those that are left out; their paths.

        Raises:
          ValueError, TypeError: as `Structure.match`.
        """
        declared, part = self._declared, self._declared.part(features)
        if part is declared:
            return features, weights, ()
        given = zip(*part.match_weighted(features, weights), strict=True)
        found = dict(zip(part.paths, given, strict=True))
        left_out = tuple(path for path in declared.paths if path not in found)
        for path, config in zip(declared.paths, self._configs, strict=True):
            if path in left_out:  # one example per replica, or as many as are declared
                bags = config.output_shape or (self._replicas.size,)
                found[path] = np.full((*bags, 1), PADDING_ID), None
        ids, scales = zip(*(found[path] for path in declared.paths), strict=True)
        return declared.unflatten(ids), declared.unflatten(scales), left_out

    def _route_lookup(self, hosts: list[HostIds], requested: BatchSpec | None, step: int) -> Batch:
        """Return a batch of validated ids that is only looked up; see `place_lookup`."""
        if self._keyed is None:
            return self._router.route(hosts, requested, "lookup")
        keyed, router = self._keyed.find(hosts, step), self._router
        if keyed.visit is None:
            return _stamp_placed(router.route(keyed.hosts, requested, "lookup"), keyed)
        small, rows = self._layout.visiting(keyed.visit.rows), keyed.visit.rows
        router = self._visited.setdefault(rows, Router(small, self.agreement, self._replicas))
        placed = _stamp_placed(router.route(keyed.hosts, requested, "lookup"), keyed)
        # If batches before it are still to be admitted, its rows come when it is admitted itself.
        ready = keyed.steps.first <= self._keyed.admitted
        visits = keyed.visit.make() if ready else None
        return dataclasses.replace(placed, visits=visits, visit_rows=rows)


def _routed(requested: BatchSpec | None, routed: Routed) -> BatchSpec | None:
    """Return the requested spec of a batch that is routed."""
    if requested is None:
        return None
    if not isinstance(requested, BatchSpec):
        got, remedy = type(requested).__name__, "batch.spec of a placed batch is one"
        raise ValueError(message("spec", expected="a BatchSpec", got=got, remedy=remedy))
    return dataclasses.replace(requested, routed=routed)


def _stamp_placed(batch: Batch, keyed: Keyed) -> Batch:
    """Return a batch that says which states it may be looked up in."""
    steps = np.array(keyed.steps, np.int32)
    admitted = not keyed.keys.is_training
    return dataclasses.replace(batch, valid_steps=steps, keys=keyed.keys, admitted=admitted)
