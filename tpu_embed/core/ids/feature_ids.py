"""The checked ids of one feature: bad ones, their static shape, and the two layouts of them.

Users give ids in many ways; the rest of the package knows only two. Dense ids are an array
`[B, bags, H]` in which -1 is padding. Flat ids are an array `[N]` in batch order without padding,
beside an array that says which bag each id belongs to. The bags [7, 3], [] and [5] are

    dense:  ids [[[7, 3]], [[-1, -1]], [[5, -1]]]
    flat:   ids [7, 3, 5], bags [0, 0, 2]

Bad ids are treated as the feature's `on_bad_id` says: they raise an error, are left out, or are
clipped. An id is bad if it is outside [0, V); in a dense array, -1 is not bad but padding. The
common case, in which no id is bad, is kept cheap: one pass over the ids, or three if there is
padding.

Input: a feature's config, the shape of its ids; dense or flat ids of any integer dtype. Output:
`FeatureShape` and `HostIds`; ids in [0, V), or -1 where there is none, as int32 or int64.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import message, refuse
from tpu_embed._types import Array
from tpu_embed.columns import describe_values
from tpu_embed.config import FeatureConfig

# -- bad ids ---------------------------------------------------------------------------------------

_INT32_MAX = int(np.iinfo(np.int32).max)
_REMEDIES = {
    **dict.fromkeys(
        "SUO",
        "tpu_embed.hash_ids makes ids of strings, once strings that hold several are split",
    ),
    "f": (
        "NaN in a pandas column turns its integers into floats: "
        'column.astype("Int64") keeps what is missing as padding, '
        "column.fillna(-1).astype(int) does, too, and for lists in a file "
        'pandas.read_parquet(…, dtype_backend="pyarrow")'
    ),
}
"""What to do about ids of another kind of dtype."""
_DIGITS = (
    "read the file again without floats in between: "
    'pandas.read_csv(…, dtype={"column": "Int64"}), '
    'pandas.read_parquet(…, dtype_backend="numpy_nullable"), or pyarrow'
)


@dataclasses.dataclass(frozen=True)
class FeatureRules:
    """A feature's config, with its path and its table's name for messages."""

    path: str
    config: FeatureConfig
    table_name: str

    @property
    def length(self) -> int:
        """L of a sequence; 0 for any other feature."""
        return self.config.max_sequence_length

    @property
    def vocabulary_size(self) -> int:
        """V of the table; of a dynamic vocabulary, more than there are positions of keys."""
        if self.config.table.vocabulary is not None:
            return _INT32_MAX
        return self.config.table.vocabulary_size

    def error(self, *, expected: str, got: Any, remedy: str = "") -> ValueError:
        """Return an error whose message names this feature."""
        return ValueError(message(self.path, expected=expected, got=got, remedy=remedy))

    def check_output_shape(self, shape: tuple[int, ...]) -> None:
        """Raise `ValueError` unless the feature declares this output shape, or declares none."""
        wanted = self.config.output_shape
        if wanted is not None and wanted != shape:
            got = f"ids that give {shape}"
            raise self.error(expected=f"ids that give output_shape {wanted}", got=got)


def check_dtype(feature: FeatureRules, ids: np.ndarray) -> None:
    """Refuse ids that are not integers.

    Raises:
      TypeError: floats, bools, times, strings or other objects.
    """
    if ids.dtype.kind not in "iu":
        expected, (got, of_times) = "ids of an integer dtype", describe_values(ids)
        remedy = of_times or _REMEDIES.get(ids.dtype.kind, "")
        # From 2**53 on, floats are further than 1 apart.
        floats = isinstance(ids, np.ndarray) and ids.dtype.kind == "f"
        if floats and (np.abs(np.ma.getdata(ids).astype(np.float64)) >= 2.0**53).any():
            got, remedy = (
                f"{got} with numbers from 2**53 on, whose last digits are gone",
                _DIGITS,
            )
        refuse(feature.path, expected=expected, got=got, remedy=remedy, error=TypeError)


def resolve_ids(
    feature: FeatureRules,
    ids: np.ndarray,
    where: Callable[[int], Iterable[Any]],
    *,
    lowest: int,
    first: str = "example",
) -> tuple[np.ndarray, bool]:
    """Return ids with every bad one resolved; -1 stands for those that are left out.

    Args:
      feature: the feature.
      ids: integers of any shape; what is masked is left out, whatever `on_bad_id` says.
      where: maps a flat index to coordinates, for messages: the example, the bag if an example has
        several, the position.
      lowest: the lowest id that is not bad: -1 where that is padding, otherwise 0.
      first: what the first coordinate counts.

    Returns:
      The ids, int32 or int64, and whether -1 is among them.

    Raises:
      ValueError: a bad id under `on_bad_id="error"`.
    """
    missing = None
    if isinstance(ids, np.ma.MaskedArray):
        missing = np.ma.getmaskarray(ids)
        ids = np.where(missing, 0, ids.data)  # row 0 is never bad
    size = feature.vocabulary_size
    # From cheap to expensive: no padding and nothing bad; padding only; bad ids.
    padded = not _all_below(ids, size)
    if padded and (ids.min() < lowest or ids.max() >= size):
        on_bad_id = feature.config.on_bad_id
        if on_bad_id == "error":
            bad = (ids < lowest) | (ids >= size)
            at, count = int(bad.argmax()), np.count_nonzero(bad)
            more = f" (and {count - 1} more)" if count > 1 else ""
            raise feature.error(
                expected=f"ids in [0, {size}) of table {feature.table_name!r}",
                got=f"id {ids.flat[at]} at {_in_words(where(at), first)}{more}",
                remedy='on_bad_id="drop" or "clip" of the feature or layer accepts it',
            )
        # Padding is in [lowest, 0).
        absent = (
            (ids < 0) & (ids >= lowest)
            if on_bad_id == "clip"
            else (ids < 0) | (ids >= size)
        )
        missing = absent if missing is None else absent | missing
        # Clip before the cast: an id of 2**40 would wrap around in int32.
        ids = np.clip(ids, 0, min(size - 1, int(np.iinfo(ids.dtype).max)))
    valid = _cast(feature, ids)
    if missing is not None:
        # x | -1 is -1, and faster than a mask. These are no longer the user's own numbers.
        valid |= -missing.astype(valid.dtype)
    return valid, padded or missing is not None


def _in_words(place: Iterable[Any], first: str) -> str:
    """Return where an id is in words, such as "example 2, bag 1, position 0"."""
    example, *inner = map(int, place)
    words = [f"{first} {example}"]
    if len(inner) > 1:
        words.append(f"bag {inner[0] if len(inner) == 2 else tuple(inner[:-1])}")
    if inner:
        words.append(f"position {inner[-1]}")
    return ", ".join(words)


def _all_below(ids: np.ndarray, size: int) -> bool:
    """Tell whether all ids are in [0, size), in one pass over them."""
    # Viewed as unsigned, negative ids are large: int32 -1 is 2**32 - 1. "<i4" becomes "<u4", so
    # the byte order stays. The limit is at most the largest signed number + 1: negatives fail.
    unsigned = ids.view(ids.dtype.str.replace("i", "u"))
    limit = min(size, int(np.iinfo(ids.dtype).max) + 1)
    return bool(np.maximum.reduce(unsigned, axis=None, initial=0) < limit)


def _cast(feature: FeatureRules, ids: np.ndarray) -> np.ndarray:
    """Return valid ids as int32, or as int64 if the vocabulary needs it."""
    if feature.vocabulary_size <= _INT32_MAX:
        return ids.astype(np.int32, copy=False)
    # Ids of a table on the host never come to the devices, which get rows for them.
    if feature.config.table.storage is None and not jax.config.read("jax_enable_x64"):
        raise feature.error(
            expected=f"a vocabulary of at most {_INT32_MAX} rows while x64 is off",
            got=f"{feature.vocabulary_size} in table {feature.table_name!r}",
            remedy='turn it on with jax.config.update("jax_enable_x64", True)',
        )
    return ids.astype(np.int64, copy=False)


# -- a signed dtype --------------------------------------------------------------------------------


def narrow_ids(ids: Any, dtype: Any) -> Array:
    """Return integers in a signed dtype; numbers outside of it become its largest or smallest.

    Args:
      ids: a NumPy array, which is narrowed before JAX could wrap it, or an array of JAX.
      dtype: int32 or int64.

    Example:
      >>> narrow_ids(np.array([7, 2**31 + 7], np.uint32), np.int32).tolist()
      [7, 2147483647]
    """
    numbers: Any = np if isinstance(ids, np.ndarray) else jnp
    own, limits = np.iinfo(ids.dtype), np.iinfo(dtype)
    # Only a bound that the own dtype can exceed is a number of the own dtype.
    if own.max > limits.max:
        ids = numbers.minimum(ids, numbers.asarray(limits.max, ids.dtype))
    if own.min < limits.min:
        ids = numbers.maximum(ids, numbers.asarray(limits.min, ids.dtype))
    return jnp.asarray(ids, dtype)


# -- shapes and layouts ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FeatureShape:
    """The static shape of one feature of a batch; hashable.

    Args:
      batch: B, number of examples.
      inner: the activation's shape between B and D: () for one bag per example, (K, …) for many,
        (L,) for a sequence.
      combines: whether the ids of a bag are combined. False: every id has a bag of its own, and
        its weight scales its row (rank-1 ids, sequences, ragged rows that keep their first k ids).
      width: H, ids per bag of a dense feature; None for flat ids.
      weighted: whether the ids have weights.
      capacity: C of a jagged feature, the rows that its activation has room for on one device; 0
        before they are counted. None for any other feature.
    """

    batch: int
    inner: tuple[int, ...]
    combines: bool
    width: int | None
    weighted: bool
    capacity: int | None = None

    @property
    def bags(self) -> int:
        """Bags per example, the product of `inner`."""
        return math.prod(self.inner)

    def with_capacity(self, capacity: int) -> FeatureShape:
        """Return the shape with another C; of a feature that is not jagged, the shape itself."""
        return (
            self
            if self.capacity is None
            else dataclasses.replace(self, capacity=capacity)
        )

    @property
    def has_places(self) -> bool:
        """Whether every id has a place in a `Jagged`; ids traced inside a jit are padded first."""
        return self.capacity is not None and self.width is None

    @property
    def room_per_bag(self) -> int | None:
        """The ids of each bag, padding included; None if bags of any length are packed flat."""
        return 1 if self.has_places else self.width

    def bags_of(self, examples: int) -> int:
        """Return the bags of some examples on one device; of a jagged feature, all its places."""
        return (self.capacity or 0) if self.has_places else examples * self.bags


class JaggedRows(NamedTuple):
    """Where the ids of a jagged feature stand in its activation, of all examples.

    Rows are cut at `max_sequence_length`, and have room for ids that are left out. The rows [7, 3],
    [] and [5, bad, 8] have the splits 0 2 2 5, and the ids 7 3 5 8 have the places 0 1 2 4.

    Attributes:
      row_splits: int64 `[B + 1]`, where the row of each example begins; the last is their end.
      places: int32 `[N]`, the place of each id, ascending.
    """

    row_splits: np.ndarray
    places: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class HostIds:
    """The validated ids of one feature of one batch.

    Args:
      shape: the static shape.
      ids: int32, or int64 if the vocabulary needs it. Dense: [B, bags, width], where -1 is
        padding. Flat: [N] in batch order, none of them -1.
      bags: for flat ids, int32 [N], the bag of each id, in [0, B · bags), non-decreasing; None for
        dense ids.
      weights: shaped like `ids`, float32 (float64 for a float64 table), 0 at dense padding; None
        for all ones.
      padded: whether -1 may be among dense ids.
      rows: of a jagged feature, whose ids are flat and whose bags are examples; otherwise None.
      keys: for a dynamic vocabulary, or the ids of a table on the host: uint64 [n], all different,
        until rows are known: `ids` are positions in it. Not all keys need be looked up.
      first: int64 [n], where each key is first among the ids; None: not known, or some are not
        looked up.
    """

    shape: FeatureShape
    ids: np.ndarray
    bags: np.ndarray | None
    weights: np.ndarray | None
    padded: bool
    rows: JaggedRows | None = None
    keys: np.ndarray | None = None
    first: np.ndarray | None = None

    def only(self, kept: np.ndarray) -> HostIds:
        """Return the feature with some of its ids, and the weights of these.

        Args:
          kept: bool, in the shape of the ids; dense ids that are not kept are -1 already.
        """
        weights, rows = self.weights, self.rows
        if self.bags is None:
            # A weight at a padded position may be any number; it must not count in its bag.
            if weights is not None:
                weights = np.where(kept, weights, weights.dtype.type(0))
            return dataclasses.replace(self, weights=weights, padded=True)
        return dataclasses.replace(
            self,
            ids=self.ids[kept],
            bags=self.bags[kept],
            weights=None if weights is None else weights[kept],
            rows=rows and rows._replace(places=rows.places[kept]),
        )


def part_of_feature(config: FeatureConfig, part: int, whole: int) -> FeatureConfig:
    """Return the config of a feature for `part` of `whole` equal parts of the batch.

    Only a declared output shape depends on the batch: (64, 3) becomes (16, 3) for 2 of 8 parts.
    """
    shape = config.output_shape
    if shape is None or part == whole:
        return config
    return dataclasses.replace(
        config, output_shape=(shape[0] * part // whole, *shape[1:])
    )


def dense_shape(
    path: str, config: FeatureConfig, shape: Sequence[int], *, weighted: bool
) -> FeatureShape:
    """Return the static shape of a feature whose ids are a dense array of shape `shape`.

    The values of the ids are not needed, so this also works for ids traced inside a jit.

    Raises:
      ValueError: the rank is 0, a sequence's rank is not 2, or the shape does not agree with the
        declared output_shape.
    """
    feature, length = FeatureRules(path, config, ""), config.max_sequence_length
    if not shape:
        remedy = "give one id as [1]"
        raise feature.error(
            expected="ids of rank 1 or more", got="rank 0", remedy=remedy
        )
    sequence = length or config.jagged
    if sequence and len(shape) != 2:
        expected, remedy = (
            "a sequence's ids as [B, H]",
            "give each example one row of ids",
        )
        raise feature.error(expected=expected, got=f"rank {len(shape)}", remedy=remedy)
    # [B] has one bag per example that is not combined; [B, H] has inner (), [B, K, H] has (K,).
    # A sequence [B, H] is cut or padded to L bags of one id each: inner (L,), width 1.
    combines = len(shape) > 1 and not sequence
    feature.check_output_shape(tuple(shape[: max(1, len(shape) - 1)]))
    inner, capacity = (length,) if length else tuple(shape[1:-1]), None
    if config.jagged:
        # Every example gets room for all H ids; what is left of it is taken out at the end.
        inner, capacity = (min(length or shape[1], shape[1]),), 0
    width = shape[-1] if combines else 1
    return _shared_shape(shape[0], inner, combines, width, weighted, capacity)


_shared_shape = functools.lru_cache(4096)(FeatureShape)
"""`FeatureShape`, but equal arguments give the same object, so that comparing batches is fast."""
