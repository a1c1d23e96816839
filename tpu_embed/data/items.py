"""What an item of a data source is: features, or a tuple that begins with features.

A training loop needs more than features: labels, numbers, weights of examples. So a source may
yield tuples, of which only the first part is placed:

    source yields                    the loop gets
    features                         batch
    (features, label)                (batch, label)
    (features, weights, label)       (batch, label)      with weighted=True

Only a plain tuple is taken apart. A namedtuple, list, dict or DataFrame is the features themselves.

A source is read ahead of the loop, and may fill the same buffers with each batch. Placing copies
the features; the rest is copied here, in the thread, before the source is asked for the next item,
but for `EventValues`, which are placed, too.

Input: an item. Output: what `place` takes, and what goes around it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from tpu_embed._checks import refuse
from tpu_embed._types import PyTree
from tpu_embed.core.batch import Batch, BatchSpec
from tpu_embed.data.event_values import EventValues


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

    def around(self, batch: Batch, engine: Any) -> Any:
        """Return the item as the loop gets it: the batch, and copies of what follows it.

        Args:
          batch: of the features.
          engine: which has placed it.

        Raises:
          TypeError, ValueError: as `EventValues.place`.
        """
        if self.rest is None:
            return batch

        def place(values):
            return values.place(engine, batch, self.features)

        return (batch, *(copy_arrays(part, place) for part in self.rest))


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
            refuse(
                "an item of the data",
                expected=f"a tuple {least}",
                got=f"a tuple of {len(item)}" if type(item) is tuple else type(item).__name__,
                error=TypeError,
            )
        if self.weighted:
            return Item(item[0], item[1], item[2:])
        return Item(item[0], None, item[1:])


def copy_arrays(part: Any, place: Callable[[EventValues], Any] | None = None) -> Any:
    """Return a part of an item with copies of its arrays, so that the source may change its own.

    Args:
      part: arrays of NumPy or of another library on the host, dicts, lists, tuples and dataclasses
        of them. JAX arrays cannot change; of all else the source itself is to make a new one.
      place: what it returns takes the place of `EventValues`.

    Example:
      >>> import numpy as np
      >>> buffer = np.zeros(2)
      >>> kept = copy_arrays({"label": buffer, "day": "Monday"})
      >>> buffer[:] = 1
      >>> kept
      {'label': array([0., 0.]), 'day': 'Monday'}
    """
    if isinstance(part, jax.Array) or hasattr(part, "__jax_array__"):
        return part
    if isinstance(part, EventValues) and place is not None:
        return place(part)
    if hasattr(part, "__array__") or hasattr(part, "__dlpack__"):
        return copy.deepcopy(part)
    if isinstance(part, dict):
        made = copy.copy(part)  # an OrderedDict stays one, and a defaultdict keeps its default
        for key, value in part.items():
            made[key] = copy_arrays(value, place)
        return made
    if isinstance(part, (list, tuple)):
        values = (copy_arrays(one, place) for one in part)
        return getattr(part, "_make", type(part))(values)  # namedtuples have `_make`
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
        copied = copy_arrays(fields, place)
        if any(copied[name] is not value for name, value in fields.items()):
            part = copy.copy(part)
            for name, value in copied.items():
                object.__setattr__(part, name, value)  # it may be frozen
    return part
