"""What a `TPUEmbedding` holds: the state, the batches that wait, the one that was dequeued.

All of it stands in one record that never changes. A call of the stateful API makes another record
and puts it in the place of the old one in a single store: whatever raises, between whatever
bytecodes, leaves the one or the other, and another thread never sees half of a call.

When the lookups of a pipelined loop are issued:

    enqueue 1, 2   dequeue 1   apply 1   enqueue 3   dequeue 2   apply 2   dequeue 3 …
    lookup  1              2                                 3
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from tpu_embed._checks import message
from tpu_embed._types import PyTree
from tpu_embed.core.batch import Batch
from tpu_embed.core.state import TableState


@dataclasses.dataclass(frozen=True)
class Enqueued:
    """A batch that waits, or was dequeued.

    Attributes:
      batch: the ids, on the devices; placing a batch starts its transfer, so what waits is
        prefetched.
      training: whether gradients will be applied.
      name: the caller's label, or None.
      activations: its lookup, once issued.
    """

    batch: Batch
    training: bool
    name: str | None
    activations: PyTree | None = None

    def issued(self, lookup: Callable[[Batch], PyTree]) -> Enqueued:
        """Return the batch with its activations, by a lookup unless it has them."""
        if self.activations is not None:
            return self
        return dataclasses.replace(self, activations=lookup(self.batch))

    def withdrawn(self) -> Enqueued:
        """Return the batch without activations, to be looked up again."""
        return dataclasses.replace(self, activations=None)


class Held(NamedTuple):
    """The record.

    Attributes:
      state: the tables; None before they are built.
      per_replica: examples of a training batch on one device; None: not set yet.
      waiting: enqueued batches, the oldest first.
      dequeued: the batch dequeued last, until its gradients are applied.
      failure: what made the state invalid, or None.
      update: where an update that takes the memory of the state leaves the next one, or None.
    """

    state: TableState | None = None
    per_replica: int | None = None
    waiting: tuple[Enqueued, ...] = ()
    dequeued: Enqueued | None = None
    failure: str | None = None
    update: list[TableState] | None = None

    def settled(self) -> Held:
        """Return the record after its update, which does not run any more.

        Whatever ended it, it has left a state or none. If it has left none, it has taken the arrays
        of the old state or has not.
        """
        if self.update:
            return self._replace(state=self.update[0], dequeued=None, update=None)
        failure = self.failure
        taken = self.update is not None and _any_deleted(jax.tree.leaves(self.state))
        if failure is None and taken:
            failure = "one whose arrays were taken by an update that did not finish"
        return self._replace(failure=failure, update=None)

    def with_size(self, size: int | None, what: str, remedy: str) -> Held:
        """Return the record with the size of training batches set; None is no such batch.

        Raises:
          ValueError: another size is set already.
        """
        if size is None:
            return self
        if self.per_replica not in (None, size):
            what = f"{what}: batch size per replica"
            expected = f"{self.per_replica}, the size it was built with"
            raise ValueError(message(what, expected=expected, got=f"{size}", remedy=remedy))
        return self._replace(per_replica=size)

    def waiting_for_gradients(self, what: str) -> tuple[TableState, Enqueued]:
        """Return the state, and the dequeued training batch.

        Raises:
          RuntimeError: there is none.
        """
        item, remedy = self.dequeued, "call enqueue and dequeue first"
        if self.state is None:
            got = "tables that were not built"
        elif item is None:
            got = "none since the last apply_gradients"
        elif not item.training:
            got, remedy = "one enqueued with training=False", "enqueue it with training=True"
        else:
            return self.state, item
        expected = "a dequeued training batch"
        raise RuntimeError(message(what, expected=expected, got=got, remedy=remedy))

    def problem(self) -> str | None:
        """Return what makes the state invalid; None if nothing does."""
        if self.failure is not None or self.state is None or self.update is not None:
            return self.failure
        leaves: list[Any] = jax.tree.leaves(self.state)
        try:
            if not _any_deleted(leaves):  # an update that failed after its dispatch shows here
                jax.block_until_ready([leaf for leaf in leaves if leaf.is_ready()])
                return None
        except jax.errors.JaxRuntimeError as error:
            return after_a_device_error(f"{error}")
        except RuntimeError:
            if not _any_deleted(leaves):
                raise
        return "one whose arrays were donated to another function, or deleted"


def _any_deleted(leaves: list[Any]) -> bool:
    return any(leaf.is_deleted() for leaf in leaves)


def after_a_device_error(error: str) -> str:
    """Say what a state is after an error, whose message may have a traceback in it."""
    lines = error.strip().splitlines()
    said = lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1]}"
    return f"one after a device error ({said})"


class Holder:
    """The place of the record.

    Attributes:
      now: the record of this moment; read it once and use what was read.
    """

    def __init__(self) -> None:
        self.now = Held()
        self._lock = threading.RLock()

    def change(self, **fields: Any) -> None:
        """Put other values in the place of these fields."""
        self.derive(lambda now: now._replace(**fields))

    def derive(self, make: Callable[[Held], Held]) -> None:
        """Put `make(now)` in the place of the record; what it raises leaves the record."""
        with self._lock:
            self.now = make(self.now)
