"""Apply a feature's `on_bad_id` to its ids: raise, leave out or clip; then cast.

Called by `ids`, which knows what the forms mean. An id is bad when it is outside [0, V); in a dense
array -1 is padding. The common case, no bad id, costs one pass for the smallest and one for the
largest id.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np

from tpu_embed import _checks
from tpu_embed._types import PADDING_ID
from tpu_embed.config import FeatureConfig

__all__ = ["FeatureRules", "check_dtype", "resolve_dense", "resolve_flat"]

_INT32_MAX = int(np.iinfo(np.int32).max)


@dataclasses.dataclass(frozen=True)
class FeatureRules:
    """Carry what every step here asks about the feature, and what its messages name."""

    path: str
    config: FeatureConfig
    table_name: str

    @property
    def length(self) -> int:
        """L of a sequence, 0 otherwise."""
        return self.config.max_sequence_length

    @property
    def vocabulary_size(self) -> int:
        """V of the table."""
        return self.config.table.vocabulary_size

    def error(self, *, expected: str, got: Any, remedy: str = "") -> ValueError:
        """Return an error about this feature."""
        return ValueError(_checks.message(self.path, expected=expected, got=got, remedy=remedy))

    def check_output_shape(self, shape: tuple[int, ...]) -> None:
        """Raise `ValueError` unless ids that give `shape` are what the feature declares."""
        wanted = self.config.output_shape
        if wanted is not None and wanted != shape:
            got = f"ids that give {shape}"
            raise self.error(expected=f"ids that give output_shape {wanted}", got=got)


def check_dtype(feature: FeatureRules, ids: np.ndarray) -> None:
    """Refuse ids that are not integers.

    Raises:
      TypeError: floats, bools, strings or objects.
    """
    if ids.dtype.kind not in "iu":
        strings = ids.dtype.kind in "SUTO"
        remedy = "tpu_embed.hash_ids makes ids of strings" if strings else ""
        message = _checks.message(
            feature.path, expected="ids of an integer dtype", got=str(ids.dtype), remedy=remedy
        )
        raise TypeError(message)


def resolve_dense(
    feature: FeatureRules, ids: np.ndarray, where: Callable[[int], str]
) -> tuple[np.ndarray, bool]:
    """Return dense ids with every bad one resolved.

    Args:
      feature: whose.
      ids: integers of any shape, -1 = padding.
      where: says in words where the entry of a flat index stands.

    Returns:
      The ids, int32 or int64, and whether -1 is among them.

    Raises:
      ValueError: a bad id under `on_bad_id="error"`.
    """
    size = feature.vocabulary_size
    if _all_below(ids, size):
        return _cast(feature, ids), False
    lowest, highest = _extent(ids)
    if lowest >= PADDING_ID and highest < size:
        return _cast(feature, ids), lowest == PADDING_ID
    padding = ids == PADDING_ID
    bad = ((ids < 0) | (ids >= size)) & ~padding
    if feature.config.on_bad_id == "error":
        _raise_bad_id(feature, ids, bad, where)
    absent = padding | bad if feature.config.on_bad_id == "drop" else padding
    valid = _cast(feature, _clip(ids, size))
    return np.where(absent, valid.dtype.type(PADDING_ID), valid), bool(absent.any())


def resolve_flat(
    feature: FeatureRules, ids: np.ndarray, where: Callable[[int], str]
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return flat ids with every bad one resolved, all of them still in place.

    Args:
      feature: whose.
      ids: [N] integers.
      where: says in words where entry i stands.

    Returns:
      The ids, int32 or int64, and a bool [N] of those to keep; None: all.

    Raises:
      ValueError: a bad id under `on_bad_id="error"`.
    """
    size = feature.vocabulary_size
    if _all_below(ids, size):
        return _cast(feature, ids), None
    bad = (ids < 0) | (ids >= size)
    if feature.config.on_bad_id == "error":
        _raise_bad_id(feature, ids, bad, where)
    valid = _cast(feature, _clip(ids, size))
    return valid, ~bad if feature.config.on_bad_id == "drop" else None


def _all_below(ids: np.ndarray, size: int) -> bool:
    """Tell whether all ids are in [0, size), in one pass: as unsigned, negative ones are large."""
    unsigned = ids.view(ids.dtype.str.replace("i", "u"))  # of the same byte order
    limit = min(size, int(np.iinfo(ids.dtype).max) + 1)
    return bool(np.maximum.reduce(unsigned, axis=None, initial=0) < limit)


def _extent(ids: np.ndarray) -> tuple[int, int]:
    return (int(ids.min()), int(ids.max())) if ids.size else (0, 0)


def _clip(ids: np.ndarray, size: int) -> np.ndarray:
    return np.clip(ids, 0, min(size - 1, int(np.iinfo(ids.dtype).max)))


def _cast(feature: FeatureRules, ids: np.ndarray) -> np.ndarray:
    """Return valid ids as int32, or int64 where the vocabulary asks for it."""
    if feature.vocabulary_size <= _INT32_MAX:
        return ids.astype(np.int32, copy=False)
    if not jax.config.read("jax_enable_x64"):
        raise feature.error(
            expected=f"a vocabulary of at most {_INT32_MAX} rows while x64 is off",
            got=f"{feature.vocabulary_size} in table {feature.table_name!r}",
            remedy='turn it on with jax.config.update("jax_enable_x64", True)',
        )
    return ids.astype(np.int64, copy=False)


def _raise_bad_id(
    feature: FeatureRules, ids: np.ndarray, bad: np.ndarray, where: Callable[[int], str]
) -> NoReturn:
    at = int(np.argmax(bad.reshape(-1)))
    count = int(np.count_nonzero(bad))
    more = f" (and {count - 1} more)" if count > 1 else ""
    raise feature.error(
        expected=f"ids in [0, {feature.vocabulary_size}) of table {feature.table_name!r}",
        got=f"id {int(ids.reshape(-1)[at])} at {where(at)}{more}",
        remedy='on_bad_id="drop" or "clip" on the FeatureConfig accepts it',
    )
