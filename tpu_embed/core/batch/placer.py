"""From judged ids to a `Batch` on the devices, in as few shapes as a stream of batches needs.

Enters: `HostIds` of all features, of this process's part of the batch. Leaves: a `Batch`. Called by
`EmbeddingEngine.place`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tpu_embed._checks import message
from tpu_embed.config import FeatureConfig
from tpu_embed.core.batch import capacity
from tpu_embed.core.batch.agreement import Agreement
from tpu_embed.core.batch.batch import Batch
from tpu_embed.core.batch.packing import natural_spec, pack
from tpu_embed.core.batch.spec import BatchSpec
from tpu_embed.core.ids import HostIds, part_of_feature
from tpu_embed.core.layout import Layout


class _Fitted(NamedTuple):
    """A part of a batch: its ids, packed as a spec of the global batch says; what it wants."""

    hosts: Sequence[HostIds]
    packed: np.ndarray
    packed_as: BatchSpec
    wanted: BatchSpec


class Placer:
    """Pack batches and send them; remember the union of their specs, so that programs are few.

    Batches of another size, or whose activations have other shapes, have a union of their own. Many
    processes place their parts together, and agree on the union.

    Args:
      layout: the engine's.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._replicas = layout.axes.local_parts(layout.axes.batch_axes)
        self._unions: dict[Any, BatchSpec] = {}
        self._lock = threading.Lock()
        self._agreement = Agreement(layout) if jax.process_count() > 1 else None

    @functools.cached_property
    def configs(self) -> list[FeatureConfig]:
        """The features' configs, for the part of the batch that this process gives."""
        axes = self._layout.axes
        here = len(self._replicas)
        return [part_of_feature(f.config, here, axes.replicas) for f in self._layout.features]

    def place(self, judge: Callable[[], Sequence[HostIds]], given: BatchSpec | None) -> Batch:
        """Return the batch in the given spec, or in the running union of all specs.

        Args:
          judge: returns the ids of every feature; what it raises, every process raises.
          given: the spec; None: the union, grown if it must.

        Raises:
          ValueError: the batch does not fit the given spec; the message has the one that does.
        """
        if self._agreement is None:
            fitted = self._fit(judge(), given)
            return self._send(fitted, given or self._grown(fitted.wanted))
        try:
            fitted = self._fit(judge(), given)
        except Exception as error:
            self._agreement.refuse(error)
            raise
        agreed = self._agreement.agree(fitted.wanted, exact=given is not None)
        return self._send(fitted, given or self._grown(agreed))

    def _fit(self, hosts: Sequence[HostIds], given: BatchSpec | None) -> _Fitted:
        """Pack this process's part in a spec that it fits.

        Raises:
          ValueError: it has none, or does not fit the given spec.
        """
        if not self._replicas.size:
            expected, remedy = "a mesh with devices of this process", "make it of jax.devices()"
            raise ValueError(message("place", expected=expected, got="none", remedy=remedy))
        natural = natural_spec(hosts, self._layout, len(self._replicas))
        least = natural.over(self._layout.axes.replicas)
        room = self._roomy(least) if given is None else BatchSpec.union(given, least)
        packed = self._pack(hosts, room)
        counted = capacity.with_capacities(
            packed, natural, self._local(room), self._layout, self._replicas
        ).over(least.replicas)
        if given is None:
            return _Fitted(hosts, packed, room, self._roomy(counted))
        fitting = BatchSpec.union(room, counted)
        if fitting != given:
            remedy = f"use {fitting}, or BatchSpec.union of the specs of all batches"
            raise ValueError(
                message("spec", expected="one that the batch fits", got=f"{given}", remedy=remedy)
            )
        return _Fitted(hosts, packed, given, given)

    def _local(self, spec: BatchSpec) -> BatchSpec:
        return spec.over(len(self._replicas))

    def _pack(self, hosts: Sequence[HostIds], spec: BatchSpec) -> np.ndarray:
        return pack(hosts, self._local(spec), self._layout)

    def _roomy(self, needed: BatchSpec) -> BatchSpec:
        """Return the running union if it has room for what is needed; else one that has."""
        known = self._unions.get(_kind_of(needed))
        if known is None:
            return needed.bucketed()
        if BatchSpec.union(known, needed) != known:
            return BatchSpec.union(known, needed.bucketed())
        return known

    def _grown(self, spec: BatchSpec) -> BatchSpec:
        """Return the running union, first grown by a spec."""
        kind = _kind_of(spec)
        with self._lock:
            known = self._unions.setdefault(kind, spec)
            if known is not spec and known != spec:
                self._unions[kind] = BatchSpec.union(known, spec)
            return self._unions[kind]

    def _send(self, fitted: _Fitted, spec: BatchSpec) -> Batch:
        """Send what is packed, packed anew if another process, or thread, needs more room."""
        packed = fitted.packed
        if _line_of(spec) != _line_of(fitted.packed_as):
            packed = self._pack(fitted.hosts, spec)
        axes = self._layout.axes
        whole = (spec.replicas, packed.shape[1])
        sharding = axes.sharding(axes.batch_axes)
        array = jax.make_array_from_process_local_data(sharding, packed, whole)
        return Batch(array, spec, self._layout.row_numbers)


def _kind_of(spec: BatchSpec) -> Any:
    return tuple((form.batch, form.inner, form.combines) for form in spec.feature_shapes)


def _line_of(spec: BatchSpec) -> tuple[Any, ...]:
    """Return what the packed array depends on: forms and numbers of ids, no exchange capacities."""
    return spec.feature_shapes, [stack.ids for stack in spec.stacks]
