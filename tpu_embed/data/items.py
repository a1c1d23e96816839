"""What an item of a data source is: features, or a tuple that begins with features.

A training loop needs more than features: labels, numbers, weights of examples. So a source may
yield tuples, of which only the first part is placed:

    source yields                    the loop gets
    features                         batch
    (features, label)                (batch, label)
    (features, weights, label)       (batch, label)      with weighted=True

Only a plain tuple is taken apart. A namedtuple, list, dict or DataFrame is the features themselves.

Input: an item. Output: what `place` takes, and what goes around it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from tpu_embed._checks import message
from tpu_embed._types import PyTree
from tpu_embed.core.batch import Batch, BatchSpec


class Item(NamedTuple):
    """An item taken apart.

    Attributes:
      features: to be placed.
      weights: to be placed with them, or None.
      rest: what follows them in the tuple; None if the item was no tuple.
    """

    features: PyTree
    weights: PyTree | None
    rest: tuple[Any, ...] | None

    def around(self, batch: Batch) -> Any:
        """Return the item as the loop gets it, with the batch in place of the features."""
        return batch if self.rest is None else (batch, *self.rest)


@dataclasses.dataclass(frozen=True)
class ItemRules:
    """How items are taken apart and placed.

    Args:
      weighted: whether items are `(features, weights, …)`.
      spec: the exact shape of every batch, or None.
      training: whether the batches are trained on.
    """

    weighted: bool = False
    spec: BatchSpec | None = None
    training: bool = True

    def take_apart(self, item: Any) -> Item:
        """Return the parts of an item.

        Raises:
          TypeError: it is no tuple, or too short a one.
        """
        # A subclass of tuple with names is one of the ways to nest features.
        if type(item) is not tuple and not self.weighted:
            return Item(item, None, None)
        least = "(features, weights, …)" if self.weighted else "(features, …)"
        if type(item) is not tuple or len(item) < least.count(","):
            got = f"a tuple of {len(item)}" if type(item) is tuple else type(item).__name__
            raise TypeError(message("an item of the data", expected=f"a tuple {least}", got=got))
        if self.weighted:
            return Item(item[0], item[1], item[2:])
        return Item(item[0], None, item[1:])
