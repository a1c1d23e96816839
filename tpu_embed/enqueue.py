"""The queue of batches between `enqueue` and `dequeue`.

Enters: placed batches, in order; placing a batch starts its transfer, so what waits here is
prefetched. Leaves: the oldest first, with its activations. Called by `tpu_embedding.py`.

    enqueue 1, 2   dequeue 1   apply 1   enqueue 3   dequeue 2   apply 2   dequeue 3 …
    lookup  1              2                                 3
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

from tpu_embed._types import PyTree
from tpu_embed.core.batch import Batch


@dataclasses.dataclass(frozen=True)
class Enqueued:
    """A batch that waits.

    Attributes:
      batch: the ids, on the devices.
      training: whether gradients will be applied.
      name: the caller's label, or None.
      activations: its lookup, once issued.
    """

    batch: Batch
    training: bool
    name: str | None
    activations: PyTree | None = None


class BatchQueue:
    """A first-in, first-out queue that can issue the lookup of its head ahead of time.

    Args:
      lookup: batch -> activations, from the tables of the moment it is called.
      ahead: issue a batch's lookup as soon as it is the head of the queue; otherwise when it
        leaves.
    """

    def __init__(self, lookup: Callable[[Batch], PyTree], *, ahead: bool) -> None:
        self._lookup = lookup
        self._ahead = ahead
        self._waiting: collections.deque[Enqueued] = collections.deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, item: Enqueued) -> None:
        """Append a batch; issue its lookup if it is the head."""
        if not self._waiting:
            item = self._issued(item)
        self._waiting.append(item)

    def pop(self) -> Enqueued:
        """Remove the head, with its activations; the next batch becomes the head.

        An exception of a lookup leaves the queue as it was.
        """
        head = self._waiting[0]
        if head.activations is None:
            head = dataclasses.replace(head, activations=self._lookup(head.batch))
        if len(self._waiting) > 1:
            self._waiting[1] = self._issued(self._waiting[1])
        self._waiting.popleft()
        return head

    def issue_again(self) -> None:
        """Look the head up again, if it had been: the tables were replaced."""
        if self._waiting:
            fresh = dataclasses.replace(self._waiting[0], activations=None)
            self._waiting[0] = self._issued(fresh)

    def _issued(self, item: Enqueued) -> Enqueued:
        if not self._ahead:
            return item
        return dataclasses.replace(item, activations=self._lookup(item.batch))
