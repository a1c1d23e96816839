"""From judged ids to a `Batch` on the devices, in as few shapes as a stream of batches needs.

Enters: `HostIds` of all features. Leaves: a `Batch`. Called by `EmbeddingEngine.place`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tpu_embed._checks import message
from tpu_embed.core import capacity
from tpu_embed.core.batch import Batch, natural_spec, pack
from tpu_embed.core.batch_spec import BatchSpec
from tpu_embed.core.ids import HostIds
from tpu_embed.core.layout import Layout


class Placer:
    """Pack batches and send them; remember the union of their specs, so that programs are few.

    Batches of another size, or whose activations have other shapes, have a union of their own.

    Args:
      layout: the engine's.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._unions: dict[Any, BatchSpec] = {}
        self._last: tuple[BatchSpec, BatchSpec] | None = None  # a need, and the union that met it
        self._lock = threading.Lock()

    def place(self, hosts: Sequence[HostIds]) -> Batch:
        """Return the batch in the running union of all specs, grown if it must."""
        natural = natural_spec(hosts, self._layout)
        spec = self._grow(natural)
        while True:
            packed = pack(hosts, spec, self._layout)
            grown = self._grow(capacity.with_capacities(packed, natural, spec, self._layout))
            if _line_of(grown) == _line_of(spec):
                return self._send(packed, grown)
            spec = grown  # it has room for more ids now: this growth made some, or another thread

    def place_as(self, hosts: Sequence[HostIds], spec: BatchSpec) -> Batch:
        """Return the batch in exactly the given spec.

        Raises:
          ValueError: it does not fit; the message has the spec that does.
        """
        natural = natural_spec(hosts, self._layout)
        whole = BatchSpec.union(spec, natural)
        packed = pack(hosts, whole, self._layout)
        exact = capacity.with_capacities(packed, natural, whole, self._layout)
        fitting = BatchSpec.union(whole, exact)
        if fitting != spec:
            remedy = f"use {fitting}, or BatchSpec.union of the specs of all batches"
            raise ValueError(
                message("spec", expected="one that the batch fits", got=f"{spec}", remedy=remedy)
            )
        return self._send(packed, spec)

    def _grow(self, needed: BatchSpec) -> BatchSpec:
        """Return the running union, first grown by what is needed, in buckets."""
        last = self._last
        if last is not None and last[0] == needed:
            return last[1]
        kind = tuple((form.batch, form.inner, form.combines) for form in needed.forms)
        with self._lock:
            known = self._unions.get(kind)
            if known is None or BatchSpec.union(known, needed) != known:
                grown = needed.bucketed()
                self._unions[kind] = grown if known is None else BatchSpec.union(known, grown)
            self._last = needed, self._unions[kind]
            return self._unions[kind]

    def _send(self, packed: np.ndarray, spec: BatchSpec) -> Batch:
        axes = self._layout.axes
        sharding = axes.sharding(axes.batch_axes)
        return Batch(jax.make_array_from_process_local_data(sharding, packed), spec)


def _line_of(spec: BatchSpec) -> tuple[Any, ...]:
    """Return what the packed array depends on: forms and numbers of ids, no exchange capacities."""
    return spec.forms, [group.ids for group in spec.groups]
