"""What a `TPUEmbedding` holds: the state, the batches that wait, and the batch dequeued last.

All of it is in one immutable record. A call of the stateful API makes a new record and stores it in
place of the old one with a single assignment. So an exception or a signal, wherever it comes,
leaves either the old record or the new one, and no thread ever sees half of a call.

In a pipelined loop, lookups are issued at these moments:

    enqueue 1, 2   dequeue 1   apply 1   enqueue 3   dequeue 2   apply 2   dequeue 3 …
    lookup  1              2                                 3

Input: batches, and states. Output: records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from tpu_embed._calls import Exchange
from tpu_embed._checks import check_int, refuse
from tpu_embed._types import PyTree
from tpu_embed.core.batch import Batch
from tpu_embed.core.ids import Structure, structure
from tpu_embed.core.state import TableState, describe_leaf


def placed_step(batch: Batch) -> int:
    """Return the step of dynamic vocabularies that a placed batch is, or whose rows it has."""
    steps = batch.valid_steps if batch.keys.steps is None else batch.keys.steps
    assert steps is not None, "batches of dynamic vocabularies have steps"
    return int(steps[0])


class Enqueued(NamedTuple):
    """A batch that waits in the queue, or was dequeued.

    Attributes:
      batch: the ids. Their transfer to the devices starts when a batch is placed, so the batches
        that wait are prefetched.
      training: whether gradients will be applied.
      name: the caller's label, or None.
      activations: the activations, or None before the lookup is issued.
    """

    batch: Batch
    training: bool
    name: str | None
    activations: PyTree | None = None

    @property
    def step(self) -> int | None:
        """Which step of dynamic vocabularies the batch is, if it is to be admitted; or None."""
        return placed_step(self.batch) if self.batch.keys.is_training else None

    @property
    def size(self) -> tuple[int, ...] | None:
        """The examples of every feature per replica; None of a batch that is not for training."""
        return self.batch.spec.local_sizes if self.training else None


class Record(NamedTuple):
    """The immutable record.

    Attributes:
      state: the state of the tables; None before they are built.
      per_replica: examples of every feature of a training batch on one device; None: not set yet.
      waiting: the enqueued batches, oldest first.
      dequeued: the batch dequeued last, until its gradients are applied.
      failure: why the state is invalid, or None.
      update: None, or what is running in the memory of the state, and how to record its result. An
        interrupted one is gone on with by the next call.
    """

    state: TableState | None = None
    per_replica: tuple[int, ...] | None = None
    waiting: tuple[Enqueued, ...] = ()
    dequeued: Enqueued | None = None
    failure: str | None = None
    update: tuple[Exchange[Any], Callable[[Record, Any], Record]] | None = None

    @property
    def progress(self) -> str:
        """How far the training is, in words: `step 3, 2 batches waiting`."""
        step = "not built" if self.state is None else f"step {describe_leaf(self.state.step)}"
        return f"{step}, {len(self.waiting)} batches waiting"

    def with_size(self, size: tuple[int, ...] | None, what: str, remedy: str) -> Record:
        """Return the record with the size of training batches set.

        Args:
          size: examples of every feature per replica; None for a batch that is not for training.
          what: the call, for the message.
          remedy: the remedy, for the message.

        Raises:
          ValueError: a different size is set already.
        """
        if size is None:
            return self
        if self.per_replica not in (None, size):
            refuse(
                f"{what}: batch size per replica",
                expected=f"{shown(self.per_replica or size)}, the size it was built with",
                got=shown(size),
                remedy=remedy,
            )
        return self._replace(per_replica=size)

    def last_step(self, admitted: int) -> int:
        """Return the step of dynamic vocabularies that the queue ends with.

        Args:
          admitted: the step that the state has.
        """
        return max((item.step for item in self.waiting if item.step is not None), default=admitted)

    def with_item(self, at: int, item: Enqueued) -> Record:
        """Return the record with a batch at a place of its queue, or behind the last one."""
        waiting = *self.waiting[:at], item, *self.waiting[at + 1 :]
        return self._replace(waiting=waiting, per_replica=item.size or self.per_replica)

    def described_sizes(self, paths: Sequence[str]) -> Any:
        """Return `per_replica` as a plain object: one number if all are equal, or one per path."""
        sizes = self.per_replica
        if sizes is None or len({*sizes}) == 1:
            return sizes and sizes[0]
        return dict(zip(paths, sizes, strict=True))

    def waiting_for_gradients(self, what: str) -> tuple[TableState, Enqueued]:
        """Return the state, and the dequeued training batch whose gradients are due.

        Raises:
          RuntimeError: there is no such batch.
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
        refuse(
            what, expected="a dequeued training batch", got=got, remedy=remedy, error=RuntimeError
        )

    def problem(self) -> str | None:
        """Return why the state is invalid, or None if it is valid."""
        if self.failure is not None or self.state is None:
            return self.failure
        leaves = jax.tree.leaves(self.state)
        try:
            # Programs run asynchronously. The results of one that failed after its dispatch are
            # "ready" and raise its error here. Results that are still computed are not waited for.
            jax.block_until_ready([x for x in leaves if x.is_deleted() or x.is_ready()])
        except RuntimeError as error:  # jax.errors.JaxRuntimeError is one too
            if any(leaf.is_deleted() for leaf in leaves):
                return "one whose arrays were donated to another function, or deleted"
            return after_a_device_error(f"{error}")
        return None


def shown(sizes: tuple[int, ...]) -> str:
    """Return batch sizes for a message: one number if they are equal."""
    return f"{sizes[0]}" if len({*sizes}) == 1 else f"{sizes}"


def batch_sizes(declared: Structure, given: PyTree | None) -> tuple[int, ...] | None:
    """Return one batch size per feature.

    Args:
      declared: the features.
      given: one number for all features, or one per feature in their structure; None: no sizes.

    Raises:
      ValueError: a size is not an integer of at least 1, or the structure differs.
      TypeError: a container has another type than in the configuration.
    """
    if given is None:
        return None
    what = "per_replica_batch_size"
    if structure.children(given) is None:
        return (check_int(what, given, minimum=1),) * len(declared.paths)
    pairs = zip(declared.labels, declared.match(given, what=what), strict=True)
    return tuple(check_int(f"{what}: {label}", size, minimum=1) for label, size in pairs)


def after_a_device_error(error: str) -> str:
    """Return the description of a state after a device error.

    Args:
      error: the error's message, which may contain a traceback; its first and last line are kept.
    """
    lines = error.strip().splitlines()
    said = lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1]}"
    return f"one after a device error ({said})"
