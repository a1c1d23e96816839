"""Treat bad ids as the feature's `on_bad_id` says: raise an error, leave them out, or clip them.

An id is bad if it is outside [0, V); in a dense array, -1 is not bad but padding. The common case,
in which no id is bad, is kept cheap: one pass over the ids, or three if there is padding.

Input: dense or flat ids of any integer dtype. Output: ids in [0, V), or -1 in dense arrays, as
int32 or int64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed import _checks
from tpu_embed._types import PADDING_ID, Array
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
        """V of the feature's table; of a living one, more than there are positions of keys."""
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


def dense_position(shape: tuple[int, ...], at: int) -> str:
    """Return in words where flat index `at` of a dense array is, such as "example 2, bag 1, …"."""
    place = [int(i) for i in np.unravel_index(at, shape)]
    words = [f"example {place[0]}"]
    if len(place) > 2:
        words.append(f"bag {place[1] if len(place) == 3 else tuple(place[1:-1])}")
    if len(place) > 1:
        words.append(f"position {place[-1]}")
    return ", ".join(words)


def check_dtype(feature: FeatureRules, ids: np.ndarray) -> None:
    """Refuse ids that are not integers.

    Raises:
      TypeError: floats, bools, times, strings or other objects.
    """
    if ids.dtype.kind not in "iu":
        expected, (got, of_times) = "ids of an integer dtype", describe_values(ids)
        remedy = of_times or _REMEDIES.get(ids.dtype.kind, "")
        # From 2**53 on, floats are further than 1 apart.
        if ids.dtype.kind == "f" and _has_lost_digits(ids):
            got, remedy = f"{got} with numbers from 2**53 on, whose last digits are gone", _DIGITS
        raise TypeError(_checks.message(feature.path, expected=expected, got=got, remedy=remedy))


def _has_lost_digits(floats: Any) -> bool:
    """Tell whether some of the numbers, where they are known, are too large for a float."""
    if not isinstance(floats, np.ndarray):
        return False
    numbers = np.nan_to_num(np.ma.getdata(floats).astype(np.float64))
    return bool((np.abs(numbers) >= 2.0**53).any())


def resolve_dense(
    feature: FeatureRules, ids: np.ndarray, where: Callable[[int], str]
) -> tuple[np.ndarray, bool]:
    """Return dense ids with every bad one resolved.

    Args:
      feature: the feature.
      ids: integers of any shape; -1 is padding, and so is what is masked.
      where: maps a flat index to words, for messages.

    Returns:
      The ids, int32 or int64, and whether -1 is among them.

    Raises:
      ValueError: a bad id under `on_bad_id="error"`.
    """
    if isinstance(ids, np.ma.MaskedArray):
        missing = np.ma.getmaskarray(ids)
        # Row 0 stands in for the missing ids: it is never bad.
        valid, padded = resolve_dense(feature, np.where(missing, 0, ids.data), where)
        ids = np.where(missing, valid.dtype.type(PADDING_ID), valid)
        return ids, padded or bool(missing.any())
    size = feature.vocabulary_size
    # From cheap to expensive: no padding and nothing bad; padding only; bad ids.
    if _all_below(ids, size):
        return _cast(feature, ids), False
    lowest, highest = _extent(ids)
    if lowest >= PADDING_ID and highest < size:
        return _cast(feature, ids), lowest == PADDING_ID
    padding = ids == PADDING_ID
    bad = ((ids < 0) | (ids >= size)) & ~padding
    if feature.config.on_bad_id == "error":
        _raise_bad_id(feature, ids, bad, where)
    # Clip before the cast: an id of 2**40 would wrap around in int32.
    absent = padding | bad if feature.config.on_bad_id == "drop" else padding
    valid = _cast(feature, _clip(ids, size))
    return np.where(absent, valid.dtype.type(PADDING_ID), valid), bool(absent.any())


def resolve_flat(
    feature: FeatureRules, ids: np.ndarray, where: Callable[[int], str]
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return flat ids with every bad one resolved; ids to drop are marked, not removed.

    Args:
      feature: the feature.
      ids: [N] integers; those that are masked are dropped, whatever `on_bad_id` says.
      where: returns in words where entry i is.

    Returns:
      The ids, int32 or int64, and a bool [N] that says which to keep; None to keep all.

    Raises:
      ValueError: a bad id under `on_bad_id="error"`.
    """
    if isinstance(ids, np.ma.MaskedArray):
        missing = np.ma.getmaskarray(ids)
        valid, keep = resolve_flat(feature, np.where(missing, 0, ids.data), where)
        return valid, ~missing if keep is None else keep & ~missing
    size = feature.vocabulary_size
    if _all_below(ids, size):
        return _cast(feature, ids), None
    # Unlike in a dense array, -1 is a bad id here: flat ids have no padding.
    bad = (ids < 0) | (ids >= size)
    if feature.config.on_bad_id == "error":
        _raise_bad_id(feature, ids, bad, where)
    valid = _cast(feature, _clip(ids, size))
    return valid, ~bad if feature.config.on_bad_id == "drop" else None


def _all_below(ids: np.ndarray, size: int) -> bool:
    """Tell whether all ids are in [0, size), in one pass over them."""
    # Viewed as unsigned, negative ids are large: int32 -1 is 2**32 - 1. "<i4" becomes "<u4", so
    # the byte order stays. The limit is at most the largest signed number + 1: negatives fail.
    unsigned = ids.view(ids.dtype.str.replace("i", "u"))
    limit = min(size, int(np.iinfo(ids.dtype).max) + 1)
    return bool(np.maximum.reduce(unsigned, axis=None, initial=0) < limit)


def _extent(ids: np.ndarray) -> tuple[int, int]:
    """Return the smallest and the largest id; (0, 0) if there are none."""
    return (int(ids.min()), int(ids.max())) if ids.size else (0, 0)


def _clip(ids: np.ndarray, size: int) -> np.ndarray:
    """Return ids clipped to [0, size), or to their dtype's maximum if that is lower."""
    return np.clip(ids, 0, min(size - 1, int(np.iinfo(ids.dtype).max)))


def _cast(feature: FeatureRules, ids: np.ndarray) -> np.ndarray:
    """Return valid ids as int32, or as int64 if the vocabulary needs it."""
    if feature.vocabulary_size <= _INT32_MAX:
        return ids.astype(np.int32, copy=False)
    # Ids of a table on the host never come to the devices, which get rows for them.
    on_host = feature.config.table.storage is not None
    if not on_host and not jax.config.read("jax_enable_x64"):
        raise feature.error(
            expected=f"a vocabulary of at most {_INT32_MAX} rows while x64 is off",
            got=f"{feature.vocabulary_size} in table {feature.table_name!r}",
            remedy='turn it on with jax.config.update("jax_enable_x64", True)',
        )
    return ids.astype(np.int64, copy=False)


def _raise_bad_id(
    feature: FeatureRules, ids: np.ndarray, bad: np.ndarray, where: Callable[[int], str]
) -> NoReturn:
    """Raise an error that names the first bad id and counts the others."""
    at = int(np.argmax(bad.reshape(-1)))
    count = int(np.count_nonzero(bad))
    more = f" (and {count - 1} more)" if count > 1 else ""
    raise feature.error(
        expected=f"ids in [0, {feature.vocabulary_size}) of table {feature.table_name!r}",
        got=f"id {int(ids.reshape(-1)[at])} at {where(at)}{more}",
        remedy='on_bad_id="drop" or "clip" of the feature or layer accepts it',
    )


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
