"""Route validated ids and send them to the devices, in as few different shapes as possible.

Every new shape means a new compilation. So `unions.py` remembers the shapes of earlier batches: a
batch that fits one of them is packed in it. After a few batches they rarely change.

Input: `HostIds` of all features, of this process's part of the batch. Output: a `Batch`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tpu_embed._checks import message
from tpu_embed.config import FeatureConfig
from tpu_embed.core.batch.agreement import Agreement
from tpu_embed.core.batch.batch import Batch
from tpu_embed.core.batch.keyed import Keyed, KeyedBatches
from tpu_embed.core.batch.packing import natural_spec, pack_all
from tpu_embed.core.batch.routing import sort_stack, with_capacities, write_lines
from tpu_embed.core.batch.spec import BatchSpec, Routed
from tpu_embed.core.batch.stack_view import view_stacks
from tpu_embed.core.batch.turns import Turns
from tpu_embed.core.batch.unions import Unions
from tpu_embed.core.batch.update_route import HostStack
from tpu_embed.core.batch.vocabularies import Vocabularies
from tpu_embed.core.ids import HostIds, part_of_feature
from tpu_embed.core.layout import Layout


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


class Ticket(NamedTuple):
    """A turn to place a batch.

    Attributes:
      number: its number.
      step: the step of living vocabularies that was admitted when the turn was drawn; it is pinned
        until the turn ends.
    """

    number: int
    step: int


class Placer:
    """Routes batches and sends them, in specs of earlier batches where they fit.

    Several processes place their parts together, and agree on the spec of each batch.

    Args:
      layout: the engine's layout.
      vocabularies: the maps of its living vocabularies; None without them.
    """

    def __init__(self, layout: Layout, vocabularies: Vocabularies | None) -> None:
        self._layout, self._vocabularies = layout, vocabularies
        self._replicas = layout.axes.local_parts(layout.axes.batch_axes)
        self._unions = Unions(layout)
        self._agreement = Agreement(layout) if jax.process_count() > 1 else None
        self._keyed = None
        if vocabularies is not None:
            self._keyed = KeyedBatches(layout, vocabularies, self._agreement, self._replicas)

    @functools.cached_property
    def configs(self) -> list[FeatureConfig]:
        """The features' configs, changed to describe only this process's part of the batch."""
        axes = self._layout.axes
        here = len(self._replicas)
        return [part_of_feature(f.config, here, axes.replicas) for f in self._layout.features]

    @property
    def _turns(self) -> Turns | None:
        """The order of calls; None in a single process without maps that depend on it."""
        if self._vocabularies is not None:
            return self._vocabularies.turns
        return None if self._agreement is None else self._agreement.turns

    def draw_turn(self, *, training: bool = True) -> Ticket | None:
        """Return the turn to place the next batch; None if the order of batches does not matter.

        Args:
          training: False for a batch that will only be looked up. Where no other process waits for
            it, no map changes by it and any time will do: nobody waits until it is placed.
        """
        if self._turns is None:
            return None
        number = self._turns.draw()
        pinned = 0 if self._vocabularies is None else self._vocabularies.pin(number)
        if self._agreement is None and not training:
            self._turns.release(number)
        return Ticket(number, pinned)

    def hold(self, turn: Ticket | None) -> contextlib.AbstractContextManager[None]:
        """Note that this thread will use a turn before the block ends; see `Turns.hold`."""
        if turn is None or self._turns is None:
            return contextlib.nullcontext()
        return self._turns.hold(turn.number)

    def place(
        self,
        turn: Ticket | None,
        validate: Callable[[], Sequence[HostIds]],
        requested: BatchSpec | None,
        *,
        training: bool,
        step: int | None = None,
    ) -> Batch:
        """Return the batch in the requested spec, or in one of earlier batches.

        Args:
          turn: what `draw_turn` returned.
          validate: validates and returns the ids of every feature. If it raises, every process
            raises.
          requested: the spec to use. None: the smallest spec of earlier batches that it fits; one
            of them grows if it fits none.
          training: whether to route the update too, and to let living vocabularies learn.
          step: of living vocabularies, whose rows a batch that is only looked up gets: the training
            batches up to this one are admitted when it is looked up. None: the step that was
            admitted when the turn was drawn.

        Raises:
          ValueError: the batch does not fit the requested spec; the message says which it fits.
        """
        routed: Routed = "update" if training else "lookup"
        if requested is not None:
            if not isinstance(requested, BatchSpec):
                got, remedy = type(requested).__name__, "batch.spec of a placed batch is one"
                raise ValueError(message("spec", expected="a BatchSpec", got=got, remedy=remedy))
            requested = dataclasses.replace(requested, routed=routed)
        with self._used(turn, training=training):
            if self._keyed is None:
                return self._place(validate, requested, routed)
            if training:
                with self._keyed.take(validate) as keyed:
                    return _stamp_placed(self._place(lambda: keyed.hosts, requested, routed), keyed)
            assert turn is not None, "living vocabularies have turns"
            keyed = self._keyed.find(validate, max(turn.step, step or 0))
            return _stamp_placed(self._place(lambda: keyed.hosts, requested, routed), keyed)

    @contextlib.contextmanager
    def _used(self, turn: Ticket | None, *, training: bool) -> Iterator[None]:
        """Wait for a turn, and end it with the block."""
        if turn is None or self._turns is None:
            yield
            return
        try:
            if self._agreement is None and not training:
                yield  # the turn ended when it was drawn
            else:
                with self._turns.use(turn.number):
                    yield
        finally:
            self._unpin(turn)

    def _place(
        self,
        validate: Callable[[], Sequence[HostIds]],
        requested: BatchSpec | None,
        routed: Routed,
    ) -> Batch:
        """Route a batch and send it, in a spec that all processes agree on."""
        if self._agreement is None:
            fitted = self._fit(validate(), requested, routed)
            return self._send(fitted, requested or self._unions.settle(fitted.needed))
        try:
            fitted = self._fit(validate(), requested, routed)
        except Exception as error:
            self._agreement.refuse(error)
            raise
        wanted = requested or self._unions.want(fitted.needed)
        agreed, exact = self._agreement.agree(wanted, exact=requested is not None)
        return self._send(fitted, agreed if exact else self._unions.adopt(agreed))

    def place_none(self, turn: Ticket | None, error: BaseException | None) -> None:
        """Use a turn to tell the other processes that this one has no batch to place.

        Args:
          turn: what `draw_turn` returned.
          error: why there is none; None: there are no more batches.

        Raises:
          ValueError: there is no error, and another process has a batch to place.
        """
        if self._agreement is None:
            self.release(turn)
            return
        with self._used(turn, training=True):
            if error is None:
                self._agreement.end()
            else:
                self._agreement.refuse(error)

    def release(self, turn: Ticket | None) -> None:
        """End a turn that will not be used; every process must do so."""
        if turn is not None and self._turns is not None:
            self._turns.release(turn.number)
            self._unpin(turn)

    def give_up(self, turn: Ticket | None) -> None:
        """End a turn that something has kept from being used; one that has ended is left alone."""
        if turn is not None and self._turns is not None:
            self._turns.give_up(turn.number)
            self._unpin(turn)

    def _unpin(self, turn: Ticket) -> None:
        if self._vocabularies is not None:
            self._vocabularies.unpin(turn.number)

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
        likely = self._unions.likely(exact) if requested is None else requested
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

    def _sorted(self, hosts: Sequence[HostIds], spec: BatchSpec) -> list[HostStack]:
        """Pack this process's part in a spec of the global batch, and sort it by row."""
        local = self._local(spec)
        packed = zip(
            pack_all(hosts, local, self._layout), view_stacks(local, self._layout), strict=True
        )
        return [sort_stack(ids, view, self._replicas) for ids, view in packed]

    def _send(self, fitted: _Fitted, spec: BatchSpec) -> Batch:
        """Write the route and send it; sort again if another process or thread needed more ids."""
        stacks = fitted.stacks
        if _ids_of(spec) != _ids_of(fitted.packed_as):
            stacks = self._sorted(fitted.hosts, spec)
        packed = write_lines(stacks, self._local(spec), self._layout)
        axes = self._layout.axes
        whole = (axes.size(axes.names), packed.shape[1])
        sharding = axes.sharding(axes.names)
        array = jax.make_array_from_process_local_data(sharding, packed, whole)
        return Batch.of(array, spec, self._layout)


def _stamp_placed(batch: Batch, keyed: Keyed) -> Batch:
    """Return a batch that says which states it may be looked up in."""
    steps = np.array(keyed.steps, np.int32)
    admitted = not keyed.admission.is_training
    return dataclasses.replace(batch, steps=steps, admission=keyed.admission, admitted=admitted)


def _ids_of(spec: BatchSpec) -> tuple[Any, ...]:
    """Return what the packed ids depend on: everything but the exchange capacities."""
    return spec.feature_shapes, [stack.ids for stack in spec.stacks]
