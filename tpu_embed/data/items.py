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

`EventValues` are what is known of each event besides its id, such as its time, in the places of the
ids. A jagged feature has room for C events on each device. The host knows which place each event
takes, so whatever else is known of the events can be sent to the same places. Nothing is padded to
the longest sequence.

Input: an item; a placed batch, and one value per event. Output: what `place` takes, and what goes
around it; a `Jagged` with the row splits that the lookup of the feature has.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tpu_embed._checks import check_integers, did_you_mean, refuse
from tpu_embed._types import ArrayLike, PyTree
from tpu_embed.config import FeatureConfig
from tpu_embed.core.batch import Batch, BatchSpec
from tpu_embed.core.engine import EmbeddingEngine, check_engine
from tpu_embed.core.ids import RaggedIds
from tpu_embed.core.lookup import Jagged

_WHAT = "place_values"
_SPLITS = f"{_WHAT}: row_splits"


@dataclasses.dataclass(frozen=True, eq=False)
class EventValues:
    """One value per event, in an item of a data source.

    What places the item's features puts the `Jagged` of `place_values` in its place, wherever it
    stands in the rest of the item.

    Args:
      feature, values: as for `place_values`.
      row_splits: as for `place_values`; None: those of the `RaggedIds` that the item has for the
        feature.

    Example:
      >>> import tpu_embed
      >>> table = tpu_embed.TableConfig(8, 2, name="items")
      >>> config = {"history": tpu_embed.FeatureConfig(table, jagged=True)}
      >>> engine = tpu_embed.EmbeddingEngine(config, mesh=jax.make_mesh((1,), ("devices",)))
      >>> ids = {"history": tpu_embed.RaggedIds.from_lists([[5], [7, 2]])}
      >>> source = [(ids, {"time": EventValues("history", np.array([30, 10, 20]))})]
      >>> for batch, rest in tpu_embed.data.Prefetcher(engine, source):
      ...     print([of_example.tolist() for of_example in rest["time"].to_list()])
      [[30], [10, 20]]
    """

    feature: str
    values: ArrayLike
    row_splits: ArrayLike | Sequence[int] | None = None

    def place(self, engine: Any, batch: Batch, features: PyTree) -> Jagged:
        """Send the values to the places of their events.

        Args:
          engine: which has placed the batch.
          batch: a placed batch.
          features: what it was placed from.

        Raises:
          TypeError, ValueError: as `place_values`; the feature has no row splits in the item.
        """
        check_engine("EventValues: engine", engine)
        splits = self.row_splits
        if splits is None:
            _look_up(engine, batch, self.feature)
            part = engine.structure.part(features)
            leaves = part.match(features, what="features", columns=True)
            ids = dict(zip(part.labels, leaves, strict=True)).get(self.feature)
            if not isinstance(ids, RaggedIds):
                refuse(
                    f"EventValues: feature {self.feature!r}",
                    expected="RaggedIds, which have some",
                    got=type(ids).__name__,
                    remedy="give the row splits",
                )
            splits = ids.row_splits
        return place_values(engine, batch, self.feature, self.values, splits)


def place_values(
    engine: EmbeddingEngine,
    batch: Batch,
    feature: str,
    values: ArrayLike,
    row_splits: ArrayLike | Sequence[int],
) -> Jagged:
    """Send one value per event to the place of the event's row.

    Args:
      engine: the engine that placed the batch.
      batch: a placed batch, of training or of evaluation.
      feature: the path of a jagged feature, as error messages name it: `"history"`.
      values: `[n, …]` of any dtype, those of this process's examples one after the other. Where
        the ids of an example are cut to `max_sequence_length`, so are its values.
      row_splits: integers [b + 1], where each example begins and the last one ends: those of the
        `RaggedIds` that were placed.

    Returns:
      A `Jagged` on the devices, values `[S, C, …]`: S replicas, C the capacity of the feature in
      this batch. Places without an event hold zeros.

    Raises:
      TypeError: the splits are not integers, or the values no numbers.
      ValueError: integers that JAX would cut to 32 bits; there is no such jagged feature, the
        numbers of values and examples do not fit each other or the batch, or the events of a
        device are more than C.

    Example:
      >>> import tpu_embed
      >>> table = tpu_embed.TableConfig(8, 2, name="items")
      >>> config = {"history": tpu_embed.FeatureConfig(table, jagged=True)}
      >>> engine = tpu_embed.EmbeddingEngine(config, mesh=jax.make_mesh((1,), ("devices",)))
      >>> batch = engine.place({"history": tpu_embed.RaggedIds.from_lists([[5], [7, 2]])})
      >>> times = place_values(engine, batch, "history", np.array([30, 10, 20]), [0, 1, 3])
      >>> [of_example.tolist() for of_example in times.to_list()]
      [[30], [10, 20]]
    """
    config, capacity, examples = _look_up(engine, batch, feature)
    axes, values = engine.layout.axes, np.asarray(values)
    _check_values(values)
    replicas = len(axes.local_parts(axes.batch_axes))
    lengths = _check_splits(row_splits, values, replicas * examples)
    values, lengths = _shorten(values, lengths, config.max_sequence_length, config.keep)
    # Lengths [replicas, examples] -> splits [replicas, examples + 1], from 0 on each replica.
    lengths = lengths.reshape(replicas, examples)
    local = np.pad(np.cumsum(lengths, axis=1), ((0, 0), (1, 0))).astype(np.int32)
    if local[:, -1].max() > capacity:
        refuse(
            _SPLITS,
            expected=f"at most {capacity} events on a device",
            got=f"{local[:, -1].max()}",
            remedy="give the row splits of the ids that were placed",
        )
    placed = np.zeros((replicas, capacity, *values.shape[1:]), values.dtype)
    placed[np.arange(capacity) < local[:, -1:]] = values
    return Jagged(_on_devices(axes, placed), _on_devices(axes, local))


