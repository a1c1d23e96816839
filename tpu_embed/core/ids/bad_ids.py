"""Treat bad ids as the feature's `on_bad_id` says: raise an error, leave them out, or clip them.

An id is bad if it is outside [0, V); in a dense array, -1 is not bad but padding. The common case,
in which no id is bad, is kept cheap: one pass over the ids, or three if there is padding.

Input: dense or flat ids of any integer dtype. Output: ids in [0, V), or -1 where there is none, as
int32 or int64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed import _checks
from tpu_embed._types import Array
from tpu_embed.columns import describe_values
from tpu_embed.config import FeatureConfig

_INT32_MAX = int(np.iinfo(np.int32).max)
_REMEDIES = {
    **dict.fromkeys(
        "SUO", "tpu_embed.hash_ids makes ids of strings, once strings that hold several are split"
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
        return ValueError(_checks.message(self.path, expected=expected, got=got, remedy=remedy))

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
            got, remedy = f"{got} with numbers from 2**53 on, whose last digits are gone", _DIGITS
        _checks.refuse(feature.path, expected=expected, got=got, remedy=remedy, error=TypeError)


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
        absent = (ids < 0) & (ids >= lowest) if on_bad_id == "clip" else (ids < 0) | (ids >= size)
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