def _look_up(
    engine: EmbeddingEngine, batch: Batch, name: str
) -> tuple[FeatureConfig, int, int]:
    """Return the config of a jagged feature, its capacity, and its examples on one device.

    Raises:
      ValueError: the batch is of another engine, or there is no such feature.
    """
    batch.check(engine.layout)
    of_spec = zip(batch.spec.feature_shapes, batch.spec.local_sizes, strict=True)
    jagged = {
        one.path: (one.config, shape.capacity, size)
        for one, (shape, size) in zip(engine.layout.features, of_spec, strict=True)
        if shape.capacity is not None
    }
    if name in jagged:
        return jagged[name]
    refuse(
        f"{_WHAT}: feature",
        expected=f"a jagged feature among {list(jagged)}",
        got=repr(name),
        remedy=did_you_mean(name, jagged),
    )


def _check_values(values: np.ndarray) -> None:
    """Check that JAX can hold the values.

    Raises:
      TypeError: they are no numbers.
      ValueError: they are integers that JAX would cut to 32 bits.
    """
    what, known = f"{_WHAT}: values", jax.dtypes.canonicalize_dtype
    if values.dtype.kind in "OSUMm":
        refuse(
            what,
            expected="numbers",
            got=str(values.dtype),
            remedy="of datetimes, give the seconds since the first event",
            error=TypeError,
        )
    if (
        values.dtype.kind in "iu"
        and values.size
        and known(values.dtype) != values.dtype
    ):
        kept = np.iinfo(known(values.dtype))
        if values.min() < kept.min or values.max() > kept.max:
            refuse(
                what,
                expected=f"integers that fit {kept.dtype}",
                got=f"{values.min()} to {values.max()}",
                remedy="give times in seconds, or since the first event",
            )


def _check_splits(given: Any, values: np.ndarray, examples: int) -> np.ndarray:
    """Return the lengths `[examples]` that row splits say.

    Raises:
      TypeError: they are not integers.
      ValueError: they are not of so many examples, or do not fit the values.
    """
    splits = np.asarray(given)
    check_integers(_SPLITS, splits.dtype)
    if splits.shape != (examples + 1,):
        refuse(
            _SPLITS,
            expected=f"[{examples + 1}], for the {examples} examples of this process",
            got=f"shape {splits.shape}",
        )
    lengths = np.diff(splits.astype(np.int64))
    if splits[0] != 0 or (lengths < 0).any():
        refuse(
            _SPLITS,
            expected="numbers that rise from 0",
            got=np.array2string(splits, threshold=8, edgeitems=3),
        )
    if values.shape[:1] != (splits[-1],):
        refuse(
            f"{_WHAT}: values",
            expected=f"[{splits[-1]}, …], one per event",
            got=f"shape {values.shape}",
        )
    return lengths


def _shorten(
    values: np.ndarray, lengths: np.ndarray, longest: int, keep: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the values and lengths of sequences that are cut as `place` cuts their ids."""
    if not longest or not lengths.size or lengths.max() <= longest:
        return values, lengths
    # Lengths 3 1 of at most 2: positions 0 1 2 0; of the first example 0 1 stay, or 1 2.
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(len(values)) - np.repeat(starts, lengths)
    kept = np.minimum(lengths, longest)
    first = np.repeat(
        lengths - kept if keep == "last" else np.zeros_like(kept), lengths
    )
    return values[
        (positions >= first) & (positions < first + np.repeat(kept, lengths))
    ], kept


def _on_devices(axes: Any, local: np.ndarray) -> jax.Array:
    """Send this process's replicas, `[replicas, …]`, to their devices."""
    sharding, whole = axes.sharding(axes.batch_axes), (axes.replicas, *local.shape[1:])
    return jax.make_array_from_process_local_data(sharding, local, whole)


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
                got=f"a tuple of {len(item)}"
                if type(item) is tuple
                else type(item).__name__,
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
        # An OrderedDict stays one, and a defaultdict keeps its default.
        made = copy.copy(part)
        for key, value in part.items():
            made[key] = copy_arrays(value, place)
        return made
    if isinstance(part, (list, tuple)):
        values = (copy_arrays(one, place) for one in part)
        return getattr(part, "_make", type(part))(values)  # namedtuples have `_make`
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        fields = {
            field.name: getattr(part, field.name) for field in dataclasses.fields(part)
        }
        copied = copy_arrays(fields, place)
        if any(copied[name] is not value for name, value in fields.items()):
            part = copy.copy(part)
            for name, value in copied.items():
                object.__setattr__(part, name, value)  # it may be frozen
    return part
